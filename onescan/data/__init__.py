"""Data sets: what a task draws its batches from, and the format its model was trained on."""

from onescan.data.arrays import ArrayDataset, ArrayDatasetConfig, ArrayFormat, ArraySplits
from onescan.data.augment import (
    AffineConfig,
    Augment,
    AugmentConfig,
    DeitAugmentConfig,
    Mix,
    MixConfig,
)
from onescan.data.base import DataConfig, DataSet, DataState, Example, Format, LoadedBatch
from onescan.data.image_dataset import ImageDataset, ImageDatasetConfig, ImageStream
from onescan.data.images import (
    DigitsConfig,
    GridFormat,
    ImageFormat,
    ImageSet,
    ImageSplits,
    ImageTensors,
    RandomCropConfig,
    read_image,
)
from onescan.data.long_range import (
    ByteTextConfig,
    ListOpsDataConfig,
    PathfinderDataConfig,
    PixelImageConfig,
    RetrievalConfig,
)
from onescan.data.order import batched, derive_seed, epoch_order
from onescan.data.recall import RecallConfig, RecallFormat
from onescan.data.sequences import (
    LabelledSequence,
    SequenceFormat,
    SequenceList,
    SequenceSet,
    SequenceSplits,
)

__all__ = [
    "AffineConfig",
    "ArrayDataset",
    "ArrayDatasetConfig",
    "ArrayFormat",
    "ArraySplits",
    "Augment",
    "AugmentConfig",
    "ByteTextConfig",
    "DataConfig",
    "DataSet",
    "DataState",
    "DeitAugmentConfig",
    "DigitsConfig",
    "Example",
    "Format",
    "GridFormat",
    "ImageDataset",
    "ImageDatasetConfig",
    "ImageFormat",
    "ImageSet",
    "ImageSplits",
    "ImageStream",
    "ImageTensors",
    "LabelledSequence",
    "ListOpsDataConfig",
    "LoadedBatch",
    "Mix",
    "MixConfig",
    "PathfinderDataConfig",
    "PixelImageConfig",
    "RandomCropConfig",
    "RecallConfig",
    "RecallFormat",
    "RetrievalConfig",
    "SequenceFormat",
    "SequenceList",
    "SequenceSet",
    "SequenceSplits",
    "batched",
    "derive_seed",
    "epoch_order",
    "read_image",
]
