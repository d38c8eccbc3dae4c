"""Attention-like layers on tokens [B, T, dim], for sequences and grids, with cross-attention."""

from typing import Any

from torch import Tensor, nn

from onescan.checks import check_choice, check_whole
from onescan.layers.basic import NormName
from onescan.layers.decays import DECAYS, NoDecayConfig
from onescan.layers.mixers.contract import Mixer, MixerConfig, ScanName
from onescan.layers.mixers.delta_rule import DeltaRuleMixerConfig
from onescan.layers.mixers.lightnet import LightNetMixer, LightNetMixerConfig
from onescan.layers.mixers.linear_attention import LinearAttention
from onescan.layers.mixers.linear_diffusion import LinearDiffusionMixerConfig
from onescan.layers.mixers.lion import LionMixerConfig
from onescan.nn.arguments import check_continuable, check_token_vectors, grid_of, keep_of


class AttentionLayer(nn.Module):
    """Base class of the layers: a mixer, `mixer`, behind the interface of attention layers."""

    mixer: Mixer

    def __init__(self, config: MixerConfig, dim: int, axes: int) -> None:
        super().__init__()
        check_whole(1, dim=dim, num_heads=config.num_heads, axes=axes)
        self.dim, self.axes = dim, axes
        self.causal = config.is_causal
        self.mixer = config.build(width=dim, axes=axes)
        self.mixer.init_weights()

    def forward(
        self,
        x: Tensor,
        shape: tuple[int, ...] | None = None,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
        *,
        prefix: int = 0,
        context_shape: tuple[int, ...] | None = None,
    ) -> Any:
        """Mix the tokens of x, or read those of a context.

        Args:
            x: Tokens ``[B, T, dim]``, those of a grid in row-major order.
            shape: Size of each axis of the grid, without the prefix. None means a single axis.
            context: Tokens ``[B, S, dim]`` to read instead of x (cross-attention).
            key_padding_mask: True for padding, as in torch; ``keep`` of `onescan.ops` is the
                opposite. ``[B, T]``, or ``[B, S]`` with a context. Padding is not read and, without
                a context, has zero output. It keeps its position, as other tokens do.
            state: State returned by a previous call, to continue a sequence, or a grid along its
                first axis: row by row or frame by frame, never in parts of a row. Causal layers
                only, without a prefix. It is part of the autograd graph: on long streams, detach
                its tensors between training steps or use `torch.no_grad`.
            return_state: Return the state after the last token as well. Causal layers only.
            prefix: Number of tokens before the grid, such as a class token.
            context_shape: Size of each axis of the context's grid, for layers with rotary
                positions. None disables positions for this call.

        Returns:
            The output ``[B, T, dim]``, or with return_state=True a pair (output, state).

        Raises:
            ValueError: If shapes do not match, the layer has no state or cannot continue the given
                one, or it does not define cross-attention.
        """
        check_token_vectors("x", x, self.dim)
        grid = grid_of(x.shape[1], shape, self.axes, prefix)
        if context is None:
            if context_shape is not None:
                raise ValueError(f"context_shape is {context_shape} without a context")
            check_continuable(self.causal, state, return_state, "a layer with causal=True")
            keep = keep_of(key_padding_mask, x)
            o, new_state = self.mixer(x, grid, keep=keep, state=state)
            return (o, new_state) if return_state else o
        check_token_vectors("context", context, self.dim)
        if context.shape[1] == 0:
            raise ValueError("context has 0 tokens, expected at least 1")
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"context has {context.shape[0]} sequences, expected {x.shape[0]}")
        if state is not None or return_state:
            raise ValueError("state or return_state was given with context, expected neither")
        if self.causal:
            raise ValueError("context was given to a causal layer, expected causal=False")
        self.check_context(context_shape)
        grids = None
        if context_shape is not None:
            context_grid = grid_of(
                context.shape[1], context_shape, self.axes, 0, name="context_shape"
            )
            grids = grid, context_grid
        keep, mixer = keep_of(key_padding_mask, context), self.mixer
        assert isinstance(mixer, LinearAttention)
        return mixer.read_context(x, context, grids=grids, keep=keep)

    def check_context(self, context_shape: Any) -> None:
        """Raise ValueError if the layer has no cross-attention, or none with positions."""
        if context_shape is not None:
            raise ValueError(
                f"context_shape is {context_shape}, expected None: {type(self).__name__} does not "
                "encode positions in cross-attention"
            )


class LightNetAttention(AttentionLayer):
    """LightNet attention: each key channel weights the tokens by a softmax; O(T).

    In cross-attention, the softmax is over the context. Rotary positions are used only if
    `context_shape` is given: `x` and `context` then lie in the same coordinates, so that
    ``layer(x, shape, context=x, context_shape=shape)`` equals self-attention.

    Source: LightNet, arXiv:2405.21022, Eq. 13 to 15.

    Args:
        dim: Width of the tokens, a multiple of num_heads unless head_dim is given.
        num_heads: Number of heads.
        axes: Number of axes of the grid.
        causal: Read only earlier tokens, in row-major order.
        lrpe: Rotate queries and keys by their position (MD-LRPE).
        norm: Norm of the output, before the gate.
        gate: Multiply the output by a sigmoid gate.
        head_dim: Query, key and value channels per head. None for dim / num_heads.
    """

    mixer: LightNetMixer

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        axes: int = 1,
        causal: bool = False,
        lrpe: bool = True,
        norm: NormName = "layer",
        gate: bool = True,
        head_dim: int | None = None,
    ) -> None:
        config = LightNetMixerConfig(
            num_heads=num_heads,
            key_width=head_dim,
            value_width=head_dim,
            direction="forward" if causal else "both",
            lrpe=lrpe,
            norm=norm,
            gate="sigmoid" if gate else "none",
        )
        super().__init__(config, dim, axes)

    def check_context(self, context_shape: Any) -> None:
        if context_shape is not None and not self.mixer.config.lrpe:
            raise ValueError(f"context_shape is {context_shape} with lrpe=False, expected None")


class LionAttention(AttentionLayer):
    """LION: linear attention with a decay per token, in both directions or causal; O(T).

    Cross-attention needs ``decay="none"``: a decay depends on the distance between two tokens,
    which is not defined between the tokens of x and those of a context.

    Source: LION, arXiv:2502.16249, Sec. 3.1 and 3.2.

    Args:
        dim: Width of the tokens, a multiple of num_heads unless head_dim is given.
        num_heads: Number of heads.
        axes: Number of axes of the grid.
        causal: Read only earlier tokens, in row-major order.
        decay: "selective" (LION-s), "fixed" (LION-d), "none" (LION-lit), or another name in
            `onescan.layers.decays.DECAYS`.
        scan: "flat" decays along the row-major order; "natural" averages one scan along each axis
            and requires causal=False.
        head_dim: Query, key and value channels per head. None for dim / num_heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        axes: int = 1,
        causal: bool = False,
        decay: str = "selective",
        scan: ScanName = "flat",
        head_dim: int | None = None,
    ) -> None:
        check_choice("decay", decay, DECAYS)
        if causal and scan == "natural":
            raise ValueError("scan is 'natural' with causal=True, expected 'flat'")
        config = LionMixerConfig(
            num_heads=num_heads,
            key_width=head_dim,
            value_width=head_dim,
            direction="forward" if causal else "both",
            decay=DECAYS[decay](),
            scan=scan,
        )
        super().__init__(config, dim, axes)

    def check_context(self, context_shape: Any) -> None:
        config: Any = self.mixer.config
        if not isinstance(config.decay, NoDecayConfig):
            raise ValueError(
                "context was given to a layer with decay, expected decay='none' or "
                "LightNetAttention"
            )
        if config.scan == "natural":
            raise ValueError(
                "context was given to a layer with scan='natural', expected scan='flat'"
            )
        super().check_context(context_shape)


class DeltaAttention(AttentionLayer):
    """DeltaNet: a memory in which each token overwrites the value stored under its key; O(T).

    In cross-attention, the queries read the memory after the last token of the context, so the
    order of the context matters.

    Sources: DeltaNet, arXiv:2406.06484; Gated DeltaNet, arXiv:2412.06464; KDA, arXiv:2510.26692;
    both directions, LION, arXiv:2502.16249, App. B.7.

    Args:
        dim: Width of the tokens, a multiple of num_heads unless head_dim is given.
        num_heads: Number of heads.
        axes: Number of axes of the grid, which is read in row-major order.
        causal: Read only earlier tokens.
        norm: Norm of the output.
        decay: Decay of the memory: "none", "gated_deltanet", "kda", or another name in
            `onescan.layers.decays.DECAYS` of a decay that does not change keys.
        head_dim: Query, key and value channels per head. None for dim / num_heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        axes: int = 1,
        causal: bool = False,
        norm: NormName = "rms",
        decay: str = "none",
        head_dim: int | None = None,
    ) -> None:
        check_choice("decay", decay, DECAYS)
        config = DeltaRuleMixerConfig(
            num_heads=num_heads,
            key_width=head_dim,
            value_width=head_dim,
            direction="forward" if causal else "both",
            norm=norm,
            decay=DECAYS[decay](),
        )
        super().__init__(config, dim, axes)


class LinearDiffusion(AttentionLayer):
    """LDN's layer: the sum of diffusion between neighbors, a gated update and linear attention.

    Add the output to the input, without a norm before the layer: ``x = x + layer(x)``. There is
    no cross-attention.

    Source: LDN, arXiv:2502.12381, Sec. 3.3.

    Args:
        dim: Width of the tokens, a multiple of num_heads.
        num_heads: Number of heads of the linear attention.
        axes: Number of axes of the grid.
        causal: Read only earlier tokens, in row-major order. Requires separable=False.
        separable: Diffuse along one axis after another instead of in row-major order.
        norm: Norm of the input of the local update and the linear attention.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        axes: int = 1,
        causal: bool = False,
        separable: bool = False,
        norm: NormName = "none",
    ) -> None:
        config = LinearDiffusionMixerConfig(
            num_heads=num_heads,
            direction="forward" if causal else "both",
            separable=separable,
            norm=norm,
        )
        super().__init__(config, dim, axes)

    def check_context(self, context_shape: Any) -> None:
        raise ValueError(
            "context was given to LinearDiffusion, which has no cross-attention; use "
            "LightNetAttention or LionAttention(decay='none')"
        )
