"""Text as token ids, and datasets of text for language models."""

from onescan.data.text.dataset import TextDatasetConfig, TextSplits
from onescan.data.text.packing import PackedText, TextStream
from onescan.data.text.tokenizer import (
    ByteTokenizer,
    PretrainedTokenizer,
    TextFormat,
    Tokenizer,
    load_tokenizer,
)

__all__ = [
    "ByteTokenizer",
    "PackedText",
    "PretrainedTokenizer",
    "TextDatasetConfig",
    "TextFormat",
    "TextSplits",
    "TextStream",
    "Tokenizer",
    "load_tokenizer",
]
