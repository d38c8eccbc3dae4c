"""Packed sequences: one call with cu_seqlens equals one call for each sequence."""

import pytest
import torch
import torch.nn.functional as F
from op_checks import assert_same

from onescan.ops import (
    additive_decay,
    decay_attention,
    delta_rule,
    linear_diffusion,
    toeplitz_position,
)

H, K, V = 2, 4, 3
# rows of equal length: single tokens, empty sequences, lengths around multiples of 4 and of 8
LENGTHS = {
    "one row": [[1, 0, 5, 8, 0, 3]],
    "two rows": [[0, 4, 7, 1], [12]],
    "single tokens": [[1, 1, 1]],
    "long": [[9, 0, 16, 1, 23, 8]],
}
over_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


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


@over_lengths
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [None, "fixed", "scalar", "diagonal"])
def test_decay_attention(lengths, causal, kind):
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


@over_lengths
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_delta_rule(lengths, causal, form):
    shape = tokens_of(lengths)

    def op(tensors, shared, start=0, **options):
        q, k, v, beta = tensors
        k, beta = F.normalize(k, dim=-1), beta.sigmoid()
        o, _ = delta_rule(q, k, v, beta, causal=causal, form=form, chunk_size=4, **options)
        return o

    tensors = [randn(*shape, H, n, seed=n) for n in (K, K + 1, V)]
    tensors[1] = tensors[1][..., 1:]
    tensors.append(randn(*shape, H, seed=1))
    for keep in (None, real(lengths)):
        assert_packing_changes_nothing(op, tensors, [], lengths, keep)


@over_lengths
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lrpe", [True, False])
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_additive_decay(lengths, causal, lrpe, scale):
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


@pytest.mark.parametrize(
    "lengths", [*LENGTHS.values(), [[65, 0, 200, 64, 300, 1, 127], [757]]], ids=[*LENGTHS, "chunks"]
)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("form", ["auto", "dense", "scan"])
def test_toeplitz_position(lengths, bidirectional, form):
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


@over_lengths
@pytest.mark.parametrize("radius", [0, 2, 9])
@pytest.mark.parametrize("form", ["auto", "dense", "banded"])
def test_linear_diffusion(lengths, radius, form):
    def op(tensors, shared, start=0, **options):
        (x,), (weights, dt) = tensors, shared
        return linear_diffusion(x, weights.exp(), dt.sigmoid(), form=form, **options)

    shared = [randn(H, 2 * radius + 1, seed=5), randn(H, seed=6)]
    x = randn(*tokens_of(lengths), H, V)
    for keep in (None, real(lengths)):
        assert_packing_changes_nothing(op, [x], shared, lengths, keep)
