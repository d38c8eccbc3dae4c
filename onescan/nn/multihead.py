"""Linear attention behind the interface of `torch.nn.MultiheadAttention`."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_choice, check_shapes, check_whole
from onescan.nn.arguments import bool_mask, check_token_vectors
from onescan.nn.attention import AttentionLayer, DeltaAttention, LightNetAttention, LionAttention

KINDS: Mapping[str, Any] = MappingProxyType(
    {"lightnet": LightNetAttention, "lion": LionAttention, "delta": DeltaAttention}
)


def build_attention(
    kind: str, dim: int, num_heads: int, shape: tuple[int, ...] | None, options: Mapping[str, Any]
) -> AttentionLayer:
    """Build the layer of a kind, for the grid `shape` or, if None, for a sequence."""
    check_choice("kind", kind, KINDS)
    known = list(inspect.signature(KINDS[kind]).parameters)[3:]  # after dim, num_heads and axes
    for name in options:
        if name not in known:
            raise ValueError(
                f"{KINDS[kind].__name__} has no option {name!r}, expected {', '.join(known)}"
            )
    axes = 1 if shape is None else len(shape)
    layer: AttentionLayer = KINDS[kind](dim, num_heads, axes=axes, **options)
    return layer


class MultiheadAttention(nn.Module):
    """Linear attention with the interface of `torch.nn.MultiheadAttention`.

    Assign it to ``self_attn`` of an `nn.TransformerEncoderLayer`. The fast paths of PyTorch for
    softmax attention are then disabled. Do so before building an `nn.TransformerEncoder`, or
    build that with ``enable_nested_tensor=False``; `replace_attention` takes care of both.

    Self-attention is ``attention(x, x, x)`` with one tensor. ``attention(x, context, context)`` is
    cross-attention, which the layer must define; see `onescan.nn`.

    Args:
        embed_dim: Width of the tokens, a multiple of num_heads.
        num_heads: Number of heads.
        dropout: Dropout of attention weights, which are never computed. Must be 0.
        bias: Must be True. Which projections have biases is the layer's choice.
        add_bias_kv: Must be False.
        add_zero_attn: Must be False.
        kdim: Width of the keys. Must be None or embed_dim.
        vdim: Width of the values. Must be None or embed_dim.
        batch_first: Take and return ``[B, T, embed_dim]`` instead of ``[T, B, embed_dim]``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        kind: Layer to build: "lightnet", "lion" or "delta".
        attention: Layer of `onescan.nn` to use instead of building one.
        shape: Size of each axis of the tokens' grid, without the prefix. None is a sequence of any
            length.
        prefix: Number of tokens before the grid, such as a class token.
        options: Options of the layer, such as ``causal=True``.

    Raises:
        ValueError: If an argument has an unsupported value.

    >>> attention = MultiheadAttention(64, 4, batch_first=True, kind="lightnet")
    >>> x = torch.randn(2, 5, 64)
    >>> output, weights = attention(x, x, x)
    >>> output.shape, weights
    (torch.Size([2, 5, 64]), None)
    """

    # PyTorch's encoder layers read these, to decide on fast paths for softmax attention.
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        kind: str = "lightnet",
        attention: nn.Module | None = None,
        shape: tuple[int, ...] | None = None,
        prefix: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole(1, embed_dim=embed_dim, num_heads=num_heads)
        for name, value, expected in (
            ("dropout", dropout, 0.0),
            ("bias", bias, True),
            ("add_bias_kv", add_bias_kv, False),
            ("add_zero_attn", add_zero_attn, False),
            ("kdim", embed_dim if kdim is None else kdim, embed_dim),
            ("vdim", embed_dim if vdim is None else vdim, embed_dim),
        ):
            if value != expected:
                raise ValueError(
                    f"{name} is {value}, expected {expected}: other values are not supported by "
                    "linear attention"
                )
        if attention is None:
            attention = build_attention(kind, embed_dim, num_heads, shape, options)
        elif options:
            raise ValueError(
                f"options {sorted(options)} were given with attention; pass them to that layer"
            )
        if not isinstance(attention, AttentionLayer):
            raise ValueError(
                f"attention is a {type(attention).__name__}, expected a layer of onescan.nn"
            )
        config: Any = attention.mixer.config
        if (attention.dim, config.num_heads) != (embed_dim, num_heads):
            raise ValueError(
                f"attention has width {attention.dim} and {config.num_heads} heads, expected "
                f"embed_dim={embed_dim} and num_heads={num_heads}"
            )
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.shape, self.prefix = shape, prefix
        self.attention = attention.to(device=device, dtype=dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the output and None, as linear attention has no attention weights.

        Args:
            query: Tokens ``[B, T, embed_dim]`` if batch_first, otherwise ``[T, B, embed_dim]``.
            key: The same tensor object as query for self-attention. Any other tensor is a context,
                ``[B, S, embed_dim]`` or ``[S, B, embed_dim]``.
            value: The same tensor object as key. Add positions to this tensor, not only to queries
                and keys.
            key_padding_mask: ``[B, S]``, True or -inf for padding.
            need_weights: Ignored: the weights are always None.
            attn_mask: None or, for a causal layer, the causal mask ``[T, T]``, True or -inf for
                later tokens.
            average_attn_weights: Ignored.
            is_causal: Must be False if the layer is not causal.

        Raises:
            ValueError: If key is not value, a mask is not supported, or shapes do not match.
        """
        if key is not value:
            raise ValueError(
                "key and value are different tensors, expected the same tensor for both; add "
                "positions to this tensor before the call"
            )
        check_token_vectors("query", query, self.embed_dim)
        check_token_vectors("key", key, self.embed_dim)
        x = query if self.batch_first else query.transpose(0, 1)
        context = None
        if key is not query:
            context = key if self.batch_first else key.transpose(0, 1)
        self._check_attn_mask(attn_mask, is_causal, x.shape[1])
        if key_padding_mask is not None:
            key_padding_mask = bool_mask("key_padding_mask", key_padding_mask)
        o = self.attention(
            x, self.shape, context=context, key_padding_mask=key_padding_mask, prefix=self.prefix
        )
        return o if self.batch_first else o.transpose(0, 1), None

    def _check_attn_mask(self, attn_mask: Tensor | None, is_causal: bool, tokens: int) -> None:
        causal = self.attention.causal
        if is_causal and not causal:
            raise ValueError("is_causal is True, expected False or a layer with causal=True")
        if attn_mask is None:
            return
        if not causal:
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)}, expected None for a layer with "
                "causal=False; use key_padding_mask for padding"
            )
        check_shapes(attn_mask=(attn_mask, f"{tokens} {tokens}"))
        mask = bool_mask("attn_mask", attn_mask)
        if can_look_at_values(mask) and not torch.equal(mask, torch.ones_like(mask).triu(1)):
            raise ValueError("attn_mask is not the causal mask, expected None or the causal mask")
