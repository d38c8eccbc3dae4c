"""The loss of language models in kernels, run by Triton in Python or on a GPU, and its gradient."""

from inspect import unwrap

import pytest
import torch
import torch.nn.functional as F
from kernel_device import (
    BRAIN,
    DEVICE,
    MARKS,
    SINGLE,
    assert_errors_like_torch,
    interpreted,
    over_dtypes,
)

from onescan.ops.backend import use_backend
from onescan.ops.cross_entropy import cross_entropy

pytest.importorskip("triton")
pytestmark = MARKS


def with_gradient(logits, labels, **options):
    logits = logits.detach().requires_grad_()
    loss = cross_entropy(logits, labels, **options)
    (gradient,) = torch.autograd.grad(0.75 * loss, logits)
    assert gradient.dtype == logits.dtype
    return [x.detach().double().cpu() for x in (loss, gradient)]


def drawn(rows, classes, dtype):
    logits = (4 * torch.randn(rows, classes)).to(DEVICE, dtype)
    labels = torch.randint(classes, (rows,), device=DEVICE)
    labels[1::3] = -100
    return logits, labels


@over_dtypes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [(7, 5), (1, 1), (4, 9000)], ids=str)
def test_kernels_err_at_most_twice_as_much_as_plain_torch(sizes, reduction, dtype):
    logits, labels = drawn(*sizes, dtype)
    exact = with_gradient(logits.double(), labels, reduction=reduction, backend="torch")
    want = F.cross_entropy(logits.double(), labels, reduction=reduction)
    torch.testing.assert_close(exact[0], want.cpu())
    usual = with_gradient(logits, labels, reduction=reduction, backend="torch")
    found = with_gradient(logits, labels, reduction=reduction, backend="triton")
    assert_errors_like_torch(found, usual, exact, dtype)
    assert not found[1][1::3].any()


def test_another_label_is_ignored():
    logits, labels = drawn(6, 5, SINGLE)
    labels = labels.clamp(min=0)
    for backend in ("torch", "triton"):
        found = with_gradient(logits, labels, ignore_index=0, backend=backend)
        want = with_gradient(logits[labels != 0], labels[labels != 0], backend="torch")
        torch.testing.assert_close(found[0], want[0], atol=1e-6, rtol=1e-6)


def test_impossible_classes_have_no_gradient_and_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -torch.inf, 1e4], [-1e4, -1e4, -torch.inf]], device=DEVICE)
    labels = torch.tensor([0, 1], device=DEVICE)
    loss, gradient = with_gradient(logits, labels, backend="triton")
    torch.testing.assert_close(loss, torch.tensor(2.0).log().double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient[0], torch.tensor([-0.1875, 0, 0.1875]).double())


@interpreted
@pytest.mark.parametrize("label", [3, -1])
def test_a_label_out_of_range_is_nan(label):
    assert cross_entropy(torch.zeros(1, 3), torch.tensor([label]), backend="triton").isnan()


def test_without_labels_the_mean_is_nan_and_the_sum_is_zero():
    logits, labels = drawn(0, 5, SINGLE)
    assert cross_entropy(logits, labels, backend="triton").isnan()
    assert cross_entropy(logits, labels, reduction="sum", backend="triton") == 0


@interpreted
def test_types_without_kernels_run_in_torch():
    for dtype, wide in ((torch.float64, torch.float64), (BRAIN, SINGLE)):
        with use_backend("triton"):
            loss = cross_entropy(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1]))
        assert loss.dtype == wide


def test_the_op_is_declared_rightly():
    logits, labels = drawn(4, 5, SINGLE)
    torch.library.opcheck(torch.ops.onescan.cross_entropy.default, (logits, labels, -100))
    logits.requires_grad_()
    torch.library.opcheck(torch.ops.onescan.cross_entropy.default, (logits, labels, -100))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_arguments_are_refused(backend):
    logits, labels = drawn(4, 5, SINGLE)
    function = unwrap(cross_entropy)  # without shape checks by jaxtyping
    with pytest.raises(ValueError, match="labels"):
        function(logits, labels[:2], backend=backend)
    with pytest.raises(ValueError, match=r"reduction .*'none'"):
        function(logits, labels, reduction="none", backend=backend)
