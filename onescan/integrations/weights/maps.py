"""Correspondence between native models and those of other libraries, for both directions.

A `Rule` relates a native tensor to the tensors of a source, and `Fields` their configs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_choice, check_whole
from onescan.configs import ModelConfig, differences, replace
from onescan.integrations.weights.source import Foreign, Tensors
from onescan.layers.basic import Activation

Names = str | tuple[str, ...]  # of a layer in the source; see `linear`

# names of activations in transformers -> names in `MLPConfig`; the first of several is written
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
NUM_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16}  # by width, as published
# fields that only affect training and have no counterpart
TRAINING_ONLY = ("init_std", "drop_path", "label_dropout")


class Layout(NamedTuple):
    """How a source stores a tensor: a function and its inverse."""

    to_native: Callable[[Tensor], Tensor]
    to_source: Callable[[Tensor], Tensor]

    def then(self, other: "Layout") -> "Layout":
        """Return this layout followed by another one, on the way to the native model."""
        return Layout(
            lambda x: other.to_native(self.to_native(x)),
            lambda x: self.to_source(other.to_source(x)),
        )


SAME = Layout(lambda x: x, lambda x: x)
TRANSPOSED = Layout(torch.t, torch.t)  # does not change vectors
NEGATED = Layout(torch.neg, torch.neg)


def batched(axes: int) -> Layout:
    """Return the layout of a tensor that the source stores with leading axes of size 1."""
    return Layout(partial(torch.flatten, end_dim=axes), lambda x: x[(None,) * axes])


class Rule(NamedTuple):
    """One native tensor, and the tensors of the source that it consists of."""

    native: str
    sources: tuple[str, ...]
    """Names of tensors of equal shape, which are concatenated along rows."""
    layout: Layout = SAME
    """Layout of the concatenation."""
    copies: tuple[str, ...] = ()
    """Further names of the first tensor, such as those of tied weights; may be missing."""
    may_be_missing: bool = False
    """Use zeros for missing tensors, which must be biases."""

    def read(self, tensors: Tensors) -> Tensor:
        """Return the native tensor.

        Raises:
            ValueError: If a tensor is missing or has an unexpected shape, or copies differ.
        """
        parts = [self._take(tensors, name) for name in self.sources]
        for copy in self.copies:
            tensors.take_equal(copy, parts[0])
        try:
            return self.layout.to_native(torch.cat(parts) if len(parts) > 1 else parts[0])
        except (RuntimeError, IndexError) as error:
            shapes = " and ".join(str(tuple(part.shape)) for part in parts)
            names = ", ".join(self.sources)
            raise ValueError(f"{names} is {shapes} in the source, which does not fit") from error

    def write(self, native: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the source; the inverse of `read`."""
        tensor = self.layout.to_source(native)
        parts = tensor.chunk(len(self.sources))
        return dict.fromkeys(self.copies, tensor) | dict(zip(self.sources, parts, strict=True))

    def _take(self, tensors: Tensors, name: str) -> Tensor:
        if not self.may_be_missing or name in tensors:
            return tensors.take(name)
        weight = tensors.get(f"{name.removesuffix('bias')}weight")
        return weight.new_zeros(len(weight))


def weights_by(
    rules: Callable[[Any], Iterable[Rule]], config: Callable[[Foreign], Any], *, unused: str = ""
) -> Callable[[Foreign], dict[str, Tensor]]:
    """Return the `weights` of a `Source`: rules for its native config, and tensors to ignore."""

    def weights(foreign: Foreign) -> dict[str, Tensor]:
        tensors = foreign.tensors
        tensors.drop(unused)
        return {rule.native: rule.read(tensors) for rule in rules(config(foreign))}

    return weights


def linear(
    native: str,
    source: Names,
    layout: Layout = SAME,
    *,
    bias: Layout | None = None,
    copies: Iterable[str] = (),
) -> Iterator[Rule]:
    """Yield the rules for weight and bias of a linear layer or a norm.

    Args:
        native: Name of the layer.
        source: Its name in the source; or a tuple of names of queries, keys and values, which the
            native layer merges, and whose biases may be missing.
        layout: Layout of the weight.
        bias: Layout of the bias, if it differs.
        copies: Further names in the source.
    """
    names = source if isinstance(source, tuple) else (source,)
    for part, part_layout in (("weight", layout), ("bias", bias or layout)):
        yield Rule(
            f"{native}.{part}",
            tuple(f"{name}.{part}" for name in names),
            part_layout,
            copies=tuple(f"{name}.{part}" for name in copies),
            may_be_missing=part == "bias" and isinstance(source, tuple),
        )


def layers(
    native: str, source: str, names: Mapping[str, Names], layout: Layout = SAME
) -> Iterator[Rule]:
    """Yield the rules of the layers of a block, by native names and those in the source."""
    for name, other in names.items():
        merged = isinstance(other, tuple)
        full = tuple(f"{source}.{part}" for part in other) if merged else f"{source}.{other}"
        yield from linear(f"{native}.{name}", full, layout)


def patch_embedding(
    source: str, channels: int, patch_size: tuple[int, ...], layout: Layout = SAME
) -> Iterator[Rule]:
    """Yield the rules of a convolution whose stride is its size; `layout` is that of its rows."""
    kernel = (channels, *patch_size)
    flat = Layout(partial(torch.flatten, start_dim=1), lambda x: x.unflatten(1, kernel))
    yield Rule("patchify.proj.weight", (f"{source}.weight",), flat.then(layout))
    yield Rule("patchify.proj.bias", (f"{source}.bias",), layout)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields of a native config, and those of a source that mean the same."""

    base: ModelConfig
    """The native config. Fields that are not listed below always have these values."""
    names: Mapping[str, str]
    """Native name -> name in the source."""
    others: tuple[str, ...] = ()
    """Further native fields that differ between models of the source."""
    hidden: str | None = None
    """Name of the hidden width of MLPs in the source; None if its ratio is always the same."""
    activation: str | None = None
    """Name of the activation of MLPs in the source; None if it is always the same."""

    def read(self, foreign: Foreign, changes: Mapping[str, Any] | None = None) -> Any:
        """Return the native config, with further changes.

        Raises:
            ValueError: If a field is missing, or has a wrong type or an unknown value.
        """
        changes = {
            **{native: foreign.need(name) for native, name in self.names.items()},
            **(changes or {}),
        }
        if self.activation is not None:
            changes["mlp.activation"] = activation(foreign, self.activation)
        config: Any = replace(self.base, changes)
        if self.hidden is not None:
            hidden = foreign.need(self.hidden)
            check_whole(1, **{self.hidden: hidden, self.names["width"]: config.width})
            config = replace(config, {"mlp.ratio": hidden / config.width})
        return config

    def write(self, config: Any, model: str) -> dict[str, Any]:
        """Return the fields in the source, except for `others`.

        Args:
            config: Native config.
            model: Name of the source's model, for messages.

        Raises:
            ValueError: If a field has no counterpart in the source (names it).
        """
        free = {*self.names, *self.others, *TRAINING_ONLY}
        free |= {"mlp.ratio", "mlp.multiple_of"} if self.hidden is not None else set()
        free |= {"mlp.activation"} if self.activation is not None else set()
        for name, given, expected in differences(config, self.base):
            if name not in free:
                raise ValueError(f"{name} is {given!r}, expected {expected!r}, as in {model}")
        fields = {other: attrgetter(native)(config) for native, other in self.names.items()}
        if self.hidden is not None:
            fields[self.hidden] = config.mlp.hidden_width(config.width)
        if self.activation is not None:
            known = {native: name for name, native in reversed(ACTIVATIONS.items())}
            fields[self.activation] = known[config.mlp.activation]
        return fields


@dataclass(frozen=True, kw_only=True)
class Target:
    """How to convert native models of one class to models of another library."""

    config: type[ModelConfig]
    """Class of the native config."""
    library: str
    """Library of the models: transformers or diffusers."""
    model: Callable[[Any], str]
    """Return the class of the model for a native config."""
    fields: Callable[[Any], dict[str, Any]]
    """Return the config of the model; raises ValueError for a field without a counterpart."""
    rules: Callable[[Any], Iterable[Rule]]
    """Return the rules of all tensors for a native config."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """As in `Source`, for versions of the library whose names differ from those in the rules."""


def activation(
    foreign: Foreign, name: str, known: Mapping[str, Activation] = ACTIVATIONS
) -> Activation:
    """Return the activation that a field of the source's config names; ValueError if unknown."""
    given = foreign.need(name)
    check_choice(name, given, known)
    return known[given]


def num_heads(foreign: Foreign, width: int) -> int:
    """Return the number of heads: as given, or that of the published model of this width.

    Raises:
        ValueError: If it is neither given nor known.
    """
    heads = foreign.fields.get("num_heads", NUM_HEADS.get(width))
    if heads is None:
        raise ValueError(f"the source of width {width} has no config; num_heads is required")
    return int(heads)
