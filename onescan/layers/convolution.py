"""Short depthwise convolution over tokens, as in Mamba and Hydra, which skips masked tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.ops.collectives import carry_tokens
from onescan.ops.parallel import Group, SequenceGroup, sequence_group
from onescan.shapes import Hidden, Keep

Window = Float[Tensor, "B _ channels"]  # the last kernel_size - 1 real tokens
BatchIndices = Int[Tensor, "B T"]


class RealFirst(NamedTuple):
    """An order of the tokens of each sequence in which the real ones are next to each other.

    Attributes:
        token: The token at each position.
        position: The position of each token, the inverse permutation.
    """

    token: BatchIndices
    position: BatchIndices

    @classmethod
    def of(
        cls, keep: Keep, sequence: BatchIndices | None = None, *, at_end: bool = False
    ) -> "RealFirst":
        """Return the order for a mask; it keeps the order of real tokens.

        Args:
            keep: True for real tokens.
            sequence: Index of the packed sequence of each token. Sequences stay where they are.
                None for one sequence per row.
            at_end: Move the real tokens to the end of each sequence instead of to the front.

        >>> RealFirst.of(torch.tensor([[False, True, False, True]])).token.tolist()
        [[1, 3, 0, 2]]
        """
        first = ~keep if at_end else keep
        if sequence is None:  # counting is faster than sorting, and ONNX has no stable sort
            count = first.cumsum(dim=1)
            position = torch.where(first, count, count[:, -1:] + (~first).cumsum(dim=1)) - 1
            return cls(_inverse(position), position)
        token = torch.argsort(2 * sequence + ~first, dim=1, stable=True)
        return cls(token, _inverse(token))

    def collect(self, x: Hidden) -> Hidden:
        """Move the real tokens together."""
        return _gather(x, self.token)

    def restore(self, x: Hidden) -> Hidden:
        """Move all tokens back, the inverse of `collect`."""
        return _gather(x, self.position)


def _inverse(permutation: BatchIndices) -> BatchIndices:
    steps = torch.arange(permutation.shape[1], device=permutation.device)
    return torch.empty_like(permutation).scatter_(1, permutation, steps.expand_as(permutation))


class ShortConvolution(nn.Conv1d):
    """Compute y_t = bias + sum_i weight_i x_{t - W + 1 + i} for each channel, with W weights.

    Masked tokens are skipped: the output is that of the real tokens alone.
    The weights have the names, shapes and initial values of `nn.Conv1d`.

    Args:
        width: Number of channels.
        kernel_size: Number of tokens that are read, W.
        causal: Read the token and those before it; False reads equally many tokens on each side.
        bias: Add a bias.

    Raises:
        ValueError: If kernel_size is not positive, or is even in a convolution that is not causal.
    """

    def __init__(
        self, width: int, kernel_size: int, *, causal: bool = True, bias: bool = True
    ) -> None:
        check_positive(conv_size=kernel_size)
        if not causal and kernel_size % 2 == 0:
            raise ValueError(
                f"conv_size is {kernel_size}, expected an odd number, to read both sides equally"
            )
        super().__init__(width, width, kernel_size, groups=width, bias=bias)
        self.causal = causal

    def forward(  # type: ignore[override]  # takes tokens, [B, T, D]
        self,
        x: Hidden,
        *,
        keep: Keep | None = None,
        state: Window | None = None,
        group: Group | None = None,
    ) -> tuple[Hidden, Window | None]:
        """Convolve tokens.

        Args:
            x: Tokens.
            keep: True for real tokens. The outputs of the others are undefined, but finite.
            state: Window returned by a previous call of a causal convolution.
            group: Process group across which the tokens are sharded; see `onescan.ops.parallel`.
                None uses that of `sequence_parallel`, if any.

        Returns:
            The convolved tokens, and the last W - 1 real inputs; None if not causal.

        Raises:
            ValueError: If there are no tokens.
        """
        if (ranks := sequence_group(group)) is not None:
            return self._over_ranks(ranks, x, keep, state)
        return self._convolve(x, keep, state)

    def _over_ranks(
        self, ranks: SequenceGroup, x: Hidden, keep: Keep | None, state: Window | None
    ) -> tuple[Hidden, Window | None]:
        """Convolve this rank's tokens, after receiving the neighboring tokens of other ranks."""
        before = self.kernel_size[0] - 1
        count = max(before if self.causal else before // 2, 1)  # at least one token to convolve
        shards = [(x, keep)]
        if not self.causal:
            shards.append((x.flip(1), None if keep is None else keep.flip(1)))
        (past, window), *future = carry_tokens(ranks, shards, count, before=state)
        tokens = torch.cat([past, x, *(after.flip(1) for after, _ in future)], dim=1)
        if keep is not None:
            keep = F.pad(keep, (count, count * len(future)), value=True)
        y, _ = self._convolve(tokens, keep, None)
        return y[:, count : count + x.shape[1]], window if self.causal else None

    def _convolve(
        self, x: Hidden, keep: Keep | None, state: Window | None
    ) -> tuple[Hidden, Window | None]:
        """Convolve tokens that are all on this process."""
        check_positive(T=x.shape[1])
        order = None if keep is None else RealFirst.of(keep)
        if keep is not None and order is not None:
            x = order.collect(x.masked_fill(~keep.unsqueeze(-1), 0))  # 0 times NaN is NaN
        before = self.kernel_size[0] - 1
        if not self.causal:
            window = F.pad(x, (0, 0, before // 2, before // 2))
        elif state is None:
            window = F.pad(x, (0, 0, before, 0))
        else:
            window = torch.cat([state.to(x.dtype), x], dim=1)
        y = F.conv1d(window.mT, self.weight, self.bias, groups=self.groups).mT
        y = y if order is None else order.restore(y)
        return y, self._last(window, keep) if self.causal else None

    def _last(self, window: Window, keep: Keep | None) -> Window:
        """Return the inputs that the next token reads: `window` from its first new token on."""
        before = self.kernel_size[0] - 1
        if keep is None:  # a copy, so that the other tokens can be freed
            return window[:, window.shape[1] - before :].clone()
        steps = torch.arange(before, device=keep.device)
        return _gather(window, keep.sum(dim=1, keepdim=True) + steps)


def _gather(x: Window, indices: Int[Tensor, "B _"]) -> Window:
    return x.gather(1, indices.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
