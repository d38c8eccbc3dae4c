"""Replace the softmax attention of encoders of PyTorch, transformers and timm."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_shapes
from onescan.layers.mixers.projections import (
    ProjectionWeights,
    copy_projection,
    projection_weights,
)
from onescan.nn.arguments import bool_mask
from onescan.nn.attention import AttentionLayer
from onescan.nn.multihead import MultiheadAttention, build_attention

# class name -> projections of queries, keys and values; projection of the output, if it has one
_PROJECTIONS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "BertSelfAttention": (("query", "key", "value"), None),  # transformers
    "ViTSelfAttention": (("query", "key", "value"), None),  # earlier versions of transformers
    "ViTAttention": (("q_proj", "k_proj", "v_proj"), "o_proj"),  # transformers
    "Attention": (("qkv",), "proj"),  # timm
}

# names of the layers that project queries, keys and values in other attention modules
_PREFIX, _SUFFIX = r"(?:to_|w_?|lin(?:ear)?_)?", r"(?:_?(?:proj|lin|linear|layer|w))?(?:_?\d)?"
_ROLES = {
    role: re.compile(f"{_PREFIX}(?:{names}){_SUFFIX}", re.IGNORECASE)
    for role, names in {
        "q": "q|query|queries",
        "k": "k|key|keys",
        "v": "v|value|values",
        "kv": "kv|key_value",
        "qkv": "qkv|query_key_value|c_attn|in_proj_qkv",
    }.items()
}
_SHOWN = 3  # modules in an error message


class SelfAttention(nn.Module):
    """A layer with the interface of the attention modules of transformers and timm."""

    def __init__(
        self,
        attention: AttentionLayer,
        shape: tuple[int, ...] | None,
        prefix: int,
        *,
        returns_weights: bool,
        dropout: nn.Module,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.shape, self.prefix = shape, prefix
        self.returns_weights = returns_weights
        self.dropout = dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the output ``[B, T, dim]``, for transformers in a pair with None as weights.

        Args:
            hidden_states: Tokens ``[B, T, dim]``.
            attention_mask: Mask of padding, ``[B, T]`` or ``[B, 1, T or 1, T]``: True or 0.0 for
                real tokens, or an integer mask ``[B, T]`` with 1 for real tokens.
            args: Arguments that encoders pass as None or False.
            attn_mask: timm's name of attention_mask.
            is_causal: Must be False.
            kwargs: Further options of transformers, which are ignored; caches must be None.

        Raises:
            ValueError: If the mask is not one of padding, or a cache is given.
        """
        cache = [kwargs.get(name) for name in ("cache", "past_key_values", "past_key_value")]
        if is_causal or any(x is not None and x is not False for x in (*args, *cache)):
            raise ValueError(
                "is_causal or a cache was given to a replaced attention, expected an encoder's call"
            )
        mask = attention_mask if attn_mask is None else attn_mask
        padding = None if mask is None else _padding(mask, hidden_states)
        o = self.attention(hidden_states, self.shape, key_padding_mask=padding, prefix=self.prefix)
        o = self.dropout(o)
        return (o, None) if self.returns_weights else o


def _padding(mask: Tensor, x: Tensor) -> Tensor:
    """Return the padding [B, T] of a mask of transformers or timm, True for padding."""
    padding = bool_mask("attention_mask", mask) if mask.is_floating_point() else mask == 0
    if padding.ndim >= x.ndim:
        rows = padding.flatten(1, -2)  # of all heads and queries
        if can_look_at_values(rows) and bool((rows != rows[:, :1]).any()):
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} differs between queries or heads, "
                "expected a mask of padding only"
            )
        padding = rows[:, 0]
    padding = padding.expand(x.shape[0], -1)
    check_shapes(hidden_states=(x, "B T D"), attention_mask=(padding, "B T"))
    return padding


@dataclass(frozen=True)
class _Source:
    """The parts of an attention module that its replacement needs."""

    weight: Tensor  # 3 dim, dim
    bias: Tensor | None
    num_heads: int
    out_proj: nn.Module


def _source(name: str, module: nn.Module) -> _Source | None:
    """Return the parts of a supported attention module, None for any other module.

    Raises:
        ValueError: If the module has an option that linear attention lacks.
    """
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                f"{name} has kdim, vdim, add_bias_kv or add_zero_attn, expected none of them"
            )
        return _Source(
            module.in_proj_weight, module.in_proj_bias, module.num_heads, module.out_proj
        )
    names, out = _PROJECTIONS.get(type(module).__name__, ((), None))
    projections = [getattr(module, each, None) for each in names]
    heads = getattr(module, "num_attention_heads", getattr(module, "num_heads", None))
    out_proj = nn.Identity() if out is None else getattr(module, out, None)
    linear = [each for each in projections if isinstance(each, nn.Linear)]
    if not names or len(linear) < len(names) or heads is None or out_proj is None:
        return None
    if getattr(module, "is_decoder", False) or getattr(module, "is_causal", False):
        raise ValueError(f"{name} is causal, expected an encoder's attention")
    weight = torch.cat([each.weight for each in linear])
    dim = linear[0].in_features
    if weight.shape[0] != 3 * dim:
        raise ValueError(f"{name} projects {dim} channels to {weight.shape[0]}, expected {3 * dim}")
    biases: list[Tensor] = [each.bias for each in linear if each.bias is not None]
    return _Source(weight, torch.cat(biases) if biases else None, heads, out_proj)


@torch.no_grad()
def _copy_weights(source: _Source, layer: AttentionLayer) -> None:
    """Copy the projections of queries, keys and values, and use the source's output projection."""
    mixer: Any = layer.mixer
    if source.bias is not None and mixer.in_proj.bias is None:
        bias = mixer.in_proj.weight.new_zeros(mixer.in_proj.out_features)
        mixer.in_proj.bias = nn.Parameter(bias)
    parts = zip(("query", "key", "value"), source.weight.chunk(3), strict=True)
    biases = [None] * 3 if source.bias is None else source.bias.chunk(3)
    for (role, weight), bias in zip(parts, biases, strict=True):
        projection = mixer.projections.get(role)
        if projection is None:
            continue
        heads = 1 if role == "value" else source.num_heads
        theirs, ours = ProjectionWeights(weight, bias, heads), projection_weights(mixer, projection)
        if ours.corresponds_to(theirs):
            copy_projection(theirs, ours)
    mixer.out_proj = source.out_proj


def _replacement(
    name: str,
    module: nn.Module,
    kind: str,
    shape: tuple[int, ...] | None,
    prefix: int,
    options: dict[str, Any],
) -> nn.Module | None:
    """Build the replacement of a module, None for modules that are no supported attention."""
    source = _source(name, module)
    if source is None:
        return None
    layer = build_attention(kind, source.weight.shape[1], source.num_heads, shape, options)
    layer.to(source.weight.device, source.weight.dtype)
    _copy_weights(source, layer)
    new: nn.Module
    if isinstance(module, nn.MultiheadAttention):
        new = MultiheadAttention(
            layer.dim, source.num_heads, batch_first=module.batch_first,
            attention=layer, shape=shape, prefix=prefix,
        )  # fmt: skip
    else:
        timm = type(module).__name__ == "Attention"
        dropout = getattr(module, "proj_drop", None) if timm else None
        new = SelfAttention(
            layer, shape, prefix, returns_weights=not timm, dropout=dropout or nn.Identity()
        )
    return new.train(module.training)


def _projects_queries_keys_and_values(module: nn.Module) -> bool:
    """Return whether a module has layers with the names of an attention's projections."""
    layers = [name for name, _ in module.named_children()]
    roles = {r for r, name in _ROLES.items() if any(name.fullmatch(each) for each in layers)}
    return "qkv" in roles or {"q", "kv"} <= roles or {"q", "k", "v"} <= roles


def _check_nothing_is_left(model: nn.Module, replaced: Collection[str]) -> None:
    """Raise ValueError if another module of the model has queries, keys and values."""
    done = [f"{name}." for name in replaced]
    done += [f"{name}." for name, x in model.named_modules() if name and _is_ours(x)]
    left = [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if _projects_queries_keys_and_values(module) and not f"{name}.".startswith(tuple(done))
    ]
    if left:
        some = ", ".join(f"{name} ({kind})" for name, kind in left[:_SHOWN])
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise ValueError(
            f"model has attention that cannot be replaced: {some}{more}; expected only modules "
            f"of the classes MultiheadAttention, {', '.join(_PROJECTIONS)}"
        )


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, AttentionLayer | SelfAttention | MultiheadAttention)


def replace_attention(
    model: nn.Module,
    kind: str = "lightnet",
    *,
    shape: tuple[int, ...] | None = None,
    prefix: int = 0,
    **options: Any,
) -> list[str]:
    """Replace the softmax attention of an encoder by linear attention, in place.

    Supported are `torch.nn.MultiheadAttention`, ``BertSelfAttention``, ``ViTAttention`` and
    ``ViTSelfAttention`` of transformers, and ``Attention`` of timm. Decoders are not supported; of
    an `nn.Transformer`, pass the encoder: ``replace_attention(model.encoder)``.

    The projections of queries, keys, values and outputs are copied, with their biases. Decays,
    gates, the norm of the output and rotary frequencies are new, and dropout of attention weights
    and norms of queries and keys are removed. The model therefore computes something else and
    needs training. The keys of a decay that computes them by itself, such as HGRN2's, are new.

    To load the weights of such a model, build it, call this function and then
    ``load_state_dict``.

    Args:
        model: Model with attention modules.
        kind: "lightnet", "lion" or "delta".
        shape: Size of each axis of the tokens' grid, without the prefix, such as ``(14, 14)`` for
            224 x 224 images in patches of 16. None treats the tokens as a sequence.
        prefix: Number of tokens before the grid, such as 1 for ViT's class token.
        options: Options of the layer, such as ``decay="fixed"``.

    Returns:
        The names of the replaced modules.

    Raises:
        ValueError: If the model has no supported attention, one with an option that linear
            attention lacks, or another module that projects queries, keys and values, or if it
            contains an `nn.TransformerDecoderLayer`. The model is then unchanged.

    >>> layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> replace_attention(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    ['layers.0.self_attn', 'layers.1.self_attn']
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerDecoderLayer):
            what = f"has a decoder layer, {name!r}" if name else "is a decoder layer"
            raise ValueError(
                f"model {what}, expected an encoder: linear attention does not support the masks "
                "of decoders; pass the encoder by itself, such as model.encoder"
            )
    new: dict[nn.Module, nn.Module] = {}
    names = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not name:
            continue
        if module not in new:
            replacement = _replacement(name, module, kind, shape, prefix, options)
            if replacement is None:
                continue
            new[module] = replacement
        names.append((name, new[module]))
    if names or _source("model", model) is None:
        _check_nothing_is_left(model, [name for name, _ in names])
    if not names and _source("model", model) is not None:
        raise ValueError(
            f"model is itself an attention layer, a {type(model).__name__}, expected a model that "
            "contains such layers; build a onescan.nn.MultiheadAttention or wrap the layer in an "
            "nn.ModuleList"
        )
    if not names:
        raise ValueError(
            f"model is a {type(model).__name__} without attention to replace, expected modules "
            f"of the classes MultiheadAttention, {', '.join(_PROJECTIONS)}"
        )
    for name, replacement in names:
        model.set_submodule(name, replacement)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # chosen for softmax attention at construction
    return [name for name, _ in names]
