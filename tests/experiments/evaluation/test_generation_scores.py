"""Fréchet distance, Inception Score, precision and recall against torchmetrics and closed forms."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from onescan.experiments.evaluation import image_scores
from onescan.experiments.evaluation.image_scores import InceptionScore, precision_recall
from onescan.experiments.tasks.feature_distance import (
    FeatureStatistics,
    Frechet,
    Gaussian,
    feature_distance,
    frechet_distance,
)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics(*batches):
    found = FeatureStatistics(batches[0].shape[1])
    for batch in batches:
        found.add(batch)
    return found


def gaussian(mean, covariance, samples=None):
    return Gaussian(mean.double(), covariance.double(), samples)


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_statistics_do_not_depend_on_batches(batch, offset):
    features = offset + 3 * numbers(64, 5) + torch.arange(5)
    found = statistics(*features.split(batch), features[:0])
    torch.testing.assert_close(found.mean, features.mean(dim=0))
    torch.testing.assert_close(found.gaussian().covariance, features.T.cov(), rtol=1e-6, atol=1e-6)
    assert found.gaussian().samples == 64


def test_statistics_sum_float32_in_float64():
    features = numbers(500, 2).float()
    found = statistics(*features.split(3))
    torch.testing.assert_close(found.mean, features.double().mean(dim=0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_statistics_reject_features_that_are_not_finite(value):
    with pytest.raises(ValueError, match="NaN or infinity"):
        FeatureStatistics(2).add(torch.tensor([[0.0, value]]))


def test_statistics_of_one_image_have_no_covariance():
    with pytest.raises(ValueError, match="1 images"):
        statistics(numbers(1, 2)).gaussian()


class Identity(nn.Module):
    num_features = 12

    def forward(self, features):
        return features


@pytest.mark.parametrize(("samples", "tolerance"), [(40, 1e-9), (9, 1e-6)])
def test_frechet_distance_equals_that_of_torchmetrics(samples, tolerance):
    from torchmetrics.image.fid import FrechetInceptionDistance

    a = numbers(samples, 12) @ numbers(12, 12, seed=1)
    b = 1 + numbers(50, 12, seed=2) @ numbers(12, 12, seed=3)
    oracle = FrechetInceptionDistance(feature=Identity())
    oracle.update(a, real=True)
    oracle.update(b, real=False)
    found = frechet_distance(statistics(a).gaussian(), statistics(b).gaussian())
    assert found.distance == pytest.approx(oracle.compute().item(), rel=tolerance)
    assert found.is_singular == (samples <= 12)
    assert feature_distance(b, a) == pytest.approx(found.distance, rel=1e-9)


def test_frechet_distance_of_commuting_covariances_has_a_closed_form():
    rotation = torch.linalg.qr(numbers(6, 6)).Q
    means, stds = numbers(2, 6), numbers(2, 6, seed=1).abs()
    stds[0, 0] = 0
    a, b = (
        gaussian(mean, rotation @ torch.diag(std**2) @ rotation.T)
        for mean, std in zip(means, stds, strict=True)
    )
    expected = ((means[0] - means[1]) ** 2 + (stds[0] - stds[1]) ** 2).sum().item()
    assert frechet_distance(a, b).distance == pytest.approx(expected, rel=1e-7)


def test_frechet_distance_of_point_masses_is_that_of_the_means():
    a, b = (gaussian(torch.full((3,), value), torch.zeros(3, 3)) for value in (0.0, 2.0))
    assert frechet_distance(a, b) == Frechet(12.0, False)


@pytest.mark.parametrize("samples", [100, 5])
def test_frechet_distance_to_itself_is_zero(samples):
    a = statistics(10 * numbers(samples, 16)).gaussian()
    assert 0 <= frechet_distance(a, a).distance < 1e-6 * a.covariance.trace().item()


@pytest.mark.parametrize(("samples", "expected"), [(5, False), (4, True), (None, False)])
def test_too_few_images_are_reported_as_singular(samples, expected):
    a = gaussian(torch.zeros(4), torch.eye(4), samples)
    b = gaussian(torch.zeros(4), torch.eye(4), 1000)
    assert frechet_distance(a, b).is_singular == frechet_distance(b, a).is_singular == expected


def test_frechet_distance_rejects_different_features():
    a, b = (gaussian(torch.zeros(n), torch.eye(n)) for n in (2, 3))
    with pytest.raises(ValueError, match="2 and 3 features"):
        frechet_distance(a, b)


@pytest.mark.parametrize("batch", [3, 100])
def test_inception_score_is_the_mean_over_splits(batch):
    probabilities, splits = (2 * numbers(57, 6)).softmax(dim=1), torch.arange(57) % 10
    score = InceptionScore(6)
    for p, split in zip(probabilities.split(batch), splits.split(batch), strict=True):
        score.add(p, split)
    parts = [probabilities[splits == split].numpy() for split in range(10)]
    scores = [np.exp((p * np.log(p / p.mean(axis=0))).sum(axis=1).mean()) for p in parts]
    assert score.score() == pytest.approx((np.mean(scores), np.std(scores)), rel=1e-12)


def test_inception_score_equals_that_of_torchmetrics():
    from torchmetrics.image.inception import InceptionScore as Oracle

    logits = 2 * numbers(50, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about its memory
        oracle = Oracle(feature=Identity(), splits=1)
    oracle.update(logits)
    score = InceptionScore(6, splits=1)
    score.add(logits.softmax(dim=1), torch.zeros(50, dtype=torch.long))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the standard deviation of one split
        expected = oracle.compute()[0].item()
    assert score.score().mean == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("p", "expected"), [(torch.eye(4), 4.0), (torch.full((4, 4), 0.25), 1.0)])
def test_inception_score_of_certain_and_of_uniform_predictions(p, expected):
    score = InceptionScore(4)
    score.add(p, torch.zeros(4, dtype=torch.long))
    assert score.score() == pytest.approx((expected, 0.0))


def naive_precision_recall(real, generated, neighbors):
    def is_covered(points, centers):
        radii = (centers[:, None] - centers).norm(dim=-1).sort(dim=1).values[:, neighbors]
        distances = (points[:, None] - centers).norm(dim=-1)
        return (distances <= radii).any(dim=1).double().mean().item()

    return is_covered(generated, real), is_covered(real, generated)


@pytest.mark.parametrize("neighbors", [1, 3])
@pytest.mark.parametrize("blocks", [(1024, 8192), (7, 5), (5, 16)])
def test_precision_and_recall_do_not_depend_on_blocks(monkeypatch, neighbors, blocks):
    monkeypatch.setattr(image_scores, "ROWS", blocks[0])
    monkeypatch.setattr(image_scores, "COLUMNS", blocks[1])
    sizes, cdist = set(), torch.cdist

    def watched(rows, columns):
        sizes.add((len(rows) <= blocks[0], len(columns) <= blocks[1]))
        return cdist(rows, columns)

    monkeypatch.setattr(torch, "cdist", watched)
    real, generated = numbers(60, 4).float(), (0.8 * numbers(41, 4, seed=1) + 0.6).float()
    found = precision_recall(real, generated, neighbors=neighbors)
    monkeypatch.undo()
    expected = naive_precision_recall(real.double(), generated.double(), neighbors)
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0.1 < found.precision != found.recall > 0.1
    assert sizes == {(True, True)}


@pytest.mark.parametrize("features", [8, 40])
@pytest.mark.parametrize(("offset", "expected"), [(0, (1.0, 1.0)), (100, (0.0, 0.0))])
def test_precision_and_recall_of_the_same_and_of_distant_images(features, offset, expected):
    points = numbers(50, features).float() + 1000
    assert precision_recall(points, points + offset) == expected


def test_copies_of_one_real_image_are_precise_but_recall_little():
    real = numbers(50, 3)
    found = precision_recall(real, real[:1] + 1e-3 * numbers(50, 3, seed=1))
    assert (found.precision, found.recall < 0.1) == (1, True)


@pytest.mark.parametrize(("real", "generated", "name"), [(3, 9, "real"), (9, 3, "generated")])
def test_precision_and_recall_need_neighbors(real, generated, name):
    with pytest.raises(ValueError, match=f"{name} has 3 points"):
        precision_recall(numbers(real, 2), numbers(generated, 2))


def test_precision_and_recall_reject_different_features():
    with pytest.raises(ValueError, match="real has 2 features and generated has 3"):
        precision_recall(numbers(9, 2), numbers(9, 3))
