"""GLUE, arXiv:1804.07461: eight tasks of one text or two, from tables or the hub."""

from onescan.data.glue.dataset import HUB, GlueDatasetConfig, GlueSet, GlueSplits
from onescan.data.glue.pairs import PairEncoder, PairFormat
from onescan.data.glue.problems import PROBLEMS, GlueProblem, GlueTask, HeldOut, Metric

__all__ = [
    "HUB",
    "PROBLEMS",
    "GlueDatasetConfig",
    "GlueProblem",
    "GlueSet",
    "GlueSplits",
    "GlueTask",
    "HeldOut",
    "Metric",
    "PairEncoder",
    "PairFormat",
]
