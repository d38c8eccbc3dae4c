"""Scores of generated images against plain references: distances, inception score, neighbours."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from onescan.evaluation import image_scores as scores
from onescan.evaluation.image_scores import (
    InceptionScore,
    chosen_by_lot,
    inception_score,
    precision_recall,
    shuffled,
)
from onescan.tasks.feature_distance import (
    FeatureStatistics,
    Frechet,
    Gaussian,
    frechet_distance,
)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics(features):
    found = FeatureStatistics.empty(features.shape[1])
    found.add(features)
    return found


def gaussian(mean, covariance, samples=None):
    return Gaussian(mean.double(), covariance.double(), samples)


def test_a_permutation_cached_in_inference_mode_is_a_normal_tensor():
    with torch.inference_mode():
        shuffled(1013)
    assert not shuffled(1013).is_inference()


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_statistics_are_those_of_all_at_once(batch):
    features = 3 * numbers(64, 5) + torch.arange(5)
    found = FeatureStatistics.empty(5)
    for part in features.split(batch):
        found.add(part)
    torch.testing.assert_close(found.mean, features.mean(dim=0))
    torch.testing.assert_close(found.gaussian().covariance, features.T.cov())
    assert found.count == 64


def test_statistics_keep_a_small_spread_around_a_large_mean():
    features = 1e8 + numbers(1000, 3)
    found = FeatureStatistics.empty(3)
    for part in features.split(10):
        found.add(part)
    torch.testing.assert_close(found.gaussian().covariance, features.T.cov(), rtol=1e-6, atol=1e-6)


def test_statistics_of_float32_are_summed_in_float64():
    features = numbers(500, 2).float()
    found = FeatureStatistics.empty(2)
    for part in features.split(3):
        found.add(part)
    assert found.mean.dtype == torch.float64
    torch.testing.assert_close(found.mean, features.double().mean(dim=0), rtol=0, atol=1e-15)


def test_merged_statistics_are_those_of_both():
    a, b = numbers(10, 4), 2 + numbers(23, 4, seed=1)
    both = statistics(a)
    both.merge(statistics(b))
    torch.testing.assert_close(both.gaussian(), statistics(torch.cat([a, b])).gaussian())
    both.merge(FeatureStatistics.empty(4))
    assert both.count == 33


def test_no_features_change_nothing():
    found = statistics(numbers(4, 2))
    found.add(torch.zeros(0, 2))
    assert found.count == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_features_that_are_not_finite_are_refused(value):
    features = torch.zeros(3, 2)
    features[1, 1] = value
    with pytest.raises(ValueError, match="features hold NaN or infinity"):
        FeatureStatistics.empty(2).add(features)


def test_there_is_no_covariance_of_one_image():
    with pytest.raises(ValueError, match="features of 1 images, expected 2 at least"):
        statistics(numbers(1, 2)).gaussian()


@pytest.mark.parametrize("samples", [40, 9], ids=["whole", "singular"])
def test_the_distance_is_that_of_scipys_root(samples):
    a = statistics(numbers(samples, 12) @ numbers(12, 12, seed=1)).gaussian()
    b = statistics(1 + numbers(50, 12, seed=2) @ numbers(12, 12, seed=3)).gaussian()
    root = sqrtm(a.covariance.numpy() @ b.covariance.numpy())
    apart = ((a.mean - b.mean) ** 2).sum().item()
    expected = apart + np.trace(a.covariance.numpy() + b.covariance.numpy() - 2 * np.real(root))
    found = frechet_distance(a, b)
    assert found.distance == pytest.approx(expected, rel=1e-6)
    assert found.is_singular == (samples == 9)
    assert frechet_distance(b, a).distance == pytest.approx(found.distance, rel=1e-9)


def test_the_distance_of_diagonal_gaussians_has_a_closed_form():
    means, spreads = numbers(2, 6), numbers(2, 6, seed=1).abs()
    a, b = (
        gaussian(mean, torch.diag(spread**2)) for mean, spread in zip(means, spreads, strict=True)
    )
    expected = ((means[0] - means[1]) ** 2 + (spreads[0] - spreads[1]) ** 2).sum().item()
    assert frechet_distance(a, b).distance == pytest.approx(expected, rel=1e-12)


def test_the_distance_of_commuting_covariances_does_not_depend_on_the_axes():
    turn = torch.linalg.qr(numbers(5, 5)).Q
    spreads = torch.tensor([[1.0, 2, 3, 4, 5], [2.0, 2, 1, 0, 9]], dtype=torch.float64)
    a, b = (gaussian(torch.zeros(5), turn @ torch.diag(s**2) @ turn.T) for s in spreads)
    expected = ((spreads[0] - spreads[1]) ** 2).sum().item()
    assert frechet_distance(a, b).distance == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("samples", [100, 5], ids=["whole", "singular"])
def test_nothing_is_far_from_itself(samples):
    a = statistics(10 * numbers(samples, 16)).gaussian()
    distance = frechet_distance(a, a).distance
    assert 0 <= distance < 1e-4 * a.covariance.trace().item() / 100


def test_a_distance_without_any_spread_is_that_of_the_means():
    a, b = (gaussian(torch.full((3,), value), torch.zeros(3, 3)) for value in (0.0, 2.0))
    assert frechet_distance(a, b) == Frechet(12.0, False)


@pytest.mark.parametrize(("samples", "expected"), [(5, False), (4, True), (None, False)])
def test_fewer_samples_than_features_are_told_of(samples, expected):
    a = gaussian(torch.zeros(4), torch.eye(4), samples)
    b = gaussian(torch.zeros(4), torch.eye(4), 1000)
    assert frechet_distance(a, b).is_singular == expected
    assert frechet_distance(b, a).is_singular == expected


def test_other_features_have_no_distance():
    a, b = (gaussian(torch.zeros(n), torch.eye(n)) for n in (2, 3))
    with pytest.raises(ValueError, match="statistics of 2 features are compared with some of 3"):
        frechet_distance(a, b)


def naive_inception_score(shares, parts):
    """As the original code has it, part by part."""
    scores = []
    for k in range(parts):
        part = shares[k * len(shares) // parts : (k + 1) * len(shares) // parts]
        kl = part * (np.log(part) - np.log(part.mean(axis=0, keepdims=True)))
        scores.append(np.exp(kl.sum(axis=1).mean()))
    return np.mean(scores), np.std(scores)


@pytest.mark.parametrize("count", [10, 57, 100])
@pytest.mark.parametrize("batch", [3, 100])
def test_the_inception_score_is_the_naive_one(count, batch):
    shares = (2 * numbers(count, 6)).softmax(dim=1)
    score = InceptionScore(count, 6)
    for start in range(0, count, batch):
        score.add(shares[start : start + batch], start)
    expected = naive_inception_score(shares[shuffled(count).argsort()].numpy(), 10)
    assert score.score() == pytest.approx(expected, rel=1e-12)
    assert inception_score(shares) == pytest.approx(expected, rel=1e-12)


def test_a_share_of_zero_adds_nothing_to_the_inception_score():
    shares = torch.eye(4).repeat(10, 1)
    assert inception_score(shares, parts=1) == pytest.approx((4.0, 0.0))
    assert inception_score(torch.full((20, 4), 0.25)) == pytest.approx((1.0, 0.0))


def test_the_inception_score_does_not_ask_for_classes_in_turn():
    """Ten clear classes, once in turn and once each by itself, as files in folders come."""
    in_turn = torch.eye(10).repeat(100, 1)
    by_class = torch.eye(10).repeat_interleave(100, dim=0)
    scores = [inception_score(shares).mean for shares in (in_turn, by_class)]
    assert all(score > 9 for score in scores)


def test_an_inception_score_needs_an_image_for_each_part():
    with pytest.raises(ValueError, match="there are 9 images, expected 10 at least"):
        inception_score(torch.eye(9))


def naive_precision_recall(real, generated, nearest):
    def balls(points):
        apart = (points[:, None] - points).norm(dim=-1)
        return apart.sort(dim=1).values[:, nearest]  # the first is the point itself

    def covered(points, centres):
        apart = (points[:, None] - centres).norm(dim=-1)
        return (apart <= balls(centres)).any(dim=1).double().mean().item()

    return covered(generated, real), covered(real, generated)


@pytest.mark.parametrize("nearest", [1, 3])
@pytest.mark.parametrize("blocks", [(1024, 8192), (7, 5), (5, 16)], ids=["one", "7x5", "5x16"])
def test_precision_and_recall_are_the_naive_ones(monkeypatch, nearest, blocks):
    monkeypatch.setattr(scores, "ROWS", blocks[0])
    monkeypatch.setattr(scores, "COLUMNS", blocks[1])
    real, generated = numbers(60, 4), 0.8 * numbers(41, 4, seed=1) + 0.6
    found = precision_recall(real.float(), generated.float(), nearest=nearest)
    expected = naive_precision_recall(real.float().double(), generated.float().double(), nearest)
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0.1 < found.precision < 1
    assert 0.1 < found.recall < 1
    assert found.precision != found.recall


def test_the_same_images_are_wholly_precise_and_recalled():
    points = numbers(50, 8).float() + 1000
    assert precision_recall(points, points) == (1.0, 1.0)


def test_images_far_away_are_neither():
    points = numbers(50, 8)
    assert precision_recall(points, points + 100) == (0.0, 0.0)


def test_one_good_image_over_and_over_is_precise_and_recalls_little():
    real = numbers(50, 3)
    found = precision_recall(real, real[:1] + 1e-3 * numbers(50, 3, seed=1))
    assert found.precision == 1
    assert found.recall < 0.1


def test_no_more_than_blocks_of_distances_are_held(monkeypatch):
    sizes = []
    squared = scores._squared_distances

    def watched(rows, columns):
        sizes.append((len(rows), len(columns)))
        return squared(rows, columns)

    monkeypatch.setattr(scores, "_squared_distances", watched)
    monkeypatch.setattr(scores, "ROWS", 16)
    monkeypatch.setattr(scores, "COLUMNS", 32)
    precision_recall(numbers(100, 2), numbers(70, 2, seed=1))
    assert max(rows for rows, _ in sizes) == 16
    assert max(columns for _, columns in sizes) == 32


@pytest.mark.parametrize(("real", "generated", "name"), [(3, 9, "real"), (9, 3, "generated")])
def test_neighbours_need_points(real, generated, name):
    with pytest.raises(ValueError, match=f"{name} has 3 points, expected more than the 3"):
        precision_recall(numbers(real, 2), numbers(generated, 2))


def test_points_of_other_features_are_refused():
    with pytest.raises(ValueError, match="real has 2 features and generated 3"):
        precision_recall(numbers(9, 2), numbers(9, 3))


@pytest.mark.parametrize(("total", "wanted"), [(10, 10), (10, 3), (7, 5), (1000, 1)])
def test_as_many_places_are_chosen_as_are_wanted(total, wanted):
    places = chosen_by_lot(torch.arange(total), total, wanted).nonzero().flatten()
    assert len(places) == wanted


@pytest.mark.parametrize("classes", [10, 25])
def test_those_that_are_chosen_are_of_all_classes_where_classes_come_in_turn(classes):
    labels = torch.arange(5000) % classes
    chosen = labels[chosen_by_lot(torch.arange(5000), 5000, 1000)]
    counts = chosen.bincount(minlength=classes)
    assert (counts - 1000 / classes).abs().max() < 5 * (1000 / classes) ** 0.5
