"""One scan on a CPU, stretch after stretch of each sample: what lies in between stays in caches.

Products read the layout that projections give, [T, H, K], and nothing of the size of q, k or v is
made but outputs and gradients, or kept for the backward but themselves. For a sample with
w_t = exp(k_t - z), G the gradient of kv, dz that of z, and <.,.> a sum over values and over both
halves:

    kv  = sum_t R_t(w_t) v_t^T      dv_t = G^T R_t(w_t),  dk_t = w_t (R_t^T(G v_t) - <kv, G> + dz)
    o_t = kv^T R_t(q_t)             dq_t = R_t^T(kv do_t),  dkv = sum_t R_t(q_t) do_t^T

Source: LightNet, arXiv:2405.21022, Eq. 14 and App. A.2.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onescan.checks import can_look_at_values
from onescan.ops.additive_decay import all_at_once
from onescan.ops.additive_decay.state import per_key
from onescan.ops.numerics import LOG_ZERO
from onescan.shapes import Angles as Table  # of cosines, of sines
from onescan.shapes import Keys, KeyValue, LogNormalizer, Queries, Values

LARGE = 1 << 15  # numbers of a sample; below, all samples at once are faster
STRETCH = 1 << 20  # numbers of k or q in one, as caches hold them

Turn = tuple[Tensor, ...]  # cosines and sines, [T, H, K]; none without LRPE


def pays(*inputs: Tensor | None) -> bool:
    """Whether the first's samples are large, and plain gradients all that may be asked for."""
    given = [x for x in inputs if x is not None]
    if forward_ad._current_level >= 0 or not all(can_look_at_values(x) for x in given):
        return False  # before lengths are looked at, which a compiler or an export would fix
    return given[0][:1].numel() >= LARGE


def summary(
    k: Keys, v: Values, cos: Table | None, sin: Table | None
) -> tuple[LogNormalizer, KeyValue]:
    """The log-normalizer and kv of these tokens alone."""
    return _Summary.apply(k, v, cos, sin)


def read_out(q: Queries, kv: KeyValue, cos: Table | None, sin: Table | None) -> Values:
    """R(q) kv."""
    return _ReadOut.apply(q, kv, cos, sin)


def _stretches(x: Tensor) -> Iterator[tuple[int, slice]]:
    """The sample and the tokens of each, for x [B, T, H, K]."""
    length = _length(x)
    for sample in range(len(x)):
        for start in range(0, x.shape[1], length):
            yield sample, slice(start, min(start + length, x.shape[1]))


def _length(x: Tensor) -> int:
    """How many tokens a stretch has."""
    return min(x.shape[1], max(1, STRETCH // x[0, 0].numel()))


def _spare(x: Tensor) -> Tensor:
    """Memory for what is made of a stretch's x and not returned."""
    return x.new_empty(_length(x), *x.shape[2:])


def _rows(x: Tensor) -> Tensor:
    """[T, H, X] as matrices of heads, [H, T, X], in place."""
    return x.transpose(0, 1)


def _halves(kv: Tensor, width: int) -> tuple[Tensor, ...]:
    """Of cosines and, under LRPE, of sines: [H, K, V] each."""
    return kv.split(width, dim=-2)


def _gather_(out: Tensor, x: Tensor, y: Tensor, turn: Turn, spare: Tensor) -> None:
    """Add sum_t R_t(x_t) y_t^T of a stretch to [H, F, V]."""
    if not turn:
        out.baddbmm_(_rows(x).mT, _rows(y))
    for factor, half in zip(turn, _halves(out, x.shape[-1]), strict=False):
        turned = torch.mul(x, factor, out=spare[: len(x)])
        half.baddbmm_(_rows(turned).mT, _rows(y))


def _spread(x: Tensor, kv: Tensor, turn: Turn, out: Tensor, spare: Tensor) -> None:
    """kv^T R_t(x_t) of a stretch, into out [T, H, V]."""
    if not turn:
        torch.bmm(_rows(x), kv, out=_rows(out))
        return
    straight, across = _halves(kv, x.shape[-1])
    spare = spare[: len(x)]
    torch.mul(x, turn[0], out=spare)
    torch.bmm(_rows(spare), straight, out=_rows(out))
    torch.mul(x, turn[1], out=spare)
    _rows(out).baddbmm_(_rows(spare), across)


def _turned_back(
    y: Tensor, kv: Tensor, x: Tensor, turn: Turn, of_turn: Turn, out: Tensor, spare: Tensor
) -> None:
    """R_t^T(kv y_t) of a stretch, into out [T, H, K]; adds x_t times each half to `of_turn`."""
    if not turn:
        torch.bmm(_rows(y), kv.mT, out=_rows(out))
        return
    straight, across = _halves(kv, x.shape[-1])
    spare = spare[: len(x)]
    torch.bmm(_rows(y), straight.mT, out=_rows(out))
    torch.bmm(_rows(y), across.mT, out=_rows(spare))
    for total, half in zip(of_turn, (out, spare), strict=False):
        total.addcmul_(x, half)
    out.mul_(turn[0]).addcmul_(spare, turn[1])


class _ReadOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, kv, cos, sin)
        turn = () if cos is None or sin is None else (cos, sin)
        o, spare = q.new_empty(*q.shape[:3], kv.shape[-1]), _spare(q)
        for at in _stretches(q):
            _spread(q[at], kv[at[0]], _of(turn, at), o[at], spare)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():  # for gradients of gradients
            return _again(all_at_once.read_out, (q, kv, cos, sin), (do,))
        turn = () if cos is None else (cos, sin)
        of_turn = _zeros(turn, ctx.needs_input_grad[2:])
        dq, dkv, spare = torch.empty_like(q), torch.zeros_like(kv), _spare(q)
        for at in _stretches(q):
            here, there = _of(turn, at), _of(of_turn, at)
            _turned_back(do[at], kv[at[0]], q[at], here, there, dq[at], spare)
            _gather_(dkv[at[0]], q[at], do[at], here, spare)
        return dq, dkv, *(of_turn or (None, None))


class _Summary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[LogNormalizer, KeyValue]:
        turn = () if cos is None or sin is None else (cos, sin)
        batch, _, heads, width = k.shape
        peak = k.amax(dim=1).clamp(min=LOG_ZERO)
        total = torch.zeros_like(peak)
        kv = k.new_zeros(batch, heads, width * (len(turn) or 1), v.shape[-1])
        weights, spare = _spare(k), _spare(k)
        for at in _stretches(k):
            w = torch.sub(k[at], peak[at[0]], out=weights[: len(k[at])]).exp_()
            total[at[0]] += w.sum(dim=0)
            _gather_(kv[at[0]], w, v[at], _of(turn, at), spare)
        total = torch.where(total > 0, total, 1)  # all logits -inf: the mean of nothing is 0
        kv /= (torch.cat([total, total], dim=-1) if turn else total).unsqueeze(-1)
        ctx.save_for_backward(k, v, cos, sin, peak, total, kv)
        return peak.double() + total.double().log(), kv

    @staticmethod
    def backward(ctx: Any, dz: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:
        k, v, cos, sin, peak, total, kv = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(all_at_once.summary, (k, v, cos, sin), (dz, dkv))
        turn = () if cos is None else (cos, sin)
        of_turn = _zeros(turn, ctx.needs_input_grad[2:])
        offset = per_key(kv * dkv, k) - dz.to(k.dtype)
        scale = total.reciprocal()
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        weights, spare = _spare(k), _spare(k)
        for at in _stretches(k):
            sample, here, there = at[0], _of(turn, at), _of(of_turn, at)
            w = torch.sub(k[at], peak[sample], out=weights[: len(k[at])]).exp_()
            w.mul_(scale[sample])
            _turned_back(v[at], dkv[sample], w, here, there, dk[at], spare)
            dk[at].sub_(offset[sample]).mul_(w)
            _spread(w, dkv[sample], here, dv[at], spare)
        return dk, dv, *(of_turn or (None, None))


def _of(turn: Turn, at: tuple[int, slice]) -> Turn:
    """What belongs to the tokens of a stretch: all samples turn alike."""
    return tuple(x[at[1]] for x in turn)


def _zeros(turn: Turn, wanted: tuple[bool, ...]) -> Turn:
    """Where gradients of cosines and sines are summed, if any are wanted."""
    return tuple(torch.zeros_like(x) for x in turn) if any(wanted) else ()


def _again(
    function: Any, inputs: tuple[Tensor | None, ...], slopes: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients by torch's own record of a function, which has gradients too."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    made = function(*inputs)
    pairs = zip(made if isinstance(made, tuple) else (made,), slopes, strict=True)
    outputs, given = zip(*[(x, slope) for x, slope in pairs if x.requires_grad], strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)
