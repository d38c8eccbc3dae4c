"""How raw data becomes a model's input: images, arrays and texts, and the tokenizers.

A run folder contains the format of its model. Names are imported on first use, and
`onescan.configs` finds the format that a config names here.
"""

from typing import TYPE_CHECKING

from onescan.lazy import lazy_attributes

if TYPE_CHECKING:
    from onescan.inputs.arrays import ArrayFormat as ArrayFormat
    from onescan.inputs.forecast import ForecastFormat as ForecastFormat
    from onescan.inputs.format import Format as Format
    from onescan.inputs.format import UnknownFormat as UnknownFormat
    from onescan.inputs.images import GridFormat as GridFormat
    from onescan.inputs.images import ImageFormat as ImageFormat
    from onescan.inputs.images import read_image as read_image
    from onescan.inputs.latents import LatentFormat as LatentFormat
    from onescan.inputs.listops import ListOpsFormat as ListOpsFormat
    from onescan.inputs.padding import pad_images as pad_images
    from onescan.inputs.pairs import PairFormat as PairFormat
    from onescan.inputs.sequences import ByteFormat as ByteFormat
    from onescan.inputs.sequences import PixelFormat as PixelFormat
    from onescan.inputs.sequences import RecallFormat as RecallFormat
    from onescan.inputs.sequences import SequenceFormat as SequenceFormat
    from onescan.inputs.targets import Target as Target
    from onescan.inputs.tokenizer import ByteTokenizer as ByteTokenizer
    from onescan.inputs.tokenizer import TextFormat as TextFormat
    from onescan.inputs.tokenizer import Tokenizer as Tokenizer
    from onescan.inputs.tokenizer import load_tokenizer as load_tokenizer
    from onescan.inputs.volumes import VolumeFormat as VolumeFormat
    from onescan.inputs.volumes import read_volume as read_volume

# name -> module of this folder that defines it
_MODULES = {
    "ArrayFormat": "arrays",
    "ByteFormat": "sequences",
    "ByteTokenizer": "tokenizer",
    "ForecastFormat": "forecast",
    "Format": "format",
    "GridFormat": "images",
    "ImageFormat": "images",
    "LatentFormat": "latents",
    "ListOpsFormat": "listops",
    "PairFormat": "pairs",
    "PixelFormat": "sequences",
    "RecallFormat": "sequences",
    "SequenceFormat": "sequences",
    "Target": "targets",
    "TextFormat": "tokenizer",
    "Tokenizer": "tokenizer",
    "UnknownFormat": "format",
    "VolumeFormat": "volumes",
    "load_tokenizer": "tokenizer",
    "pad_images": "padding",
    "read_image": "images",
    "read_volume": "volumes",
}

__all__ = list(_MODULES)
__getattr__ = lazy_attributes(__name__, _MODULES)
