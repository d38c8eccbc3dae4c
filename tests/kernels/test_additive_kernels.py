"""Additive decay in Triton, against its float64 definition: interpreted, or on a GPU."""

from inspect import unwrap

import pytest
import torch
from kernel_device import (
    BRAIN,
    DEVICE,
    DTYPES,
    HALF,
    LONGEST,
    MARKS,
    SINGLE,
    assert_a_graph_repeats,
    assert_errors_like_torch,
    drawn,
    interpreted,
    on_device,
    over_dtypes,
    over_seeds,
)
from op_checks import key_of
from pairwise import pairwise

from onescan.kernels.chips import widest_causal_head
from onescan.layers.mixers.lightnet import LightNetMixerConfig
from onescan.ops.additive_decay import (
    ADDITIVE_DECAY,
    AdditiveDecayState,
    additive_decay,
    reference,
)
from onescan.ops.additive_decay.op import Inputs, Options
from onescan.ops.backend import chip_of, name_of, preferred_backend, use_backend
from onescan.ops.lrpe import lrpe_angles, lrpe_frequencies
from onescan.ops.numerics import LOG_ZERO
from onescan.ops.packing import Packing
from onescan.shapes import Grid

pytest.importorskip("triton")

pytestmark = MARKS
FORMS = {False: "one_scan", True: "chunk"}
ROUNDING = {SINGLE: 1e-5, HALF: 4e-3, BRAIN: 3e-2}


class Case:
    """Inputs that are the same numbers in float64 and in a narrower type."""

    def __init__(
        self, batch=2, tokens=40, heads=2, keys=9, values=10, *,
        causal=False, lrpe=True, keep=True, state=True, climb=0.0, dtype=SINGLE,
    ):  # fmt: skip
        self.causal, self.dtype = causal, dtype
        self.read = (0, 1, 2)  # of o, z and kv, those that the loss depends on
        if causal:  # whose gradients fit fewer channels on some GPUs
            most = widest_causal_head(name_of(dtype), chip_of(torch.device(DEVICE)))
            keys, values = min(keys, most), min(values, most)
        g = torch.Generator().manual_seed(tokens * 7 + keys)

        def normal(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        q, k, v = (normal(batch, tokens, heads, width) for width in (keys, keys, values))
        k = 2 * k + climb * torch.arange(tokens)[None, :, None, None]
        self.q, self.k, self.v = (x.to(dtype).double() for x in (q, k, v))
        self.angles = 3 * normal(tokens, heads, keys).float().double() if lrpe else None
        self.keep = torch.rand(batch, tokens, generator=g) > 0.3 if keep else None
        features = keys * (2 if lrpe else 1)
        z, kv = 3 * normal(batch, heads, keys), normal(batch, heads, features, values).float()
        self.state = (z, kv.double()) if state else ()
        self.o_slope = normal(batch, tokens, heads, values).to(dtype).double()
        self.z_slope, self.kv_slope = normal(*z.shape), normal(*kv.shape)

    def results(self, op, dtype, device):
        """The output, the state after it, and the gradients of all that went in."""
        narrow = [x.to(dtype) for x in (self.q, self.k, self.v)]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        angles = None if self.angles is None else self.angles.to(wide)
        state = [x.to(t) for x, t in zip(self.state, (torch.float64, wide), strict=False)]
        given = [*narrow, *([] if angles is None else [angles]), *state]
        given = [x.to(device).requires_grad_() for x in given]
        q, k, v, *rest = given
        angles = rest.pop(0) if angles is not None else None
        o, after = op(
            q, k, v, angles=angles, causal=self.causal,
            keep=None if self.keep is None else self.keep.to(device),
            state=AdditiveDecayState(*rest) if rest else None,
        )  # fmt: skip
        pairs = ((o, self.o_slope), (after.log_normalizer, self.z_slope), (after.kv, self.kv_slope))
        pairs = [pairs[i] for i in self.read]
        total = sum((x.double() * slope.to(device)).sum() for x, slope in pairs)
        gradients = torch.autograd.grad(total, given, materialize_grads=True)
        return [x.detach().double().cpu() for x in (o, *after, *gradients)]

    def exact(self):
        return self.results(reference.forward, torch.float64, "cpu")

    def by_kernel(self, **options):
        def op(*args, **kwargs):
            form = FORMS[self.causal]
            return additive_decay(*args, **kwargs, form=form, backend="triton", **options)

        return self.results(op, self.dtype, DEVICE)

    def check(self, **options):
        for found, expected in zip(self.by_kernel(**options), self.exact(), strict=True):
            error = (found - expected).abs().max()
            assert error <= ROUNDING[self.dtype] * expected.abs().max().clamp(min=1)


def plain(q, k, v, *, angles, causal, keep=None, state=None):
    """Every step in the type of q, k and v, as one would write it in torch."""
    if angles is not None:
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    if not causal:
        w = k.softmax(1)
        if angles is not None:
            q, w = (torch.cat([x * cos, x * sin], -1) for x in (q, w))
        kv = torch.einsum("bthf,bthv->bhfv", w, v)
        return torch.einsum("bthf,bhfv->bthv", q, kv), kv
    z = k.float().logcumsumexp(1)
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).triu(1)
    exponent = (k.float().unsqueeze(1) - z.unsqueeze(2)).masked_fill(later[..., None, None], -1e30)
    w = exponent.exp().to(q.dtype)  # b t s h k
    if angles is not None:
        w = w * (cos[:, None] * cos + sin[:, None] * sin)
    scores = torch.einsum("bthk,btshk->bths", q, w)
    return torch.einsum("bths,bshv->bthv", scores, v), None


def within_twice_plain(case):
    """The kernel's error of outputs and gradients, at most twice that of plain torch."""

    def run(op, dtype, device):
        given = [x.to(dtype).to(device).requires_grad_() for x in (case.q, case.k, case.v)]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        angles = None if case.angles is None else case.angles.to(wide).to(device)
        o, _ = op(*given, angles=angles, causal=case.causal)
        slopes = torch.autograd.grad(o, given, case.o_slope.to(o))
        return [x.detach().double().cpu() for x in (o, *slopes)]

    def kernel(*args, **kwargs):
        return additive_decay(*args, **kwargs, form=FORMS[case.causal], backend="triton")

    exact = run(reference.forward, torch.float64, "cpu")
    by_kernel, by_torch = (run(op, case.dtype, DEVICE) for op in (kernel, plain))
    assert_errors_like_torch(by_kernel, by_torch, exact, case.dtype)


@pytest.mark.sampled
@pairwise(
    {"causal": [False, True], "lrpe": [False, True], "dtype": DTYPES},
    rest_is_slow=True,
)
def test_values_states_and_gradients_are_those_of_the_definition(causal, lrpe, dtype):
    Case(causal=causal, lrpe=lrpe, dtype=dtype).check()


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (1, 2, 3, 5, 7), (1, 33, 1, 16, 70), (1, 65, 1, 70, 3)]
)
def test_any_length_and_any_width(sizes, causal):
    Case(*sizes, causal=causal, keep=False, state=False).check()


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_that_are_not_kept_change_nothing(causal):
    case = Case(causal=causal, state=False)
    first = case.by_kernel()
    case.q, case.k, case.v = (
        x.masked_fill(~case.keep[:, :, None, None], 50.0) for x in (case.q, case.k, case.v)
    )
    for found, expected in zip(case.by_kernel(), first, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_without_tokens_all_is_zero(causal):
    case = Case(2, 20, 1, 5, 6, causal=causal, state=False)
    case.keep[1] = False
    o, z, kv, dq, dk, dv, _ = case.by_kernel()
    assert all((x[1] == 0).all() for x in (o, kv, dq, dk, dv))
    assert (z[1] <= LOG_ZERO).all()


@pytest.mark.sampled
@pytest.mark.parametrize("climb", [3.6, -5.0, 300.0])
@pytest.mark.parametrize("causal", [False, True])
def test_logits_may_climb_and_fall_without_bound(causal, climb):
    Case(1, 40, 1, 6, 5, causal=causal, climb=climb).check(chunk_size=16)


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_logits_of_minus_infinity_weigh_nothing(causal):
    case = Case(1, 40, 1, 6, 5, causal=causal, keep=False, state=False)
    case.k[:, :9], case.k[:, 12:20, :, 2] = -torch.inf, -torch.inf
    for found, expected in zip(case.by_kernel(chunk_size=16), case.exact(), strict=True):
        finite = expected.isfinite()  # a normalizer of nothing is -inf there, LOG_ZERO here
        assert torch.allclose(found[finite], expected[finite], rtol=1e-5, atol=1e-5)
        assert found.isfinite().all()


def test_large_logits_keep_their_digits():
    case = Case(1, 50, 1, 4, 4, causal=True, state=False)
    case.k = (case.k + 1e4).float().double()
    case.check()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("causal", "form"), [(False, "one_scan"), (True, "chunk"), (True, "recurrent")]
)
def test_shifting_all_positions_changes_no_output(causal, form):
    q, k, v = on_device(*torch.randn(3, 1, 40, 2, 8))
    theta = lrpe_frequencies(8, axes=1).repeat(2, 1).to(DEVICE)

    def output(start):
        angles = lrpe_angles((40,), theta, start=start)
        return additive_decay(
            q, k, v, angles=angles, causal=causal, form=form, backend="triton"
        )[0]  # fmt: skip

    near, far = output(0), output(100_000_000)
    assert (far - near).norm() <= 2e-6 * near.norm()


@pytest.mark.sampled
@pytest.mark.parametrize("chunk_size", [1, 31, 1000])
def test_chunks_of_any_size_give_the_same(chunk_size):
    Case(1, 40, 1, 5, 5, causal=True).check(chunk_size=chunk_size)


@pytest.mark.sampled
@pytest.mark.parametrize("cut", [1, 16, 39])
def test_two_calls_equal_one(cut):
    case = Case(2, 40, 1, 5, 6, causal=True, state=False)
    q, k, v, angles = (x.float().to(DEVICE) for x in (case.q, case.k, case.v, case.angles))
    keep = case.keep.to(DEVICE)

    def run(part, state=None):
        return additive_decay(
            q[:, part], k[:, part], v[:, part], angles=angles[part], causal=True,
            keep=keep[:, part], state=state, form="chunk", backend="triton",
        )  # fmt: skip

    whole, last = run(slice(None))
    first, state = run(slice(cut))
    second, state = run(slice(cut, None), state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-5, atol=1e-5)
    for found, expected in zip(state, last, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_states_and_masks_with_gaps_are_taken(causal):
    case = Case(2, 20, 1, 5, 6, causal=causal)
    expected = case.by_kernel()
    case.keep = case.keep.mT.contiguous().mT
    case.state = [x.mT.contiguous().mT for x in case.state]
    case.kv_slope = case.kv_slope.mT.contiguous().mT
    for found, wanted in zip(case.by_kernel(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_parts_of_a_long_sequence_are_merged(monkeypatch):
    from onescan.ops.additive_decay import launch

    monkeypatch.setattr(launch, "MIN_SPLIT", 32)
    Case(1, 70, 1, 5, 6).check()


@pytest.mark.sampled
@over_dtypes
def test_parts_of_a_long_sequence_are_merged_where_kv_is_held(dtype, monkeypatch):
    from onescan.kernels import common
    from onescan.ops.additive_decay import launch

    def holding(blocks_of):
        return lambda case: blocks_of(case)._replace(keys=64)

    monkeypatch.setattr(launch, "MIN_SPLIT", 32)
    for name, kernel in (("read_blocks", "read_out"), ("collect_blocks", "collect")):
        blocks_of = holding(getattr(launch.scan, name))
        monkeypatch.setattr(launch.scan, name, blocks_of)
        monkeypatch.setattr(getattr(launch.scan, kernel), "blocks", blocks_of)
    case = Case(1, 70, 1, 60, 20, dtype=dtype)
    compiled_for = common.Case(name_of(dtype), "sm_90", 1, 60, 20, lrpe=True)
    assert launch.scan.collect_blocks(compiled_for).holds(compiled_for)
    case.check()


@pytest.mark.parametrize("causal", [False, True])
def test_a_normalizer_that_float32_cannot_hold_comes_in_whole(causal):
    case = Case(1, 20, 1, 5, 6, causal=causal, keep=False)
    shift = 30_000.3
    case.k = (case.k + shift).float().double()
    case.state = (case.state[0] + shift + 10, case.state[1])  # outweighs all tokens
    case.check()


@pytest.mark.parametrize("empty", [LOG_ZERO, -torch.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_a_state_of_no_tokens_changes_nothing(causal, empty):
    case = Case(1, 20, 1, 4, 4, causal=causal, lrpe=False, keep=False)
    z, kv = case.state
    case.state = torch.full_like(z, empty), torch.zeros_like(kv)
    case.check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("read", [(0,), (1,), (2,), (1, 2)], ids=["o", "z", "kv", "z and kv"])
def test_a_loss_may_depend_on_some_outputs_alone(causal, read):
    case = Case(1, 20, 1, 4, 4, causal=causal)
    case.read = read
    case.check()


def test_what_all_values_share_leaves_no_gradient_of_keys():
    case = Case(1, 40, 1, 8, 8, lrpe=False, keep=False, state=False, dtype=HALF)
    case.v, case.kv_slope = (case.v.half() + 30).double(), torch.zeros_like(case.kv_slope)
    found, expected = case.by_kernel()[4], case.exact()[4]
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_what_all_values_share_costs_no_more_than_in_plain_torch():
    case = Case(1, 40, 1, 8, 8, causal=True, lrpe=False, keep=False, state=False, dtype=HALF)
    case.v = (case.v.half() + 30).double()
    within_twice_plain(case)


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_may_be_empty(causal):
    q = torch.zeros(0, 5, 2, 4, device=DEVICE)
    o, state = additive_decay(q, q, q, causal=causal, backend="triton")
    assert o.shape == q.shape
    assert state.kv.shape == (0, 2, 4, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_the_widest_of_several_types_is_read(causal):
    q, k, v = torch.randn(3, 1, 9, 1, 4)
    named = {"causal": causal, "form": FORMS[causal]}
    for mixed in ((q.half(), k, v), (q, k.half(), v), (q, k, v.half())):
        found, _ = additive_decay(*on_device(*mixed), **named, backend="triton")
        wide, _ = additive_decay(*(x.double() for x in mixed), **named)
        assert (found.double().cpu() - wide).abs().max() < ROUNDING[found.dtype]


def test_values_of_another_type_and_tensors_with_gaps_are_taken():
    q, k = torch.randn(2, 5, 9, 2, 8).transpose(2, 3).reshape(2, 5, 2, 9, 8).transpose(2, 3)
    v = torch.randn(5, 9, 2, 6, dtype=HALF)
    o, _ = additive_decay(*on_device(q, k, v), backend="triton")
    assert o.dtype is HALF
    torch.testing.assert_close(o.cpu(), additive_decay(q, k, v, backend="torch")[0])


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
@over_dtypes
def test_errors_are_at_most_twice_those_of_plain_torch(dtype, causal):
    within_twice_plain(Case(1, 70, 1, 32, 32, causal=causal, dtype=dtype, keep=False, state=False))


def assert_packing_equals_separate_calls(case, *lengths, cu_device="cpu"):
    """Compare values and gradients with the definition of each sequence, in rows of `lengths`."""
    offsets = torch.tensor([0, *(n for row in lengths for n in row)]).cumsum(0)

    def results(op, dtype, device):
        given = [x.to(dtype) for x in (case.q, case.k, case.v)]
        if case.angles is not None:
            given.append(case.angles.to(torch.promote_types(dtype, SINGLE)))
        given = [x.to(device).requires_grad_() for x in given]
        keep = None if case.keep is None else case.keep.to(device)
        o = op(*given[:3], *given[3:] or [None], keep)
        gradients = torch.autograd.grad((o.double() * case.o_slope.to(device)).sum(), given)
        return [x.detach().double().cpu() for x in (o, *gradients)]

    def separate(q, k, v, angles, keep):
        o = torch.zeros_like(v)
        for start, length in zip(offsets.tolist(), offsets.diff().tolist(), strict=False):
            if not length:
                continue
            row, first = divmod(start, q.shape[1])
            part = slice(first, first + length)
            at = slice(row, row + 1), part
            o[at] = reference.forward(
                q[at], k[at], v[at], angles=None if angles is None else angles[part],
                causal=case.causal, keep=None if keep is None else keep[at],
            )[0]  # fmt: skip
        return o

    def packed(q, k, v, angles, keep):
        return additive_decay(
            q, k, v, angles=angles, causal=case.causal, keep=keep, form=FORMS[case.causal],
            cu_seqlens=offsets.int().to(cu_device), backend="triton",
        )[0]  # fmt: skip

    expected = results(separate, torch.float64, "cpu")
    for found, wanted in zip(results(packed, case.dtype, DEVICE), expected, strict=True):
        error = (found - wanted).abs().max()
        assert error <= ROUNDING[case.dtype] * wanted.abs().max().clamp(min=1)


@pytest.mark.sampled
@pairwise(
    {"causal": [False, True], "lrpe": [False, True], "keep": [False, True], "dtype": DTYPES},
    rest_is_slow=True,
)
def test_packed_sequences(causal, lrpe, keep, dtype, monkeypatch):
    from onescan.ops.additive_decay import launch

    monkeypatch.setattr(launch, "MIN_SPLIT", 64)
    case = Case(1, 193, 1, 5, 6, causal=causal, lrpe=lrpe, keep=keep, state=False, dtype=dtype)
    assert_packing_equals_separate_calls(case, [0, 1, 63, 0, 64, 65, 0])


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_any_logits(causal):
    case = Case(1, 24, 1, 6, 5, causal=causal, state=False, climb=5.0)
    case.keep[:, :4] = case.keep[:, 20:] = False  # all tokens of the first and last sequence
    case.k[:, 4:14] = (case.k[:, 4:14] + 3000).float().double()
    assert_packing_equals_separate_calls(case, [4, 10, 6, 4])


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_offsets_on_the_device_bound_the_number_of_chunks(causal, monkeypatch):
    monkeypatch.setattr("onescan.ops.packing.can_look_at_values", lambda _: False)
    case = Case(2, 20, 1, 5, 6, causal=causal, state=False)
    assert_packing_equals_separate_calls(case, [3, 0, 17], [20], cu_device=DEVICE)


# heads, widths of a key and of a value, LRPE: few, as a kernel is compiled anew for each
HEADS = [
    (2, 1, 1, True),
    (3, 16, 33, False),
    (1, 33, 16, True),
    (3, 64, 64, False),
    (1, 64, 96, True),
    (2, 128, 1, False),
    (2, 96, 64, False),
    (1, 128, 128, True),
]


@pytest.mark.slow
@over_dtypes
@over_seeds
def test_random_shapes(seed, dtype):
    batch, tokens = drawn(seed, 3, LONGEST)
    heads, keys, values, lrpe = HEADS[3 * seed % len(HEADS)]
    sizes = (heads, keys, values)
    named = {"causal": bool(seed % 2), "lrpe": lrpe, "dtype": dtype}
    # of one token alone the gradient of keys is 0, and in plain torch exactly
    within_twice_plain(Case(batch, tokens + 1, *sizes, keep=False, state=False, **named))
    Case(batch, tokens, *sizes, climb=float(seed % 5 == 0), **named).check()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_a_cuda_graph_repeats_a_call(causal):
    q, k, v = torch.randn(3, 2, 100, 4, 64).to(DEVICE, BRAIN)
    named = {"causal": causal, "form": FORMS[causal], "backend": "triton"}
    assert_a_graph_repeats(lambda: additive_decay(q, k, v, **named)[0])


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True])
def test_torch_accepts_the_operators(causal):
    from onescan.ops.additive_decay import launch

    case = Case(1, 20, 1, 4, 3)
    narrow = [x.float() for x in (case.q, case.k, case.v, case.angles, case.state[1])]
    *given, kv, z = (x.requires_grad_() for x in on_device(*narrow, case.state[0]))
    keep = case.keep.to(DEVICE)
    spans, firsts = Packing(torch.tensor([0, 3, 20]), batch=1, tokens=20).spans(16)
    spans, firsts = on_device(spans, firsts)
    if causal:
        torch.library.opcheck(launch._causal_scan, (*given, keep, z, kv, None, 16))
        torch.library.opcheck(launch._causal_scan, (*given[:3], *[None] * 5, 16))
        torch.library.opcheck(launch._causal_scan, (*given, keep, None, None, spans, 16))
    else:
        torch.library.opcheck(launch._one_scan, (*given, keep, z, kv, None, None))
        torch.library.opcheck(launch._one_scan, (*given[:3], *[None] * 6))
        torch.library.opcheck(launch._one_scan, (*given, keep, None, None, spans, firsts))


@pytest.mark.compile
@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_graph_holds_them_whole(causal):
    def run(q, k, v, angles):
        form = FORMS[causal]
        o, _ = additive_decay(q, k, v, angles=angles, causal=causal, form=form, backend="triton")
        return (o * o).sum()

    case = Case(1, 20, 1, 4, 3)
    given = on_device(*(x.float() for x in (case.q, case.k, case.v, case.angles)))
    given = [x.requires_grad_() for x in given]
    expected = torch.autograd.grad(run(*given), given)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(torch.autograd.grad(compiled(*given), given), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.compile
def test_an_exported_program_holds_them():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return additive_decay(q, k, v, form="one_scan", backend="triton")[0]

    q, k, v = torch.randn(3, 2, 12, 2, 8).to(DEVICE)
    tokens = torch.export.Dim("tokens", min=2, max=100)
    program = torch.export.export(Attention(), (q, k, v), dynamic_shapes=[{1: tokens}] * 3)
    longer = torch.randn(3, 2, 31, 2, 8).to(DEVICE)
    expected = additive_decay(*longer)[0]
    torch.testing.assert_close(program.module()(*longer), expected, rtol=1e-5, atol=1e-5)


def test_unsupported_inputs_are_refused():
    x, wide = on_device(torch.randn(1, 4, 1, 4), torch.randn(1, 4, 1, 129))
    with pytest.raises(ValueError, match=r"kernels take float32.*got torch.float64"):
        additive_decay(x.double(), x.double(), x.double(), backend="triton")
    with pytest.raises(ValueError, match=r"a head has 129 channels, expected at most 128"):
        additive_decay(x, x, wide, backend="triton")
    with pytest.raises(
        ValueError, match=r"does not support form .full.*one_scan/torch, one_scan/triton"
    ):
        additive_decay(x, x, x, form="full", backend="triton")


def chosen(x, form="auto", backend="auto", *, v=None, carried=(), causal=False):
    tensors = Inputs(x, x, x if v is None else v, None)
    options = Options("identity", 64)
    return key_of(ADDITIVE_DECAY, tensors, options, form, backend, carried=carried, causal=causal)


def test_decoding_under_auto_takes_the_step_where_no_gradient_is_wanted():
    x = torch.randn(1, 1, 1, 4).to(DEVICE)
    with use_backend("triton"):
        assert chosen(x, causal=True) == ("causal", "recurrent", "triton")
        wants = x.clone().requires_grad_()
        assert chosen(x, v=wants, causal=True) == ("causal", "chunk", "triton")
        assert chosen(x, carried=(wants,), causal=True).form == "chunk"
        with torch.no_grad():
            assert chosen(x, v=wants, causal=True).form == "recurrent"


def test_derivatives_that_kernels_lack_are_left_to_torch_or_refused():
    q, k, v = torch.randn(3, 1, 4, 1, 4).to(DEVICE)

    def run(v, backend="auto"):
        return additive_decay(q, k, v, backend=backend)[0]

    expected = torch.func.jvp(run, (v,), (torch.ones_like(v),))[1]
    with use_backend("triton"):
        found = torch.func.jvp(run, (v,), (torch.ones_like(v),))[1]
        torch.testing.assert_close(found, expected)
        torch.func.grad(lambda v: run(v).sum())(v)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
            found = torch.autograd.forward_ad.unpack_dual(run(dual)).tangent
            torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"'triton' under torch\.func or forward-mode"):
        torch.func.jvp(lambda v: run(v, "triton"), (v,), (torch.ones_like(v),))


@interpreted
def test_the_interpreter_is_not_given_what_it_multiplies_wrong():
    x = torch.randn(1, 4, 1, 4, dtype=BRAIN)
    with pytest.raises(ValueError, match="interpreted kernels take float32 or float16"):
        additive_decay(x, x, x, backend="triton")


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(1, 4, 1, 4)
    with pytest.raises(ValueError, match="tensors are on cpu"):
        additive_decay(x, x, x, backend="triton")


def test_auto_is_torch_until_a_backend_is_preferred(monkeypatch):
    monkeypatch.setattr("onescan.ops.backend.VALIDATED_GPUS", frozenset())
    x = torch.randn(1, 4, 1, 4).to(DEVICE)
    assert chosen(x) == ("both", "one_scan", "torch")
    with use_backend("triton"):
        assert chosen(x) == ("both", "one_scan", "triton")
        assert chosen(x.double()).backend == "torch"
        assert chosen(x, "full").backend == "torch"
        assert chosen(x, backend="torch").backend == "torch"
    assert preferred_backend() == "auto"
    with pytest.raises(
        ValueError, match="backend 'gpu' is unknown; available: auto, torch, triton"
    ):
        next(unwrap(use_backend)("gpu"))


@pytest.mark.gpu
def test_auto_is_kernels_on_a_validated_gpu(monkeypatch):
    monkeypatch.setattr("onescan.ops.backend.VALIDATED_GPUS", {torch.cuda.get_device_name()})
    x = torch.randn(1, 4, 1, 4).to(DEVICE)
    assert chosen(x).backend == "triton"
    with use_backend("torch"):
        assert chosen(x).backend == "torch"


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_runs_on_the_preferred_backend(causal):
    mixer = (
        LightNetMixerConfig(num_heads=2, direction="forward" if causal else "both")
        .build(width=16, axes=1)
        .to(DEVICE)
    )
    x = torch.randn(2, 9, 16).to(DEVICE)
    with use_backend("torch"):
        expected, _ = mixer(x, Grid((9,)))
    with use_backend("triton"):
        found, _ = mixer(x, Grid((9,)))
    assert not torch.equal(found, expected)  # the numbers were summed in another order
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
