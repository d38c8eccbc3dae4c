"""Images as sequences of gray levels, row by row."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange

from onescan.experiments.data.base import DataConfig, DataState, Example, LoadedBatch, OnError
from onescan.experiments.data.image_dataset import ImageDatasetConfig
from onescan.experiments.data.images import ImageSet
from onescan.experiments.data.sequences import LabeledSequence, SequenceSet, SequenceSplits
from onescan.inputs.images import to_bytes
from onescan.inputs.sequences import PixelFormat


@dataclass(frozen=True, kw_only=True)
class PixelImageConfig(DataConfig):
    """Labeled images as sequences of gray levels, from the same sources as `ImageDatasetConfig`.

    The Long Range Arena uses CIFAR-10, with sequences of 1024 tokens.
    """

    path: str
    """Folder, parquet file, or name of a dataset on the Hugging Face Hub."""
    name: str | None = None
    """Configuration of a hub dataset."""
    train_split: str = "train"
    """Split to train on."""
    test_split: str | None = None
    """Split to evaluate on; None uses validation or test, or else holds out a part of
    train_split."""
    test_fraction: float = 0.1
    """Fraction of each class held out if there is no test split."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    image_column: str | None = None
    """Column of the images; None uses the only image column."""
    label_column: str | None = None
    """Column of the labels; None uses the only column of class labels, or the one named label."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in order, if the data does not define them."""
    image_size: tuple[int, int] = (32, 32)
    """Height and width that images are resized to, in pixels."""
    on_error: OnError = "raise"
    """On an unreadable image, end the run (raise), or skip and count it (skip)."""

    @property
    def max_tokens(self) -> int:
        return math.prod(self.image_size)

    def build(self) -> SequenceSplits:
        """Find the images and read their labels.

        Raises:
            ImportError: If the datasets library is not installed.
            ValueError: As `ImageDatasetConfig.build`.
        """
        splits = ImageDatasetConfig(
            **{name: getattr(self, name) for name in PixelImageConfig.__dataclass_fields__},
            channels=1,
            mean=(0.0,),
            std=(1.0,),
            train_crop=None,
            test_crop=None,
        ).build()
        return SequenceSplits(
            train=PixelSequences(splits.train),
            test=PixelSequences(splits.test),
            class_names=splits.class_names,
            notes=splits.notes,
            format=PixelFormat(height=self.image_size[0], width=self.image_size[1]),
        )


class PixelSequences(SequenceSet):
    """Gray images of one size, as sequences."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images
        self.decodes = images.decodes

    def __len__(self) -> int:
        return len(self.images)

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        return self.images.examples(
            seed=seed, epoch=epoch, start=start, repeats=repeats, data_state=data_state
        )

    def example(self, index: int) -> LabeledSequence:
        tokens, _, labels = self.read([Example(index)]).batch
        return LabeledSequence(tokens[0].numpy().astype(np.uint8), int(labels))

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        (images, labels), failures = self.images.read(examples)
        tokens = rearrange(to_bytes(images), "b 1 height width -> b (height width)").long()
        return LoadedBatch((tokens, torch.ones_like(tokens, dtype=torch.bool), labels), failures)
