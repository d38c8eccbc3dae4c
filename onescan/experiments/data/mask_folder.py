"""Images with a mask each: files in the folders images and masks, with the class of each pixel."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from onescan.checks import check_distinct
from onescan.experiments.data.array_maps import IGNORED, MAX_CLASSES, count_classes
from onescan.experiments.data.base import DataConfig, Example, LoadedBatch
from onescan.experiments.data.images import ImageSet, ImageSplits
from onescan.experiments.data.pairs import Pair, split_pairs
from onescan.inputs.image_files import is_image_name, open_image, read_header
from onescan.inputs.images import ImageFormat, to_bytes
from onescan.inputs.targets import Target

LOSSY = ("JPEG", "MPO")
GRAY = ("1", "L", "P", "I", "I;16")  # modes whose pixels are single numbers


@dataclass(frozen=True, kw_only=True)
class MaskFolderConfig(DataConfig):
    """Images, and masks with the class of each pixel: a folder with subfolders images and masks.

    A mask has the same name as its image, apart from the suffix, and the same size. Its pixel
    values are class indices from 0, stored as grayscale or palette indices. The folder of masks may
    also be called labels, and the subfolders may be in train and val (or test) folders. Images and
    masks are resized; masks use nearest-neighbor interpolation.
    """

    path: str
    """A folder with images/NAME.jpg and masks/NAME.png, for example."""
    image_size: tuple[int, int] = (64, 64)
    """Height and width that images are resized to."""
    channels: int = 3
    """Channels of the images: 3 for color, 1 for grayscale."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in order; () numbers the classes in the masks, which are all read."""
    ignore_index: int | None = None
    """Value of masks at pixels without a class, such as 255. They are ignored in the loss and all
    scores."""
    binary: bool = False
    """Whether masks have two classes: 0, and all values above 0."""
    test_fraction: float = 0.15
    """Fraction of the images held out if there is no val or test folder."""
    split_seed: int = 0
    """Random seed of the train-test split."""
    mean: tuple[float, ...] = (0.5,)
    """Mean of each channel of pixels from 0 to 1, subtracted; one number for all, or one each."""
    std: tuple[float, ...] = (0.25,)
    """Standard deviation of each channel, divided by; one number for all, or one each."""

    def build(self) -> ImageSplits:
        """Find the files and check the masks.

        Raises:
            ValueError: If a field is out of range, a folder or a mask is missing, or a mask cannot
                be read, differs in size from its image, or has a class that is out of range; names
                the file.
        """
        height, width = self.image_size
        format = ImageFormat(
            channels=self.channels,
            height=height,
            width=width,
            mean=self._per_channel(self.mean),
            std=self._per_channel(self.std),
        )
        train, test, notes = self.split()
        for pair in (*train, *test):
            _check_sizes(pair)
        names = self.class_names or self.names(*self.values())
        check_distinct(**{"data.class_names": names})
        sets = [
            MaskedImages(config=self, format=format, pairs=tuple(pairs), classes=len(names))
            for pairs in (train, test)
        ]
        return ImageSplits(
            train=sets[0],
            test=sets[1],
            class_names=names,
            format=format,
            target=Target(kind="class_map"),
            notes=tuple(notes),
        )

    def values(self) -> tuple[set[int], set[int]]:
        """Return the values of the training and of the test masks, without `ignore_index`.

        Raises:
            ValueError: If a mask cannot be read, or has a value that is not a class.
        """
        train, test, _ = self.split()
        training, testing = (mask_values(pairs, self.ignore_index) for pairs in (train, test))
        return training, testing

    def names(self, training: set[int], testing: set[int]) -> tuple[str, ...]:
        """Name the classes by their numbers, from the values of the training and the test masks.

        Raises:
            ValueError: If there is only one class, the classes have gaps, or a test mask has a
                larger class than all training masks.
        """
        if self.binary:
            return ("0", "1")
        tests = {f"a test mask in {self.path}": testing}
        hint = ", and if all values above 0 are one class, pass --data.binary"
        count = count_classes(f"the masks in {self.path}", training, tests, hint=hint)
        return tuple(map(str, range(count)))

    def split(self) -> tuple[list[Pair], list[Pair], list[str]]:
        """Return the files of the training and the test images, and notes on the split."""
        return split_pairs(
            self.path, _stem, ".png", fraction=self.test_fraction, seed=self.split_seed
        )

    def _per_channel(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        return numbers * self.channels if len(numbers) == 1 else numbers


@dataclass(frozen=True, kw_only=True)
class MaskedImages(ImageSet):
    """Images of one split with their masks: a batch is (pixels as bytes, classes [B, H, W]).

    Attributes:
        config: How masks are read.
        format: Size and channels of the images.
        pairs: The files.
        classes: Number of classes.
    """

    config: MaskFolderConfig
    format: ImageFormat
    pairs: tuple[Pair, ...]
    classes: int
    decodes = True

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        """Read a batch.

        Raises:
            ValueError: If a file cannot be read, sizes differ, or a class is out of range.
        """
        images, masks = zip(
            *(self._read(self.pairs[each.source]) for each in examples), strict=True
        )
        return LoadedBatch((torch.stack(images), torch.stack(masks)))

    def _read(self, pair: Pair) -> tuple[UInt8[Tensor, "C H W"], Int[Tensor, "H W"]]:
        try:
            image = self.format.decode(pair.image)
        except (OSError, ValueError) as error:
            raise ValueError(f"{pair.image} {error}") from error
        mask = read_mask(pair.mask)
        resized = Image.fromarray(mask).resize(
            (self.format.width, self.format.height), Image.Resampling.NEAREST
        )
        classes = torch.from_numpy(np.asarray(resized).astype(np.int64))
        is_ignored = torch.zeros_like(classes, dtype=torch.bool)
        if self.config.ignore_index is not None:
            is_ignored = classes == self.config.ignore_index
        if self.config.binary:
            classes = classes.clamp(max=1)
        wrong = ~is_ignored & ((classes < 0) | (classes >= self.classes))
        if bool(wrong.any()):
            raise ValueError(
                f"{pair.mask} has class {int(classes[wrong][0])}, expected 0 to {self.classes - 1}"
            )
        return to_bytes(image), classes.masked_fill(is_ignored, IGNORED)


def _check_sizes(pair: Pair) -> None:
    """Raise ValueError unless an image and its mask can be opened and have the same size."""
    try:
        header = read_header(pair.image)
    except (OSError, ValueError) as error:
        raise ValueError(f"{pair.image} {error}") from error
    with _open_mask(pair.mask) as mask:
        if mask.size != (header.width, header.height):
            width, height = mask.size
            raise ValueError(
                f"{pair.mask} has {width} x {height} pixels, but {pair.image} has {header.width} x "
                f"{header.height}"
            )


def _stem(name: str) -> str | None:
    return Path(name).stem if is_image_name(name) else None


def read_mask(file: Path) -> Int[np.ndarray, "height width"]:
    """Read the values of a mask, as 32-bit integers.

    Raises:
        ValueError: If it is not an image with one exact number per pixel; names the file.
    """
    with _open_mask(file) as image:
        try:
            return np.asarray(image).astype(np.int32)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


@contextmanager
def _open_mask(file: Path) -> Iterator[Image.Image]:
    try:
        image = open_image(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    with image:
        if image.format in LOSSY:
            raise ValueError(
                f"{file} is a {image.format} file, whose compression changes pixel values, "
                "expected PNG"
            )
        if image.mode not in GRAY:
            raise ValueError(
                f"{file} has mode {image.mode}, expected one class index per pixel, as grayscale "
                "or palette indices"
            )
        yield image


def mask_values(pairs: Iterable[Pair], ignore_index: int | None) -> set[int]:
    """Return the values that occur in masks, except `ignore_index`.

    Raises:
        ValueError: If a mask cannot be read, or has values that are too large for classes.
    """
    values: set[int] = set()
    for pair in pairs:
        found = set(np.unique(read_mask(pair.mask)).tolist()) - {ignore_index}
        if wrong := [value for value in found if not 0 <= value < MAX_CLASSES]:
            raise ValueError(
                f"{pair.mask} has a pixel with value {wrong[0]}, expected classes from 0 to "
                f"{MAX_CLASSES - 1}"
            )
        values |= found
    return values
