"""States passed from chunk to chunk in one direction, and what tokens read of them."""

from typing import Any

import torch
from torch import Tensor

from onescan.ops.chunks import carried, is_known
from onescan.ops.decay_attention.tile import Reach


def with_passed(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: Reach,
    state: Tensor | None,
    *,
    return_state: bool,
    backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Add to outputs [B, H, N, C, V] what tokens read of the states that enter their chunks.

    Args:
        o: outputs so far.
        q: queries in chunks, [B, H, N, C, K].
        k: keys, likewise.
        v: values, [B, H, N, C, V].
        reach: how much of a state gets to each token, and of a token to the end of its chunk.
        state: what enters the first chunk visited, [B, H, K, V].
        return_state: whether the state that leaves is wanted where nothing else needs it.
        backward: whether the last chunk is visited first.

    Returns:
        The outputs, and the state that leaves the last chunk visited, if wanted or needed.
    """
    alone = is_known(k.shape[2]) and k.shape[2] == 1 and state is None
    if alone and not return_state:
        return o, None
    if alone:
        return o, ((k * reach.leave).mT @ v)[:, :, 0]
    if state is None:
        state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    if torch.compiler.is_compiling():
        before, last = carried(state, (k * reach.leave).mT @ v, reach.through.mT, backward=backward)
        return o + (q * reach.enter) @ before, last
    o, last, _ = _Passed.apply(o, q, k, v, *reach, state, backward)
    return o, last


class _Passed(torch.autograd.Function):
    """Products with decays are not kept for the backward, but made again there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        enter: Tensor,
        leave: Tensor,
        through: Tensor,
        state: Tensor,
        backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        before, last = carried(state, (k * leave).mT @ v, through.mT, backward=backward)
        return o + (q * enter) @ before, last, before

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *tensors, ctx.runs_back = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tensors, output[2])

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, enter, leave, through, state, before = ctx.saved_tensors
        added, kept = k * leave, through.mT
        if torch.is_grad_enabled():  # for gradients of gradients
            before, _ = carried(state, added.mT @ v, kept, backward=ctx.runs_back)
        read = do @ before.mT
        down, dstate = carried(dlast, (q * enter).mT @ do, kept, backward=not ctx.runs_back)
        left = v @ down.mT
        of_decays: tuple[Tensor | None, ...] = (None, None, None)
        if any(ctx.needs_input_grad[4:7]):
            of_decays = (
                (read * q).sum_to_size(enter.shape),
                (left * k).sum_to_size(leave.shape),
                (down * before).sum_to_size(kept.shape).mT,
            )
        return do, read * enter, left * leave, added @ down, *of_decays, dstate, None
