"""One step of diffusion along a sequence (LDN): arguments, state and choice of form.

h'_t = h_t + dt sum_s K_ts (h_s - h_t)                        explicit
     = (1 - dt sum_s K_ts) h_t + dt sum_s K_ts h_s            a weighted mean, if dt is small
(I - dt/2 L) h' = (I + dt/2 L) h,    L = K - diag(K 1)        Crank-Nicolson
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from onescan.checks import (
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_no_nan,
    check_positive,
    check_shapes,
    check_supported,
    check_whole,
    is_known,
)
from onescan.messages import named_type, unsupported
from onescan.ops.backend import Backend, resolved_backend
from onescan.ops.collectives import carry_tokens, halo
from onescan.ops.layout import layout_of
from onescan.ops.linear_diffusion import crank_nicolson, forms
from onescan.ops.linear_diffusion.kernel import (
    check_kernels,
    gaussian_kernel,
    gaussian_radius,
    stable_step,
)
from onescan.ops.numerics import (
    disable_autocast,
    product_dtype,
    to_accumulation_dtype,
    zero_masked,
)
from onescan.ops.packing import Packing, PackingShard
from onescan.ops.parallel import (
    Group,
    SequenceGroup,
    one_token,
    refuse_group,
    sequence_group,
)
from onescan.shapes import (
    AllTokens,
    DiffusionKernels,
    Keep,
    Operators,
    StepSizes,
    Values,
)

__all__ = [
    "IMPLEMENTATIONS",
    "SOLVERS",
    "DiffusionState",
    "choose",
    "diffusion_operator",
    "gaussian_kernel",
    "gaussian_radius",
    "linear_diffusion",
    "next_state",
    "stable_step",
]

Scheme = Literal["explicit", "crank_nicolson"]
Form = Literal["auto", "dense", "banded", "fft"]

IMPLEMENTATIONS = forms.PRODUCTS  # of the explicit step
SOLVERS = crank_nicolson.SOLVERS  # of Crank-Nicolson
# forms of the explicit step that support packed sequences and a process group
LOCAL = ("dense", "banded")
KERNELS = ("banded",)  # forms of the explicit step with Triton kernels

# Measured on a CPU with benchmarks/linear_diffusion.py; no other device was measured.
FFT_COST = 2500  # multiplications per token and channel that take as long as the FFT
FEW_BLOCKS = 8  # blocks up to which the dense solve is faster


class DiffusionState(NamedTuple):
    """The tokens before a call that the kernel reads.

    Attributes:
        x: [B, R, H, V], the last R tokens before the step. Missing tokens are zeros, in front.
        keep: [B, R], True for the real tokens among them.
    """

    x: Values
    keep: Keep


def linear_diffusion(
    x: Values,
    weights: DiffusionKernels,
    dt: StepSizes,
    *,
    scheme: Scheme = "explicit",
    keep: Keep | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    state: DiffusionState | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    group: Group | None = None,
) -> Values:
    """Move each token towards the others, weighted by a kernel: one step in time.

    The layout is ``[B, T, H, V]``, unlike the ``[B, H, T, V]`` of torch's
    ``scaled_dot_product_attention``.

    Source: LDN, arXiv:2502.12381, Sec. 3.3, without the local update and the attention.

    Args:
        x: Tokens [B, T, H, V]; each head has its own kernel.
        weights: [H, 2R+1], K_ts = weights[h, R + t - s], at least 0. The weight of lag 0 has no
            effect. A kernel that is zero for all negative lags is causal.
        dt: [H], step size, at least 0. Up to `stable_step(weights)`, an explicit step computes
            weighted means of tokens, so the largest absolute value never grows. Crank-Nicolson is
            stable for any step, but a step of n times the stable one loses about log10(n) digits.
        scheme: "explicit", or "crank_nicolson", which is implicit and second-order in time. Up to
            twice the stable step, a Crank-Nicolson step also computes weighted means. A longer step
            is 2 (I - dt/2 L)^-1 - I, with an inverse of weighted means, so it may increase the
            largest absolute value, at most by a factor of 3. Repeated steps stay bounded: in 200
            steps on 256 tokens, Gaussian kernels with sigma 1, 4 and 32 increased it at most by a
            factor of 5.1.
        keep: [B, T], True for real tokens, the opposite of ``key_padding_mask`` in PyTorch and
            `onescan.nn`. The outputs of the others are zero; the real tokens and their row sums
            ignore them. None keeps all.
        cu_seqlens: Offsets of several sequences packed in one row, as in flash-attention: int32,
            [S + 1], from 0 to T, on the CPU or the device of x. With several rows, offsets count
            the tokens of all rows, up to B * T, and every row begins with a new sequence. Only for
            the explicit scheme, with the forms "dense" and "banded"; not with `state`.
        state: The tokens before x, which are read but not returned; for the explicit scheme only.
            Use `next_state` to compute the state for the next call.
        form: Algorithm. Explicit: "dense" in O(T^2), "banded" in O(T R), "fft" in O(T log T).
            Crank-Nicolson solves one linear system, or with keep one for each sequence: "dense" in
            O(T^3), "banded" in O(T R^2).
        backend: "torch" runs on any device. "triton" runs the banded explicit step on a GPU, for
            any radius and with `keep`, `cu_seqlens` and `state`; it multiplies in the dtype of x,
            sums in float32 and has first derivatives only. "auto" chooses; see `use_backend`.
        group: Process group across which the T axis is sharded in rank order; see
            `onescan.ops.parallel`. None uses that of `sequence_parallel`, if any. Only for the
            explicit scheme, with the forms "dense" and "banded".

    Returns:
        The tokens after the step, [B, T, H, V], in the dtype of x.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the scheme, form or backend
            is unknown, the backend cannot run the call, a state is combined with Crank-Nicolson,
            cu_seqlens is invalid, the scheme or form does not support cu_seqlens or a group or, on
            a CPU, weights or dt are negative or an argument contains NaN.

    >>> x = torch.tensor([0.0, 0.0, 4.0, 0.0]).reshape(1, 4, 1, 1)
    >>> neighbors, dt = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([0.25])
    >>> linear_diffusion(x, neighbors, dt).flatten().tolist()
    [0.0, 1.0, 2.0, 1.0]
    """
    layout = layout_of(
        x, "B T H V", name="x", keep=keep, cu_seqlens=cu_seqlens, state=state, group=group
    )
    ranks, packing = layout.ranks, layout.packing
    _check(x, weights, dt, scheme, keep, state, may_be_empty=ranks is not None)
    if ranks is not None:
        _refuse_ranks(ranks, scheme, form)
    tokens, radius = x.shape[1], weights.shape[1] // 2
    rows, start = tokens, 0
    if ranks is None:
        inputs, inputs_keep = _all_tokens(x, keep, state)
    else:
        inputs, inputs_keep, start = _tokens_around(ranks, x, keep, state, radius)
        rows = inputs.shape[1]
    sequence = None if packing is None else packing.sequence
    if isinstance(packing, PackingShard):
        sequence = packing.sequences_around(start, rows - start - packing.tokens)
    is_local = packing is not None or ranks is not None
    chosen_form = choose(
        form, scheme=scheme, tokens=inputs.shape[1], radius=radius, is_local=is_local
    )
    if _backend(form, scheme, backend, x, weights, dt, state) == "triton":
        from onescan.ops.linear_diffusion import launch

        with disable_autocast(x):
            rates = _rates(*to_accumulation_dtype(weights, dt))
            y = launch.explicit(inputs, rates, inputs_keep, sequence, rows)
            return (y if ranks is None else y.narrow(1, start, tokens)).to(x.dtype)
    with disable_autocast(x):
        if inputs_keep is not None:
            (inputs,) = zero_masked(inputs_keep, inputs)
        wide, *others = to_accumulation_dtype(inputs, weights, dt)
        rates = _rates(*others)
        if sequence is not None:
            y = forms.packed_explicit(chosen_form, wide, rates, inputs_keep, sequence)
        elif scheme == "explicit":
            multiplied = inputs if product_dtype(inputs) == torch.bfloat16 else wide
            y = forms.explicit(IMPLEMENTATIONS[chosen_form], multiplied, rates, inputs_keep, rows)
        else:
            size = SOLVERS[chosen_form](radius)
            y = crank_nicolson.crank_nicolson(size, wide, rates, inputs_keep)
        y = y if ranks is None else y.narrow(1, start, tokens)
        if keep is not None:
            y = y.masked_fill(~keep[:, :, None, None], 0)
    state_tensors = {} if state is None else {"state.x": state.x}
    check_no_nan(y, wide, x=x, weights=weights, dt=dt, **state_tensors)
    return y.to(x.dtype)


def diffusion_operator(
    weights: DiffusionKernels,
    dt: StepSizes,
    tokens: int,
    *,
    scheme: Scheme = "explicit",
    form: Form = "auto",
) -> Operators:
    """Return the matrix A of a step, h' = A h: explicit, I + dt (K - diag(K 1)).

    Source: LDN, arXiv:2502.12381, Sec. 4.1.

    >>> A = diffusion_operator(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([0.25]), 3)
    >>> A.tolist()
    [[[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]]
    """
    identity = torch.eye(tokens, dtype=weights.dtype, device=weights.device)
    unit_vectors = identity[None, :, None].expand(1, -1, weights.shape[0], -1)
    return linear_diffusion(unit_vectors, weights, dt, scheme=scheme, form=form)[0].transpose(0, 1)


def next_state(
    state: DiffusionState | None,
    x: Values,
    keep: Keep | None,
    *,
    radius: int,
    group: Group | None = None,
) -> DiffusionState:
    """Return the state after the tokens x, given the state before them, or None at the start.

    With a `group`, as in `linear_diffusion`, return the state after the tokens of all ranks.

    Raises:
        ValueError: If the state has another radius, or radius is not an integer of at least 0.

    >>> x = torch.arange(3.0).reshape(1, 3, 1, 1)
    >>> next_state(None, x, None, radius=2).x.flatten().tolist()
    [1.0, 2.0]
    >>> next_state(None, x[:, 2:], None, radius=2).keep.tolist()
    [[False, True]]
    """
    check_whole(0, radius=radius)
    if state is not None and state.x.shape[1] != radius:
        raise ValueError(f"state has radius {state.x.shape[1]}, expected {radius}")
    if keep is None:
        keep = x.new_ones(x.shape[:2], dtype=torch.bool)
    if state is None:
        zeros = x.new_zeros(x.shape[0], radius, *x.shape[2:])
        state = DiffusionState(zeros, keep.new_zeros(x.shape[0], radius))
    if (ranks := sequence_group(group)) is not None and radius:
        marked, before = (
            torch.cat([x.flatten(2), keep.unsqueeze(-1)], dim=-1) for x, keep in ((x, keep), state)
        )
        ((_, last),) = carry_tokens(ranks, [(marked, None)], radius, before=before)
        return DiffusionState(last[..., :-1].view_as(state.x), last[..., -1] > 0)
    keep = _last(state.keep, keep, radius)
    (x,) = zero_masked(keep, _last(state.x, x, radius))
    return DiffusionState(x, keep)


def _last(before: Tensor, x: Tensor, radius: int) -> Tensor:
    """Return the last R tokens of both tensors, without keeping the others in memory."""
    tokens = x.shape[1]
    if not is_known(tokens):
        return torch.cat([before, x], dim=1).narrow(1, tokens, radius)
    new = min(tokens, radius)
    return torch.cat([before[:, new:], x[:, tokens - new :]], dim=1)


def choose(form: str, *, scheme: str, tokens: int, radius: int, is_local: bool = False) -> str:
    """Return the form that a call runs.

    An explicit step takes the form with the fewest multiplications per token and channel.

    Args:
        form: The argument of the caller.
        scheme: The scheme.
        tokens: Number of tokens, including those of a state.
        radius: Radius of the kernels.
        is_local: Whether only forms without distant tokens fit, as for packed sequences.

    >>> choose("auto", scheme="explicit", tokens=196, radius=138)
    'dense'
    """
    if is_local:
        what = "cu_seqlens or group"
        check_supported("scheme", scheme, ["explicit"], known=get_args(Scheme), what=what)
        check_supported("form", form, ["auto", *LOCAL], known=IMPLEMENTATIONS, what=what)
    if form != "auto":
        forms_of_scheme = IMPLEMENTATIONS if scheme == "explicit" else SOLVERS
        what = f"scheme {scheme!r}"
        check_supported("form", form, forms_of_scheme, known=IMPLEMENTATIONS, what=what)
        return form
    if not is_known(tokens):  # symbolic: a form that suits any length
        return "banded" if scheme == "explicit" else "dense"
    if scheme != "explicit":
        return (
            "dense" if tokens <= FEW_BLOCKS * crank_nicolson.solve_block_size(radius) else "banded"
        )
    costs = _costs(tokens, radius)
    best = "dense"
    for other in LOCAL if is_local else costs:  # comparisons: symbolic lengths cannot be sorted
        best = other if costs[other] < costs[best] else best
    return best


def _costs(tokens: int, radius: int) -> dict[str, int]:
    return {
        "dense": tokens,
        "banded": forms.band_block_size(radius) + 2 * radius,
        "fft": FFT_COST,
    }


def _backend(
    form: str, scheme: str, backend: str, x: Tensor, weights: Tensor, dt: Tensor,
    state: DiffusionState | None,
) -> str:  # fmt: skip
    """Return the backend of a call; kernels support any width."""
    tensors = (x, weights, dt, None if state is None else state.x)
    has_kernel = scheme == "explicit" and form in ("auto", *KERNELS)
    resolved = resolved_backend(backend, has_kernel, *tensors, widest=None)
    if resolved == "triton" and not has_kernel:
        pairs = [f"explicit/{name}/triton" for name in ("auto", *KERNELS)]
        raise unsupported("backend", resolved, f"scheme {scheme!r} with form {form!r}", pairs)
    return resolved


def _rates(weights: DiffusionKernels, dt: StepSizes) -> DiffusionKernels:
    """Return dt K, [H, 2R+1], without the weight of lag 0."""
    radius = weights.shape[1] // 2
    lags = torch.arange(-radius, radius + 1, device=weights.device)
    return dt.unsqueeze(1) * weights.masked_fill(lags == 0, 0)


def _all_tokens(
    x: Values, keep: Keep | None, state: DiffusionState | None
) -> tuple[AllTokens, Bool[Tensor, "B S"] | None]:
    """Return the state's tokens and x, and which of them are real."""
    if state is None:
        return x, keep
    new = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
    return torch.cat([state.x, x], dim=1), torch.cat([state.keep, new], dim=1)


def _tokens_around(
    ranks: SequenceGroup, x: Values, keep: Keep | None, state: DiffusionState | None, radius: int
) -> tuple[AllTokens, Bool[Tensor, "B S"] | None, int]:
    """Return the tokens of this rank and those of other ranks that they read.

    The tokens of a state come before those of the first rank.

    Returns:
        The tokens, which of them are real, and the number of tokens before x.
    """
    lengths, tokens = ranks.lengths(x), x.shape[1]
    if state is not None:
        lengths[0] += radius
        keep = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        x, keep = _all_tokens(x, keep, state if ranks.is_first else None)
    before, after = halo(ranks, x, lengths, radius)
    inputs, inputs_keep = torch.cat([before, x, after], dim=1), keep
    if keep is not None:
        before_keep, after_keep = (y.bool() for y in halo(ranks, keep.byte(), lengths, radius))
        inputs_keep = torch.cat([before_keep, keep, after_keep], dim=1)
    if not inputs.shape[1]:  # a token whose output is dropped
        (inputs,), inputs_keep = one_token(inputs), None
    return inputs, inputs_keep, before.shape[1] + x.shape[1] - tokens


def _refuse_ranks(ranks: SequenceGroup, scheme: str, form: str) -> None:
    """Raise ValueError for a call that needs all tokens in one process."""
    if scheme != "explicit":
        reason = "it solves a system over all tokens; expected 'explicit'"
        refuse_group(ranks, f"scheme {scheme!r}", reason)
    if form == "fft":
        refuse_group(ranks, "form 'fft'", "an FFT needs all tokens; expected 'dense' or 'banded'")


def _check(
    x: Any, weights: Any, dt: Any, scheme: Any, keep: Any, state: Any, *, may_be_empty: bool
) -> None:
    # Any: the arguments are not checked yet
    check_choice("scheme", scheme, get_args(Scheme))
    if not isinstance(state, DiffusionState | None):
        raise ValueError(f"state is {named_type(state)}, expected a DiffusionState")
    if state is not None and not isinstance(state.keep, torch.Tensor):
        raise ValueError(f"state.keep is {named_type(state.keep)}, expected a tensor")
    if state is not None and scheme != "explicit":
        raise ValueError(f"state was given with scheme={scheme!r}, expected scheme='explicit'")
    state_tensors = {} if state is None else {"state.x": state.x, "state.keep": state.keep}
    check_floating(x=x, weights=weights, dt=dt)
    check_devices(x=x, weights=weights, dt=dt, keep=keep, **state_tensors)
    sizes = check_shapes(
        x=(x, "B T H V"), weights=(weights, "H lags"), dt=(dt, "H"), keep=(keep, "B T")
    )
    check_positive(**{letter: sizes[letter] for letter in ("HV" if may_be_empty else "THV")})
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
            raise ValueError(f"dt has minimum {lowest:.6g}, expected at least 0")
