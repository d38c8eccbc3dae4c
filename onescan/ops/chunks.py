"""Split sequences into chunks, and carry a state from one chunk to the next.

During export, lengths are symbolic and the number of chunks is unknown, so the loop over chunks is
replaced by PyTorch's scan operator.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from onescan.checks import is_known, is_plain
from onescan.ops.numerics import apply_function

Step = Callable[..., Tensor]  # from the state before a chunk and its parts to the state after it


def length_of_chunks(chunk_size: int, tokens: int) -> int:
    """Return the number of tokens per chunk, at most the sequence length if that is known.

    >>> length_of_chunks(64, 9)
    9
    """
    return min(chunk_size, tokens) if is_known(tokens) else chunk_size


def number_of_chunks(tokens: int, size: int) -> int:
    """Return the number of chunks that cover all tokens.

    For a symbolic length, the number is a new symbol. If it were an expression of the length,
    PyTorch would add guards to the program, such as whether there is more than one chunk.

    >>> number_of_chunks(9, 4)
    3
    """
    if is_known(tokens):
        return -(-tokens // size)
    count: Any = ((torch.scalar_tensor(tokens, dtype=torch.int64) + (size - 1)) // size).item()
    torch._check(count >= 1)
    torch._check(count * size >= tokens)
    torch._check(count * size - tokens < size)
    return count


def split_chunks(x: Tensor, count: int, size: int, *, fill: float = 0.0) -> Tensor:
    """Split [B, T, H, ...] into chunks of `size` tokens, [B, H, N, C, ...]; the last one is padded.

    >>> split_chunks(torch.arange(1.0, 4.0).view(1, 3, 1, 1), count=2, size=2).flatten(2).tolist()
    [[[1.0, 2.0, 3.0, 0.0]]]
    """
    x, missing = x.transpose(1, 2), count * size - x.shape[1]
    if not is_known(missing) or missing:
        x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, missing), value=fill)
    return x.unflatten(2, (count, size))


def join_chunks(x: Tensor, tokens: int) -> Tensor:
    """Join chunks, [B, H, N, C, ...], to [B, T, H, ...]."""
    return x.flatten(2, 3).transpose(1, 2).narrow(1, 0, tokens)


def needs_plain_functions(*tensors: Tensor | None) -> bool:
    """Return whether a call may only use PyTorch's own differentiable functions.

    True for export, forward-mode derivatives, torch.func transforms and tensor subclasses. Other
    calls may use operators with a custom backward.

    >>> needs_plain_functions(torch.ones(2))
    False
    """
    functorch = torch._C._functorch
    # isinstance, because torch.compile cannot compare an interpreter with None
    is_transformed = isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter)
    if torch.compiler.is_exporting() or is_transformed:
        return True
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or not all(is_plain(x) for x in tensors if x is not None)


def chunk_scan(
    step: Step, state: Tensor, *parts: Tensor, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Carry a state from chunk to chunk.

    Args:
        step: Function of the state before a chunk and the chunk's parts that returns the state
            after it.
        state: State before the first chunk visited, [B, H, ...].
        parts: Inputs of the steps, [B, H, N, ...].
        backward: Whether to visit the chunks from last to first.

    Returns:
        The state before each chunk, [B, H, N, ...], and the state after the last chunk visited.

    >>> added = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3)
    >>> before, last = chunk_scan(torch.add, torch.zeros(1, 1), added)
    >>> before.tolist(), last.tolist()
    ([[[0.0, 1.0, 3.0]]], [[6.0]])
    """
    if not is_known(parts[0].shape[2]):
        return _scan_operator(step, state, parts, backward)
    order = -1 if backward else 1
    before = []
    for chunk_parts in list(zip(*(x.unbind(2) for x in parts), strict=True))[::order]:
        before.append(state)
        state = step(state, *chunk_parts)
    return torch.stack(before[::order], dim=2), state


def _scan_operator(
    step: Step, state: Tensor, parts: tuple[Tensor, ...], backward: bool
) -> tuple[Tensor, Tensor]:
    from torch._higher_order_ops.scan import scan_op

    chunks = [x.movedim(2, 0) for x in parts]
    if backward:
        chunks = [x.flip(0) for x in chunks]

    def visit(state: Tensor, *chunk_parts: Tensor) -> list[Tensor]:
        return [step(state, *chunk_parts), state.clone()]

    # the operator requires an initial state with the same strides as the output of a step
    last, before = scan_op(visit, [state.contiguous()], chunks, ())
    return (before.flip(0) if backward else before).movedim(0, 2), last


def linear_scan(
    state: Tensor, added: Tensor, decay: Tensor | None = None, *, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Carry a state from chunk to chunk by S_n = decay_n S_{n-1} + added_n.

    Args:
        state: State before the first chunk visited, [B, H, ...].
        added: Contribution of each chunk to the state, [B, H, N, ...].
        decay: Factor of the state at each chunk, in a shape that broadcasts to that of `added` and
            has the same number of axes. None for 1.
        backward: Whether to visit the chunks from last to first.

    Returns:
        As `chunk_scan`.

    >>> added, half = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3), torch.tensor([[[0.5]]])
    >>> before, last = linear_scan(torch.zeros(1, 1), added, half)
    >>> before.tolist(), last.tolist()
    ([[[0.0, 1.0, 2.5]]], [[4.25]])
    """
    if not needs_plain_functions(state, added, decay):
        if torch.compiler.is_compiling():
            return _operator(state, added, decay, backward)
        return apply_function(_LinearScan, state, added, decay, backward)
    parts = [added]
    if decay is not None:
        parts.append(decay.expand(*decay.shape[:2], added.shape[2], *decay.shape[3:]))
    return chunk_scan(_linear_step, state, *parts, backward=backward)


def _linear_step(state: Tensor, added: Tensor, decay: Tensor | None = None) -> Tensor:
    return added + state if decay is None else torch.addcmul(added, decay, state)


def _linear_scan(
    state: Tensor, added: Tensor, decay: Tensor | None, backward: bool
) -> tuple[Tensor, Tensor]:
    order = -1 if backward else 1
    before, last = _results(state, added, decay, backward)
    states = [*before.unbind(2)[::order], last]
    added_chunks = added.unbind(2)[::order]
    decay_chunks: Sequence[Tensor | None] = [None] * len(added_chunks)
    if decay is not None:
        decay_chunks = decay.expand(*decay.shape[:2], len(added_chunks), *decay.shape[3:]).unbind(
            2
        )[::order]
    states[0].copy_(state)
    for added_n, decay_n, state_before, state_after in zip(
        added_chunks, decay_chunks, states[:-1], states[1:], strict=True
    ):
        if decay_n is None:
            torch.add(added_n, state_before, out=state_after)
        else:
            torch.addcmul(added_n, decay_n, state_before, out=state_after)
    return before, last


def _results(
    state: Tensor, added: Tensor, decay: Tensor | None, backward: bool
) -> tuple[Tensor, Tensor]:
    return added.new_empty(added.shape), added.new_empty(added.select(2, 0).shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    state, _, decay, ctx.backward_scan = inputs
    ctx.state_shape = state.shape
    ctx.save_for_backward(output[0], decay)


def _differentiate(
    ctx: Any, *gradients: Any, scan: Callable[..., Any] = linear_scan
) -> tuple[Tensor | None, ...]:
    """Scan gradients in the opposite direction: G_n = decay_n G_{n+1} + dbefore_n."""
    dbefore, dlast = gradients
    before, decay = ctx.saved_tensors
    dadded, dstate = scan(dlast, dbefore, decay, backward=not ctx.backward_scan)
    ddecay = None
    if decay is not None and ctx.needs_input_grad[2]:
        ddecay = (dadded * before).sum_to_size(decay.shape)
    return dstate.sum_to_size(ctx.state_shape), dadded, ddecay, None


class _LinearScan(torch.autograd.Function):
    forward = staticmethod(_linear_scan)
    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)


# Compiled programs call an operator, so that they do not grow with the number of chunks. Eager
# calls do not, because the first call imports sympy.
_operator = torch.library.custom_op("onescan::linear_scan", _linear_scan, mutates_args=())
_operator.register_fake(_results)
_operator.register_autograd(partial(_differentiate, scan=_operator), setup_context=_save)
