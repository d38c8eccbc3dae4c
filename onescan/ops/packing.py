"""Several sequences packed into the rows of a batch, given by their offsets `cu_seqlens`.

As in flash-attention, sequence i consists of the tokens from cu_seqlens[i] up to cu_seqlens[i + 1].
With several rows, offsets count the tokens of all rows, one row after another.

Nothing here waits for a device: sizes depend on shapes, and on values only if these are on the CPU.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.messages import named_type
from onescan.ops.numerics import apply_function
from onescan.shapes import Tokens

LONG_SEQUENCE = 256  # average length above which padding to chunks of 64 tokens is cheap
EXPECTED = "offsets [S + 1] of S sequences"


class Packing:
    """Index tensors of packed sequences: the sequence of each token, and chunks of sequences.

    Ops accept a `Packing` in place of `cu_seqlens`. Models build one for all layers, because it
    computes its index tensors only once.

    >>> packing = Packing(torch.tensor([0, 3, 4]), batch=1, tokens=4)
    >>> packing.sequence.tolist(), packing.starts.tolist()
    ([[0, 0, 0, 1]], [[True, False, False, True]])
    >>> packing.chunks(2).source.tolist()  # 4 represents padding
    [[0, 1, 2, 4, 3, 4]]

    Args:
        cu_seqlens: Offsets, [S + 1], on the CPU or on `device`. Rows begin with a new sequence.
        batch: Number of rows B.
        tokens: Number of tokens per row, T.
        device: Device of the index tensors; None for that of the offsets.
    """

    def __init__(
        self, cu_seqlens: Tensor, *, batch: int, tokens: int, device: torch.device | None = None
    ) -> None:
        self.cu_seqlens, self.batch, self.tokens = cu_seqlens, batch, tokens
        self.device = cu_seqlens.device if device is None else device
        self._cache: dict[str | int, Any] = {}  # torch.compile cannot trace cached_property

    @property
    def sequences(self) -> int:
        """Number of sequences S."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def sequence(self) -> Int[Tensor, "B T"]:
        """Index of the sequence of each token."""
        return self._once("sequence", lambda: self._to_device(self._sequence_of_tokens()))

    @property
    def position(self) -> Int[Tensor, "B T"]:
        """Number of earlier tokens of the same sequence."""
        return self._once("position", lambda: self._to_device(self._position_of_tokens()))

    @property
    def starts(self) -> Bool[Tensor, "B T"]:
        """Whether each token is the first one of its sequence."""
        return self._once("starts", lambda: self._to_device(self._starts_of_tokens()))

    @property
    def ends(self) -> Bool[Tensor, "B T"]:
        """Whether each token is the last one of its sequence."""
        return self._once("ends", lambda: self._to_device(self._ends_of_tokens()))

    def chunk_size(self, most: int = 64) -> int:
        """Return the number of tokens per chunk: shorter sequences use shorter, less padded chunks.

        On a CPU, additive decay is fastest with 32 tokens for sequences of 40 and 80 on average.
        """
        is_short = self.batch * self.tokens < LONG_SEQUENCE * self.sequences
        return min(most, 32) if is_short else most

    def chunks(self, size: int) -> "Chunks":
        """Return chunks of up to `size` tokens, each of a single sequence.

        Every row has the same number of chunks: as many as needed if the offsets are on the CPU,
        otherwise the upper bound T // size + S - B + 1.
        """
        indices = self._indices
        return self._once(size, lambda: Chunks(*map(self._to_device, indices(size))))

    def spans(self, size: int) -> tuple[Int[Tensor, "B N 4"], Int[Tensor, " offsets"]]:
        """Return the tokens of each chunk of up to `size` tokens, as kernels read them.

        Returns:
            For each chunk, its first token and the end of its tokens, whether it continues a
            sequence, and the index of the sequence; and for each sequence, its first chunk in all
            rows, with the number of chunks at the end. Both are int32.

        >>> spans, firsts = Packing(torch.tensor([0, 3, 4]), batch=1, tokens=4).spans(2)
        >>> spans.tolist(), firsts.tolist()
        ([[[0, 2, 0, 0], [2, 3, 1, 0], [3, 4, 0, 1]]], [0, 2, 3])
        """
        compute = self._spans
        return self._once(f"spans of {size}", lambda: tuple(map(self._to_device, compute(size))))

    def _once(self, key: str | int, compute: Callable[[], Any]) -> Any:
        if key not in self._cache:
            with torch.inference_mode(False):  # so that later calls can compute gradients
                self._cache[key] = compute()
        return self._cache[key]

    def _to_device(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def sequence_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the sequences of the tokens at these positions of these rows."""
        ends = self.cu_seqlens[1:].long()
        return torch.searchsorted(ends, rows * self.tokens + positions, right=True)

    def _sequence_of_tokens(self) -> Tensor:
        tokens = torch.arange(self.batch * self.tokens, device=self.cu_seqlens.device)
        ends = self.cu_seqlens[1:].long()
        return torch.searchsorted(ends, tokens, right=True).view(self.batch, self.tokens)

    def _starts_of_tokens(self) -> Tensor:
        return self._position_of_tokens() == 0

    def _ends_of_tokens(self) -> Tensor:
        return F.pad((self._position_of_tokens() == 0)[:, 1:], (0, 1), value=True)

    def _position_of_tokens(self) -> Tensor:
        sequence = self._sequence_of_tokens()
        tokens = torch.arange(self.batch * self.tokens, device=self.cu_seqlens.device)
        return tokens.view_as(sequence) - self.cu_seqlens.long()[sequence]

    def _indices(self, size: int) -> tuple[Tensor, ...]:
        """Return the fields of `Chunks`, on the device of the offsets."""
        sequence, positions = self._sequence_of_tokens(), self._position_of_tokens()
        batch, tokens = sequence.shape
        # chunks of the row up to that of each token, which begins where positions is 0, size, ...
        chunk = (positions % size == 0).cumsum(1) - 1
        count = tokens // size + max(self.sequences - batch, 0) + 1
        if can_look_at_values(chunk):
            count = int(chunk[:, -1:].amax()) + 1 if chunk.numel() else 1
        slots = chunk * size + positions % size
        row = torch.arange(tokens, device=slots.device).expand(batch, -1)
        source = slots.new_full((batch, count * size), tokens).scatter_(1, slots, row)
        first = source[:, ::size].clamp(max=max(tokens - 1, 0))
        is_used = source[:, ::size] < tokens
        begins = (positions.gather(1, first) == 0) | ~is_used
        return source, slots, sequence.gather(1, first), begins

    def _spans(self, size: int) -> tuple[Tensor, Tensor]:
        source, _, sequence, begins = self._indices(size)
        start = source[:, ::size]
        stop = F.pad(start[:, 1:], (0, 1), value=self.tokens)
        sequences = torch.arange(self.sequences + 1, device=sequence.device)
        firsts = torch.searchsorted(sequence.flatten(), sequences)
        return torch.stack([start, stop, ~begins, sequence], dim=-1).int(), firsts.int()


class PackingShard(Packing):
    """Packed sequences on one rank of a process group; see `onescan.ops.parallel`.

    The packing of the rank's tokens, except that `starts`, `ends` and the first chunks of sequences
    refer to whole sequences. A rank without tokens has one masked token per row.

    >>> whole = Packing(torch.tensor([0, 3, 6]), batch=1, tokens=6)
    >>> second = PackingShard(whole, lengths=[2, 4], rank=1)
    >>> second.starts.tolist(), second.ends.tolist()
    ([[False, True, False, False]], [[True, False, False, True]])
    >>> second.heads.tolist(), second.tails.tolist()
    ([[0], [0]], [[0], [1]])

    Args:
        whole: The packing of all tokens.
        lengths: Number of tokens per row on each rank.
        rank: The rank.

    Attributes:
        heads: The sequence of the first token of each row on each rank, [W, B]; -1 for ranks
            without tokens.
        tails: The sequence of the last token of each row on each rank, [W, B].
    """

    def __init__(self, whole: Packing, lengths: Sequence[int], rank: int) -> None:
        offsets, total = whole.cu_seqlens.long(), max(whole.tokens, 1)
        rows = torch.arange(whole.batch, device=offsets.device)
        self.whole, self.tokens_before, tokens = whole, sum(lengths[:rank]), lengths[rank]
        cut = (offsets % total - self.tokens_before).clamp(0, tokens) + offsets // total * tokens
        if not tokens:
            cut = torch.arange(whole.batch + 1, device=offsets.device)
        elif can_look_at_values(cut):
            cut = cut.unique_consecutive()
        super().__init__(cut, batch=whole.batch, tokens=max(tokens, 1), device=whole.device)
        first = rows * total + self.tokens_before
        self._continues, self._continued = (
            ~torch.isin(edge, offsets) | (not tokens) for edge in (first, first + tokens)
        )
        ends, has_tokens = torch.tensor([*accumulate(lengths)]), torch.tensor(lengths) > 0
        ends = ends.to(offsets.device)
        starts = ends - torch.tensor(lengths, device=offsets.device)
        has_tokens = has_tokens.to(offsets.device).unsqueeze(1)
        self.heads, self.tails = (
            self._to_device(torch.where(has_tokens, whole.sequence_at(rows, positions), -1))
            for positions in (starts.unsqueeze(1), ends.unsqueeze(1) - 1)
        )

    def sequences_around(self, before: int, after: int) -> Int[Tensor, "B S"]:
        """Return the sequence of each token, including `before` and `after` tokens around them."""
        start = self.tokens_before - before
        stop = self.tokens_before + self.tokens + after
        rows = torch.arange(self.batch, device=self.cu_seqlens.device).unsqueeze(1)
        positions = torch.arange(start, stop, device=self.cu_seqlens.device)
        return self._to_device(self.whole.sequence_at(rows, positions))

    def _starts_of_tokens(self) -> Tensor:
        starts = super()._starts_of_tokens()
        starts[:, 0] &= ~self._continues
        return starts

    def _ends_of_tokens(self) -> Tensor:
        ends = super()._ends_of_tokens()
        ends[:, -1] &= ~self._continued
        return ends

    def _indices(self, size: int) -> tuple[Tensor, ...]:
        *others, begins = super()._indices(size)
        begins[:, 0] &= ~self._continues
        return *others, begins


class Chunks(NamedTuple):
    """Chunks of C tokens, each of a single sequence, [B, N, C], padded after its tokens.

    Attributes:
        source: The token of its row in each slot of the chunks, [B, N * C]; T for padding.
        slots: The slot of each token, [B, T].
        sequence: The sequence of each chunk, [B, N]. Chunks without tokens repeat one of the row.
        begins: Whether each chunk is the first one of its sequence, [B, N]; True without tokens.
    """

    source: Int[Tensor, "B slots"]
    slots: Int[Tensor, "B T"]
    sequence: Int[Tensor, "B N"]
    begins: Bool[Tensor, "B N"]

    def from_tokens(self, x: Tensor, *, fill: float = 0.0) -> Tensor:
        """Move tokens, [B, T, ...], to the slots of the chunks, [B, N * C, ...], and pad them."""
        return _rearrange(x, self.source, self.slots, fill)

    def from_row(self, x: Tensor) -> Tensor:
        """Move values that rows share, [T, ...], to the slots of the chunks, [B, N * C, ...]."""
        index = self.source.clamp(max=len(x) - 1)
        return x.index_select(0, index.flatten()).unflatten(0, index.shape)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Move the slots of the chunks, [B, N * C, ...], back to tokens, [B, T, ...]."""
        return _rearrange(x, self.slots, self.source, None)


def _rearrange(x: Tensor, index: Tensor, inverse: Tensor, fill: float | None) -> Tensor:
    if torch.compiler.is_compiling():
        return _select(x, index, fill)
    return apply_function(_Rearrange, x, index, inverse, fill)


def _select(x: Tensor, index: Tensor, fill: float | None) -> Tensor:
    """Select x[b, index[b]] for each row b, or `fill` where the index is T, if it is ever."""
    batch, tokens = x.shape[:2]
    first = torch.arange(batch, device=index.device).unsqueeze(1) * tokens
    flat = (index.clamp(max=max(tokens - 1, 0)) + first).flatten()
    selected = x.flatten(0, 1).index_select(0, flat).unflatten(0, index.shape)
    if fill is None:
        return selected
    return selected.masked_fill_((index == tokens).view(*index.shape, *(1,) * (x.ndim - 2)), fill)


class _Rearrange(torch.autograd.Function):
    """Select by an index without duplicates; the gradient selects by its inverse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, fill: float | None) -> Tensor:
        return _select(x, index, fill)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, inverse, ctx.fill = inputs
        ctx.save_for_backward(index, inverse)
        ctx.save_for_forward(index, inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse = ctx.saved_tensors
        fill = 0.0 if ctx.fill is None else None  # only one of both indices selects padding
        return _Rearrange.apply(gradient, inverse, index, fill), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        fill = None if ctx.fill is None else 0.0
        return _Rearrange.apply(tangent, *ctx.saved_tensors, fill)


def document_offsets(numbers: Tokens) -> Int[Tensor, " offsets"]:
    """Return cu_seqlens, given the number of each token's document, [B, T].

    A document ends where the number changes. The result is on the CPU. Numbers on another device
    are copied to the CPU, which waits for that device.

    >>> document_offsets(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])).tolist()
    [0, 2, 4, 5, 8]
    """
    numbers = numbers.cpu()
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers.diff(dim=1) != 0
    starts = begins.flatten().nonzero()[:, 0]
    return torch.cat([starts, starts.new_tensor([numbers.numel()])]).int()


def packing_of(
    cu_seqlens: Any, x: Tensor, *, state: Any = None, tokens: int | None = None
) -> Packing:
    """Return the packing of tokens x, [B, T, ...], from an op's argument.

    Args:
        cu_seqlens: Offsets, or a `Packing`.
        x: The tokens.
        state: The op's state, which cannot be combined with offsets.
        tokens: Number of tokens per row, if x has only some of them.

    Raises:
        ValueError: If the offsets have the wrong type or shape, a state is given or, for offsets on
            the CPU, they do not run from 0 to B * T, decrease, or cross the end of a row.

    >>> packing_of(torch.tensor([0, 2, 5]), torch.ones(1, 4, 3))
    Traceback (most recent call last):
    ValueError: cu_seqlens ends at 5, expected 4, the number of tokens
    """
    if state is not None:
        raise ValueError("cu_seqlens and state were both given, expected only one of them")
    batch, tokens = x.shape[0], x.shape[1] if tokens is None else tokens
    if isinstance(cu_seqlens, Packing):
        packed = cu_seqlens.batch, cu_seqlens.tokens
        if packed != (batch, tokens):
            raise ValueError(
                f"cu_seqlens is a Packing of {packed[0]} rows of {packed[1]} tokens, expected "
                f"{batch} rows of {tokens}"
            )
        return cu_seqlens
    check_offsets_type("cu_seqlens", cu_seqlens, EXPECTED)
    if cu_seqlens.device not in (x.device, torch.device("cpu")):
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, expected cpu or {x.device}")
    if can_look_at_values(cu_seqlens):
        check_offsets("cu_seqlens", cu_seqlens, batch * tokens)
        _check_rows(cu_seqlens, batch, tokens)
    return Packing(cu_seqlens, batch=batch, tokens=tokens, device=x.device)


def check_offsets_type(name: str, offsets: Any, expected: str) -> None:
    """Raise ValueError unless this is a tensor of offsets.

    >>> check_offsets_type("cu_seqlens", torch.ones(2), EXPECTED)
    Traceback (most recent call last):
    ValueError: cu_seqlens has dtype torch.float32, expected torch.int32
    """
    if not isinstance(offsets, Tensor):
        raise ValueError(f"{name} is {named_type(offsets)}, expected a tensor: {expected}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {offsets.dtype}, expected torch.int32")
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}, expected {expected}")


def check_offsets(name: str, offsets: Tensor, tokens: int) -> None:
    """Raise ValueError unless offsets run from 0 to the number of tokens, in order."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"{name} begins with {first}, expected 0")
    if last != tokens:
        raise ValueError(f"{name} ends at {last}, expected {tokens}, the number of tokens")
    decreases = offsets.diff() < 0
    if decreases.any():
        i = int(decreases.nonzero()[0])
        pair = f"{int(offsets[i])} to {int(offsets[i + 1])}"
        raise ValueError(f"{name} decreases from {pair}, expected offsets in ascending order")


def _check_rows(cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    rows = torch.arange(0, batch * tokens, tokens, dtype=cu_seqlens.dtype)
    crossed = ~torch.isin(rows, cu_seqlens)
    if crossed.any():
        row = int(rows[crossed][0])
        raise ValueError(
            f"cu_seqlens has no offset {row}, where a row of {tokens} tokens begins; expected "
            "each sequence within one row"
        )


def refuse_cu_seqlens(cu_seqlens: Any, what: str, expected: str) -> None:
    """Raise ValueError if offsets are given to a form that has none.

    >>> refuse_cu_seqlens(torch.tensor([0, 4]), "form 'fft'", "'dense' or 'banded'")
    Traceback (most recent call last):
    ValueError: cu_seqlens was given with form 'fft', expected 'dense' or 'banded'
    """
    if cu_seqlens is not None:
        raise ValueError(f"cu_seqlens was given with {what}, expected {expected}")
