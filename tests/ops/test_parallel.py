"""Ops over several ranks: outputs and gradients of one process, and what the ranks exchange."""

import os
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from communication import Communication
from ranks import TIMEOUT, assert_same_over_ranks, run_ranks, split

from onescan.ops import (
    AdditiveDecayState,
    DecayState,
    DecayStates,
    DeltaState,
    DeltaStates,
    DiffusionState,
    ToeplitzState,
    additive_decay,
    decay_attention,
    delta_rule,
    linear_diffusion,
    lrpe,
    lrpe_angles,
    toeplitz_position,
)
from onescan.ops.collectives import PendingGather
from onescan.ops.packing import Packing, PackingShard
from onescan.ops.parallel import SequenceGroup, sequence_parallel
from onescan.ops.toeplitz_position import forms

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


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_additive_decay(over_ranks, causal):
    def op(q, k, v, group, angles=None, keep=None, z=None, kv=None, **options):
        state = None if z is None else AdditiveDecayState(z, kv)
        options |= {"angles": angles, "keep": keep, "state": state}
        return additive_decay(q, k, v, causal=causal, group=group, **options)

    def check(group):
        lengths, tokens = split(T, group.size()), qkv()
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


@pytest.mark.sampled
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
        lengths, tokens = split(T, group.size()), qkv() | per_token
        if group.size() == 3:
            fixed = {"log_decay": -rand(H).abs()}
            assert_same_over_ranks(op, qkv(), fixed | state, lengths, group)
        else:
            assert_same_over_ranks(op, tokens, {}, lengths, group)
        tokens["keep"] = torch.rand(B, T) > 0.3
        assert_same_over_ranks(op, tokens, state, lengths, group)

    over_ranks(check)


# Offsets of two rows of T tokens: sequences on one rank or several, ends where ranks end.
OFFSETS = torch.tensor([0, 1, 1, 3, 8, T, T + 6, T + 7, 2 * T], dtype=torch.int32)


def diffuse(x, weights, dt, **options):
    return linear_diffusion(x, weights.exp(), dt.exp(), **options), None


def toeplitz(x, log_decay, weight, **options):
    return toeplitz_position(x, -log_decay.exp(), weight, (x.shape[1],), **options)


def toeplitz_coefficients(*directions):
    return {name: rand(1, *directions, K, 3) for name in COEFFICIENTS}


PACKED = {
    "decay, causal": (
        partial(decay_attention, causal=True, chunk_size=4),
        lambda: (qkv() | {"log_decay": decays(B, T, H)}, {}),
    ),
    "decay, both": (
        partial(decay_attention, normalize="max_one", chunk_size=4, decay_at="source"),
        lambda: (qkv() | {"log_decay": decays(B, T, H)}, {}),
    ),
    "no decay": (partial(decay_attention, chunk_size=4), lambda: (qkv(), {})),
    "delta rule, causal": (
        partial(delta_rule, causal=True, chunk_size=4),
        lambda: (qkv() | {"beta": 0.1 * rand(B, T, H)}, {}),
    ),
    "delta rule, both": (
        partial(delta_rule, chunk_size=4),
        lambda: (qkv() | {"beta": 0.1 * rand(B, T, H), "log_decay": decays(B, T, H, K)}, {}),
    ),
    "additive": (additive_decay, lambda: (qkv() | {"angles": rand(T, H, K)}, {})),
    "additive, causal": (
        partial(additive_decay, causal=True),
        lambda: (qkv() | {"angles": rand(T, H, K)}, {}),
    ),
    "toeplitz": (toeplitz, lambda: ({"x": rand(B, T, K)}, toeplitz_coefficients())),
    "toeplitz, both": (
        partial(toeplitz, bidirectional=True),
        lambda: ({"x": rand(B, T, K)}, toeplitz_coefficients(2)),
    ),
    "diffusion": (
        diffuse,
        lambda: ({"x": rand(B, T, H, V)}, {"weights": rand(H, 9), "dt": rand(H)}),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(over_ranks, name):
    run, inputs = PACKED[name]

    def op(group, **tensors):
        offsets = OFFSETS
        if group is not None and group.size() == 3:  # shared by several calls
            whole = Packing(OFFSETS, batch=B, tokens=T)
            offsets = PackingShard(whole, split(T, 3), dist.get_rank(group))
        o, state = run(**tensors, cu_seqlens=offsets, group=group)
        assert state is None
        return o, []

    def check(group):
        tokens, shared = inputs()
        if "toeplitz" not in name and group.size() > 2:
            tokens["keep"] = torch.rand(B, T) > 0.3
        assert_same_over_ranks(op, tokens, shared, split(T, group.size()), group)

    over_ranks(check)


def test_attention_without_decay(over_ranks):
    def op(q, k, v, group):
        o, outgoing = decay_attention(q, k, v, normalize="max_one", group=group)
        return o, [x for side in outgoing for x in side]

    def check(group):
        assert_same_over_ranks(op, qkv(), {}, split(T, group.size()), group)

    over_ranks(check)


# causal, channels of the decay (0 for none), updates per token
DELTA_CALLS = [(True, 0, 1), (True, K, 2), (False, 1, 1), (False, K, 2)]


@pytest.mark.sampled
@pytest.mark.parametrize(("causal", "channels", "updates"), DELTA_CALLS)
def test_delta_rule(over_ranks, causal, channels, updates):
    sides = SIDES[:1] if causal else SIDES

    def op(q, k, v, beta, group, log_decay=None, keep=None, **kvs):
        states = [DeltaState(kvs[side]) for side in sides if kvs]
        o, outgoing = delta_rule(
            q, k, v, beta, log_decay, causal=causal, keep=keep, group=group, chunk_size=4,
            state=(states[0] if causal else DeltaStates(*states)) if states else None,
        )  # fmt: skip
        return o, [side.kv for side in ([outgoing] if causal else outgoing)]

    def check(group):
        r = (updates,) if updates > 1 else ()
        tokens = {"q": rand(B, T, H, K), "k": F.normalize(rand(B, T, *r, H, K), dim=-1)}
        tokens |= {"v": rand(B, T, *r, H, V), "beta": torch.rand(B, T, *r, H).double()}
        if channels:
            tokens["log_decay"] = decays(B, T, H) if channels == 1 else decays(B, T, H, K)
        lengths, state = split(T, group.size()), {side: rand(B, H, K, V) for side in sides}
        if group.size() < 4:
            assert_same_over_ranks(op, tokens, {}, lengths, group)
        else:
            tokens["keep"] = torch.rand(B, T) > 0.3
        assert_same_over_ranks(op, tokens, state, lengths, group)

    over_ranks(check)


@pytest.mark.sampled
@pytest.mark.parametrize("radius", [2, 40])
def test_linear_diffusion(over_ranks, radius):
    def op(x, weights, dt, group, keep=None, before=None):
        state = None if before is None else DiffusionState(before, before[:, :, 0, 0] > -1)
        o = linear_diffusion(x, weights.exp(), dt.exp(), keep=keep, state=state, group=group)
        return o, []

    def check(group):
        shared = {"weights": rand(H, 2 * radius + 1), "dt": rand(H)}
        lengths, tokens = split(T, group.size()), {"x": rand(B, T, H, V)}
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
        tokens, shared = {"x": rand(B, prefix + T * columns, H, K)}, {"theta": rand(H, K)}
        options = {"per_position": columns, "prefix": prefix}
        assert_same_over_ranks(op, tokens, shared, split(T, group.size()), group, **options)

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


@pytest.mark.sampled
@pytest.mark.parametrize(("columns", "bidirectional", "width", "exchanged"), TOEPLITZ_CALLS)
def test_toeplitz_position(over_ranks, columns, bidirectional, width, exchanged):
    rows, channels = 50, 5

    def op(x, log_decay, weight, group, hidden=None):
        shape = (x.shape[1] // columns, columns)[: 1 + (columns > 1)]
        joint = columns == 1 and not bidirectional  # for one axis, the same as without
        y, state = toeplitz_position(
            x, -log_decay.exp(), weight[0] if joint else weight, shape,
            bidirectional=bidirectional, joint=joint, group=group,
            state=None if hidden is None else ToeplitzState(hidden),
        )  # fmt: skip
        return y, [] if state is None else [*state]

    def check(group):
        axes, directions = 1 + (columns > 1), (2,) * bidirectional
        shared = {name: rand(axes, *directions, channels, width) for name in COEFFICIENTS}
        lengths, tokens = split(rows, group.size()), {"x": rand(B, rows * columns, channels)}
        options = {"per_position": columns}
        with Communication() as traffic:
            assert_same_over_ranks(op, tokens, shared, lengths, group, **options)
        assert (traffic.calls.count("all_to_all_single") > 1) == exchanged
        if not bidirectional:
            state = {"hidden": rand(B, *(columns,) * (axes - 1), channels, width)}
            assert_same_over_ranks(op, tokens, shared | state, lengths, group, **options)

    over_ranks(check)


def test_toeplitz_mixes_its_own_tokens_during_the_exchange(tmp_path, monkeypatch):
    events, wait, mix = [], PendingGather.wait, forms.FORMS["scan"]
    monkeypatch.setattr(PendingGather, "wait", lambda self: (events.append("wait"), wait(self))[1])
    monkeypatch.setitem(forms.FORMS, "scan", lambda *x: (events.append("mix"), mix(*x))[1])

    def check(group):
        rates = torch.full((1, K, 3), -0.1).double()
        toeplitz_position(rand(B, T, K), rates, rates, (T,), group=group, form="scan")
        assert events == ["mix", "wait"]

    run_ranks(2, check, tmp_path)


KERNELS = {
    "additive": lambda q, k, v, w, **options: additive_decay(q, k, v, causal=True, **options),
    "diffusion": lambda q, k, v, w, **options: (
        linear_diffusion(v, w.abs(), w[:, 0].abs(), form="banded", **options),
    ),
}


def test_kernels_over_ranks(tmp_path):
    def check(group):
        tokens = [x[:1].float() for x in qkv().values()]
        weights = torch.rand(H, 3)
        at = slice(0, 5) if dist.get_rank(group) == 0 else slice(5, T)
        for run in KERNELS.values():
            o = run(*(x[:, at] for x in tokens), weights, group=group, backend="triton")[0]
            torch.testing.assert_close(o, run(*tokens, weights)[0][:, at], atol=1e-5, rtol=1e-5)

    run_ranks(2, check, tmp_path)


def test_a_rank_that_needs_no_loss(over_ranks):
    """The other ranks' gradients are those of their losses alone, and no rank waits forever."""

    def check(group):
        rank, last = dist.get_rank(group), group.size() - 1
        tokens = qkv()
        whole = [x.clone().requires_grad_() for x in tokens.values()]
        at = slice(rank, rank + 1) if rank < last else slice(last, T)
        own = [x[:, at].clone().requires_grad_() for x in tokens.values()]
        for causal in (False, True):
            o, state = additive_decay(*whole, causal=causal)
            (o[:, :1].sum() + state.kv.sum()).backward()
            o, state = additive_decay(*own, causal=causal, group=group)
            # each rank uses another result, and those between the first and the last none
            loss = state.kv.sum() if rank == last else o.sum() * (rank == 0)
            loss.backward()
        for x, y in zip(own, whole, strict=True):
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            torch.testing.assert_close(gradient, y.grad[:, at], atol=1e-9, rtol=1e-9)

    over_ranks(check)


@pytest.mark.sampled
@pytest.mark.parametrize("diagonal", [False, True])
def test_traffic_of_decays_does_not_grow_with_the_length(over_ranks, diagonal):
    factors = K if diagonal else 1

    def check(group):
        for tokens, causal in [(3, True), (70, True), (3, False), (70, False)]:
            decay = decays(B, tokens, H, K) if diagonal else decays(B, tokens, H)
            with Communication() as traffic:
                decay_attention(*qkv(tokens).values(), decay, causal=causal, group=group)
            directions = 1 if causal else 2
            numbers = directions * B * H * (K * (V + 1) + factors)
            assert traffic.bytes == 8 * (group.size() - 1) * numbers

    over_ranks(check)


# Calls over nodes of ranks, with their tensors.
NODE_CALLS = {
    "additive": (partial(additive_decay, causal=True), qkv),
    "additive, packed": (partial(additive_decay, causal=True, cu_seqlens=OFFSETS), qkv),
    "decay": (decay_attention, lambda: qkv() | {"log_decay": decays(B, T, H, K)}),
    "decay, packed": (
        partial(decay_attention, cu_seqlens=OFFSETS),
        lambda: qkv() | {"log_decay": decays(B, T, H)},
    ),
    "delta rule": (
        delta_rule,
        lambda: qkv() | {"beta": 0.1 * rand(B, T, H), "log_decay": decays(B, T, H)},
    ),
    "toeplitz": (
        lambda x, group: toeplitz_position(
            x, *torch.full((2, 1, 2, K, 3), -0.1).double(), (x.shape[1],),
            bidirectional=True, group=group,
        ),
        lambda: {"x": rand(B, T, K)},
    ),
}  # fmt: skip


def tensors_of(states):
    """Return the tensors of nested states."""
    if isinstance(states, torch.Tensor):
        return [states]
    return [] if states is None else [x for state in states for x in tensors_of(state)]


def groups_of_nodes(ranks, node_size):
    """Return the group of this rank's node, and that of its place in every node."""
    within = [[*range(start, start + node_size)] for start in range(0, ranks, node_size)]
    between = [[*range(place, ranks, node_size)] for place in range(node_size)]
    groups = {tuple(members): dist.new_group(members) for members in within + between}
    own = dist.get_rank()
    return tuple(group for members, group in groups.items() if own in members)


def test_nodes_exchange_merged_states(tmp_path):
    ranks, node_size, lengths = 6, 2, [0, 3, 0, 0, T - 4, 1]

    def check(group):
        if group.size() < ranks:
            return
        levels = groups_of_nodes(ranks, node_size)
        nodes, even = SequenceGroup(group, nodes=levels), [T] * ranks
        grouped = [SequenceGroup(group, even), SequenceGroup(group, even, nodes=levels)]
        for name, (run, inputs) in NODE_CALLS.items():

            def op(group, run=run, **tensors):
                o, states = run(**tensors, group=group and nodes)
                return o, tensors_of(states)

            assert_same_over_ranks(op, inputs(), {}, lengths, group)
            received = []
            for each in grouped if "packed" not in name else ():
                with Communication() as traffic:
                    run(**inputs(), group=each)
                received.append(traffic.bytes)
            states = node_size - 1 + ranks // node_size - 1  # of other ranks and nodes
            assert not received or received[0] * states == received[1] * (ranks - 1)
        if 0 < group.rank() < ranks - 1:
            with pytest.raises(ValueError, match="nodes describe 2 nodes of 3 ranks"):
                SequenceGroup(group, nodes=levels[::-1])

    run_ranks(ranks, check, tmp_path)


def test_diffusion_moves_the_tokens_within_its_radius(over_ranks):
    def check(group):
        for tokens in (4, 70):
            x = rand(B, tokens, H, V)
            ranks = SequenceGroup(group, [tokens] * group.size())
            with Communication() as traffic:
                linear_diffusion(x, torch.ones(H, 7).double(), torch.ones(H).double(), group=ranks)
            sides = 1 + (0 < ranks.rank < group.size() - 1)
            assert traffic.calls == ["all_to_all_single"]
            assert traffic.bytes == 8 * sides * B * 3 * H * V

    over_ranks(check)


@pytest.mark.parametrize("ends", ["before the call", "before the backward pass"])
def test_other_ranks_fail_if_a_rank_ends(tmp_path, ends):
    def run(group, rank):
        if rank == 1 and ends == "before the call":
            os._exit(0)
        o, _ = additive_decay(*(x.requires_grad_() for x in qkv().values()), group=group)
        if rank == 1:
            os._exit(0)
        o.sum().backward()

    def check(group):
        rank = dist.get_rank(group)
        if group.size() == 3:
            with pytest.raises(dist.DistError, match=f"rank {rank} of 3 could not .* has ended"):
                run(group, rank)
            os._exit(0)  # a barrier would fail

    run_ranks(3, check, tmp_path)


def test_torch_names_calls_that_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def check(group):
        dist.set_debug_level_from_env()
        debugged = dist.new_group(range(2), timeout=TIMEOUT)
        q, k, v = (x[:, :, : 1 + dist.get_rank(group)] for x in qkv().values())
        with pytest.raises(dist.DistError, match="calls differ") as failure:
            additive_decay(q, k, v, causal=True, group=debugged)
        assert "Detected mismatch between collectives" in str(failure.value.__cause__)

    run_ranks(2, check, tmp_path)


def test_the_group_of_a_context(over_ranks):
    def check(group):
        q, k, v = qkv().values()
        want = additive_decay(q, k, v, causal=True, group=group)[0]
        alone = additive_decay(q, k, v, causal=True)[0]
        with sequence_parallel(group):
            torch.testing.assert_close(additive_decay(q, k, v, causal=True)[0], want)
            with sequence_parallel(None):
                torch.testing.assert_close(additive_decay(q, k, v, causal=True)[0], alone)
            torch.testing.assert_close(additive_decay(q, k, v, causal=True)[0], want)
        torch.testing.assert_close(additive_decay(q, k, v, causal=True)[0], alone)

    over_ranks(check)


def refusals(group):
    """Yield calls over a group that raise, with a part of each message."""
    (q, k, v), x = qkv().values(), rand(B, T, H, V)
    ones, grid = torch.ones(H, 3).double(), rand(B, 12, H)
    diffusion = partial(linear_diffusion, x, ones, ones[:, 0], group=group)
    mdtpe = partial(toeplitz_position, group=group)
    decays, weight = -torch.ones(2, H, 1).double(), torch.ones(2, H, 1).double()
    size = group.size()
    yield lambda: diffusion(form="fft"), f"group has {size} ranks, but form 'fft' supports only one"
    yield lambda: diffusion(scheme="crank_nicolson"), "it solves a system over all tokens"
    yield lambda: mdtpe(grid, decays, weight, (4, 3), form="fft"), "an FFT needs all tokens"
    yield lambda: mdtpe(grid, decays, weight[0], (4, 3), joint=True), "its FFT needs all tokens"
    yield (
        lambda: additive_decay(q, k, v, form="full", group=group),
        "form is 'full', which does not support .* and group; available",
    )
    yield lambda: delta_rule(q, k, v, v[..., 0], form="recurrent", group=group), "form .*group"
    for lengths in ([1], [True] * size):
        yield (
            partial(SequenceGroup, group, lengths),
            re.escape(f"lengths is {lengths!r}, expected a non-negative integer for each"),
        )
    yield (
        lambda: linear_diffusion(x, ones, ones[:, 0], group=SequenceGroup(group, [0] * size)),
        f"rank {dist.get_rank(group)} has {T} tokens",
    )
    if dist.get_rank(group):
        yield (
            lambda: lrpe_angles((3,), rand(H, K), prefix=1, group=group),
            "prefix is 1 on rank",
        )
    else:
        lrpe_angles((3,), rand(H, K), prefix=1, group=group)


def test_calls_that_need_one_process(over_ranks):
    def check(group):
        for call, message in refusals(group):
            with pytest.raises(ValueError, match=message):
                call()

    over_ranks(check)


def test_a_group_must_be_a_process_group():
    with pytest.raises(ValueError, match="group is a str, expected a process group"):
        SequenceGroup("world")
    with pytest.raises(ValueError, match="group is a group without this process"):
        SequenceGroup(dist.GroupMember.NON_GROUP_MEMBER)
