"""Softmax attention as in ViT and BERT, with a cache as in GPT-2, or in a sliding window."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from onescan.checks import check_choice, check_whole, is_known
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Direction,
    Mixer,
    check_tokens,
    masked,
)
from onescan.layers.mixers.projections import Projections, merged_projections
from onescan.layers.rotary import check_rotary, rotary_angles, rotated
from onescan.ops.collectives import carry_tokens, gather_tokens, halo
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.packing import Packing, PackingShard, refuse_cu_seqlens
from onescan.ops.parallel import SequenceGroup, packing_over, sequence_group, sequence_parallel
from onescan.ops.window_attention import window_attention
from onescan.shapes import CachedKeep, CachedKeys, CachedSequence, Grid, Hidden, Keep

MAX_CAUSAL_WINDOW = 2**20


@dataclass(frozen=True, kw_only=True)
class SoftmaxMixerConfig(DirectedMixerConfig):
    """Multi-head softmax attention; O(T^2), or O(T) in a sliding window."""

    directions: ClassVar[tuple[Direction, ...]] = ("both", "forward")

    direction: Direction = "both"
    """Tokens to read: all ("both") or earlier ones ("forward"). The state of the latter grows with
    every token, except with a window."""
    window: int | None = None
    """Sliding-window attention: read only tokens at most this many positions away, on both sides,
    or only earlier ones if causal. Equals flash-attention's window_size=(window, window) or
    (window, 0), and Mistral's sliding_window minus 1. Requires one axis; prefix tokens are the
    first tokens of the sequence. None reads all tokens."""
    dropout: float = 0.0
    """Dropout probability of the attention weights in training; 0.1 in BERT."""
    feature_map: FeatureMapName = "identity"
    """Feature map of queries and keys before the softmax; see rows 1 and 3 of LION's Table 14."""
    bias: bool = True
    """Add biases to the projections."""
    rotary: bool = False
    """Rotate queries and keys by their position (RoPE). Requires one axis."""

    @property
    def state_grows(self) -> bool:
        return self.is_causal and self.window is None

    @property
    def skips_padding(self) -> bool:
        return not self.rotary and self.window is None

    @property
    def takes(self) -> frozenset[str]:
        return frozenset({"cu_seqlens"} if self.window is not None else ())

    def build(self, *, width: int, axes: int) -> "SoftmaxMixer":
        self.check_direction()
        head_width = self.head_width(width)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"mixer.dropout is {self.dropout}, expected 0 or more and less than 1")
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        if self.rotary:
            check_rotary(axes, head_width)
        if self.window is not None:
            check_whole(1, window=self.window)
            if self.is_causal and self.window > MAX_CAUSAL_WINDOW:
                raise ValueError(
                    f"window is {self.window}, expected at most {MAX_CAUSAL_WINDOW}, because the "
                    "state holds that many tokens, or None to read all tokens"
                )
            if axes > 1:
                raise ValueError(
                    f"mixer.window is {self.window} with {axes} axes, expected one axis"
                )
        return SoftmaxMixer(self, width)


class SoftmaxState(NamedTuple):
    """Cache of the keys and values of all S tokens so far, or of the last S = window tokens.

    Linear attention does not need it. With a window, keys are stored without rotation, and missing
    tokens before the first one are zeros that `keep` masks, so the size of the state is constant.

    Attributes:
        k: [B, H, S, K].
        v: [B, H, S, K].
        keep: [B, S], True for real tokens.
    """

    k: CachedKeys
    v: CachedKeys
    keep: CachedKeep


class SoftmaxMixer(Mixer):
    """softmax(phi(Q) phi(K)^T / sqrt(K)) V, then W_o, with dropout on the attention weights.

    With a window, the softmax is over |t - s| <= window, as in Longformer, arXiv:2004.05150.
    """

    def __init__(self, config: SoftmaxMixerConfig, width: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.causal = config.is_causal
        self.window = config.window
        self.dropout = config.dropout
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self.rotary = config.rotary
        self.in_proj = nn.Linear(width, 3 * width, bias=config.bias)  # q, k, v
        self.out_proj = nn.Linear(width, width, bias=config.bias)

    @property
    def projections(self) -> Projections:
        widths = [self.out_proj.in_features] * 3
        return merged_projections(widths, self.out_proj, heads=self.num_heads)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        cu_seqlens: Packing | None = None,
        state: SoftmaxState | None = None,
    ) -> tuple[Hidden, SoftmaxState | None]:
        check_tokens(x, grid, keep)
        packing = self._check(x, cu_seqlens, state)
        q, k, v = rearrange(
            self.in_proj(masked(x, keep)),
            "b t (three h k) -> three b h t k",
            three=3,
            h=self.num_heads,
        )
        q, k = self.feature_map(q), self.feature_map(k)
        cached = 0 if state is None else state.k.shape[2]
        if self.rotary and self.window is None:  # cached keys are already rotated
            angles = self._angles(grid, q, start=cached)
            q, k = rotated(q, angles), rotated(k, angles)
        real, new_state, after = keep, None, 0
        if self.causal:
            real = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        needs_no_mask = keep is None and state is None  # fused kernels are faster without one
        if (group := sequence_group(None)) is not None:
            (k, v, real), new_state, after = self._over_ranks(group, x, k, v, keep, state)
            if self.causal and self.window is not None:  # the window begins before the first token
                needs_no_mask = False
            q = F.pad(q, (0, 0, 0, after))
        elif state is not None and real is not None:
            k, v = torch.cat([state.k, k], dim=2), torch.cat([state.v, v], dim=2)
            real = torch.cat([state.keep, real], dim=1)
        if group is None and self.causal and real is not None:
            new_state = self._state(k, v, real)
        cached = k.shape[2] - q.shape[2]
        if self.rotary and self.window is not None:
            angles = self._window_angles(k)
            q, k = rotated(q, angles[cached:]), rotated(k, angles)
        dropout = self.dropout if self.training else 0.0
        if self._window_contains_all(k, packing):
            mask: Any = None if needs_no_mask else self._mask(real, q.shape[2])
            is_causal = self.causal and needs_no_mask
            if is_causal and group is not None:  # the last queries and keys are aligned
                from torch.nn.attention.bias import causal_lower_right  # imports the compiler: slow

                mask, is_causal = causal_lower_right(q.shape[2], k.shape[2]), False
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, dropout_p=dropout
            )
        else:
            assert self.window is not None
            o = window_attention(
                q, k, v, window=self.window, causal=self.causal, dropout=dropout,
                keep=None if needs_no_mask else real,
                sequence=_sequences(packing, cached, after, k.shape[2]),
            )  # fmt: skip
        o = o[:, :, : x.shape[1]] if after else o
        o = self.out_proj(rearrange(o, "b h t v -> b t (h v)"))
        return masked(o, keep), new_state if packing is None else None

    def after_masked(self, before: SoftmaxState, after: SoftmaxState, keep: Keep) -> Any:
        """Rotate keys in rows with a masked token by one position; see `Mixer.after_masked`."""
        if self.window is not None:
            return super().after_masked(before, after, keep)
        if not self.rotary:
            return after
        rotated_k = rotated(after.k, self._angles(Grid((2,)), after.k)[1])
        return after._replace(k=after.k.where(keep[:, :, None, None], rotated_k))

    def _check(
        self, x: Hidden, cu_seqlens: Packing | None, state: Any
    ) -> Packing | None:  # Any: the state is not checked yet
        """Raise ValueError for an invalid state or invalid offsets; return the packing."""
        if state is not None:
            self.check_state(state, SoftmaxState, causal=self.causal)
            if self.window is not None and state.k.shape[2] != self.window:
                raise ValueError(
                    f"state has {state.k.shape[2]} cached tokens, expected {self.window}, the "
                    "window of the mixer"
                )
        if self.window is None:
            refuse_cu_seqlens(cu_seqlens, "window None", "a window")
        return packing_over(sequence_group(None), cu_seqlens, x, state=state)

    def _window_contains_all(self, k: CachedKeys, packing: Packing | None) -> bool:
        """Return whether the window contains all tokens, or all earlier ones if causal."""
        if self.window is None:
            return True
        return packing is None and is_known(k.shape[2]) and k.shape[2] <= self.window + 1

    def _angles(self, grid: Grid, q: Tensor, *, start: int = 0) -> Tensor:
        """Return the angles of tokens, [T, K / 2]."""
        angles = rotary_angles(grid, q.shape[-1], start=start, dtype=q.dtype, device=q.device)
        return angles.squeeze(1)

    def _window_angles(self, k: CachedKeys) -> Tensor:
        """Return the rotary angles of all keys; only their differences matter."""
        if sequence_group(None) is None:
            return self._angles(Grid((k.shape[2],)), k)
        with sequence_parallel(None):
            return self._angles(Grid((k.shape[2] + 1,)), k)[1:]  # a grid is never empty

    def _state(self, k: CachedKeys, v: CachedKeys, keep: CachedKeep) -> SoftmaxState:
        """Return the state after the last token."""
        if self.window is None:
            return SoftmaxState(k, v, keep)
        if is_known(k.shape[2]):  # so that padding copies only these
            recent = slice(max(k.shape[2] - self.window, 0), None)
            k, v, keep = k[:, :, recent], v[:, :, recent], keep[:, recent]
        end = k.shape[2]
        k, v = (F.pad(x, (0, 0, self.window, 0))[:, :, end:] for x in (k, v))
        return SoftmaxState(k, v, F.pad(keep, (self.window, 0))[:, end:])

    def _over_ranks(
        self,
        group: SequenceGroup,
        x: Hidden,
        k: CachedKeys,
        v: CachedKeys,
        keep: Keep | None,
        state: SoftmaxState | None,
    ) -> tuple[SoftmaxState, SoftmaxState | None, int]:
        """Return the tokens that this rank reads, and the state after the tokens of all ranks.

        The tokens read end with those of this rank, except with a bidirectional window: it also
        contains tokens of later ranks, whose number is the third result (otherwise 0).
        """
        real = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        local, before = _joined(k, v, real), None if state is None else _joined(*state)
        if self.causal and self.window is not None:
            ((past, last),) = carry_tokens(group, [(local, None)], self.window, before=before)
            return self._split(past, local), self._split(last), 0
        lengths = group.lengths(x)
        if self.causal:
            if before is not None:
                lengths[0] += before.shape[1]
                local = torch.cat([before, local], dim=1) if group.is_first else local
            gathered = gather_tokens(group, local, lengths)
            end = sum(lengths[: group.rank + 1])
            return self._split(gathered[:, :end]), self._split(gathered), 0
        past, future = halo(group, local, lengths, self.window or sum(lengths))
        if self.window is None:
            return self._split(past, future, local), None, 0
        return self._split(past, local, future), None, future.shape[1]

    def _split(self, *tokens: Tensor) -> SoftmaxState:
        """Return the keys, values and mask of joined tokens; the inverse of `_joined`."""
        x = torch.cat(tokens, dim=1)
        k, v = rearrange(x[..., :-1], "b s (two h k) -> two b h s k", two=2, h=self.num_heads)
        return SoftmaxState(k, v, x[..., -1] > 0)

    def _mask(self, real: Tensor | None, rows: int) -> Tensor | None:
        """Return a mask of the tokens that the last `rows` tokens read, [B, 1, rows, S].

        Masked tokens read all tokens, or those up to themselves if causal, so that no row is empty.
        """
        if real is None:
            return None
        columns = real.shape[1]
        is_real_query = real[:, columns - rows :]
        mask = real[:, None, None, :] | ~is_real_query[:, None, :, None]
        if not self.causal:
            return mask
        t = torch.arange(columns - rows, columns, device=real.device)
        s = torch.arange(columns, device=real.device)
        past = t.unsqueeze(1) >= s
        return (mask & past) | (t.unsqueeze(1) == s)


def _joined(k: CachedKeys, v: CachedKeys, keep: CachedKeep) -> Tensor:
    """Concatenate the key, value and mask of each token, [B, S, 2 H K + 1]."""
    both = rearrange([k, v], "two b h s k -> b s (two h k)")
    return torch.cat([both, keep.unsqueeze(-1)], dim=-1)


def _sequences(
    packing: Packing | None, before: int, after: int, tokens: int
) -> CachedSequence | None:
    """Return the packed sequence of each token that is read, including those of other ranks."""
    if not isinstance(packing, PackingShard):
        return None if packing is None else packing.sequence
    return packing.sequences_around(before, after)[:, :tokens]
