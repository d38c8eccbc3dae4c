"""Text as token ids, and datasets of text for language models."""

from onescan.experiments.data.text.dataset import TextDatasetConfig, TextSplits
from onescan.experiments.data.text.packing import PackedText, TextRows, TextStream, TruncatedText

__all__ = [
    "PackedText",
    "TextDatasetConfig",
    "TextRows",
    "TextSplits",
    "TextStream",
    "TruncatedText",
]
