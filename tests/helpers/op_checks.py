"""Comparisons that the tests of several ops share."""

import sys

import torch


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


def multiply_in_bfloat16(monkeypatch, op):
    """Let an op in plain torch multiply bfloat16 inputs as it does on a GPU."""
    monkeypatch.setattr(
        sys.modules[f"onescan.ops.{op}"], "product_dtype", lambda *tensors: torch.bfloat16
    )
