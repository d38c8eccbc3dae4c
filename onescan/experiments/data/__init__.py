"""Datasets: where they are read from, in which order, and how training images are augmented.

Names are imported on first use. `onescan.configs` finds the class that a config names here.
"""

from typing import TYPE_CHECKING

from onescan.lazy import lazy_attributes

if TYPE_CHECKING:
    from onescan.experiments.data.arrays import ArrayDataset as ArrayDataset
    from onescan.experiments.data.arrays import ArrayDatasetConfig as ArrayDatasetConfig
    from onescan.experiments.data.arrays import ArraySplits as ArraySplits
    from onescan.experiments.data.augment import AffineConfig as AffineConfig
    from onescan.experiments.data.augment import Augment as Augment
    from onescan.experiments.data.augment import AugmentConfig as AugmentConfig
    from onescan.experiments.data.augment import DeitAugmentConfig as DeitAugmentConfig
    from onescan.experiments.data.augment import Mix as Mix
    from onescan.experiments.data.augment import MixConfig as MixConfig
    from onescan.experiments.data.base import DataConfig as DataConfig
    from onescan.experiments.data.base import DataSet as DataSet
    from onescan.experiments.data.base import DataState as DataState
    from onescan.experiments.data.base import Example as Example
    from onescan.experiments.data.base import LoadedBatch as LoadedBatch
    from onescan.experiments.data.base import Splits as Splits
    from onescan.experiments.data.canvas_digits import CanvasDigitsConfig as CanvasDigitsConfig
    from onescan.experiments.data.forecasting import ForecastDatasetConfig as ForecastDatasetConfig
    from onescan.experiments.data.forecasting import ForecastSplits as ForecastSplits
    from onescan.experiments.data.glue import GlueDatasetConfig as GlueDatasetConfig
    from onescan.experiments.data.image_dataset import ImageDataset as ImageDataset
    from onescan.experiments.data.image_dataset import ImageDatasetConfig as ImageDatasetConfig
    from onescan.experiments.data.image_dataset import ImageStream as ImageStream
    from onescan.experiments.data.images import DigitsConfig as DigitsConfig
    from onescan.experiments.data.images import ImageSet as ImageSet
    from onescan.experiments.data.images import ImageSplits as ImageSplits
    from onescan.experiments.data.images import ImageTensors as ImageTensors
    from onescan.experiments.data.images import RandomCropConfig as RandomCropConfig
    from onescan.experiments.data.latents import LatentsConfig as LatentsConfig
    from onescan.experiments.data.long_range import ByteTextConfig as ByteTextConfig
    from onescan.experiments.data.long_range import ListOpsDataConfig as ListOpsDataConfig
    from onescan.experiments.data.long_range import PathfinderDataConfig as PathfinderDataConfig
    from onescan.experiments.data.long_range import PixelImageConfig as PixelImageConfig
    from onescan.experiments.data.long_range import RetrievalConfig as RetrievalConfig
    from onescan.experiments.data.mask_folder import MaskFolderConfig as MaskFolderConfig
    from onescan.experiments.data.moving_digits import MovingDigitsConfig as MovingDigitsConfig
    from onescan.experiments.data.nifti import NiftiFolderConfig as NiftiFolderConfig
    from onescan.experiments.data.order import batched as batched
    from onescan.experiments.data.order import derive_seed as derive_seed
    from onescan.experiments.data.order import epoch_order as epoch_order
    from onescan.experiments.data.recall import RecallConfig as RecallConfig
    from onescan.experiments.data.sequences import LabeledSequence as LabeledSequence
    from onescan.experiments.data.sequences import SequenceList as SequenceList
    from onescan.experiments.data.sequences import SequenceSet as SequenceSet
    from onescan.experiments.data.sequences import SequenceSplits as SequenceSplits
    from onescan.experiments.data.solids import SolidsConfig as SolidsConfig
    from onescan.experiments.data.text import TextDatasetConfig as TextDatasetConfig
    from onescan.experiments.data.text_table import TextTableConfig as TextTableConfig

# name -> module of this folder that defines it
_MODULES = {
    "AffineConfig": "augment",
    "ArrayDataset": "arrays",
    "ArrayDatasetConfig": "arrays",
    "ArraySplits": "arrays",
    "Augment": "augment",
    "AugmentConfig": "augment",
    "ByteTextConfig": "long_range",
    "CanvasDigitsConfig": "canvas_digits",
    "DataConfig": "base",
    "DataSet": "base",
    "DataState": "base",
    "DeitAugmentConfig": "augment",
    "DigitsConfig": "images",
    "Example": "base",
    "ForecastDatasetConfig": "forecasting",
    "ForecastSplits": "forecasting",
    "GlueDatasetConfig": "glue",
    "ImageDataset": "image_dataset",
    "ImageDatasetConfig": "image_dataset",
    "ImageSet": "images",
    "ImageSplits": "images",
    "ImageStream": "image_dataset",
    "ImageTensors": "images",
    "LabeledSequence": "sequences",
    "LatentsConfig": "latents",
    "ListOpsDataConfig": "long_range",
    "LoadedBatch": "base",
    "MaskFolderConfig": "mask_folder",
    "Mix": "augment",
    "MixConfig": "augment",
    "MovingDigitsConfig": "moving_digits",
    "NiftiFolderConfig": "nifti",
    "PathfinderDataConfig": "long_range",
    "PixelImageConfig": "long_range",
    "RandomCropConfig": "images",
    "RecallConfig": "recall",
    "RetrievalConfig": "long_range",
    "SequenceList": "sequences",
    "SequenceSet": "sequences",
    "SequenceSplits": "sequences",
    "SolidsConfig": "solids",
    "Splits": "base",
    "TextDatasetConfig": "text",
    "TextTableConfig": "text_table",
    "batched": "order",
    "derive_seed": "order",
    "epoch_order": "order",
}

__all__ = list(_MODULES)
__getattr__ = lazy_attributes(__name__, _MODULES)
