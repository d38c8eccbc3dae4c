"""`write` and `read`: the state of tokens, and what queries read from it."""

from functools import partial
from inspect import unwrap

import pytest
import torch
from op_checks import assert_same
from ranks import run_ranks, split

from onescan.ops import additive_decay as additive_op
from onescan.ops import decay_attention as decay_op
from onescan.ops import delta_rule as delta_op
from onescan.ops.additive_decay import AdditiveDecayState
from onescan.ops.additive_decay import read as read_additive
from onescan.ops.additive_decay import write as write_additive
from onescan.ops.decay_attention import DecayState
from onescan.ops.decay_attention import read as read_decay
from onescan.ops.decay_attention import write as write_decay
from onescan.ops.delta_rule import DeltaState
from onescan.ops.delta_rule import read as read_delta
from onescan.ops.delta_rule import write as write_delta
from onescan.ops.lrpe import RotaryPositions, lrpe_angles
from onescan.ops.parallel import sequence_parallel

B, T, H, K, V = 2, 7, 3, 4, 5
WRITERS = {
    "additive": (additive_op, write_additive, read_additive),
    "decay": (decay_op, write_decay, read_decay),
    "delta": (delta_op, write_delta, read_delta),
}
over_ops = pytest.mark.parametrize("name", WRITERS)


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def drawn(name, tokens=T):
    """Tokens of an op without queries: positional arguments."""
    k, v = rand(B, tokens, H, K), rand(B, tokens, H, V)
    others = {"additive": (), "decay": (-rand(B, tokens, H),)}
    return k, v, *others.get(name, (rand(B, tokens, H), -rand(B, tokens, H)))


@over_ops
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_state_is_that_of_a_causal_call(name, masked, with_state):
    op, write, _ = WRITERS[name]
    given = [x.requires_grad_() for x in drawn(name)]
    state = write(*drawn(name, 3)) if with_state else None
    keep = torch.rand(B, T) > 0.4 if masked else None
    got = write(*given, keep=keep, state=state)
    want = op(given[0], *given, causal=True, keep=keep, state=state)[1]
    assert type(got) is type(want)
    assert_same(got, want)
    slopes = [torch.rand_like(x) for x in want]
    pairs = [torch.autograd.grad(list(x), given, slopes, allow_unused=True) for x in (got, want)]
    for ours, theirs in zip(*pairs, strict=True):
        assert_same([ours], [theirs])


@over_ops
def test_queries_read_as_if_one_token_came_later(name):
    op, write, read = WRITERS[name]
    state, q = write(*drawn(name)), rand(B, 3, H, K)
    nothing = {
        "additive": (torch.full((B, 1, H, K), -torch.inf).double(), torch.zeros(B, 1, H, V)),
        "decay": (torch.zeros(B, 1, H, K).double(), torch.zeros(B, 1, H, V).double()),
        "delta": (torch.zeros(B, 1, H, K).double(), rand(B, 1, H, V), torch.zeros(B, 1, H)),
    }[name]
    got = read(q, state)
    for t in range(3):
        want, _ = op(q[:, t : t + 1], *(x.double() for x in nothing), causal=True, state=state)
        assert_same([got[:, t : t + 1]], [want])


def test_angles_and_feature_maps():
    k, v = drawn("additive")
    q, theta = rand(B, T, H, K), rand(H, K)
    angles = lrpe_angles((T,), theta)
    want, _ = additive_op(q, k, v, angles=angles, feature_map="silu")
    for written in (angles, RotaryPositions(theta)):
        state = write_additive(k, v, angles=written)
        assert_same([read_additive(q, state, angles=angles, feature_map="silu")], [want])


@pytest.mark.parametrize("normalize", ["none", "sum", "max_one"])
def test_decayed_reads_are_normalized(normalize):
    k, v = drawn("additive")
    q = rand(B, T, H, K) - 0.5
    options = {"normalize": normalize, "feature_map": "shifted_silu"}
    state = write_decay(k, v, feature_map="shifted_silu")
    want, _ = decay_op(
        q[:, -1:],
        k[:, -1:],
        v[:, -1:],
        causal=True,
        state=write_decay(k[:, :-1], v[:, :-1], feature_map="shifted_silu"),
        **options,
    )
    assert_same([read_decay(q, state, **options)[:, -1:]], [want])


@pytest.mark.sampled
@over_ops
def test_ranks_write_the_state_of_all_tokens(name, tmp_path):
    _, write, _ = WRITERS[name]
    given, keep = drawn(name), torch.rand(B, T) > 0.4
    want = write(*given, keep=keep)

    def check(group):
        lengths, rank = split(T, group.size()), group.rank()
        at = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        with sequence_parallel(group):
            got = write(*(x[:, at] for x in given), keep=keep[:, at])
        assert_same(got, want)

    run_ranks(4, check, tmp_path)


@over_ops
def test_half_precision_reads_keep_their_dtype(name):
    _, write, read = WRITERS[name]
    state = write(*(x.bfloat16() for x in drawn(name)))
    assert all(x.dtype in (torch.float32, torch.float64) for x in state)
    assert read(rand(B, 2, H, K).bfloat16(), state).dtype is torch.bfloat16


READS = {
    "additive": (read_additive, AdditiveDecayState(rand(B, H, K), rand(B, H, K, V))),
    "decay": (read_decay, DecayState(rand(B, H, K, V), rand(B, H, K))),
    "delta": (read_delta, DeltaState(rand(B, H, K, V))),
}


@over_ops
def test_errors_name_the_argument(name):
    read, state = (unwrap(READS[name][0]), READS[name][1])
    q = rand(B, 2, H, K)
    for call, message in (
        (partial(read, 1, state), "q is an int"),
        (partial(read, q[0], state), r"q has shape \(2, 3, 4\), expected 'B T H K'"),
        (partial(read, q, state[0]), "state is a Tensor, expected the state of a direction"),
        (partial(read, rand(B, 2, H + 1, K), state), "has shape .*H=4"),
        (partial(read, q, state._replace(kv=state.kv * torch.nan)), "state.kv holds 120 NaN"),
        (partial(read, q * torch.nan, state), "q holds 48 NaN values out of 48"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    write = unwrap(WRITERS[name][1])
    k, v, *others = drawn(name)
    for call, message in (
        (partial(write, 1, v, *others), "k is an int"),
        (partial(write, k, v[:, :3], *others), "v has shape"),
        (partial(write, k, v * torch.nan, *others), "v holds 210 NaN"),
        (partial(write, k * torch.nan, v, *others), "k holds 168 NaN"),
        (partial(write, k, v.to("meta"), *others), "v is on meta and k on cpu"),
        (partial(write, k, v, *others, keep=torch.ones(B, T)), "keep has dtype"),
        (partial(write, k, v, *others, state=1), "state is an int"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_state_with_angles_is_read_with_angles():
    q, theta = rand(B, T, H, K), rand(H, K)
    angles = lrpe_angles((T,), theta)
    k, v = drawn("additive")
    with pytest.raises(ValueError, match=r"state\.kv has 8 features, expected 4 without angles"):
        read_additive(q, write_additive(k, v, angles=angles))
    with pytest.raises(ValueError, match=r"state\.kv has 4 features, expected 8 with angles"):
        read_additive(q, write_additive(k, v), angles=angles)
