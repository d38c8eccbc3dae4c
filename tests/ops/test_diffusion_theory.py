"""What LDN's Section 4 proves of diffusion, and what its kernel promises."""

import math
from inspect import unwrap
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onescan.layers.mixers.linear_diffusion import (
    MAX_STEP_FRACTION,
    MIN_SIGMA,
    DenseDiffusion,
    FreeDiffusion,
    GaussianDiffusion,
)
from onescan.ops.linear_diffusion import (
    IMPLEMENTATIONS,
    SOLVERS,
    diffusion_operator,
    gaussian_kernel,
    gaussian_radius,
    linear_diffusion,
    next_state,
    stable_step,
)
from onescan.ops.linear_diffusion.kernel import smallest_positive_power

over_forms = pytest.mark.parametrize("form", IMPLEMENTATIONS)
sizes = given(tokens=st.integers(1, 40), radius=st.integers(1, 50), seed=st.integers(0, 999))


def random_kernels(radius, seed, heads=3):
    """Kernels of every kind: few lags or many, one side or both, weights from 1e-3 to 1e3."""
    g = torch.Generator().manual_seed(seed)
    weights = 10 ** (6 * torch.rand(heads, 2 * radius + 1, generator=g, dtype=torch.float64) - 3)
    return weights * (torch.rand(weights.shape, generator=g) < torch.rand(1, generator=g))


def tokens_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
@sizes
def test_rows_of_the_operator_are_shares(tokens, radius, seed):
    """Sec. 4.4: under the bound they are at least 0 and sum to 1."""
    weights = random_kernels(radius, seed)
    for part in (0.0, 0.3, 1.0):
        for form in IMPLEMENTATIONS:
            operator = diffusion_operator(weights, part * stable_step(weights), tokens, form=form)
            assert operator.min() > -1e-12
            torch.testing.assert_close(operator.sum(-1), torch.ones(3, tokens).double())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["dense", "banded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_stable_step_gives_no_negative_weights(form, dtype):
    for seed in range(60):
        weights = random_kernels(1 + seed % 12, seed).to(dtype)
        for operator in diffusion_operator(weights, stable_step(weights), 30, form=form):
            assert operator.min() >= 0
            smallest_positive_power(operator)  # refuses numbers below 0


@sizes
def test_no_step_beyond_the_papers_bound_is_called_stable(tokens, radius, seed):
    """Sec. 4.4: dt <= min_t 1 / sum_s K_ts, and for a row that reaches 2 R tokens just that."""
    weights = random_kernels(radius, seed) + 1e-3
    lag = torch.arange(tokens)[:, None] - torch.arange(tokens)
    kernel = weights[:, (radius + lag).clamp(0, 2 * radius)] * ((lag != 0) & (lag.abs() <= radius))
    bound = 1 / kernel.sum(-1).amax(-1)
    stable = stable_step(weights)
    assert (stable <= bound * (1 + 1e-12)).all()
    if tokens > 2 * radius:
        torch.testing.assert_close(stable, bound)


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["explicit", "crank_nicolson"])
@sizes
def test_constants_are_preserved(scheme, tokens, radius, seed):
    weights = random_kernels(radius, seed)
    constant = tokens_of(2, 1, 3, 4, seed=seed).expand(-1, tokens, -1, -1)
    keep = torch.rand(2, tokens) < 0.7
    dt = 0.9 * stable_step(weights)
    for form in IMPLEMENTATIONS if scheme == "explicit" else SOLVERS:
        moved = linear_diffusion(constant, weights, dt, scheme=scheme, keep=keep, form=form)
        torch.testing.assert_close(moved, constant * keep[:, :, None, None])


@settings(max_examples=3)
@given(
    radius=st.integers(1, 20), seed=st.integers(0, 999), form=st.sampled_from([*IMPLEMENTATIONS])
)
def test_the_largest_number_never_grows_over_200_layers(radius, seed, form):
    weights = random_kernels(radius, seed)
    x = tokens_of(2, 24, 3, 2, seed=seed)
    keep = torch.rand(2, 24, generator=torch.Generator().manual_seed(seed)) < 0.8
    x = x * keep[:, :, None, None]
    for layer in range(200):
        moved = linear_diffusion(x, weights, stable_step(weights), keep=keep, form=form)
        largest = (x.amax(1), moved.amax(1)), (-x.amin(1), -moved.amin(1))
        # a masked token is 0, and within what is real only by chance
        for before, after in largest:
            assert (after <= before.clamp(min=0) + 1e-12).all(), layer
        x = moved


def test_the_l2_norm_may_grow_where_the_kernel_is_not_symmetric():
    """The paper's statement is of the l2 norm; its proof, and the truth, of the largest number."""
    weights = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)  # each takes its predecessor's
    x = torch.tensor([5.0, 0.0, 0.0]).double().reshape(1, 3, 1, 1)
    moved = linear_diffusion(x, weights, torch.ones(1, dtype=torch.float64))
    assert moved.flatten().tolist() == [5.0, 5.0, 0.0]
    assert moved.norm() > x.norm()


@given(
    logits=st.lists(st.floats(-1e4, 1e4), min_size=4, max_size=4),
    causal=st.booleans(),
    tokens=st.integers(1, 80),
)
def test_no_parameters_leave_the_bound(logits, causal, tokens):
    """A token keeps at least a thousandth of itself, whatever has been learnt."""
    diffusion = GaussianDiffusion(
        [1.0], max_sigma=8.0, epsilon=1e-4, causal=causal, scheme="explicit", form="auto"
    )
    names = ["raw_sigma", "raw_past", "raw_future", "raw_step"]
    with torch.no_grad():
        for name, value in zip(names, logits, strict=True):
            if getattr(diffusion, name) is not None:
                getattr(diffusion, name).fill_(value)
    weights = diffusion.weights()
    assert MIN_SIGMA <= diffusion.sigma().item() <= 8.0
    operator = diffusion_operator(weights, diffusion.dt(weights), tokens)[0]
    assert torch.isfinite(operator).all()
    assert operator.min() >= 0
    assert operator.diagonal().min() > (1 - MAX_STEP_FRACTION) / 2
    torch.testing.assert_close(operator.sum(-1), torch.ones(tokens))
    x = torch.randn(1, tokens, 2, requires_grad=True)
    diffusion(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in [x, *diffusion.parameters()])


def learned_diffusion(kind, tokens, *, scale, seed):
    """Diffusion whose kernel is learned weight by weight, with random parameters."""
    if kind == "dense":
        diffusion = DenseDiffusion([1.0], tokens, epsilon=1e-4)
    else:
        diffusion = FreeDiffusion(
            [1.0], max_sigma=2.0, epsilon=1e-4, causal=kind == "causal", scheme="explicit",
            form="auto",
        )  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in diffusion.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=g))
    return diffusion


@pytest.mark.parametrize("kind", ["both", "causal", "dense"])
@settings(max_examples=12)
@given(tokens=st.integers(1, 40), scale=st.sampled_from([0.1, 3, 1e3, 1e6]), seed=st.integers(0))
def test_no_learned_kernel_leaves_the_bound(kind, tokens, scale, seed):
    """Sec. 4.4: constants are preserved, and the largest value never grows."""
    diffusion = learned_diffusion(kind, tokens, scale=scale, seed=seed % 1000)
    (operator,) = diffusion(torch.eye(tokens).unsqueeze(0))
    assert operator.min() >= 0
    assert operator.diagonal().min() > (1 - MAX_STEP_FRACTION) / 2
    torch.testing.assert_close(operator.sum(-1), torch.ones(tokens))
    x = torch.randn(2, tokens, 3, requires_grad=True)
    keep = torch.rand(2, tokens) < 0.7
    for masks in ({}, {"keep": keep}):
        real = keep.unsqueeze(-1) if masks else torch.ones(2, tokens, 1, dtype=torch.bool)
        start = x.detach().masked_fill(~real, 0)
        moved = diffusion(start, **masks).masked_fill(~real, 0)
        assert (moved.amax(1) <= start.amax(1).clamp(min=0) * (1 + 1e-5)).all()
        assert (moved.amin(1) >= start.amin(1).clamp(max=0) * (1 + 1e-5)).all()
        ones = real.expand(-1, -1, 3).float()
        same = diffusion(ones, **masks).masked_fill(~real, 0)
        torch.testing.assert_close(same, ones)
    diffusion(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in [x, *diffusion.parameters()])


@pytest.mark.parametrize("raw", [-30.0, -40.0, -45.0, -50.0, -60.0, -70.0, -90.0])
def test_gradients_stay_finite_where_a_kernel_all_but_vanishes(raw):
    diffusion = GaussianDiffusion(
        [1.0], max_sigma=8.0, epsilon=1e-4, causal=False, scheme="explicit", form="auto"
    )
    with torch.no_grad():
        diffusion.raw_past.fill_(raw)
        diffusion.raw_future.fill_(raw)
    diffusion(torch.randn(1, 9, 2)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in diffusion.parameters())


@pytest.mark.parametrize("form", SOLVERS)
def test_constants_survive_a_million_times_the_stable_step_in_float32(form):
    weights = torch.rand(1, 5)
    one = torch.ones(1, 50, 1, 1)
    dt = 1e6 * stable_step(weights)
    moved = linear_diffusion(one, weights, dt, scheme="crank_nicolson", form=form)
    torch.testing.assert_close(moved, one, atol=1e-5, rtol=0)


def brute_force_power(operator):
    """The smallest L by multiplying; Wielandt's bound says when to give up."""
    reached = torch.eye(len(operator), dtype=torch.float64)
    pattern = (operator > 0).double()
    for power in range(1, (len(operator) - 1) ** 2 + 3):
        reached = ((reached @ pattern) > 0).double()
        if reached.all():
            return power
    return None


@given(
    tokens=st.integers(1, 7),
    density=st.floats(0.1, 0.9),
    seed=st.integers(0, 999),
    stay=st.booleans(),
)
def test_the_smallest_positive_power(tokens, density, seed, stay):
    g = torch.Generator().manual_seed(seed)
    operator = (torch.rand(tokens, tokens, generator=g) < density).double()
    if stay:
        operator += torch.eye(tokens, dtype=torch.float64)
    assert smallest_positive_power(operator) == brute_force_power(operator)


def test_wielandts_own_matrix_needs_the_most():
    """A ring with one shortcut: no primitive matrix of its size has a larger exponent."""
    for tokens in (3, 5, 8):
        ring = torch.eye(tokens).roll(1, dims=1)
        ring[-1, 1] = 1
        assert smallest_positive_power(ring) == (tokens - 1) ** 2 + 1


@pytest.mark.parametrize(("tokens", "radius"), [(1, 1), (2, 1), (9, 1), (9, 2), (10, 4), (10, 40)])
def test_theorem_1_every_token_hears_of_every_other(tokens, radius):
    """The smallest such L is the number of hops from one end to the other."""
    weights = torch.full((1, 2 * radius + 1), 0.5, dtype=torch.float64)
    operator = diffusion_operator(weights, 0.9 * stable_step(weights), tokens)[0]
    power = smallest_positive_power(operator)
    assert power == max(math.ceil((tokens - 1) / radius), 1)
    assert (torch.linalg.matrix_power(operator, power) > 0).all()
    if power > 1:
        assert (torch.linalg.matrix_power(operator, power - 1) == 0).any()


def test_theorem_1_fails_where_the_graph_is_not_strongly_connected():
    causal = torch.tensor([[0.0, 0.0, 0.5]], dtype=torch.float64)
    operator = diffusion_operator(causal, 0.9 * stable_step(causal), 5)[0]
    assert smallest_positive_power(operator) is None


def test_theorem_1_fails_at_the_bound_itself_though_its_graph_is_strongly_connected():
    """Two tokens that swap: the paper's proof takes irreducible for primitive."""
    weights = torch.ones(1, 3, dtype=torch.float64)
    at_the_bound = diffusion_operator(weights, torch.ones(1, dtype=torch.float64), 2)[0]
    assert at_the_bound.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert smallest_positive_power(at_the_bound) is None
    below = diffusion_operator(weights, 2 * MAX_STEP_FRACTION * stable_step(weights), 2)[0]
    assert smallest_positive_power(below) == 1


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (torch.ones(2, 3), r"operator has shape \(2, 3\)"),
        (torch.tensor([[1.0, -1.0], [0.0, 1.0]]), "operator contains numbers below 0 or NaN"),
        (torch.full((2, 2), torch.nan), "operator contains numbers below 0 or NaN"),
    ],
)
def test_what_is_no_operator_has_no_power(operator, message):
    with pytest.raises(ValueError, match=message):
        smallest_positive_power(operator)


@pytest.mark.sampled
@pytest.mark.parametrize("form", SOLVERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_crank_nicolson_is_stable_at_100_times_the_bound(form, symmetric):
    weights = random_kernels(6, seed=1) + 1e-3
    if symmetric:
        weights = weights + weights.flip(1)
    x = tokens_of(2, 50, 3, 4)
    dt = 100 * stable_step(weights)
    operator = diffusion_operator(weights, dt, 50, scheme="crank_nicolson", form=form)
    assert torch.linalg.eigvals(operator).abs().max() <= 1 + 1e-9
    torch.testing.assert_close(operator.sum(-1), torch.ones(3, 50).double())
    largest = x.norm(dim=1)
    for _ in range(200):
        x = linear_diffusion(x, weights, dt, scheme="crank_nicolson", form=form)
        if symmetric:
            assert (x.norm(dim=1) <= largest * (1 + 1e-9)).all()
    assert (x.norm(dim=1) <= 10 * largest).all()
    explicit = diffusion_operator(weights, dt, 50)
    assert torch.linalg.eigvals(explicit).abs().max() > 10  # which the explicit step is not


@pytest.mark.parametrize("future", [1.0, 0.01, 0.0])
@pytest.mark.parametrize("sigma", [1.0, 8.0])
def test_crank_nicolson_may_increase_the_maximum_but_stays_bounded(sigma, future):
    """The infinity norm of the operator is the largest growth of the maximum over tokens."""
    past, future, sigma = (torch.tensor([x], dtype=torch.float64) for x in (1.0, future, sigma))
    weights = gaussian_kernel(past, future, sigma, 64)

    def growth(multiple, steps=1):
        dt = multiple * stable_step(weights)
        (operator,) = diffusion_operator(weights, dt, 128, scheme="crank_nicolson")
        powers = [operator]
        for _ in range(steps - 1):
            powers.append(powers[-1] @ operator)
        return max(power.abs().sum(dim=-1).max().item() for power in powers)

    for multiple in (0.5, 2.0):
        assert growth(multiple, steps=3) == pytest.approx(1)
    for multiple in (4.0, 64.0, 1024.0):
        assert 1.3 < growth(multiple) < 3
        assert growth(multiple, steps=100) < 6


def test_crank_nicolson_is_of_second_order():
    """Halving the step takes a quarter of the error; an explicit step's error halves."""
    weights = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)
    x = tokens_of(1, 12, 1, 1)
    one = torch.ones(1, dtype=torch.float64)
    laplacian = diffusion_operator(weights, one, 12)[0] - torch.eye(12).double()
    exact = torch.linalg.matrix_exp(0.4 * laplacian) @ x[0, :, 0]

    def error(scheme, steps):
        moved = x
        for _ in range(steps):
            moved = linear_diffusion(moved, weights, 0.4 / steps * one, scheme=scheme)
        return (moved[0, :, 0] - exact).norm().item()

    assert error("crank_nicolson", 8) / error("crank_nicolson", 16) == pytest.approx(4, rel=0.05)
    assert error("explicit", 32) / error("explicit", 64) == pytest.approx(2, rel=0.1)


def test_the_kernel_is_the_papers():
    past, future, sigma = torch.tensor([[2.0, 1.0], [0.5, 0.0], [3.0, 1.5]]).double()
    weights = gaussian_kernel(past, future, sigma, radius=4)
    for h in range(2):
        for lag in range(-4, 5):
            phi = past[h] if lag > 0 else future[h] if lag < 0 else 0
            want = phi * math.exp(-(lag**2) / (2 * sigma[h].item() ** 2))
            assert weights[h, 4 + lag].item() == pytest.approx(float(want), abs=1e-15)


@given(
    sigma=st.floats(MIN_SIGMA, 20),
    ratio=st.floats(0, 1),
    epsilon=st.sampled_from([1e-1, 1e-2, 1e-4, 1e-6, 1e-9]),
    tokens=st.integers(1, 120),
)
def test_what_is_cut_off_moves_no_token_by_more_than_epsilon(sigma, ratio, epsilon, tokens):
    """Times the distance between the largest token and the smallest, for any stable step."""
    radius = gaussian_radius(sigma, epsilon)
    assert math.exp(-(radius**2) / (2 * sigma**2)) <= epsilon * (1 + 1e-9)
    past, future, width = torch.tensor([[1.0], [ratio], [sigma]]).double()
    whole = gaussian_kernel(past, future, width, radius=max(tokens, radius))
    banded = gaussian_kernel(past, future, width, radius=radius)
    x = tokens_of(1, tokens, 1, 3)
    dt = stable_step(whole)
    exact = linear_diffusion(x, whole, dt, form="dense")
    spread = (x.amax(1) - x.amin(1)).squeeze()
    for form in IMPLEMENTATIONS:
        error = (linear_diffusion(x, banded, dt, form=form) - exact).abs().amax(1).squeeze()
        assert (error <= epsilon * spread + 1e-12).all()


@over_forms
def test_where_nothing_is_cut_off_all_forms_agree(form):
    weights = random_kernels(70, seed=3)
    x = tokens_of(2, 60, 3, 4)
    dt = stable_step(weights)
    want = linear_diffusion(x, weights, dt, form="dense")
    got = linear_diffusion(x, weights, dt, form=form)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_kernel(ONE, ONE, ONE, 1.5), "radius is 1.5"),
        (lambda: gaussian_kernel(ONE, ONE, ONE, -1), "radius is -1"),
        (lambda: gaussian_kernel(-ONE, ONE, ONE, 1), "past has minimum -1"),
        (lambda: gaussian_kernel(ONE, -ONE, ONE, 1), "future has minimum -1"),
        (lambda: gaussian_kernel(ONE, ONE, 0 * ONE, 1), "sigma has minimum 0, expected above 0"),
        (lambda: gaussian_kernel(ONE, ONE, torch.nan * ONE, 1), "sigma has minimum nan"),
        (lambda: gaussian_kernel(torch.inf * ONE, ONE, ONE, 1), "past has maximum inf"),
        (lambda: gaussian_kernel(ONE, ONE[:1], ONE, 1), r"future has shape \(1,\)"),
        (lambda: gaussian_kernel(1.0, ONE, ONE, 1), "past is a float"),
        (lambda: gaussian_radius(-1.0, 0.1), "sigma is -1.0"),
        (lambda: gaussian_radius(math.inf, 0.1), "sigma is inf"),
        (lambda: gaussian_radius(1.0, 0.0), "epsilon is 0.0"),
        (lambda: gaussian_radius(1.0, 2.0), "epsilon is 2.0"),
        (lambda: stable_step(-torch.ones(1, 3)), "weights has minimum -1"),
        (lambda: stable_step(torch.ones(1, 4)), "an odd number of lags"),
        (lambda: stable_step(torch.ones(3)), r"weights has shape \(3,\)"),
        (lambda: stable_step([1.0]), "weights is a list"),
        (lambda: next_state(None, torch.ones(1, 2, 1, 1), None, radius=-1), "radius is -1"),
        (
            lambda: next_state(
                next_state(None, torch.ones(1, 2, 1, 1), None, radius=2),
                torch.ones(1, 2, 1, 1),
                None,
                radius=5,
            ),
            "state has radius 2, expected 5",
        ),
    ],
)
def test_kernels_and_steps_refuse_what_they_are_not_made_of(call, message):
    hooks = ("gaussian_kernel", "gaussian_radius", "stable_step", "next_state")
    bare = {name: unwrap(globals()[name]) for name in hooks}
    with patch.dict(globals(), bare), pytest.raises(ValueError, match=message):
        call()


def test_a_vanishing_epsilon_has_a_radius():
    assert gaussian_radius(1.0, 5e-324) == 39


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stable_step_of_a_rounded_kernel_is_stable(dtype):
    one = torch.ones(1)
    weights = gaussian_kernel(one, one, 60 * one, radius=250).to(dtype)
    dt = stable_step(weights)
    assert dt.dtype == torch.float32
    assert (weights.double().sum() - weights[0, 250].double()) * dt.double() <= 1 + 1e-6
