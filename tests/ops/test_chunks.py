"""States passed from chunk to chunk, pieces of samples and heads, and derivatives of both."""

from functools import partial

import pytest
import torch
from pairwise import pairwise

from onescan.ops import chunks
from onescan.ops.chunks import linear_scan
from onescan.ops.numerics import apply_function, broadcast_divide

SHAPES = [(2, 3, 4, 5, 2), (1, 3, 1, 5, 2), (2, 3, 5, 1, 1), (1, 1, 11, 1, 2)]  # B H N K V
over_directions = pytest.mark.parametrize("backward", [False, True])


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def inputs(shape, kept):
    """A state, what chunks add, and what they keep of a state."""
    batch, heads, count, keys, values = shape
    of_kept = {"none": None, "one": (1, 1, count, 1, 1), "key": (batch, heads, count, keys, 1)}
    state, own = normal(batch, heads, keys, values), normal(batch, heads, count, keys, values)
    return state, own, None if of_kept[kept] is None else normal(*of_kept[kept])


def one_by_one(state, own, kept, *, backward):
    """The definition: S_n = kept_n S_{n-1} + own_n."""
    before = {}
    order = range(own.shape[2])
    for n in reversed(order) if backward else order:
        before[n] = state
        state = own[:, :, n] + (state if kept is None else kept[:, :, n] * state)
    return torch.stack([before[n] for n in order], dim=2), state


@pairwise(
    {"shape": SHAPES, "kept": ["none", "one", "key"], "backward": [False, True]}, rest_is_slow=True
)
def test_linear_scan_is_the_definition(shape, kept, backward):
    given = inputs(shape, kept)
    learnt = [x for x in given if x is not None]
    weights = normal(*given[1].shape), normal(*given[0].shape)

    def results(function):
        made = function(*given, backward=backward)
        loss = sum((x * w).sum() for x, w in zip(made, weights, strict=True))
        return *made, *torch.autograd.grad(loss, learnt)

    for got, want in zip(results(linear_scan), results(one_by_one), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.sampled(3)
@over_directions
@pytest.mark.parametrize("kept", ["none", "one", "key"])
def test_gradients_of_linear_scan_have_gradients_and_go_forward(kept, backward):
    given = inputs((1, 2, 3, 2, 2), kept)
    learnt = tuple(x for x in given if x is not None)

    def call(*tensors):
        return linear_scan(*tensors, *given[len(tensors) :], backward=backward)

    assert torch.autograd.gradcheck(call, learnt, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, learnt)


@over_directions
@pytest.mark.parametrize(
    ("kept", "axes"), [("none", (0, 3)), ("one", (1, 5, 0)), ("key", (2, 0, 4))]
)
def test_vmap_of_linear_scan_along_any_axis(kept, axes, backward):
    several = [inputs((2, 1, 3, 2, 2), kept) for _ in range(3)]
    want = [linear_scan(*each, backward=backward) for each in several]
    stacked = [
        torch.stack(x, dim=a) for x, a in zip(zip(*several, strict=True), axes, strict=False)
    ]
    call = partial(linear_scan, backward=backward)
    got = torch.func.vmap(call, in_dims=axes)(*stacked)
    for x, y in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y))


def test_vmap_of_linear_scan_over_states_alone():
    state, own, kept = inputs((2, 1, 3, 2, 2), "key")
    states = torch.stack([state, 2 * state])
    got = torch.func.vmap(linear_scan, in_dims=(0, None, None))(states, own, kept)
    want = [linear_scan(x, own, kept) for x in states]
    for x, y in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(y))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kept", ["none", "one", "key"])
@over_directions
def test_what_compiled_programs_call_is_an_operator_of_torch(kept, backward):
    given = inputs((2, 1, 3, 2, 2), kept)
    torch.library.opcheck(chunks._operator, (*given, backward))


@pytest.mark.compile
@over_directions
@pytest.mark.parametrize("kept", ["none", "one", "key"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_linear_scan_compiles_to_as_much_for_any_number_of_chunks(kept, backward, dynamic):
    torch.compiler.reset()
    lengths = []

    def noted(graph, _):
        lengths.append(len(graph.graph.nodes))
        return graph.forward

    def call(*given):
        return linear_scan(*given, backward=backward)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=noted)
    exact = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for count in (4, 40):
        given = inputs((2, 3, count, 5, 2), kept)
        learnt = [x for x in given if x is not None]
        weights = normal(*given[1].shape), normal(*given[0].shape)
        compiled(*given)
        got, want = exact(*given), one_by_one(*given, backward=backward)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)
        got, want = (
            torch.autograd.grad(
                sum((x * w).sum() for x, w in zip(made, weights, strict=True)), learnt
            )
            for made in (got, want)
        )
        torch.testing.assert_close(got, want)
    assert len(set(lengths)) == 1


@pytest.mark.compile
@pytest.mark.parametrize("axes", [(0, 3, 0), (None, 1, None)])
def test_vmap_of_linear_scan_compiles(axes):
    torch.compiler.reset()
    several = [inputs((2, 1, 3, 2, 2), "key") for _ in range(2)]
    stacked = [
        several[0][i] if a is None else torch.stack(x, dim=a)
        for i, (x, a) in enumerate(zip(zip(*several, strict=True), axes, strict=True))
    ]
    call = torch.func.vmap(linear_scan, in_dims=axes)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*stacked)
    torch.testing.assert_close(got, call(*stacked))


@pytest.mark.parametrize("shape", [(3, 2, 4), (1, 2, 1)])
def test_quotient_is_division(shape):
    """With gradients, those of gradients, forward ones, and of many at a time."""
    x, by = normal(3, 2, 4), (normal(*shape).detach().abs() + 1).requires_grad_()
    torch.testing.assert_close(broadcast_divide(x, by), x / by)
    assert torch.autograd.gradcheck(broadcast_divide, (x, by), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(broadcast_divide, (x, by))
    got = torch.func.vmap(broadcast_divide, in_dims=(0, None))(torch.stack([x, 2 * x]), by)
    torch.testing.assert_close(got, torch.stack([x / by, 2 * x / by]))


@pytest.mark.parametrize("by_row", [True, False])
def test_autocast_does_not_narrow_the_gradient_of_a_quotient(by_row):
    x = torch.randn(3, 2, 64, requires_grad=True)
    by = torch.rand(3, 2, 1 if by_row else 64) + 1

    def slopes(*, narrow):
        learnt = by.clone().requires_grad_()
        y = broadcast_divide(x, learnt).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            return torch.autograd.grad(y, (x, learnt))

    torch.testing.assert_close(slopes(narrow=True), slopes(narrow=False))


@pytest.mark.parametrize("by_row", [True, False])
def test_quotient_of_what_is_owned_is_in_place_where_no_derivative_is_asked_for(by_row):
    x, by = normal(3, 2, 4), (normal(3, 2, 1 if by_row else 4).abs() + 1).detach()
    want = (x / by).detach()

    def is_in_place(x, by):
        given = x.clone()
        got = broadcast_divide(given, by, overwrite=True)
        torch.testing.assert_close(got, want)
        return got.data_ptr() == given.data_ptr()

    assert is_in_place(x.detach(), by)
    with torch.no_grad():
        assert is_in_place(x, by)
    assert not is_in_place(x, by)
    assert not is_in_place(x.detach(), by.requires_grad_())
    with torch.autograd.forward_ad.dual_level():
        assert not is_in_place(x.detach(), by.detach())


def test_quotient_of_others_is_not_in_place():
    x = normal(3, 2, 4).detach()
    before = x.clone()
    broadcast_divide(x, torch.full((3, 2, 1), 2.0, dtype=x.dtype))
    assert torch.equal(x, before)


class Doubled(torch.autograd.Function):
    """2 x, which tells whether it is called as a function of autograd."""

    generate_vmap_rule = True
    calls = 0

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        Doubled.calls += 1

    @staticmethod
    def backward(ctx, slope):
        return 2 * slope

    @staticmethod
    def jvp(ctx, slope):
        return 2 * slope


def test_functions_are_applied_where_derivatives_can_be_asked_for():
    def calls(function, *given):
        Doubled.calls = 0
        return function(*given), Doubled.calls

    x = torch.ones(3)
    call = partial(apply_function, Doubled)
    got, count = calls(call, x)
    assert torch.equal(got, 2 * x)
    assert not count
    learnt = x.clone().requires_grad_()
    with torch.no_grad():
        assert calls(call, learnt)[1] == 0
    got, count = calls(call, learnt)
    assert count
    assert torch.equal(torch.autograd.grad(got.sum(), learnt)[0], 2 * x)
    assert calls(torch.func.vmap(call), x)[1]
    (_, forward), count = calls(torch.func.jvp, call, (x,), (x,))
    assert count
    assert torch.equal(forward, 2 * x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        got, count = calls(call, dual)
        assert count
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(got).tangent, 2 * x)
