"""Mean and standard deviation over parts, against numpy and in hard ranges."""

import numpy as np
import pytest
import torch

from onescan.experiments.data.array_maps import Maps
from onescan.experiments.data.statistics import divisors, mean_and_std

RNG = np.random.default_rng(0)


def parts_of(x, *cuts):
    return (torch.from_numpy(part) for part in np.split(x, cuts, axis=1))


@pytest.mark.parametrize("cuts", [(), (1, 2), (10, 11, 60)])
@pytest.mark.parametrize(("offset", "scale"), [(0, 1), (1e9, 1e-3), (-3, 1e200), (0, 1e-200)])
def test_any_cut_gives_the_numbers_of_numpy(cuts, offset, scale):
    x = offset + scale * RNG.normal(size=(3, 99)).astype(np.longdouble)
    mean, std = mean_and_std(parts_of(x.astype(float), *cuts))
    exact = x.astype(float).astype(np.longdouble)
    center = exact.mean(1, keepdims=True)
    spread = scale * np.sqrt((((exact - center) / scale) ** 2).mean(1))
    np.testing.assert_allclose(mean, center[:, 0].astype(float), rtol=1e-14, atol=1e-14 * scale)
    np.testing.assert_allclose(std, spread.astype(float), rtol=1e-9)


def test_unknown_values_are_left_out():
    x = RNG.normal(size=(3, 40)) + 5
    x[0, :25], x[1, ::2], x[2] = np.nan, np.nan, np.nan
    mean, std = mean_and_std(parts_of(x, 20))
    np.testing.assert_allclose(mean[:2], np.nanmean(x[:2], 1), rtol=1e-14)
    np.testing.assert_allclose(std[:2], np.nanstd(x[:2], 1), rtol=1e-14)
    assert (mean[2], std[2]) == (0, 0)
    assert divisors(mean, std)[2] == 1


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e9 + 0.1, -7.7e-5])
@pytest.mark.parametrize("count", [3, 10, 33, 100])
def test_constants_have_no_deviation(value, count):
    y = np.full((count, 17, 13), value)
    target = Maps(y=y, kind="value_map", layout="alone").fit(torch.arange(count))
    assert (target.mean, target.std) == ((value,), (1.0,))
