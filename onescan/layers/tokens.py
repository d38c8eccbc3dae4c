"""Tokens of grids and texts: patches, scan orders, packed documents and pooling."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_devices, check_positive
from onescan.ops.collectives import from_first_rank, gather, select_rank, sum_over_ranks
from onescan.ops.numerics import to_accumulation_dtype
from onescan.ops.packing import Packing
from onescan.ops.parallel import SequenceGroup, refuse_group, sequence_group, sequence_parallel
from onescan.shapes import Grid, GridKeep, Grids, Hidden, Keep, Pooled

Indices = Int[Tensor, " T"]
Mix = Callable[..., tuple[Hidden, Any]]


class Patchify(nn.Module):
    """Split a signal, an image or a video into patches and embed each with a linear map.

    If a side is not a multiple of the patch size, it is padded with zeros.

    Args:
        channels: Channels of the input.
        patch_size: Side of a patch along each axis: (p,) for signals, (p, p) for images.
        width: Width of a token.
    """

    def __init__(self, channels: int, patch_size: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.channels, self.patch_size = channels, patch_size
        self.proj = nn.Linear(channels * math.prod(patch_size), width)
        self.pattern = "{grid} -> {tokens}".format(**_patterns(len(patch_size)))

    def forward(self, x: Grids) -> tuple[Hidden, tuple[int, ...]]:
        """Return the tokens in row-major order, and their number along each axis.

        Raises:
            ValueError: If the number of axes or channels differs from the module's, or a side is 0.
        """
        shape = self.grid_shape(tuple(x.shape[1:]))
        sizes = {f"p{i}": size for i, size in enumerate(self.patch_size)}
        x = whole_patches(x, self.patch_size)
        return self.proj(rearrange(x, self.pattern, **sizes)), shape

    def grid_shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of patches along each axis of an input of size (channels, *sides)."""
        channels, *sides = size
        if len(sides) != len(self.patch_size) or channels != self.channels:
            is_one_short = len(sides) == len(self.patch_size) - 1
            hint = "; add the batch dimension if it is missing: x[None]" if is_one_short else ""
            raise ValueError(
                f"input has {channels} channels and sides {tuple(sides)}, expected "
                f"{self.channels} channels and one side for each of {len(self.patch_size)} axes"
                f"{hint}"
            )
        may_be_empty = sequence_group(None) is not None  # a rank may have no patch
        if any(side < 1 for side in (sides[1:] if may_be_empty else sides)):
            raise ValueError(
                f"input has size {' x '.join(map(str, sides))}, expected at least 1 along each axis"
            )
        # two cases instead of one rounded division: exported sizes stay simple
        return tuple(
            side // p + 1 if side % p else side // p
            for side, p in zip(sides, self.patch_size, strict=True)
        )

    def known_lengths(self, x: Grids, *, prefix: int) -> AbstractContextManager[None]:
        """Exchange the number of tokens on each rank once, for all layers in a `with` block.

        Args:
            x: This rank's shard of the input along the first axis, [B, channels, *sides].
            prefix: Number of tokens before the patches, which are on the first rank.

        Raises:
            ValueError: If a shard does not consist of whole patches, or all shards are empty.
        """
        group = sequence_group(None)
        if group is None:
            return nullcontext()
        patch, (_, side, *sides) = self.patch_size[0], x.shape[1:]
        parts = group.gather_number(side, x.device).tolist()
        if not any(parts) or any(part % patch for part in parts):
            raise ValueError(
                f"shards of the input have sizes {parts} along axis 0, expected multiples of the "
                f"patch size {patch}, not all 0"
            )
        lines = math.prod(self.grid_shape((self.channels, 0, *sides))[1:])
        lengths = [part // patch * lines for part in parts]
        lengths[0] += prefix
        return sequence_parallel(group.with_lengths(lengths, prefix=prefix))


def whole_patches(x: Tensor, patch_size: tuple[int, ...]) -> Tensor:
    """Pad the last axes of x with zeros, or False, to multiples of the patch size.

    >>> whole_patches(torch.ones(1, 3, 7, 8), (4, 4)).shape
    torch.Size([1, 3, 8, 8])
    """
    sides = x.shape[x.ndim - len(patch_size) :]
    missing = [-side % patch for side, patch in zip(sides, patch_size, strict=True)]
    if not any(missing):
        return x
    return F.pad(x, [size for after in reversed(missing) for size in (0, after)])


def check_sizes(image_size: tuple[int, ...], patch_size: tuple[int, ...]) -> None:
    """Raise ValueError unless both have one positive number per axis.

    >>> check_sizes((8, 32, 32), (8, 8))
    Traceback (most recent call last):
    ValueError: patch_size is (8, 8), which has 2 axes, expected 3, as in image_size (8, 32, 32)
    """
    if not image_size:
        raise ValueError("image_size is (), expected one number per axis")
    if len(image_size) != len(patch_size):
        raise ValueError(
            f"patch_size is {patch_size}, which has {len(patch_size)} axes, expected "
            f"{len(image_size)}, as in image_size {image_size}"
        )
    check_positive(
        **{
            f"{name}[{axis}]": size
            for name, sizes in (("image_size", image_size), ("patch_size", patch_size))
            for axis, size in enumerate(sizes)
        }
    )


def masked_grid(x: Grids, keep: GridKeep | None) -> Grids:
    """Set positions to zero, even if they are NaN, where `keep`, [B, *sides], is False."""
    return x if keep is None else x.masked_fill(~keep.unsqueeze(1), 0)


def masked_pixels(images: Grids, keep: GridKeep, patch_size: tuple[int, ...]) -> tuple[Grids, Keep]:
    """Set padding to zero, and return which patches contain real pixels; see `keep_patches`.

    Raises:
        ValueError: If the device, dtype or shape of the mask is wrong.
    """
    check_devices(images=images, keep=keep)
    if keep.dtype != torch.bool:
        raise ValueError(f"keep has dtype {keep.dtype}, expected torch.bool, True for real pixels")
    batch, _, *sides = images.shape  # len(images) would fix the batch size of exported programs
    if keep.shape != (batch, *sides):
        raise ValueError(
            f"keep has shape {tuple(keep.shape)}, expected {(batch, *sides)}, one value per pixel"
        )
    patches = keep_patches(keep, patch_size)
    return masked_grid(images, keep), patches


def keep_patches(keep: GridKeep, patch_size: tuple[int, ...]) -> Keep:
    """Return which patches contain real pixels, in row-major order, given which pixels are real.

    The real pixels of an image are a box that begins at the first pixel.

    Raises:
        ValueError: If they do not form such a box. Checked only on a CPU and on a single rank.

    >>> keep_patches(torch.tensor([[True, True, True, False, False, False]]), (2,)).tolist()
    [[True, True, False]]
    """
    if can_look_at_values(keep) and sequence_group(None) is None:
        box = torch.ones_like(keep)
        for axis in range(1, keep.ndim):
            lines = keep.movedim(axis, 1).unsqueeze(-1).flatten(2)
            count = lines[..., 0].sum(dim=1)  # of the pixels along the first line
            inside = torch.arange(keep.shape[axis]) < count.unsqueeze(1)
            box &= inside.view(
                len(keep), *(size if a == axis else 1 for a, size in enumerate(keep.shape) if a)
            )
        wrong = ~box.flatten(1).any(dim=1) | (box != keep).flatten(1).any(dim=1)
        if wrong.any():
            raise ValueError(
                f"keep of image {int(wrong.nonzero()[0])} is not a box that begins at the first "
                "pixel and has at least one pixel"
            )
    keep = whole_patches(keep, patch_size)
    for axis, patch in enumerate(patch_size, start=1):  # not sliced: exported sizes stay simple
        keep = keep.unflatten(axis, (-1, patch)).select(axis + 1, 0)
    return keep.flatten(1)


class Unpatchify(nn.Module):
    """Map each token to a patch and reassemble the grid; the inverse of `Patchify`.

    Args:
        width: Width of a token.
        channels: Channels of the output.
        patch_size: Side of a patch along each axis.
    """

    def __init__(self, width: int, channels: int, patch_size: tuple[int, ...]) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(width, channels * math.prod(patch_size))
        self.pattern = "{tokens} -> {grid}".format(**_patterns(len(patch_size)))

    def forward(
        self, x: Hidden, shape: tuple[int, ...], sides: tuple[int, ...] | None = None
    ) -> Grids:
        """Return the grid, given tokens in row-major order and their number along each axis.

        Args:
            x: Tokens.
            shape: Number of tokens along each axis.
            sides: Size of the grid, if it does not consist of whole patches.
        """
        sizes = {f"n{i}": size for i, size in enumerate(shape)}
        sizes |= {f"p{i}": size for i, size in enumerate(self.patch_size)}
        grid = rearrange(self.proj(x), self.pattern, **sizes)
        return grid if sides is None else grid[(..., *map(slice, sides))]

    def init_weights(self) -> None:
        """Initialize the projection to zero, so that initial outputs are zero."""
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


def _patterns(axes: int) -> dict[str, str]:
    """Return einops patterns of a grid and of its patches, with axes n0, n1, ... and p0, p1, ..."""
    sides = " ".join(f"(n{i} p{i})" for i in range(axes))
    counts, inside = (" ".join(f"{letter}{i}" for i in range(axes)) for letter in "np")
    return {"grid": f"b c {sides}", "tokens": f"b ({counts}) (c {inside})"}


class Order(NamedTuple):
    """An order of the tokens of a grid.

    Attributes:
        token: The token visited at each step.
        step: The step at which each token is visited, the inverse permutation.
    """

    token: Indices
    step: Indices


def snake_orders(grid: Grid, device: torch.device) -> tuple[Order, ...]:
    """Return one scan order per axis, in which that axis varies fastest, from the last axis on.

    The direction along an axis reverses whenever a slower axis advances, so that neighbors in the
    order are neighbors on the grid. Prefix tokens come first.

    Source: LION, arXiv:2502.16249, App. C.14 and Fig. 11, for two axes.

    >>> rows, columns = snake_orders(Grid((2, 3)), torch.device("cpu"))
    >>> rows.token.tolist(), columns.token.tolist()
    ([0, 1, 2, 5, 4, 3], [0, 3, 4, 1, 2, 5])
    """
    tokens = torch.arange(grid.tokens, device=device)
    prefix, positions = tokens[: grid.prefix], tokens[grid.prefix :].reshape(grid.shape)
    visits = (
        torch.cat([prefix, _snake(positions.movedim(axis, -1))])
        for axis in reversed(range(positions.ndim))
    )
    return tuple(
        Order(token, torch.empty_like(token).scatter_(0, token, tokens)) for token in visits
    )


def _snake(positions: Tensor) -> Indices:
    """Flatten a grid line by line, with every other line reversed."""
    while positions.ndim > 1:
        odd = torch.arange(positions.shape[-2], device=positions.device) % 2 == 1
        positions = torch.where(odd.unsqueeze(-1), positions.flip(-1), positions).flatten(-2)
    return positions


class _Group(NamedTuple):
    """Documents of similar length, one per row."""

    positions: Int[Tensor, "texts longest"]  # in the flattened batch; padding repeats the first
    inside: Bool[Tensor, "texts longest"] | None  # None if all have the same length


class Documents:
    """The documents of a packed batch, as offsets for ops that take them, or regrouped.

    Index tensors are computed on the CPU and copied to the device without waiting for it.

    >>> documents = Documents(Packing(torch.tensor([0, 2, 4, 5, 8]), batch=2, tokens=4))
    >>> [tuple(group.positions.shape) for group in documents.groups]
    [(3, 3), (1, 1)]

    Args:
        packing: Offsets of the documents.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    @cached_property
    def groups(self) -> list[_Group]:
        """The documents, one per row.

        All documents of a group are more than half as long as its longest, which limits padding.
        """
        starts, lengths = self._sorted
        counts, groups, first = lengths.tolist(), [], 0
        while first < len(counts):
            last = sum(2 * count > counts[first] for count in counts)  # counts are sorted
            last = max(last, first + 1)
            steps = torch.arange(counts[first])
            inside = steps < lengths[first:last, None]
            positions = starts[first:last, None] + steps.where(inside, 0)
            is_full = bool(inside.all())
            groups.append(
                _Group(self._to_device(positions), None if is_full else self._to_device(inside))
            )
            first = last
        return groups

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The first token and the length of each document, from the longest to the shortest."""
        offsets = self.packing.cu_seqlens.cpu().long()
        lengths, order = offsets.diff().sort(descending=True, stable=True)
        is_nonempty = lengths > 0
        return offsets[:-1][order[is_nonempty]], lengths[is_nonempty]

    @cached_property
    def _slots(self) -> Tensor:
        """The slot of each token in the rows of all groups, padding included."""
        starts, lengths = self._sorted
        longest = torch.cat(
            [lengths.new_full((len(g.positions),), g.positions.shape[1]) for g in self.groups]
        )
        rows = longest.cumsum(0) - longest
        slots = torch.repeat_interleave(rows - starts, lengths)
        tokens = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
        tokens = tokens + torch.arange(len(tokens))
        return self._to_device(torch.empty_like(tokens).scatter_(0, tokens, slots + tokens))

    def _to_device(self, x: Tensor) -> Tensor:
        return x.to(self.packing.device, non_blocking=True)

    def mix_per_document(
        self, mix: Mix, x: Hidden, *, keep: Keep | None, **others: Hidden
    ) -> Hidden:
        """Apply `y, _ = mix(x, grid, keep=keep, **others)` to each document, and return y."""
        if (group := sequence_group(None)) is not None:
            refuse_group(
                group, "a layer without cu_seqlens", "it reads packed documents one per row"
            )
        mixed = []
        for positions, inside in self.groups:
            group_keep = inside
            if keep is not None:
                group_keep = keep.flatten()[positions]
                group_keep = group_keep if inside is None else group_keep & inside
            rows = {name: tensor.flatten(0, 1)[positions] for name, tensor in others.items()}
            y, _ = mix(
                x.flatten(0, 1)[positions], Grid((positions.shape[1],)), keep=group_keep, **rows
            )
            mixed.append(y.flatten(0, 1))
        return torch.cat(mixed).index_select(0, self._slots).view(x.shape)


# Tokens may be sharded across ranks. Pooling then returns the same result on every rank.


def prefix_token(x: Hidden, index: int) -> Pooled:
    """Return a prefix token of each sequence, [B, D]. Only the first rank has prefix tokens."""
    if sequence_group(None) is None:
        return x[:, index]
    return from_first_rank(_padded(x, index + 1)[:, index])


def first_token(x: Hidden, keep: Keep | None = None) -> Pooled:
    """Return the first real token of each sequence, [B, D], or zeros if there are none."""
    group = sequence_group(None)
    if group is not None:
        keep = F.pad(x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep, (0, 1))
        x = _padded(x)
    first = torch.zeros_like(x[:, 0, 0]).long() if keep is None else keep.long().argmax(1)
    token = x[torch.arange(x.shape[0], device=x.device), first]
    if keep is not None:
        token = token.masked_fill(~keep.any(dim=1, keepdim=True), 0)
    if group is None or keep is None:
        return token
    return select_rank(group, token, keep.any(dim=1))


def _padded(x: Tensor, count: int = 1, *, value: float = 0.0) -> Tensor:
    """Append tokens, so that a rank without tokens has the same graph as the others."""
    return F.pad(x, (0, 0, 0, count), value=value)


def mean_pool(x: Hidden, keep: Keep | None = None) -> Pooled:
    """Return the mean of all real tokens, or zeros if there are none.

    >>> x = torch.tensor([[[1.0], [3.0], [8.0]]])
    >>> mean_pool(x).item(), mean_pool(x, torch.tensor([[True, True, False]])).item()
    (4.0, 2.0)
    """
    if keep is None:
        if sequence_group(None) is None:
            return x.mean(dim=1)
        keep = x.new_ones(x.shape[:2], dtype=torch.bool)
    # Sums may overflow float16.
    (wide,) = to_accumulation_dtype(x.masked_fill(~keep.unsqueeze(-1), 0))
    total, count = sum_over_ranks(wide.sum(dim=1), keep.sum(dim=1, keepdim=True))
    return (total / count.clamp(min=1)).to(x.dtype)


def max_pool(x: Hidden, keep: Keep | None = None) -> Pooled:
    """Return the maximum of each channel over all real tokens, or zeros if there are none."""
    group = sequence_group(None)
    if keep is not None:
        x = x.masked_fill(~keep.unsqueeze(-1), -torch.inf)
    if group is not None:
        x = gather(group, _padded(x, value=-torch.inf).amax(dim=1))[0].movedim(0, 1)  # B W D
    largest = x.amax(dim=1)
    return largest if keep is None else largest.masked_fill(largest.isneginf(), 0)


class AttentionPool(nn.Module):
    """Compute sum_t a_t x_t with a = softmax(x . query) over real tokens.

    The learnable query is initialized to zero, so the initial output is the mean. The output is
    zero for sequences without real tokens.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, x: Hidden, keep: Keep | None = None) -> Pooled:
        if keep is not None:
            x = x.masked_fill(~keep.unsqueeze(-1), 0)  # 0 times NaN is NaN
        logits = x @ self.query  # B T
        if (group := sequence_group(None)) is not None:
            return self._over_ranks(group, x, logits, keep)
        if keep is None:
            return torch.einsum("bt,btd->bd", logits.softmax(dim=1), x)
        # the softmax of a row that contains only -inf is NaN
        empty = ~keep.any(dim=1, keepdim=True)
        weights = logits.masked_fill(~(keep | empty), -torch.inf).softmax(dim=1)
        return torch.einsum("bt,btd->bd", weights.masked_fill(empty, 0), x)

    def _over_ranks(
        self, group: SequenceGroup, x: Hidden, logits: Tensor, keep: Keep | None
    ) -> Pooled:
        """Sum the numerators and denominators of all ranks, relative to a common maximum."""
        lowest = torch.finfo(logits.dtype).min
        if keep is not None:
            logits = logits.masked_fill(~keep, lowest)
        x, logits = _padded(x), F.pad(logits, (0, 1), value=lowest)
        peak = logits.detach().amax(dim=1, keepdim=True)
        weights = (logits - peak).exp()
        pooled = torch.einsum("bt,btd->bd", weights, x)
        peaks, totals, sums = gather(group, peak, weights.sum(dim=1, keepdim=True), pooled)
        shares = (peaks - peaks.amax(dim=0)).exp()
        return (shares * sums).sum(dim=0) / (shares * totals).sum(dim=0)
