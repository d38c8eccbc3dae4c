"""What ONNX has no operator for, or none that is exact for large numbers, by operators it has.

ONNX's own logarithms of sums of exponentials overflow, or lose what climbs far below a later
maximum; it solves no linear system.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram


def with_onnx_ops(program: ExportedProgram) -> ExportedProgram:
    """The same program without what ONNX lacks; itself where it lacks nothing of it."""
    aten = torch.ops.aten
    own: dict[Any, Callable[..., Tensor]] = {
        aten.logaddexp.default: logaddexp,
        aten.logcumsumexp.default: logcumsumexp,
        aten.linalg_solve_triangular.default: solve_unit_triangular,
    }
    if not any(node.target in own for node in program.graph.nodes):
        return program
    return program.run_decompositions(own)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Take log(exp(a) + exp(b)) for finite a and b.

    >>> logaddexp(torch.tensor(1e4), torch.tensor(-1e30)).item()
    10000.0
    """
    return torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs()))


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Take log sum_{s <= t} exp(x_s) for finite x: spans of twice the length at each step.

    Where the length is a symbol every number meets every other: such an axis is of chunks, few.
    """
    x = x.movedim(dim, -1)
    if isinstance(x.shape[-1], torch.SymInt):
        return _by_pairs(x).movedim(-1, dim)
    span = 1
    while span < x.shape[-1]:
        sums = logaddexp(x[..., span:], x[..., :-span])
        x, span = torch.cat([x[..., :span], sums], dim=-1), 2 * span
    return x.movedim(-1, dim)


def _by_pairs(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[-1], device=x.device)
    later = place.unsqueeze(-1) < place
    x = x.unsqueeze(-2).masked_fill(later, -torch.inf)
    peak = x.amax(dim=-1, keepdim=True)
    return ((x - peak).exp().sum(dim=-1, keepdim=True).log() + peak).squeeze(-1)


def solve_unit_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """Solve (I + A) x = b, of a the lower part alone: inverses of blocks of twice the size.

    Raises:
        NotImplementedError: another kind of system.

    >>> a, b = torch.tensor([[1.0, 0.0], [3.0, 1.0]]), torch.tensor([[2.0], [5.0]])
    >>> solve_unit_triangular(a, b, upper=False, unitriangular=True).flatten().tolist()
    [2.0, -1.0]
    """
    if upper or not left or not unitriangular:
        raise NotImplementedError("ONNX gets unit lower triangular systems only")
    size = a.shape[-1]
    whole = 1 << (size - 1).bit_length()
    a = F.pad(a, (0, whole - size, 0, whole - size))
    # ..., blocks, 1, 1
    inverse = torch.ones_like(a[..., 0]).unsqueeze(-1).unsqueeze(-1)
    while (length := inverse.shape[-1]) < whole:
        pairs = a.unflatten(-1, (-1, 2 * length)).unflatten(-3, (-1, 2 * length))
        own = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        between = own[..., length:, :length]
        first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)
        corner = -(second @ between @ first)
        lines = (
            torch.cat([first, torch.zeros_like(first)], dim=-1),
            torch.cat([corner, second], dim=-1),
        )
        inverse = torch.cat(lines, dim=-2)
    return inverse.squeeze(-3)[..., :size, :size] @ b
