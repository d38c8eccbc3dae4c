"""Datasets of the Long Range Arena (arXiv:2011.04006), generated or read from published files."""

from onescan.data.long_range.curves import Scene, draw
from onescan.data.long_range.listops import (
    PADDING,
    VOCABULARY,
    ListOps,
    ListOpsConfig,
    ListOpsDataConfig,
    ListOpsFormat,
    decode,
    encode,
    evaluate,
    read_listops,
    write_listops,
)
from onescan.data.long_range.pathfinder import (
    Pathfinder,
    PathfinderConfig,
    PathfinderDataConfig,
    PathfinderFolder,
)
from onescan.data.long_range.pixels import PixelFormat, PixelImageConfig
from onescan.data.long_range.texts import SEPARATOR, ByteFormat, ByteTextConfig, RetrievalConfig

__all__ = [
    "PADDING",
    "SEPARATOR",
    "VOCABULARY",
    "ByteFormat",
    "ByteTextConfig",
    "ListOps",
    "ListOpsConfig",
    "ListOpsDataConfig",
    "ListOpsFormat",
    "Pathfinder",
    "PathfinderConfig",
    "PathfinderDataConfig",
    "PathfinderFolder",
    "PixelFormat",
    "PixelImageConfig",
    "RetrievalConfig",
    "Scene",
    "decode",
    "draw",
    "encode",
    "evaluate",
    "read_listops",
    "write_listops",
]
