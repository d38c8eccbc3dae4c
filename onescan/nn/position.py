"""Position encodings for tokens of any grid: MD-TPE and MD-LRPE."""

from typing import Any

from torch import Tensor, nn

from onescan.checks import check_whole
from onescan.layers.position import ToeplitzPosition
from onescan.nn.arguments import check_continuable, check_token_vectors, grid_of, keep_of
from onescan.ops.lrpe import check_axes_have_features, lrpe, lrpe_angles, lrpe_frequencies


class MDTPE(nn.Module):
    """Encode positions by a learned decaying kernel along each axis, for any grid size (MD-TPE).

    Apply it once, to the embedded tokens; its output replaces them.

    Source: LightNet, arXiv:2405.21022, Eq. 16 and 17.

    Args:
        dim: Width of the tokens.
        axes: Number of axes of the grid.
        causal: Read only earlier positions along each axis, as in the paper.
        hidden_states: Number of exponentials per channel, axis and direction.
        joint: Use one kernel over all axes (Eq. 16) instead of a sum of one per axis (Eq. 17).
        length: Typical number of tokens along an axis, for the initial half-lives only.
    """

    def __init__(
        self,
        dim: int,
        *,
        axes: int = 1,
        causal: bool = False,
        hidden_states: int = 64,
        joint: bool = False,
        length: int = 64,
    ) -> None:
        super().__init__()
        check_whole(1, dim=dim, axes=axes, hidden_states=hidden_states, length=length)
        self.dim, self.axes = dim, axes
        self.position = ToeplitzPosition(dim, (length,) * axes, hidden_states, not causal, joint)

    def forward(
        self,
        x: Tensor,
        shape: tuple[int, ...] | None = None,
        key_padding_mask: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
        *,
        prefix: int = 0,
    ) -> Any:
        """Return the tokens with positions, or with return_state=True a pair with the state.

        Args:
            x: Tokens ``[B, T, dim]``.
            shape: Size of each axis of the grid, without the prefix. None means a single axis.
            key_padding_mask: True for padding ``[B, T]``, which is read as zero. The output at
                padded positions is not zero.
            state: State returned by a previous call, to continue a sequence, or a grid along its
                first axis. Only with causal=True, and not with joint=True on several axes.
            return_state: Return the state after the last token as well, under the same conditions.
            prefix: Number of tokens before the grid, which are unchanged.

        Raises:
            ValueError: If shapes do not match, or the layer has no state or cannot continue the
                given one.
        """
        check_token_vectors("x", x, self.dim)
        grid = grid_of(x.shape[1], shape, self.axes, prefix)
        expected = "a layer with causal=True and, on several axes, joint=False"
        check_continuable(self.position.has_state, state, return_state, expected)
        y, new_state = self.position(
            x, grid, state, keep_of(key_padding_mask, x), return_state=return_state
        )
        return (y, new_state) if return_state else y


class MDLRPE(nn.Module):
    """Rotate queries and keys so that their products depend on relative positions (MD-LRPE).

    `theta`, ``[num_heads, head_dim]``, holds radians per step and is learned. The features of a
    head are divided among the axes. Those of each axis start at theta = base^(-2j / head_dim) for
    j = 0, 1, ...: from 1 radian per step for short distances to slow rotations for long ones. A
    larger base suits longer axes.

    Source: LightNet, arXiv:2405.21022, Eq. 20, App. A.2 and App. B.

    Args:
        head_dim: Width of one head.
        num_heads: Number of heads.
        axes: Number of axes of the grid.
        base: Base of the initial theta.
    """

    no_weight_decay = frozenset({"theta"})

    def __init__(
        self, head_dim: int, num_heads: int, *, axes: int = 1, base: float = 10000.0
    ) -> None:
        super().__init__()
        check_whole(1, head_dim=head_dim, num_heads=num_heads, axes=axes)
        check_axes_have_features(head_dim, axes, described=f"head_dim {head_dim}")
        self.axes = axes
        frequencies = lrpe_frequencies(head_dim, axes, base)
        self.theta = nn.Parameter(frequencies.repeat(num_heads, 1))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        shape: tuple[int, ...] | None = None,
        *,
        prefix: int = 0,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys, ``[B, T, H, 2 head_dim]``.

        Args:
            q: Queries after their feature map, ``[B, T, H, head_dim]``, unlike the
                ``[B, H, T, head_dim]`` of torch's ``scaled_dot_product_attention``.
            k: Keys after their feature map, in the same layout.
            shape: Size of each axis of the grid, without the prefix. None means a single axis.
            prefix: Number of tokens before the grid, which are not rotated.
            start: Position of the first token along the first axis, to continue a sequence or grid.
        """
        grid = grid_of(q.shape[1], shape, self.axes, prefix)
        angles = lrpe_angles(grid.shape, self.theta, prefix=prefix, start=start)
        return lrpe(q, angles), lrpe(k, angles)
