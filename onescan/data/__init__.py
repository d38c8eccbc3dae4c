"""Datasets, and the input formats of the models trained on them.

Names are imported on first use. `onescan.configs` finds the class that a config names here.
"""

from typing import TYPE_CHECKING

from onescan.lazy import lazy_attributes

if TYPE_CHECKING:
    from onescan.data.arrays import ArrayDataset as ArrayDataset
    from onescan.data.arrays import ArrayDatasetConfig as ArrayDatasetConfig
    from onescan.data.arrays import ArrayFormat as ArrayFormat
    from onescan.data.arrays import ArraySplits as ArraySplits
    from onescan.data.augment import AffineConfig as AffineConfig
    from onescan.data.augment import Augment as Augment
    from onescan.data.augment import AugmentConfig as AugmentConfig
    from onescan.data.augment import DeitAugmentConfig as DeitAugmentConfig
    from onescan.data.augment import Mix as Mix
    from onescan.data.augment import MixConfig as MixConfig
    from onescan.data.base import DataConfig as DataConfig
    from onescan.data.base import DataSet as DataSet
    from onescan.data.base import DataState as DataState
    from onescan.data.base import Example as Example
    from onescan.data.base import Format as Format
    from onescan.data.base import LoadedBatch as LoadedBatch
    from onescan.data.base import Splits as Splits
    from onescan.data.canvas_digits import CanvasDigitsConfig as CanvasDigitsConfig
    from onescan.data.glue import GlueDatasetConfig as GlueDatasetConfig
    from onescan.data.glue import PairFormat as PairFormat
    from onescan.data.image_dataset import ImageDataset as ImageDataset
    from onescan.data.image_dataset import ImageDatasetConfig as ImageDatasetConfig
    from onescan.data.image_dataset import ImageStream as ImageStream
    from onescan.data.images import DigitsConfig as DigitsConfig
    from onescan.data.images import GridFormat as GridFormat
    from onescan.data.images import ImageFormat as ImageFormat
    from onescan.data.images import ImageSet as ImageSet
    from onescan.data.images import ImageSplits as ImageSplits
    from onescan.data.images import ImageTensors as ImageTensors
    from onescan.data.images import RandomCropConfig as RandomCropConfig
    from onescan.data.images import read_image as read_image
    from onescan.data.latents import LatentFormat as LatentFormat
    from onescan.data.latents import LatentsConfig as LatentsConfig
    from onescan.data.long_range import ByteFormat as ByteFormat
    from onescan.data.long_range import ByteTextConfig as ByteTextConfig
    from onescan.data.long_range import ListOpsDataConfig as ListOpsDataConfig
    from onescan.data.long_range import ListOpsFormat as ListOpsFormat
    from onescan.data.long_range import PathfinderDataConfig as PathfinderDataConfig
    from onescan.data.long_range import PixelFormat as PixelFormat
    from onescan.data.long_range import PixelImageConfig as PixelImageConfig
    from onescan.data.long_range import RetrievalConfig as RetrievalConfig
    from onescan.data.moving_digits import MovingDigitsConfig as MovingDigitsConfig
    from onescan.data.order import batched as batched
    from onescan.data.order import derive_seed as derive_seed
    from onescan.data.order import epoch_order as epoch_order
    from onescan.data.padding import pad_images as pad_images
    from onescan.data.recall import RecallConfig as RecallConfig
    from onescan.data.recall import RecallFormat as RecallFormat
    from onescan.data.sequences import LabelledSequence as LabelledSequence
    from onescan.data.sequences import SequenceFormat as SequenceFormat
    from onescan.data.sequences import SequenceList as SequenceList
    from onescan.data.sequences import SequenceSet as SequenceSet
    from onescan.data.sequences import SequenceSplits as SequenceSplits
    from onescan.data.text import TextDatasetConfig as TextDatasetConfig
    from onescan.data.text import TextFormat as TextFormat
    from onescan.data.text_table import TextTableConfig as TextTableConfig

# name -> module of this folder that defines it
_MODULES = {
    "AffineConfig": "augment",
    "ArrayDataset": "arrays",
    "ArrayDatasetConfig": "arrays",
    "ArrayFormat": "arrays",
    "ArraySplits": "arrays",
    "Augment": "augment",
    "AugmentConfig": "augment",
    "ByteFormat": "long_range",
    "ByteTextConfig": "long_range",
    "CanvasDigitsConfig": "canvas_digits",
    "DataConfig": "base",
    "DataSet": "base",
    "DataState": "base",
    "DeitAugmentConfig": "augment",
    "DigitsConfig": "images",
    "Example": "base",
    "Format": "base",
    "GlueDatasetConfig": "glue",
    "GridFormat": "images",
    "ImageDataset": "image_dataset",
    "ImageDatasetConfig": "image_dataset",
    "ImageFormat": "images",
    "ImageSet": "images",
    "ImageSplits": "images",
    "ImageStream": "image_dataset",
    "ImageTensors": "images",
    "LabelledSequence": "sequences",
    "LatentFormat": "latents",
    "LatentsConfig": "latents",
    "ListOpsDataConfig": "long_range",
    "ListOpsFormat": "long_range",
    "LoadedBatch": "base",
    "Mix": "augment",
    "MixConfig": "augment",
    "MovingDigitsConfig": "moving_digits",
    "PairFormat": "glue",
    "PathfinderDataConfig": "long_range",
    "PixelFormat": "long_range",
    "PixelImageConfig": "long_range",
    "RandomCropConfig": "images",
    "RecallConfig": "recall",
    "RecallFormat": "recall",
    "RetrievalConfig": "long_range",
    "SequenceFormat": "sequences",
    "SequenceList": "sequences",
    "SequenceSet": "sequences",
    "SequenceSplits": "sequences",
    "Splits": "base",
    "TextDatasetConfig": "text",
    "TextFormat": "text",
    "TextTableConfig": "text_table",
    "batched": "order",
    "derive_seed": "order",
    "epoch_order": "order",
    "pad_images": "padding",
    "read_image": "images",
}

__all__ = list(_MODULES)
__getattr__ = lazy_attributes(__name__, _MODULES)
