"""One step of diffusion as defined, token by token: the reference for the tests.

Source: LDN, arXiv:2502.12381, Sec. 3.3, without the local update and the attention:

    explicit          h'_t = h_t + dt sum_s K_ts (h_s - h_t)
    crank_nicolson    h'_t = h_t + dt sum_s K_ts (h_s - h_t + h'_s - h'_t) / 2

with K_ts = weights[R + t - s], or 0 where t and s are more than R apart or one is masked.
"""

import torch
from torch import Tensor

from onescan.ops.linear_diffusion import DiffusionState
from onescan.shapes import DiffusionKernels, Keep, StepSizes, Values


def forward(
    x: Values,
    weights: DiffusionKernels,
    dt: StepSizes,
    *,
    scheme: str = "explicit",
    keep: Keep | None = None,
    state: DiffusionState | None = None,
) -> Values:
    new = x.shape[1]
    keep = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
    if state is not None:
        x, keep = torch.cat([state.x, x], dim=1), torch.cat([state.keep, keep], dim=1)
    outputs = [
        torch.stack([_step(x[b, :, h], weights[h], dt[h], keep[b], scheme) for b in range(len(x))])
        for h in range(x.shape[2])
    ]
    return torch.stack(outputs, dim=2)[:, -new:]


def _step(x: Tensor, weights: Tensor, dt: Tensor, keep: Tensor, scheme: str) -> Tensor:
    """Compute the step of one sequence, [T, V], with one kernel."""
    tokens, radius = len(x), len(weights) // 2
    rows = []
    for t in range(tokens):
        row = [torch.zeros_like(dt)] * tokens
        for s in range(tokens):
            if s != t and abs(t - s) <= radius and keep[t] and keep[s]:
                row[s] = weights[radius + t - s]
        rows.append(torch.stack(row))
    kernel = torch.stack(rows)  # T T
    if scheme == "explicit":
        flow = torch.zeros_like(x)
        for s in range(tokens):
            flow = flow + kernel[:, s, None] * (x[s] - x)
        y = x + dt * flow
    else:
        laplacian = kernel - torch.diag(kernel.sum(dim=1))
        identity = torch.eye(tokens, dtype=x.dtype)
        y = torch.linalg.inv(identity - dt / 2 * laplacian) @ (identity + dt / 2 * laplacian) @ x
    return torch.where(keep.unsqueeze(1), y, 0)
