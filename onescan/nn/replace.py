"""Replace the softmax attention of PyTorch, transformers and timm encoders."""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_shapes, in_a_line
from onescan.layers.mixers.projections import copy_projection, projection_weights
from onescan.lazy import lazy_attributes
from onescan.messages import expected_model, named_type
from onescan.nn.arguments import bool_mask
from onescan.nn.attention import AttentionLayer
from onescan.nn.multihead import MultiheadAttention, build_attention
from onescan.nn.softmax_parts import (
    RELATIVE,
    AttentionParts,
    Call,
    attention_parts,
    computes_relative_bias,
    computes_windows,
    is_position_argument,
)

MASKS = ("attention_mask", "attn_mask", "mask")
# caches of decoders, the other tokens of cross-attention, and offsets of packed sequences
UNSUPPORTED = (
    "cache", "past_key_values", "past_key_value", "layer_past", "key_value_states",
    "encoder_hidden_states", "context", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k",
)  # fmt: skip
ARGUMENTS = "replacement"  # attribute of a new module: the `Replacement` it was built from
IGNORED = ("position_ids", "cache_position")
_SHOWN = 3  # modules in an error message
_integrations = lazy_attributes("onescan", {"save_linearized": "integrations.transformers"})


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """How attention was replaced: the arguments of `replace_attention`."""

    kind: str = "lightnet"
    shape: tuple[int, ...] | None = None
    prefix: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


class SelfAttention(nn.Module):
    """Linear attention with the interface of the attention module that it replaced."""

    def __init__(
        self,
        attention: AttentionLayer,
        call: Call,
        *,
        shape: tuple[int, ...] | None = None,
        prefix: int = 0,
        omitted: tuple[str, ...] = (),
        dropout: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.call = call
        self.shape, self.prefix = shape, prefix
        self.omitted = omitted
        self.dropout = nn.Identity() if dropout is None else dropout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original module returned, with None for attention weights.

        Args:
            args: Positional arguments of the original module: first the tokens ``[B, T, dim]``.
                A mask must be a padding mask: ``[B, T]`` or ``[B, 1, T or 1, T]`` with True or 0.0
                for real tokens, or ``[B, T]`` integers with 1 for real tokens. Layers with
                causal=True also take the causal mask. Positions and relative biases are ignored.
            kwargs: Keyword arguments of the original module, and others that transformers passes.

        Raises:
            ValueError: If the mask is of another kind, or if the call is that of a decoder, or uses
                cross-attention or packed sequences.
        """
        x, padding = self.read(args, kwargs)
        o = self.attention(x, self.shape, key_padding_mask=padding, prefix=self.prefix)
        o = self.dropout(o)
        if self.call.outputs is None:
            return o
        return (o, *[None] * (self.call.outputs - 1))

    def read(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of a call and their padding, [B, T], True for padding.

        Raises:
            ValueError: See `forward`.
        """
        given = {**dict(zip(self.call.parameters, args, strict=False)), **kwargs}
        x = given.pop(self.call.parameters[0])
        mask = next((m for name in MASKS if (m := given.pop(name, None)) is not None), None)
        self._check(given)
        return x, None if mask is None else self._padding(mask, x)

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError if an argument would change the output of the original module."""
        if given.get("is_causal") and not self.attention.causal:
            raise ValueError(
                "is_causal is True, but the new attention is bidirectional; pass causal=True when "
                "you replace the attention of this part of the model"
            )
        for name, value in given.items():
            is_ignored = name in IGNORED or is_position_argument(name)
            is_read = name in self.call.parameters and torch.is_tensor(value) and not is_ignored
            if is_read or (name in UNSUPPORTED and value is not None and value is not False):
                raise ValueError(
                    f"{name} was given, but the linear attention that replaces softmax attention "
                    "does not support it"
                )

    def _padding(self, mask: Tensor, x: Tensor) -> Tensor:
        """Return the padding [B, T] of a transformers or timm mask, True for padding."""
        if not mask.is_floating_point():
            masked = mask == 0
        elif RELATIVE in self.omitted:  # the bias is added to the mask
            masked = mask <= torch.finfo(mask.dtype).min
        else:
            masked = bool_mask("attention_mask", mask)
        if masked.ndim >= x.ndim:
            rows = masked.flatten(1, -3) if masked.ndim > x.ndim else masked.unsqueeze(1)
            masked = rows.all(dim=(1, 2))  # B T; a real token reads itself
            if not computes_windows(self.omitted) and can_look_at_values(rows):
                self._check_rows(rows, masked, mask.shape)
        padding = masked.expand(x.shape[0], -1)
        check_shapes(hidden_states=(x, "B T D"), attention_mask=(padding, "B T"))
        return padding

    def _check_rows(self, rows: Tensor, padding: Tensor, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the mask hides only padding and, if causal, later tokens."""
        queries, keys = rows.shape[-2:]
        expected = padding[:, None, None]
        if self.attention.causal and queries == keys:
            expected = expected | rows.new_ones(queries, keys).triu(1)
        differs = (rows != expected).any(dim=-1)  # B heads queries
        if queries == keys:
            differs = differs & ~padding[:, None]
        if bool(differs.any()):
            kind = "causal mask" if self.attention.causal else "padding mask"
            hint = (
                ""
                if self.attention.causal
                else (
                    "; if the mask is causal, pass causal=True when you replace the attention of "
                    "this part of the model"
                )
            )
            raise ValueError(
                f"attention_mask of shape {tuple(shape)} differs between queries or heads, "
                f"expected a {kind}{hint}"
            )


@torch.no_grad()
def _copy_weights(parts: AttentionParts, layer: AttentionLayer) -> None:
    """Copy the projections of queries, keys and values, and use the source's output projection."""
    mixer: Any = layer.mixer
    has_bias = any(source.bias is not None for source in parts.projections.values())
    if has_bias and mixer.in_proj.bias is None:
        bias = mixer.in_proj.weight.new_zeros(mixer.in_proj.out_features)
        mixer.in_proj.bias = nn.Parameter(bias)
    for role, source in parts.projections.items():
        projection = mixer.projections.get(role)
        if projection is not None:
            target = projection_weights(mixer, projection)
            if target.corresponds_to(source):
                copy_projection(source, target)
    mixer.out_proj = parts.out_proj


def _build(
    module: nn.Module, parts: AttentionParts, arguments: Replacement, omitted: tuple[str, ...]
) -> nn.Module:
    """Build the replacement of an attention module with these parts."""
    options, shape, prefix = arguments.options, arguments.shape, arguments.prefix
    if parts.num_heads * parts.head_dim != parts.dim:
        options = {"head_dim": parts.head_dim, **options}
    layer = build_attention(arguments.kind, parts.dim, parts.num_heads, shape, options)
    weight = parts.projections["query"].weight
    layer.to(weight.device, weight.dtype)
    _copy_weights(parts, layer)
    new: nn.Module
    if parts.call is None:
        assert isinstance(module, nn.MultiheadAttention)
        new = MultiheadAttention(
            layer.dim, parts.num_heads, batch_first=module.batch_first,
            attention=layer, shape=shape, prefix=prefix,
        )  # fmt: skip
    else:
        new = SelfAttention(
            layer, parts.call, shape=shape, prefix=prefix, dropout=parts.dropout,
            omitted=tuple(dict.fromkeys((*parts.omitted, *omitted))),
        )  # fmt: skip
    setattr(new, ARGUMENTS, arguments)
    return new.train(module.training)


def real_tokens(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens of the output of a replacement are not padding; None for all.

    Args:
        module: Replacement, as `build_replacements` returns it.
        args: Positional arguments of its call.
        kwargs: Keyword arguments of its call.
    """
    if isinstance(module, SelfAttention):
        _, padding = module.read(args, kwargs)
        return None if padding is None else ~padding
    assert isinstance(module, MultiheadAttention)
    padding = kwargs.get("key_padding_mask", args[3] if len(args) > 3 else None)  # noqa: PLR2004
    if padding is None:
        return None
    real = ~bool_mask("key_padding_mask", padding)
    return real if module.batch_first else real.mT


def is_replacement(module: nn.Module) -> bool:
    """Return whether a module is linear attention from `onescan.nn`."""
    return isinstance(module, AttentionLayer | SelfAttention | MultiheadAttention)


def _is_in(name: str, parents: Collection[str]) -> bool:
    return f"{name}.".startswith(tuple(f"{parent}." for parent in parents))


def find_attention(
    model: nn.Module, exclude: Collection[str], *, causal: bool
) -> dict[str, AttentionParts]:
    """Return the parts of all softmax attention modules of a model, by name.

    Raises:
        ValueError: If there is none, if one cannot be replaced, or if an excluded name does not
            exist.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in exclude:
        if name not in modules or not name:
            raise ValueError(
                f"exclude contains {name!r}, but the model has no module with that name"
            )
    parts_by_name: dict[str, AttentionParts] = {}
    problems: list[str] = []
    skipped = [*exclude]
    for name, module in modules.items():
        if _is_in(name, skipped):
            continue
        if is_replacement(module):
            skipped.append(name)
            continue
        try:
            parts = attention_parts(module)
            if parts is not None and getattr(module, "is_causal", False) and not causal:
                raise ValueError("is causal; pass causal=True to replace it")
            parent = modules[name.rpartition(".")[0]]  # may divide the tokens into windows
            sizes = [getattr(each, "window_size", None) for each in (module, parent)]
            if parts is not None and any(sizes):
                raise ValueError("attends within windows, which linear attention does not need")
        except ValueError as error:
            problems.append(f"{name or 'the model itself'} ({type(module).__name__}) {error}")
            continue
        if parts is not None:
            if not name:
                raise ValueError(
                    f"model is itself an attention layer, {named_type(module)}, expected a model "
                    "that contains such layers; build a onescan.nn.MultiheadAttention or wrap the "
                    "layer in an nn.ModuleList"
                )
            parts_by_name[name] = parts
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"model has attention that cannot be replaced: {'; '.join(problems[:_SHOWN])}{more}. "
            "To keep it, pass its name in exclude"
        )
    if not parts_by_name:
        raise ValueError(
            f"model is {named_type(model)} without softmax attention to replace, expected modules "
            "with linear layers for queries, keys and values"
        )
    return parts_by_name


def _omitted_by_model(
    model: nn.Module, parts_by_name: Mapping[str, AttentionParts]
) -> tuple[str, ...]:
    """Return what other modules of the model add to attention and replacements omit."""
    names = (name for name, _ in model.named_modules() if not _is_in(name, parts_by_name))
    is_biased = any(computes_relative_bias(name.rpartition(".")[2]) for name in names)
    return (RELATIVE,) if is_biased else ()


def _warn_of_omitted(parts_by_name: Mapping[str, AttentionParts], omitted: tuple[str, ...]) -> None:
    """Warn about what the attention of a model computed that its replacement does not."""
    names = dict.fromkeys(
        (*omitted, *(name for parts in parts_by_name.values() for name in parts.omitted))
    )
    if names:
        warnings.warn(
            f"the linear attention that replaces {len(parts_by_name)} modules does not compute "
            f"{', '.join(names)}",
            stacklevel=4,
        )


def replace_attention(
    model: nn.Module,
    kind: str = "lightnet",
    *,
    shape: tuple[int, ...] | None = None,
    prefix: int = 0,
    exclude: Collection[str] = (),
    **options: Any,
) -> list[str]:
    """Replace the softmax attention of an encoder with linear attention, in place.

    Attention is recognized by its structure: a module with linear layers for queries, keys and
    values, separate or merged, as in nearly all PyTorch, transformers and timm encoders. Decoders
    are not supported; for an encoder-decoder model, pass only the encoder:
    ``replace_attention(model.encoder)``.

    The query, key, value and output projections are copied, with their biases; grouped keys and
    values are repeated for each head. Decays, gates, the norm of the output and rotary frequencies
    are new, and so are keys that a decay computes itself, as in HGRN2. The model therefore computes
    a different function and needs training, for example with `onescan.linearize`. Dropout of
    attention weights is removed. A warning lists what else the model computed that its replacement
    does not: rotary positions, relative position biases, norms of queries and keys, or windows.

    `save_linearized` and `load_linearized` of `onescan.integrations.transformers` save and load
    transformers models with replaced attention; ``save_pretrained`` of the model saves it in the
    same way. To load any other model, build it, call this function with the same arguments, and
    then call ``load_state_dict``.

    Args:
        model: Model with attention modules.
        kind: "lightnet", "lion" or "delta".
        shape: Size of each axis of the tokens' grid, without the prefix, such as ``(14, 14)`` for
            224 x 224 images in patches of 16. None treats the tokens as a sequence.
        prefix: Number of tokens before the grid, such as 1 for ViT's class token.
        exclude: Names of modules to leave as they are, with everything in them.
        options: Options of the layer, such as ``decay="fixed"``, or ``causal=True`` for an encoder
            with a causal mask, such as CLIP's text encoder.

    Returns:
        The names of the replaced modules.

    Raises:
        ValueError: If the model has no softmax attention, or if some of it cannot be replaced and
            is not excluded: attention in a decoder, within windows, or with unknown layers. The
            model is then unchanged.

    >>> layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> replace_attention(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    ['layers.0.self_attn', 'layers.1.self_attn']
    """
    arguments = Replacement(kind=kind, shape=shape, prefix=prefix, options=options)
    new = build_replacements(model, arguments, exclude=exclude)
    install_replacements(model, new)
    return list(new)


def build_replacements(
    model: nn.Module, arguments: Replacement, *, exclude: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Build the replacements of all softmax attention modules of a model, by name.

    The model stays unchanged, but the replacements share its output projections. See
    `replace_attention`.
    """
    if not isinstance(model, nn.Module):
        raise expected_model(model, "an nn.Module")
    if isinstance(exclude, str):
        raise ValueError(f"exclude is {exclude!r}, expected a list of names")
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerDecoderLayer) and not _is_in(name, exclude):
            what = f"has a decoder layer, {name!r}" if name else "is a decoder layer"
            raise ValueError(
                f"model {what}, expected an encoder: linear attention does not support the masks "
                "of decoders; pass the encoder by itself, such as model.encoder"
            )
    causal = bool(arguments.options.get("causal", False))
    parts_by_name = find_attention(model, exclude, causal=causal)
    omitted = _omitted_by_model(model, parts_by_name)
    new = _build_all(model, parts_by_name, arguments, omitted)
    _warn_of_omitted(parts_by_name, omitted)
    return new


def _build_all(
    model: nn.Module,
    parts_by_name: Mapping[str, AttentionParts],
    arguments: Replacement,
    omitted: tuple[str, ...],
) -> dict[str, nn.Module]:
    """Build the replacements of some modules; a module with several names has one replacement."""
    built: dict[nn.Module, nn.Module] = {}
    for name, parts in parts_by_name.items():
        module = model.get_submodule(name)
        if module not in built:
            built[module] = _build(module, parts, arguments, omitted)
    return {name: built[model.get_submodule(name)] for name in parts_by_name}


def install_replacements(model: nn.Module, new: Mapping[str, nn.Module]) -> None:
    """Replace modules of a model with the new modules of the same names."""
    for name, module in new.items():
        model.set_submodule(name, module)
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # chosen for softmax attention at construction
        is_of_transformers = type(part).__module__.startswith("transformers.")
        is_saved = is_of_transformers and hasattr(part, "save_pretrained")
        if is_saved and any(hasattr(module, ARGUMENTS) for module in part.modules()):
            vars(part)["save_pretrained"] = partial(_save_pretrained, part)


def _save_pretrained(model: nn.Module, folder: Any, **options: Any) -> None:
    """Save a transformers model whose own `save_pretrained` would lose the new attention."""
    _integrations("save_linearized")(model, folder, **options)


def describe_replacements(model: nn.Module) -> list[dict[str, Any]]:
    """Return how a model's attention was replaced, as JSON types, for `repeat_replacements`."""
    groups: list[tuple[Replacement, list[str]]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        arguments = getattr(module, ARGUMENTS, None)
        if not isinstance(arguments, Replacement):
            continue
        known = next((names for each, names in groups if each == arguments), None)
        if known is None:
            groups.append((arguments, [name]))
        else:
            known.append(name)
    return [
        {
            "kind": each.kind,
            "shape": None if each.shape is None else list(each.shape),
            "prefix": each.prefix,
            "options": dict(each.options),
            "modules": names,
        }
        for each, names in groups
    ]


def repeat_replacements(model: nn.Module, described: Collection[Mapping[str, Any]]) -> None:
    """Replace the attention of a new model as `describe_replacements` described it for another.

    Raises:
        ValueError: If the description is damaged, or names modules that are not softmax attention.
    """
    for group in described:
        try:
            shape, names = group["shape"], list(group["modules"])
            arguments = Replacement(
                kind=group["kind"],
                shape=None if shape is None else tuple(shape),
                prefix=group["prefix"],
                options=dict(group["options"]),
            )
            parts_by_name = {name: attention_parts(model.get_submodule(name)) for name in names}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the description of replaced attention is damaged: {in_a_line(error)}"
            ) from error
        parts = {name: each for name, each in parts_by_name.items() if each is not None}
        if missing := parts_by_name.keys() - parts.keys():
            raise ValueError(
                f"the description of replaced attention names {min(missing)}, which is not softmax "
                "attention"
            )
        omitted = _omitted_by_model(model, parts)
        install_replacements(model, _build_all(model, parts, arguments, omitted))
