"""Ops over several ranks: outputs and gradients of one process, and what the ranks exchange."""

import pytest
import torch
import torch.distributed as dist
from ranks import Traffic, assert_same_over_ranks, run_ranks, splits

from onescan.ops import (
    AdditiveDecayState,
    DecayState,
    DecayStates,
    DiffusionState,
    ToeplitzState,
    additive_decay,
    decay_attention,
    linear_diffusion,
    lrpe,
    lrpe_angles,
    toeplitz_position,
)

B, T, H, K, V = 2, 13, 2, 4, 3
SIDES = ("left", "right")
COEFFICIENTS = ("log_decay", "weight")


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def qkv(tokens=T):
    return {"q": rand(B, tokens, H, K), "k": rand(B, tokens, H, K), "v": rand(B, tokens, H, V)}


@pytest.fixture
def over_ranks(tmp_path):
    """Run a check in groups of 2, 3 and 4 processes."""
    return lambda check: run_ranks(4, check, tmp_path)


@pytest.mark.parametrize("causal", [False, True])
def test_additive_decay(over_ranks, causal):
    def op(q, k, v, group, angles=None, keep=None, z=None, kv=None, **options):
        state = None if z is None else AdditiveDecayState(z, kv)
        options |= {"angles": angles, "keep": keep, "state": state}
        return additive_decay(q, k, v, causal=causal, group=group, **options)

    def check(group):
        for lengths in splits(T, group.size()):
            tokens = qkv()
            assert_same_over_ranks(op, tokens, {}, lengths, group)
            tokens |= {"angles": rand(T, H, K), "keep": torch.rand(B, T) > 0.3}
            tokens["k"] *= 300  # weights that differ by more than any float holds
            state = {"z": rand(B, H, K), "kv": rand(B, H, 2 * K, V)}
            assert_same_over_ranks(op, tokens, state, lengths, group)

    over_ranks(check)


def decays(*shape):
    """Log-decays of which some are 0, and some reset the state."""
    log_decay = -rand(*shape).abs()
    return log_decay.masked_fill(torch.rand(shape) < 0.1, -torch.inf)


# causal, decay_at, normalize, whether the decay is diagonal
DECAY_CALLS = [
    (True, "target", "max_one", False),
    (True, "source", "none", True),
    (False, "source", "sum", False),
    (False, "target", "none", True),
    (False, "symmetric", "max_one", False),
]


@pytest.mark.parametrize(("causal", "decay_at", "normalize", "is_diagonal"), DECAY_CALLS)
def test_decay_attention(over_ranks, causal, decay_at, normalize, is_diagonal):
    def op(q, k, v, log_decay, group, keep=None, **state):
        kvs, k_sums = ([x for name, x in state.items() if name.endswith(e)] for e in ("_kv", "_k"))
        sides = [*map(DecayState, kvs, k_sums)]
        o, outgoing = decay_attention(
            q.exp(), k.exp(), v, log_decay,
            causal=causal, decay_at=decay_at, normalize=normalize, keep=keep, group=group,
            state=(sides[0] if causal else DecayStates(*sides)) if sides else None, chunk_size=4,
        )  # fmt: skip
        return o, [x for side in ([outgoing] if causal else outgoing) for x in side]

    def check(group):
        per_token = {"log_decay": decays(B, T, H, K) if is_diagonal else decays(B, T, H)}
        sides = SIDES[:1] if causal else SIDES
        state = {f"{side}_kv": rand(B, H, K, V) for side in sides}
        state |= {f"{side}_k": rand(B, H, K) for side in sides}
        for lengths in splits(T, group.size()):
            tokens = qkv() | per_token
            assert_same_over_ranks(op, tokens, {}, lengths, group)
            tokens["keep"] = torch.rand(B, T) > 0.3
            assert_same_over_ranks(op, tokens, state, lengths, group)
        fixed = {"log_decay": -rand(H).abs()}
        assert_same_over_ranks(op, qkv(), fixed | state, lengths, group)

    over_ranks(check)


@pytest.mark.parametrize("normalize", ["none", "max_one"])
def test_attention_without_decay(over_ranks, normalize):
    def op(q, k, v, group):
        o, outgoing = decay_attention(q, k, v, normalize=normalize, group=group)
        return o, [x for side in outgoing for x in side]

    def check(group):
        for lengths in splits(T, group.size()):
            assert_same_over_ranks(op, qkv(), {}, lengths, group)

    over_ranks(check)


@pytest.mark.parametrize("radius", [2, 5, 40])
def test_linear_diffusion(over_ranks, radius):
    def op(x, weights, dt, group, keep=None, before=None):
        state = None if before is None else DiffusionState(before, before[:, :, 0, 0] > -1)
        o = linear_diffusion(x, weights.exp(), dt.exp(), keep=keep, state=state, group=group)
        return o, []

    def check(group):
        shared = {"weights": rand(H, 2 * radius + 1), "dt": rand(H)}
        for lengths in splits(T, group.size()):
            tokens = {"x": rand(B, T, H, V)}
            assert_same_over_ranks(op, tokens, shared, lengths, group)
            tokens["keep"] = torch.rand(B, T) > 0.3
            with_state = shared | {"before": rand(B, radius, H, V)}
            assert_same_over_ranks(op, tokens, with_state, lengths, group)

    over_ranks(check)


def test_lrpe(over_ranks):
    columns, prefix = 3, 2

    def op(x, theta, group):
        tokens = x.shape[1] - (prefix if group is None or dist.get_rank(group) == 0 else 0)
        shape = (tokens // columns, columns)
        own_prefix = x.shape[1] - tokens
        angles = lrpe_angles(shape, theta, prefix=own_prefix, start=0, group=group)
        return lrpe(x, angles), []

    def check(group):
        for lengths in splits(T, group.size()):
            tokens = {"x": rand(B, prefix + T * columns, H, K)}
            assert_same_over_ranks(
                op,
                tokens,
                {"theta": rand(H, K)},
                lengths,
                group,
                per_position=columns,
                prefix=prefix,
            )

    over_ranks(check)


# columns, bidirectional, E, whether the tokens are exchanged
TOEPLITZ_CALLS = [
    (1, False, 3, False),
    (1, True, 2, False),
    (1, True, 40, True),
    (3, False, 30, True),
    (3, False, 1, False),
    (3, True, 30, True),
]


@pytest.mark.parametrize(("columns", "bidirectional", "width", "exchanged"), TOEPLITZ_CALLS)
def test_toeplitz_position(over_ranks, columns, bidirectional, width, exchanged):
    rows, channels = 50, 5

    def op(x, log_decay, weight, group, hidden=None):
        shape = (x.shape[1] // columns, columns)[: 1 + (columns > 1)]
        y, state = toeplitz_position(
            x, -log_decay.exp(), weight, shape, bidirectional=bidirectional, group=group,
            state=None if hidden is None else ToeplitzState(hidden),
        )  # fmt: skip
        return y, [] if state is None else [*state]

    def check(group):
        axes, directions = 1 + (columns > 1), (2,) * bidirectional
        shared = {name: rand(axes, *directions, channels, width) for name in COEFFICIENTS}
        for lengths in splits(rows, group.size()):
            tokens = {"x": rand(B, rows * columns, channels)}
            with Traffic() as traffic:
                assert_same_over_ranks(op, tokens, shared, lengths, group, per_position=columns)
            assert (traffic.calls.count("all_to_all_single") > 1) == exchanged
            if not bidirectional:
                state = {"hidden": rand(B, *(columns,) * (axes - 1), channels, width)}
                assert_same_over_ranks(
                    op, tokens, shared | state, lengths, group, per_position=columns
                )

    over_ranks(check)
