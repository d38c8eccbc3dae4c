"""Packed sequences: one call with cu_seqlens equals one call for each sequence."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from op_checks import assert_same
from pairwise import pairwise

from onescan.ops import (
    additive_decay,
    decay_attention,
    delta_rule,
    linear_diffusion,
    toeplitz_position,
)
from onescan.ops.packing import Packing, packing_of

H, K, V = 2, 4, 3
# rows of equal length: single tokens, empty sequences, lengths around multiples of 4 and of 8
LENGTHS = {
    "one row": [[1, 0, 5, 8, 0, 3]],
    "two rows": [[0, 4, 7, 1], [12]],
    "single tokens": [[1, 1, 1]],
    "long": [[9, 0, 16, 1, 23, 8]],
}


def offsets(lengths, dtype=torch.int32):
    """Return cu_seqlens of the lengths of each row."""
    flat = torch.tensor([n for row in lengths for n in row])
    return F.pad(flat.cumsum(0), (1, 0)).to(dtype)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def assert_packing_changes_nothing(op, tensors, shared, lengths, keep=None):
    """Compare values and gradients of one packed call and of a call for each sequence.

    `op` returns its outputs, given tensors [B, T, ...], tensors without tokens, and options.
    """
    tensors = [x.requires_grad_() for x in tensors]
    shared = [x.requires_grad_() for x in shared]
    leaves = [*tensors, *shared]
    packed = op(tensors, shared, keep=keep, cu_seqlens=offsets(lengths))
    rows = []
    for b, of_row in enumerate(lengths):
        start, row = 0, []
        for length in of_row:
            at = slice(b, b + 1), slice(start, start + length)
            start += length
            if length:
                kept = None if keep is None else keep[at]
                row.append(op([x[at] for x in tensors], shared, keep=kept, start=at[1].start))
        rows.append(torch.cat(row, dim=1))
    separate = torch.cat(rows)
    assert_same([packed], [separate])
    slope = randn(*packed.shape, seed=9)
    gradients = (
        torch.autograd.grad((o * slope).sum(), leaves, materialize_grads=True)
        for o in (packed, separate)
    )
    assert_same(*gradients)


def tokens_of(lengths):
    return len(lengths), sum(lengths[0])


def real(lengths):
    """Return a mask that leaves out some tokens, first ones of sequences included."""
    shape = tokens_of(lengths)
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.7


def log_decays(kind, shape):
    """Return log-decays from 0 to -inf; a list, because there may be none."""
    if kind is None:
        return []
    if kind == "fixed":
        return [-randn(H, seed=3).abs()]
    size = (*shape, H) if kind == "scalar" else (*shape, H, K)
    logs = -randn(*size, seed=3).exp()
    draw = torch.rand(size, generator=torch.Generator().manual_seed(4))
    logs = torch.where(draw < 0.1, 0.0, logs)
    return [torch.where(draw > 0.95, -torch.inf, torch.where(draw > 0.9, -60.0, logs))]


DECAY_FORMS = ("full", "chunk", "recurrent")


@pytest.mark.sampled(7)
@pairwise(
    {
        "name": LENGTHS,
        "causal": [True, False],
        "kind": [None, "fixed", "scalar", "diagonal"],
    },
    rest_is_slow=True,
)
def test_decay_attention(name, causal, kind):
    lengths = LENGTHS[name]
    shape = tokens_of(lengths)
    at = ["source", "target"] if causal else ["source", "target", "symmetric"]
    normalizes = [("sum", real(lengths)), ("none", None), ("max_one", None)]
    for i, form in enumerate(DECAY_FORMS):
        decay_at, (normalize, keep) = at[i % len(at)], normalizes[i]

        def op(tensors, shared, decay_at=decay_at, normalize=normalize, form=form, **options):
            options.pop("start", None)
            decay = [*tensors[3:], *shared][0] if kind else None
            o, state = decay_attention(
                tensors[0].sigmoid(), tensors[1].sigmoid(), tensors[2], decay, causal=causal,
                decay_at=decay_at, normalize=normalize, form=form, chunk_size=4, **options,
            )  # fmt: skip
            assert "cu_seqlens" not in options or state is None
            return o

        logs = log_decays(kind, shape)
        tensors = [randn(*shape, H, n, seed=n) for n in (K, K, V)]
        given = (tensors, logs) if kind == "fixed" else (tensors + logs, [])
        assert_packing_changes_nothing(op, *given, lengths, keep)


@pairwise(
    {
        "name": LENGTHS,
        "causal": [True, False],
        "form": ["full", "chunk", "recurrent"],
        "kind": [None, "scalar", "diagonal"],
    },
    rest_is_slow=True,
)
def test_delta_rule(name, causal, form, kind):
    lengths = LENGTHS[name]
    shape = tokens_of(lengths)
    updates = (2,) if kind == "diagonal" else ()

    def op(tensors, shared, start=0, **options):
        q, k, v, beta, *log_decay = tensors
        k, beta = F.normalize(k, dim=-1), beta.sigmoid()
        options |= {"causal": causal, "form": form, "chunk_size": 4}
        return delta_rule(q, k, v, beta, *log_decay, **options)[0]

    tensors = [
        randn(*shape, H, K),
        randn(*shape, *updates, H, K, seed=1),
        randn(*shape, *updates, H, V, seed=2),
        randn(*shape, *updates, H, seed=3),
        *log_decays(kind, shape),
    ]
    for keep in (None, real(lengths)):
        assert_packing_changes_nothing(op, tensors, [], lengths, keep)


@pairwise(
    {
        "name": LENGTHS,
        "causal": [True, False],
        "lrpe": [True, False],
        "scale": [1.0, 200.0],
    },
    rest_is_slow=True,
)
def test_additive_decay(name, causal, lrpe, scale):
    lengths = LENGTHS[name]
    shape = tokens_of(lengths)

    def op(tensors, shared, start=0, **options):
        q, k, v = tensors
        (angles,) = shared if lrpe else (None,)
        if angles is not None:
            angles = angles[start : start + q.shape[1]]
        o, _ = additive_decay(q, k, v, angles=angles, causal=causal, chunk_size=8, **options)
        return o

    tensors = [randn(*shape, H, n, seed=n) for n in (K, K + 1, V)]
    tensors[1] = scale * tensors[1][..., 1:]
    angles = [randn(shape[1], H, K, seed=7)] if lrpe else []
    for keep in (None, real(lengths)):
        assert_packing_changes_nothing(op, tensors, angles, lengths, keep)


@pairwise(
    {
        "name": [*LENGTHS, "chunks"],
        "bidirectional": [True, False],
        "form": ["auto", "dense", "scan"],
    },
    rest_is_slow=True,
)
def test_toeplitz_position(name, bidirectional, form):
    lengths = {**LENGTHS, "chunks": [[65, 0, 200, 64, 300, 1, 127], [757]]}[name]

    def op(tensors, shared, keep=None, start=0, **options):
        (x,), (log_rate, weight) = tensors, shared
        y, _ = toeplitz_position(
            x, -log_rate.exp(), weight, (x.shape[1],), bidirectional=bidirectional, form=form,
            **options,
        )  # fmt: skip
        return y

    directions = (2,) if bidirectional else ()
    shared = [randn(1, *directions, 3, 2, seed=n) for n in (5, 6)]
    x = randn(*tokens_of(lengths), 3)
    assert_packing_changes_nothing(op, [x], shared, lengths)


@pairwise(
    {"name": LENGTHS, "radius": [0, 2, 9], "form": ["auto", "dense", "banded"]},
    rest_is_slow=True,
)
def test_linear_diffusion(name, radius, form):
    lengths = LENGTHS[name]

    def op(tensors, shared, start=0, **options):
        (x,), (weights, dt) = tensors, shared
        return linear_diffusion(x, weights.exp(), dt.sigmoid(), form=form, **options)

    shared = [randn(H, 2 * radius + 1, seed=5), randn(H, seed=6)]
    x = randn(*tokens_of(lengths), H, V)
    for keep in (None, real(lengths)):
        assert_packing_changes_nothing(op, [x], shared, lengths, keep)


BAD = [
    ([0, 4], "cu_seqlens is a list, expected a tensor"),
    (torch.tensor([0.0, 4.0]), "cu_seqlens has dtype torch.float32, expected torch.int32"),
    (torch.tensor([[0, 4]]), r"cu_seqlens has shape \(1, 2\), expected offsets"),
    (torch.tensor([], dtype=torch.int32), r"cu_seqlens has shape \(0,\)"),
    (torch.tensor([0, 4], device="meta"), "cu_seqlens is on meta, expected cpu"),
    (torch.tensor([1, 8]), "cu_seqlens begins with 1, expected 0"),
    (torch.tensor([0, 7]), "cu_seqlens ends at 7, expected 8, the number of tokens"),
    (torch.tensor([0, 4, 3, 8]), "cu_seqlens decreases from 4 to 3"),
    (torch.tensor([0, 3, 8]), "cu_seqlens has no offset 4, where a row of 4 tokens begins"),
    (
        Packing(torch.tensor([0, 4]), batch=1, tokens=4),
        "cu_seqlens is a Packing of 1 rows of 4 tokens",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_bad_offsets(wrong, message):
    with pytest.raises(ValueError, match=message):
        packing_of(wrong, torch.ones(2, 4, 1))


OFFSETS = torch.tensor([0, 2, 4], dtype=torch.int32)
Q = torch.ones(1, 4, 1, 2)
KERNEL = (torch.ones(1, 3), torch.full((1,), 0.1))
COEFFICIENTS = (-torch.ones(1, 2, 3), torch.ones(1, 2, 3))
REFUSED = {
    "additive full": (lambda **o: additive_decay(Q, Q, Q, form="full", **o), "form .*'full'"),
    "additive steps": (
        lambda **o: additive_decay(Q, Q, Q, causal=True, form="recurrent", **o),
        "form .*'recurrent'",
    ),
    "additive state": (
        lambda **o: additive_decay(Q, Q, Q, state=additive_decay(Q, Q, Q)[1], **o), "and state"
    ),
    "decay state": (
        lambda **o: decay_attention(
            Q, Q, Q, causal=True, state=decay_attention(Q, Q, Q, causal=True)[1], **o
        ),
        "and state",
    ),
    "diffusion fft": (lambda **o: linear_diffusion(Q, *KERNEL, form="fft", **o), "form .*'fft'"),
    "diffusion implicit": (
        lambda **o: linear_diffusion(Q, *KERNEL, scheme="crank_nicolson", **o),
        "scheme .*'crank_nicolson'",
    ),
    "toeplitz fft": (
        lambda **o: toeplitz_position(Q[:, :, 0], *COEFFICIENTS, (4,), form="fft", **o),
        "form .*'fft'",
    ),
    "toeplitz grid": (
        lambda **o: toeplitz_position(
            Q[:, :, 0], *(x.expand(2, 2, 3) for x in COEFFICIENTS), (2, 2), **o
        ),
        r"shape \(2, 2\), expected one axis",
    ),
    "toeplitz state": (
        lambda **o: toeplitz_position(Q[:, :, 0], *COEFFICIENTS, (4,), return_state=True, **o),
        "return_state is True",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_calls_without_packed_sequences(call, message):
    with pytest.raises(ValueError, match=f"{message}") as error:
        call(cu_seqlens=OFFSETS)
    assert "cu_seqlens" in str(error.value)


def test_offsets_on_a_device_bound_the_number_of_chunks(monkeypatch):
    """Without a look at values, the chunks are the same, followed by empty ones."""
    cu_seqlens = offsets([[1, 0, 5, 8, 0, 3], [17]])
    exact = Packing(cu_seqlens, batch=2, tokens=17).chunks(4)
    monkeypatch.setattr("onescan.ops.packing.can_look_at_values", lambda _: False)
    bound = Packing(cu_seqlens, batch=2, tokens=17).chunks(4)
    count = exact.begins.shape[1]
    assert bound.begins.shape[1] == 17 // 4 + 7 - 2 + 1 > count
    assert torch.equal(bound.slots, exact.slots)
    assert torch.equal(bound.source[:, : 4 * count], exact.source)
    assert (bound.source[:, 4 * count :] == 17).all()
    assert bound.begins[:, count:].all()


def test_second_derivatives_of_packed_additive_decay():
    q, k, v = (randn(1, 6, 1, 2, seed=n).requires_grad_() for n in range(3))
    options = {"causal": True, "chunk_size": 8, "cu_seqlens": torch.tensor([0, 2, 6])}
    call = lambda *x: additive_decay(*x, **options)[0]
    assert torch.autograd.gradgradcheck(call, (q, k, v))
    out, tangent = torch.func.jvp(call, (q, k, v), (q, k, v))
    torch.testing.assert_close(out, call(q, k, v))
    assert tangent.isfinite().all()


def _toeplitz(q, k, v, **options):
    del q, k
    return toeplitz_position(
        v[:, :, 0], *COEFFICIENTS, (v.shape[1],), form="scan", **options
    )  # fmt: skip


SEPARATE = {
    "additive": additive_decay,
    "causal additive": lambda *x, **o: additive_decay(*x, causal=True, **o),
    "decay": lambda *x, **o: decay_attention(*x, -torch.ones(1), chunk_size=8, **o),
    "delta": lambda *x, **o: delta_rule(*x, torch.ones(1, 30, 1), chunk_size=8, **o),
    "diffusion": lambda q, k, v, **o: (linear_diffusion(v, *KERNEL, **o), None),
    "toeplitz": _toeplitz,
}


@pytest.mark.parametrize("op", SEPARATE.values(), ids=SEPARATE)
def test_sequences_are_separated_exactly(op):
    """In float32, a sequence changes by no bit if there are huge values beside it."""
    cut, cu_seqlens = 11, torch.tensor([0, 4, 11, 30])
    plain = [randn(1, 30, 1, 2, seed=n).float() for n in range(3)]
    found = []
    for factor in (1.0, 1e15):
        for here, there in ((slice(cut), slice(cut, 30)), (slice(cut, 30), slice(cut))):
            tensors = [x.clone() for x in plain]
            tensors[2][:, there] *= factor
            leaves = [x.requires_grad_() for x in tensors]
            o, _ = op(*leaves, cu_seqlens=cu_seqlens)
            slope = torch.ones_like(o)
            slope[:, there] *= factor
            grads = torch.autograd.grad(o, leaves, slope, materialize_grads=True)
            found.append([x[:, here] for x in (o, *grads)])
    for got, want in ((found[2], found[0]), (found[3], found[1])):
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.compile
@pytest.mark.parametrize("op", SEPARATE.values(), ids=SEPARATE)
def test_compiles_without_a_graph_break(op):
    def call(*tensors):
        return op(*tensors, cu_seqlens=torch.tensor([0, 4, 11, 30]))[0]

    tensors = [randn(1, 30, 1, 2, seed=n).float().requires_grad_() for n in range(3)]
    found = [
        (o, *torch.autograd.grad(o.sum(), tensors, materialize_grads=True))
        for o in (
            call(*tensors),
            torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors),
        )
    ]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_a_packing_of_an_inference_is_used_in_training():
    packing = Packing(torch.tensor([0, 3, 7]), batch=1, tokens=7)
    q, k, v = (randn(1, 7, H, n, seed=n) for n in (K, K, V))
    for op in (additive_decay, partial(decay_attention, log_decay=None)):
        with torch.inference_mode():
            op(q, k, v, cu_seqlens=packing)
        trained = v.clone().requires_grad_()
        o, _ = op(q, k, trained, cu_seqlens=packing)
        o.sum().backward()
        assert trained.grad.isfinite().all()
