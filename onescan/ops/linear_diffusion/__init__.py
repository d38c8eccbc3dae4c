"""One step of diffusion along a sequence (LDN): the front door, and nothing else.

h'_t = h_t + dt sum_s K_ts (h_s - h_t)                        explicit
     = (1 - dt sum_s K_ts) h_t + dt sum_s K_ts h_s            a mean of tokens, if dt is small
(I - dt/2 L) h' = (I + dt/2 L) h,    L = K - diag(K 1)        Crank-Nicolson
"""

from typing import Any, Literal, NamedTuple, get_args

import torch

from onescan.checks import (
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_no_nan,
    check_positive,
    check_shapes,
    fingerprint,
)
from onescan.ops.chunks import is_known
from onescan.ops.linear_diffusion import banded, dense, fft, implicit
from onescan.ops.linear_diffusion.kernel import (
    check_kernels,
    gaussian_kernel,
    gaussian_radius,
    stable_step,
)
from onescan.ops.linear_diffusion.state import DiffusionState, following
from onescan.ops.linear_diffusion.step import Product, crank_nicolson, explicit
from onescan.ops.numerics import full_precision, widened
from onescan.shapes import DiffusionKernels, Giving, Keep, MemoryMask, StepSizes, Values

__all__ = [
    "IMPLEMENTATIONS",
    "Choice",
    "DiffusionState",
    "choose",
    "following",
    "gaussian_kernel",
    "gaussian_radius",
    "linear_diffusion",
    "stable_step",
]

Scheme = Literal["explicit", "crank_nicolson"]
Form = Literal["auto", "dense", "banded", "fft"]

# What multiplies by the kernel. Every form there is.
IMPLEMENTATIONS: dict[str, Product] = {
    "dense": dense.product,
    "banded": banded.product,
    "fft": fft.product,
}
FFT_COST = 2500  # about as many multiplications as an FFT takes the time of
FEW_BLOCKS = 8

# What solves Crank-Nicolson's system.
SOLVERS: dict[str, implicit.Solve] = {
    "dense": implicit.dense,
    "banded": implicit.banded,
}


def linear_diffusion(
    x: Values,
    weights: DiffusionKernels,
    dt: StepSizes,
    *,
    scheme: Scheme = "explicit",
    keep: Keep | None = None,
    state: DiffusionState | None = None,
    form: Form = "auto",
) -> Values:
    """Let each token move towards the others, as the kernel weighs them: one step in time.

    Source: LDN, arXiv:2502.12381, Sec. 3.3; without the local update and the attention.

    Args:
        x: tokens, in heads that have a kernel each.
        weights: [H, 2R+1], K_ts = weights[h, R + t - s], at least 0; that of lag 0 has no effect.
            0 for all lags below 0 is causal.
        dt: [H], the step in time, at least 0. Up to `stable_step(weights)` an explicit step takes
            means of tokens: no number grows beyond the largest. Crank-Nicolson is stable at any,
            and of n times as long a step loses about as many digits as n has.
        scheme: "explicit"; "crank_nicolson", implicit and of second order in time.
        keep: True for real tokens. The others give zero output, and nothing to the real ones,
            whose row sums leave them out. None keeps all.
        state: the tokens before x, which give and are not returned; explicit only. `following`
            makes the next call's.
        form: how the same sum is evaluated. "dense" is O(T^2), "banded" O(T R), "fft" O(T log T).
            Crank-Nicolson solves a system, with keep one for each sequence: "dense" O(T^3),
            "banded" O(T R^2).

    Returns:
        The tokens after the step, in x's dtype.

    Raises:
        ValueError: shapes, types or devices disagree, there is no such scheme or form, a state with
            Crank-Nicolson, or, on a CPU, weights or dt below 0, or an argument that holds NaN.

    >>> x = torch.tensor([0.0, 0.0, 4.0, 0.0]).reshape(1, 4, 1, 1)
    >>> neighbours, dt = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([0.25])
    >>> linear_diffusion(x, neighbours, dt).flatten().tolist()
    [0.0, 1.0, 2.0, 1.0]
    """
    _check(x, weights, dt, scheme, keep, state)
    tokens, radius = x.shape[1], weights.shape[1] // 2
    before = 0 if state is None else radius
    chosen = _chosen(form, scheme, before + tokens, radius)
    with full_precision(x):
        giving, seen = _all_tokens(x, keep, state)
        giving, wide_weights, wide_dt = widened(giving, weights, dt)
        lags = torch.arange(-radius, radius + 1, device=x.device)
        share = wide_dt.unsqueeze(1) * wide_weights.masked_fill(lags == 0, 0)  # dt K, H 2R+1
        if scheme == "explicit":
            moved = explicit(IMPLEMENTATIONS[chosen], giving, share, seen, tokens)
        else:
            moved = crank_nicolson(SOLVERS[chosen], giving, share, seen)
        if keep is not None:
            moved = moved.masked_fill(~keep[:, :, None, None], 0)
    if can_look_at_values(moved):
        named = {} if state is None else {"state.x": state.x}
        check_no_nan(fingerprint(moved, giving), x=x, weights=weights, dt=dt, **named)
    return moved.to(x.dtype)


class Choice(NamedTuple):
    """Which form a call runs, and why.

    Attributes:
        form: as in `linear_diffusion`, never "auto".
        why: the reason in a few words.
    """

    form: str
    why: str


def choose(form: str, *, scheme: str, tokens: int, radius: int) -> Choice:
    """Name the form a call would run: the whole policy is these lines.

    Explicit, multiplications per token and channel; those of the FFT, whose work is of another
    kind, and how many blocks are few for an implicit step, are fitted by eye to what
    `benchmarks/linear_diffusion.py` measures on a CPU. No other device was measured.

    >>> choose("auto", scheme="explicit", tokens=196, radius=138)
    Choice(form='dense', why='196 multiplications a token and channel, banded 414, fft 2500')
    """
    chosen = _chosen(form, scheme, tokens, radius)
    if form != "auto":
        return Choice(chosen, "asked for")
    if scheme != "explicit":
        size = implicit.block_size(radius)
        compared = "at most" if chosen == "dense" else "more than"
        return Choice(chosen, f"{compared} {FEW_BLOCKS} blocks of {size} tokens")
    costs = _costs(tokens, radius)
    others = ", ".join(f"{name} {cost}" for name, cost in costs.items() if name != chosen)
    return Choice(chosen, f"{costs[chosen]} multiplications a token and channel, {others}")


def _chosen(form: str, scheme: str, tokens: int, radius: int) -> str:
    """The form alone: to spell the reason would fix a compiler's length."""
    if form != "auto":
        known = IMPLEMENTATIONS if scheme == "explicit" else SOLVERS
        check_choice(f"form (scheme={scheme!r})", form, known)
        return form
    if not is_known(tokens):  # what fits any length
        return "banded" if scheme == "explicit" else "dense"
    if scheme != "explicit":
        return "dense" if tokens <= FEW_BLOCKS * implicit.block_size(radius) else "banded"
    costs = _costs(tokens, radius)
    best = "dense"
    for other in costs:  # plain comparisons: a compiler's lengths cannot be sorted
        best = other if costs[other] < costs[best] else best
    return best


def _costs(tokens: int, radius: int) -> dict[str, int]:
    return {
        "dense": tokens,
        "banded": banded.block_size(radius) + 2 * radius,
        "fft": FFT_COST,
    }


def _all_tokens(
    x: Values, keep: Keep | None, state: DiffusionState | None
) -> tuple[Giving, MemoryMask | None]:
    """The state's tokens and x's, zeros where masked, and which of them are real."""
    if state is not None:
        new = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        x, keep = torch.cat([state.x, x], dim=1), torch.cat([state.keep, new], dim=1)
    return (x if keep is None else x.masked_fill(~keep[:, :, None, None], 0)), keep


def _check(x: Any, weights: Any, dt: Any, scheme: Any, keep: Any, state: Any) -> None:
    # Any: these are what a user passed
    check_choice("scheme", scheme, get_args(Scheme))
    if not isinstance(state, DiffusionState | None):
        raise ValueError(f"state is a {type(state).__name__}, expected a DiffusionState")
    if state is not None and not isinstance(state.keep, torch.Tensor):
        raise ValueError(f"state.keep is a {type(state.keep).__name__}, expected a tensor")
    if state is not None and scheme != "explicit":
        raise ValueError(f"a state came with scheme={scheme!r}, expected scheme='explicit'")
    given = {} if state is None else {"state.x": state.x, "state.keep": state.keep}
    check_floating(x=x, weights=weights, dt=dt)
    check_devices(x=x, weights=weights, dt=dt, keep=keep, **given)
    sizes = check_shapes(
        x=(x, "B T H V"), weights=(weights, "H lags"), dt=(dt, "H"), keep=(keep, "B T")
    )
    check_positive(**{letter: sizes[letter] for letter in "THV"})
    check_kernels(weights)
    masks = {"keep": keep}
    if state is not None:
        radius = sizes["lags"] // 2
        check_floating(**{"state.x": state.x})
        check_shapes(
            x=(x, "B T H V"),
            **{"state.x": (state.x, f"B {radius} H V"), "state.keep": (state.keep, f"B {radius}")},
        )
        masks["state.keep"] = state.keep
    for name, mask in masks.items():
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(
                f"{name} has dtype {mask.dtype}, expected torch.bool, True for real tokens"
            )
    if can_look_at_values(dt):
        lowest = dt.detach().amin().item()
        if lowest < 0:
            raise ValueError(f"dt reaches {lowest:.6g}, expected at least 0")
