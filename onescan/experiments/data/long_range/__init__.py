"""Datasets of the Long Range Arena (arXiv:2011.04006), generated or read from published files."""

from onescan.experiments.data.long_range.curves import Scene, draw
from onescan.experiments.data.long_range.listops import (
    ListOps,
    ListOpsConfig,
    ListOpsDataConfig,
    evaluate,
    read_listops,
    write_listops,
)
from onescan.experiments.data.long_range.pathfinder import (
    Pathfinder,
    PathfinderConfig,
    PathfinderDataConfig,
    PathfinderFolder,
)
from onescan.experiments.data.long_range.pixels import PixelImageConfig
from onescan.experiments.data.long_range.texts import ByteTextConfig, RetrievalConfig

__all__ = [
    "ByteTextConfig",
    "ListOps",
    "ListOpsConfig",
    "ListOpsDataConfig",
    "Pathfinder",
    "PathfinderConfig",
    "PathfinderDataConfig",
    "PathfinderFolder",
    "PixelImageConfig",
    "RetrievalConfig",
    "Scene",
    "draw",
    "evaluate",
    "read_listops",
    "write_listops",
]
