"""GLUE's measures of how well labels are told, from 0 or -1 to 1."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from onescan.data.glue import Metric


def measure(metric: Metric, labels: Tensor, predictions: Tensor) -> float:
    """Compare predictions with labels.

    Args:
        metric: which measure; f1 is of class 1, and 0 where neither side has any.
        labels: [B] classes, or numbers.
        predictions: [B] likewise.
    """
    from sklearn import metrics  # imported on use: half a second

    classes: dict[Metric, Callable[..., Any]] = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda *sides: metrics.f1_score(*sides, zero_division=0.0),
        "matthews_correlation": metrics.matthews_corrcoef,
    }
    sides = labels.numpy(), predictions.numpy()
    if metric in classes:
        return float(classes[metric](*sides))
    return _correlation(metric, labels, predictions)


def _correlation(metric: Metric, labels: Tensor, estimates: Tensor) -> float:
    """Pearson's or Spearman's; 0 where one side is constant, of which there is none."""
    from scipy import stats  # type: ignore[import-untyped]

    if any((side == side[0]).all() for side in (labels, estimates)):
        return 0.0
    correlate = stats.pearsonr if metric == "pearson" else stats.spearmanr
    return float(correlate(labels.double().numpy(), estimates.double().numpy()).statistic)
