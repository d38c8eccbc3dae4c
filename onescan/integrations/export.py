"""Models as programs that run without onescan: torch.export's, and ONNX's in onnxruntime.

Batch and length stay free, and so do height and width of images. What chooses a form by length
takes one that fits any: sums in chunks of fixed size, whose number is free.
"""

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from onescan.checks import check_choice, check_positive
from onescan.configs import to_dict
from onescan.layers.mixers import LinearDiffusionMixerConfig
from onescan.layers.position import AbsolutePositionConfig
from onescan.models.causal_lm import CausalLM
from onescan.models.image_classifier import ImageClassifier
from onescan.models.masked_lm import MaskedLM
from onescan.models.sequence_classifier import SequenceClassifier
from onescan.models.token_network import flatten_state, unflatten_state

__all__ = [
    "Also",
    "export_onnx",
    "export_onnx_step",
    "export_program",
    "export_step",
    "first_state",
]

Also = Literal["keep", "segments"]
MODELS = (ImageClassifier, MaskedLM, SequenceClassifier, CausalLM)

BATCH, TOKENS, PATCHES = 2, 37, (3, 5)  # of the example that is traced
MOST_BYTES = 2**31 - 2**24  # a protobuf file ends at 2 GiB; the graph needs some of it
AXES = {"images": ("batch", "channels", "height", "width"), "tokens": ("batch", "length")}
FIXED_FORMS = ("full", "recurrent")  # loops over tokens, or over halves of them
NEXT = "next."  # what a step returns of the state goes by its name behind this


def export_program(model: nn.Module, *, also: tuple[Also, ...] = ()) -> ExportedProgram:
    """Trace a model for torch.export; its program takes and returns what the model does.

    An image classifier takes `images`, of any batch and any size that patches divide, from two on
    each side, or of the one size that absolute positions have. The others take `tokens`, of any
    batch and length, and what `also` names; a causal language model returns its logits alone.

    Args:
        model: in eval mode.
        also: further inputs of a model of texts, in this order: "keep", "segments". A causal
            language model has no segments.

    Raises:
        ValueError: no such model, one that trains, inputs that it does not take, or a mixer whose
            form was chosen to be "full" or "recurrent", which fits one length.
    """
    _check(model)
    names, example, sizes = _inputs_of(model, also)
    return _traced(model, _Whole(model, names), example, sizes)


def export_step(model: CausalLM, *, any_length: bool = False) -> ExportedProgram:
    """Trace the step of a causal language model: (tokens, state) to (logits, state).

    The state is a dict of tensors by the names of `onescan.models.token_network.flatten_state`;
    `first_state`
    makes the one before any token. Its batch is free, and so is how many tokens a softmax keeps.

    Args:
        model: in eval mode.
        any_length: take any number of tokens, to read a prompt at once, and not one, [B, 1].

    Raises:
        ValueError: no causal language model, one that trains, or, with any_length, a form as in
            `export_program`.
    """
    _check_causal(model)
    example, sizes = _step_inputs(model, any_length)
    return _traced(model, _Step(model), example, sizes)


@torch.no_grad()
def first_state(model: CausalLM, batch: int = 1) -> dict[str, Tensor]:
    """The state before any token, for the step of a program.

    It is what one masked token leaves behind, with zeros for what the mask hides.

    Raises:
        ValueError: no causal language model, one that trains, or a batch that is not above 0.
    """
    _check_causal(model)
    check_positive(batch=batch)
    return {name: _without_contents(x) for name, x in _masked_state(model, batch, 1).items()}


def export_onnx(
    model: nn.Module, path: str | os.PathLike[str], *, also: tuple[Also, ...] = ()
) -> None:
    """Write `export_program`'s program as an ONNX file, with the model's config in its metadata.

    Its output is `logits`; free sizes are called batch, length, height and width.

    Raises:
        ValueError: as `export_program`; also a diffusion by Crank-Nicolson, which solves a system,
            or more weights than the 2 GiB that an ONNX file holds.
        OSError: the file cannot be written.
    """
    _check(model)
    _check_onnx(model)
    names, example, sizes = _inputs_of(model, also)
    program = _traced(model, _Whole(model, names), example, sizes)
    _write(model, program, Path(path), names, ["logits"], {})


def export_onnx_step(
    model: CausalLM, path: str | os.PathLike[str], *, any_length: bool = False
) -> None:
    """Write `export_step`'s program as an ONNX file.

    Its inputs are `tokens` and the state's tensors by name; its outputs `logits` and the same
    names behind "next.". The metadata has the model's config, and as "first_state" for each
    tensor of the state its shape, type and the one number that it is filled with before any token.

    Raises:
        ValueError: as `export_step` and `export_onnx`.
        OSError: the file cannot be written.
    """
    _check_causal(model)
    _check_onnx(model)
    example, sizes = _step_inputs(model, any_length)
    program = _traced(model, _Step(model), example, sizes)
    state = list(example[1])
    outputs = ["logits", *(NEXT + name for name in state)]
    first = {
        name: {
            "shape": ["batch", *x.shape[1:]] if x.ndim else [],
            "type": str(x.dtype).removeprefix("torch."),
            "value": x.flatten()[0].item(),
        }
        for name, x in first_state(model).items()
    }
    _write(model, program, Path(path), ["tokens", *state], outputs, {"first_state": first})


class _Whole(nn.Module):
    """A model from named inputs to scores alone."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        named = dict(zip(self.names[1:], inputs[1:], strict=True))
        scores = self.model(inputs[0], **named)
        return scores[0] if isinstance(self.model, CausalLM) else scores


class _Step(nn.Module):
    """A causal language model with its state as flat named tensors."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model
        self.like = _as_tensors(_after_masked(model, 1, 1))

    def forward(
        self, tokens: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits, after = self.model(tokens, unflatten_state(self.like, state))
        return logits, flatten_state(after)


def _traced(model: nn.Module, program: nn.Module, example: Any, sizes: Any) -> ExportedProgram:
    with _without_gradients(model):
        return torch.export.export(program.eval(), example, dynamic_shapes=sizes)


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Learn nothing for a while: torch cannot differentiate a scan over a free number of chunks."""
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learnt:
            parameter.requires_grad_(False)
        with torch.no_grad():
            yield
    finally:
        for parameter in learnt:
            parameter.requires_grad_(True)


def _inputs_of(model: Any, also: tuple[Also, ...]) -> tuple[list[str], Any, Any]:
    """The inputs' names, an example of them, and which of their sizes are free."""
    _check_form(model)
    batch = Dim("batch")
    if isinstance(model, ImageClassifier):
        if also:
            raise ValueError(f"also is {also!r} with a model of images, expected ()")
        images, sizes = _images_of(model, batch)
        return ["images"], (images,), ((sizes,),)
    for name in also:
        check_choice("also", name, get_args(Also))
    if "segments" in also and not (model.config.segment_types and not isinstance(model, CausalLM)):
        raise ValueError("also has 'segments', and the model tells none apart")
    tokens = _tokens(model, BATCH, TOKENS)
    # of its own each: a tensor that comes twice would be traced as one input
    keep, segments = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    examples = {"keep": keep, "segments": segments}
    names = ["tokens", *also]
    free = {0: batch, 1: Dim("length")}
    return names, (tokens, *(examples[name] for name in also)), (tuple(free for _ in names),)


def _images_of(model: ImageClassifier, batch: Any) -> tuple[Tensor, dict[int, Any]]:
    config = model.config
    place = next(model.parameters())
    if isinstance(config.position, AbsolutePositionConfig):
        images = place.new_zeros(BATCH, config.channels, *config.image_size)
        return images, {0: batch}
    sides = [n * patch for n, patch in zip(PATCHES, config.patch_size, strict=True)]
    free = [
        patch * Dim(f"{side}_in_patches", min=2) if patch > 1 else Dim(side, min=2)
        for side, patch in zip(("height", "width"), config.patch_size, strict=True)
    ]
    images = place.new_zeros(BATCH, config.channels, *sides)
    return images, {0: batch, 2: free[0], 3: free[1]}


def _step_inputs(model: CausalLM, any_length: bool) -> tuple[Any, Any]:
    if any_length:
        _check_form(model)
    batch = Dim("batch")
    tokens = _tokens(model, BATCH, TOKENS if any_length else 1)
    sizes = {0: batch, 1: Dim("length")} if any_length else {0: batch}
    state, longer = (_masked_state(model, BATCH, count) for count in (3, 4))
    growing = Dim("cached")
    of_state: dict[str, dict[int, Any]] = {}
    for name, x in state.items():
        pairs = enumerate(zip(x.shape, longer[name].shape, strict=True))
        grows = {axis: growing for axis, (a, b) in pairs if a != b}
        of_state[name] = grows | ({0: batch} if x.ndim else {})
    return (tokens, state), (sizes, of_state)


def _tokens(model: nn.Module, batch: int, count: int) -> Tensor:
    return torch.zeros(batch, count, dtype=torch.long, device=next(model.parameters()).device)


@torch.no_grad()
def _after_masked(model: CausalLM, batch: int, count: int) -> Any:
    """The state after tokens that are none."""
    tokens = _tokens(model, batch, count)
    return model(tokens, keep=torch.zeros_like(tokens, dtype=torch.bool))[1]


def _masked_state(model: CausalLM, batch: int, count: int) -> dict[str, Tensor]:
    return flatten_state(_after_masked(model, batch, count))


def _without_contents(x: Tensor) -> Tensor:
    """A tensor of one number: the one that it holds, or 0 for a count, or for what a mask hides."""
    return x if x.ndim and bool((x == x.flatten()[0]).all()) else torch.zeros_like(x)


def _as_tensors(state: Any) -> Any:
    """The same tree with tensors for numbers: a program that is traced knows no numbers."""
    if isinstance(state, tuple):
        parts = [_as_tensors(part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return None if state is None else torch.as_tensor(state)


def _write(
    model: Any,
    program: ExportedProgram,
    path: Path,
    inputs: list[str],
    outputs: list[str],
    metadata: dict[str, Any],
) -> None:
    onnx = _to_onnx(program, inputs, outputs)
    _name_sizes(onnx.model.graph)
    config = {"type": type(model.config).__name__} | to_dict(model.config)
    for name, value in {"config": config, **metadata}.items():
        onnx.model.metadata_props[name] = json.dumps(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        onnx.save(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _to_onnx(program: ExportedProgram, inputs: list[str], outputs: list[str]) -> Any:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("writing ONNX needs the extra: pip install 'onescan[export]'") from error
    from onescan.integrations.onnx_ops import with_onnx_ops

    with warnings.catch_warnings():  # torch uses what it has deprecated itself
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        return torch.onnx.export(
            with_onnx_ops(program),
            (),
            input_names=inputs,
            output_names=outputs,
            dynamo=True,
            verbose=False,
        )


def _name_sizes(graph: Any) -> None:
    """Call free sizes what they are, in place of the symbols that they have while traced."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        axes = AXES.get(value.name, ("batch", *["cached"] * len(value.shape)))
        for size, name in zip(value.shape, axes, strict=False):
            if not isinstance(size, int):
                names.setdefault(str(size), name)
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int):
                value.shape[axis] = _renamed(str(size), names)


def _renamed(size: str, names: Mapping[str, str]) -> str:
    """A size with its symbols, which are words, replaced by their names."""
    return names.get(size) or re.sub(r"\b\w+\b", lambda found: names.get(found[0], found[0]), size)


def _check(model: Any) -> None:
    if not isinstance(model, MODELS):
        known = ", ".join(kind.__name__ for kind in MODELS)
        raise ValueError(f"model is a {type(model).__name__}, expected one of {known}")
    if model.training:
        raise ValueError("model is training, expected it in eval mode: model.eval()")


def _check_causal(model: Any) -> None:
    if not isinstance(model, CausalLM):
        raise ValueError(f"model is a {type(model).__name__}, expected a CausalLM")
    _check(model)


def _check_form(model: Any) -> None:
    form = getattr(model.config.mixer, "form", "auto")
    if form in FIXED_FORMS:
        raise ValueError(
            f"mixer.form is {form!r}, expected 'auto': its work is laid out for one length, and an "
            "exported length is free"
        )


def _check_onnx(model: Any) -> None:
    mixer = model.config.mixer
    if isinstance(mixer, LinearDiffusionMixerConfig) and mixer.scheme != "explicit":
        raise ValueError(
            f"mixer.scheme is {mixer.scheme!r}, expected 'explicit': ONNX solves no linear system"
        )
    size = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    if size > MOST_BYTES:
        raise ValueError(f"model has {size} bytes, expected at most {MOST_BYTES} in an ONNX file")
