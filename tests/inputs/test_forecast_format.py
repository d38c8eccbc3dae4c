"""Normalization of windows of time series."""

from fractions import Fraction

import pytest
import torch

from onescan.inputs import ForecastFormat

FORMAT = ForecastFormat(channels=2, context=8, horizon=3, quantiles=(0.1, 0.5, 0.9))
NAN = torch.nan


def windows(count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 8, generator=generator, dtype=torch.float64)


def test_the_input_has_values_and_masks_and_no_future():
    context = windows()
    context[0, 1, 2:5] = NAN
    inputs = FORMAT.model_input(context)
    assert inputs.shape == (4, 4, 11)
    assert inputs.dtype == torch.float32
    assert not inputs[..., 8:].any()
    values, masks = inputs[:, :2, :8], inputs[:, 2:, :8]
    assert torch.equal(masks.bool(), ~context.isnan())
    assert not values[0, 1, 2:5].any()
    torch.testing.assert_close(values[1].mean(-1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(values[1].std(-1, correction=0), torch.ones(2))
    known = context[0, 1][~context[0, 1].isnan()]
    mean, std = FORMAT.scale(context)
    assert mean[0, 1].item() == pytest.approx(known.mean().item(), rel=1e-14)
    assert std[0, 1].item() == pytest.approx(known.std(correction=0).item(), rel=1e-14)


@pytest.mark.parametrize("offset", [1e9, -1e12, 1.0])
def test_offsets_cost_no_precision(offset):
    context = windows() + offset
    exact = [[Fraction(x) for x in row] for row in context.flatten(0, 1).tolist()]
    means = [sum(row) / len(row) for row in exact]
    mean, std = FORMAT.scale(context)
    for got, row, true, spread in zip(
        mean.flatten().tolist(), exact, means, std.flatten().tolist(), strict=True
    ):
        assert abs(got - true) <= abs(offset) * 2**-52
        variance = float(sum((x - true) ** 2 for x in row) / len(row))
        assert spread == pytest.approx(variance**0.5, rel=1e-12)
    plain = FORMAT.model_input(context - offset)
    torch.testing.assert_close(FORMAT.model_input(context), plain, atol=abs(offset) * 1e-15, rtol=0)


@pytest.mark.parametrize("scale", [1e-140, 1e140, 1e-3])
def test_large_and_small_values_are_in_range(scale):
    plain = FORMAT.model_input(windows())
    torch.testing.assert_close(FORMAT.model_input(windows() * scale), plain)


def test_constant_contexts_are_continued():
    context = torch.full((1, 2, 8), 1e9 + 0.1, dtype=torch.float64)
    context[0, 1, 3:] = NAN
    mean, std = FORMAT.scale(context)
    assert std.unique().tolist() == [0]
    assert mean.unique().tolist() == [1e9 + 0.1]
    assert not FORMAT.model_input(context)[:, :2].any()
    assert FORMAT.targets(context[..., :3] + 2, context)[0, 0].tolist() == [2, 2, 2]
    forecast = FORMAT.predictions(torch.randn(1, 6, 11), context)
    assert forecast.unique().tolist() == [1e9 + 0.1]


def test_targets_and_predictions_are_inverse():
    context, future = windows() + 1e9, windows(seed=1)[..., :3] * 5 + 1e9
    targets = FORMAT.targets(future, context)
    assert targets.dtype == torch.float32
    outputs = torch.zeros(4, 6, 11)
    outputs.unflatten(1, (3, 2))[..., 8:] = targets[:, None]
    back = FORMAT.predictions(outputs, context)
    assert (back.dtype, back.shape) == (torch.float64, (4, 3, 2, 3))
    for quantile in range(3):
        torch.testing.assert_close(back[:, quantile], future, atol=3e-6, rtol=0)


def test_quantiles_are_sorted():
    outputs = torch.zeros(1, 6, 11)
    outputs.unflatten(1, (3, 2))[0, :, 1, -1] = torch.tensor([3.0, 1.0, 2.0])
    context = windows(1)
    (mean,), (std,) = FORMAT.scale(context)
    got = FORMAT.predictions(outputs, context)[0, :, 1, -1]
    torch.testing.assert_close(got, torch.tensor([1.0, 2, 3]).double() * std[1] + mean[1])


def test_missing_values_are_left_out():
    context = windows()
    context[0, 0] = NAN  # nothing is known
    future = windows(seed=1)[..., :3]
    future[1, 1, 0] = NAN
    targets = FORMAT.targets(future, context)
    expected = torch.zeros(4, 2, 3, dtype=torch.bool)
    expected[0, 0], expected[1, 1, 0] = True, True
    assert torch.equal(targets.isnan(), expected)
    assert FORMAT.model_input(context).isfinite().all()
    predicted = FORMAT.predictions(torch.zeros(4, 6, 11), context)
    assert predicted[0, :, 0].isnan().all()
    assert predicted[0, :, 1].isfinite().all()


def test_other_shapes_and_infinite_values_are_refused():
    with pytest.raises(ValueError, match=r"context has shape \(4, 2, 7\), expected \(B, 2, 8\)"):
        FORMAT.model_input(windows()[..., 1:])
    with pytest.raises(ValueError, match="context has infinite values, expected finite numbers"):
        FORMAT.model_input(windows() / 0)
    with pytest.raises(ValueError, match=r"\(4, 5, 11\), expected \(B, 6, 11\): .*, 3 x 2"):
        FORMAT.scores(torch.zeros(4, 5, 11))
