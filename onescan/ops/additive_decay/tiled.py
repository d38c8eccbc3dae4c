"""One scan of additive decay per sample, tile by tile: faster on a CPU, and in less memory.

Products read the layout of projections, [T, H, K]. The only allocations of the size of q, k or v
are outputs and gradients, and only inputs are saved for the backward pass. For a sample with
w_t = exp(k_t - z), G the gradient of kv, dz the gradient of z, and <.,.> a sum over values and over
both halves:

    kv  = sum_t R_t(w_t) v_t^T      dv_t = G^T R_t(w_t),  dk_t = w_t (R_t^T(G v_t) - <kv, G> + dz)
    o_t = kv^T R_t(q_t)             dq_t = R_t^T(kv do_t),  dkv = sum_t R_t(q_t) do_t^T
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onescan.checks import can_look_at_values
from onescan.ops.additive_decay import state as plain
from onescan.ops.additive_decay.state import per_feature, per_key
from onescan.ops.backend import wants_gradient
from onescan.ops.chunks import needs_plain_functions
from onescan.ops.numerics import LOG_ZERO, differentiable_gradients
from onescan.shapes import Angles as Table  # of cosines or sines
from onescan.shapes import Keys, KeyValue, LogNormalizer, Queries, Values

# Tuned on a CPU. Plain functions are faster if k or q has fewer elements than these:
SMALL_WITH_GRADIENTS = 1 << 16  # per sample, with gradients
SMALL_SAMPLE = 1 << 15  # per sample, without gradients
LARGE_SAMPLE = 1 << 18  # per sample, without gradients, if all samples together have fewer than
LARGE_BATCH = 1 << 21
TILE = 1 << 20  # elements of k or q per tile, so that a tile fits the caches


Function = Callable[..., Any]  # of tensors, or None
Tables = tuple[Tensor, ...]  # cosines and sines, [T, H, K]; empty without LRPE


def write(
    k: Keys, v: Values, cos: Table | None, sin: Table | None, *, low_memory: bool = False
) -> tuple[LogNormalizer, KeyValue]:
    """Return `state.write`, tile by tile if k is large, or to save memory (`low_memory`)."""
    return _run(plain.write, _Write, k, v, cos, sin, low_memory=low_memory)


def read(q: Queries, kv: KeyValue, cos: Table | None, sin: Table | None) -> Values:
    """Return `state.read`, tile by tile if q is large."""
    return _run(plain.read, _Read, q, kv, cos, sin)


def _run(
    function: Function,
    in_tiles: type[torch.autograd.Function],
    *inputs: Any,
    low_memory: bool = False,
) -> Any:
    """Run a plain function, or its form in tiles if the first input is large.

    Plain functions keep several times their inputs for the gradient, and tiles only their inputs.
    """
    if torch.compiler.is_compiling():
        return function(*inputs)  # return early, because comparisons specialize symbolic lengths
    tensors = [x for x in inputs if x is not None]
    elements, sample_elements = tensors[0].numel(), tensors[0][:1].numel()
    if wants_gradient(*tensors):
        is_small = sample_elements < SMALL_WITH_GRADIENTS and not low_memory
    else:
        is_small = sample_elements < SMALL_SAMPLE or (
            elements < LARGE_BATCH and sample_elements < LARGE_SAMPLE
        )
    if is_small or needs_plain_functions(*tensors) or not can_look_at_values(tensors[0]):
        return function(*inputs)
    return in_tiles.apply(*inputs)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, kv, cos, sin)
        tables = () if cos is None or sin is None else (cos, sin)
        o, workspace = q.new_empty(*q.shape[:3], kv.shape[-1]), _workspace(q)
        for tile in _tiles(q):
            _read(q[tile], kv[tile[0]], _select(tables, tile), o[tile], workspace)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(lambda *x: (plain.read(*x),), (q, kv, cos, sin), (do,))
        tables = () if cos is None else (cos, sin)
        dtables = _zeros(tables, ctx.needs_input_grad[2:])
        dq, dkv, workspace = torch.empty_like(q), torch.zeros_like(kv), _workspace(q)
        for tile in _tiles(q):
            tile_tables, tile_dtables = _select(tables, tile), _select(dtables, tile)
            _read_gradient(
                do[tile], kv[tile[0]], q[tile], tile_tables, tile_dtables, dq[tile], workspace
            )
            _add_products_(dkv[tile[0]], q[tile], do[tile], tile_tables, workspace)
        return dq, dkv, *(dtables or (None, None))


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[LogNormalizer, KeyValue]:
        tables = () if cos is None or sin is None else (cos, sin)
        batch, _, heads, width = k.shape
        peak = k.amax(dim=1).clamp(min=LOG_ZERO)
        total = torch.zeros_like(peak)
        kv = k.new_zeros(batch, heads, width * (len(tables) or 1), v.shape[-1])
        weights, workspace = _workspace(k), _workspace(k)
        for tile in _tiles(k):
            w = torch.sub(k[tile], peak[tile[0]], out=weights[: len(k[tile])]).exp_()
            total[tile[0]] += w.sum(dim=0)
            _add_products_(kv[tile[0]], w, v[tile], _select(tables, tile), workspace)
        total = torch.where(total > 0, total, 1)
        kv /= per_feature(total, kv)
        ctx.save_for_backward(k, v, cos, sin, peak, total, kv)
        return peak.double() + total.double().log(), kv

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
        k, v, cos, sin, peak, total, kv = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(plain.write, (k, v, cos, sin), (dz, dkv))
        tables = () if cos is None else (cos, sin)
        dtables = _zeros(tables, ctx.needs_input_grad[2:])
        offset = per_key(kv * dkv, k) - dz.to(k.dtype)
        scale = total.reciprocal()
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        weights, workspace = _workspace(k), _workspace(k)
        for tile in _tiles(k):
            sample, tile_tables, tile_dtables = (
                tile[0],
                _select(tables, tile),
                _select(dtables, tile),
            )
            w = torch.sub(k[tile], peak[sample], out=weights[: len(k[tile])]).exp_()
            w.mul_(scale[sample])
            _read_gradient(v[tile], dkv[sample], w, tile_tables, tile_dtables, dk[tile], workspace)
            dk[tile].sub_(offset[sample]).mul_(w)
            _read(w, dkv[sample], tile_tables, dv[tile], workspace)
        return dk, dv, *(dtables or (None, None))


def _tiles(x: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the sample and the tokens of each tile of x, [B, T, H, K]."""
    length = _tile_length(x)
    for sample in range(len(x)):
        for start in range(0, x.shape[1], length):
            yield sample, slice(start, min(start + length, x.shape[1]))


def _tile_length(x: Tensor) -> int:
    """Return the number of tokens of a tile."""
    return min(x.shape[1], max(1, TILE // x[0, 0].numel()))


def _workspace(x: Tensor) -> Tensor:
    """Allocate memory for intermediate results, as large as a tile of x."""
    return x.new_empty(_tile_length(x), *x.shape[2:])


def _select(tables: Tables, tile: tuple[int, slice]) -> Tables:
    """Select the rows of a tile; all samples have the same angles."""
    return tuple(x[tile[1]] for x in tables)


def _zeros(tables: Tables, needed: tuple[bool, ...]) -> Tables:
    """Allocate the gradients of cosines and sines, if any are needed."""
    return tuple(torch.zeros_like(x) for x in tables) if any(needed) else ()


def _by_head(x: Tensor) -> Tensor:
    """View [T, H, X] as one matrix per head, [H, T, X]."""
    return x.transpose(0, 1)


def _add_products_(out: Tensor, x: Tensor, y: Tensor, tables: Tables, workspace: Tensor) -> None:
    """Add sum_t R_t(x_t) y_t^T over a tile to out, [H, F, V]."""
    if not tables:
        out.baddbmm_(_by_head(x).mT, _by_head(y))
    for factor, half in zip(tables, out.split(x.shape[-1], dim=-2), strict=False):
        rotated = torch.mul(x, factor, out=workspace[: len(x)])
        half.baddbmm_(_by_head(rotated).mT, _by_head(y))


def _read(x: Tensor, kv: Tensor, tables: Tables, out: Tensor, workspace: Tensor) -> None:
    """Write kv^T R_t(x_t) for a tile to out, [T, H, V]."""
    if not tables:
        torch.bmm(_by_head(x), kv, out=_by_head(out))
        return
    of_cos, of_sin = kv.split(x.shape[-1], dim=-2)
    workspace = workspace[: len(x)]
    torch.mul(x, tables[0], out=workspace)
    torch.bmm(_by_head(workspace), of_cos, out=_by_head(out))
    torch.mul(x, tables[1], out=workspace)
    _by_head(out).baddbmm_(_by_head(workspace), of_sin)


def _read_gradient(
    y: Tensor,
    kv: Tensor,
    x: Tensor,
    tables: Tables,
    dtables: Tables,
    out: Tensor,
    workspace: Tensor,
) -> None:
    """Write R_t^T(kv y_t) for a tile to out, [T, H, K], and add gradients of the tables."""
    if not tables:
        torch.bmm(_by_head(y), kv.mT, out=_by_head(out))
        return
    of_cos, of_sin = kv.split(x.shape[-1], dim=-2)
    workspace = workspace[: len(x)]
    torch.bmm(_by_head(y), of_cos.mT, out=_by_head(out))
    torch.bmm(_by_head(y), of_sin.mT, out=_by_head(workspace))
    for total, half in zip(dtables, (out, workspace), strict=False):
        total.addcmul_(x, half)
    out.mul_(tables[0]).addcmul_(workspace, tables[1])
