"""Comparisons that the tests of several ops share."""

import sys

import torch

from onescan.ops.layout import layout_of
from onescan.ops.recurrence import Call, choose


def assert_same(got, want):
    """Each tensor is equal to rounding, in the same dtype."""
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


def assert_at_most_twice_the_error(ours, plain, exact):
    """The error of each tensor against float64 is at most twice that of plain torch."""

    def errors(tensors):
        return [
            (x.double() - y).square().mean().sqrt().item()
            for x, y in zip(tensors, exact, strict=True)
        ]

    ours, plain = errors(ours), errors(plain)
    assert all(x <= 2 * y for x, y in zip(ours, plain, strict=True)), (ours, plain)


def call_of(tensors, options, *, carried=(), **layout):
    """A call of an op in `onescan.ops.recurrence` with these tensors."""
    named = {f"state.{i}": x for i, x in enumerate(carried)}
    placed = layout_of(tensors.q, **layout)
    return Call(tensors, placed, (None, None), options, returns_state=True, state_tensors=named)


def key_of(op, tensors, options, form="auto", backend="auto", **layout):
    """The implementation that a call runs."""
    return choose(op, call_of(tensors, options, **layout), form=form, backend=backend)


def multiply_in_bfloat16(monkeypatch, op):
    """Let an op in plain torch multiply bfloat16 inputs as it does on a GPU."""
    places = (sys.modules.get(f"onescan.ops.{op}{part}") for part in (".op", ""))
    (where,) = (module for module in places if hasattr(module, "product_dtype"))
    monkeypatch.setattr(where, "product_dtype", lambda *tensors: torch.bfloat16)
