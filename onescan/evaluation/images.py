"""Generated and real images, read by their places."""

import json
import math
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image

from onescan import configs
from onescan.checkpoint.weights import BEST, WEIGHTS
from onescan.checks import in_a_line
from onescan.data import DataConfig, DataSet, Example, ImageDataset, ImageFormat, derive_seed
from onescan.data.crop import centre_box
from onescan.data.decode import Pixels, decode, open_image
from onescan.data.image_columns import ColumnNames, find_classes, image_table
from onescan.data.image_folder import walk
from onescan.data.image_reader import ImageReader
from onescan.data.image_source import find_source
from onescan.data.images import unit_pixels
from onescan.evaluation.config import SamplesConfig, short_name
from onescan.evaluation.features import Features, fingerprint
from onescan.shapes import Images, Labels
from onescan.tasks import ImageGenerationConfig
from onescan.training.folder import Manifest, read_manifest
from onescan.training.loading import is_run
from onescan.training.sampling import INDEX, default_sampler, load_pipeline, sample_seed

if TYPE_CHECKING:
    from onescan.integrations.diffusers import DenoiserPipeline


def stamp(path: Path) -> str:
    """Sum up where a file, or all below a folder, lies, its size, and when it was changed."""
    files = (Path(file) for file in walk(str(path))) if path.is_dir() else [path]
    return digest([str(path.resolve()), *_states(files)])


def digest(parts: Any) -> str:
    """Sum up JSON types.

    >>> digest([1, "a"]) == digest([1, "a"]) != digest([1, "b"])
    True
    """
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    states = ((str(file), file.stat()) for file in files)
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


STEPS = 255  # from black to white


class Source(ABC):
    """Images that can be asked for by their places."""

    name: str
    """For people."""
    stamp: str
    """What other images have another of."""
    size: tuple[int, int]
    """Height and width of the images."""
    class_names: tuple[str, ...] = ()
    """What labels stand for; none where there are no labels, or they have no names."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the images that there are, or can be."""

    @abstractmethod
    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        """Images from 0 to 1, of 3 channels or 1, and the classes they are of or were asked for.

        The same places give the same images. There may be fewer where some cannot be read.
        """


def in_steps(images: Images) -> Images:
    """Round to the 256 steps that files have, so that an image and its file are one."""
    return (images.float().clamp(0, 1) * STEPS).round() / STEPS


READERS = 8  # threads


class DataSource(Source):
    """The images of a data set, in its stored order."""

    def __init__(
        self,
        data: DataSet,
        *,
        name: str,
        stamp: str,
        size: tuple[int, int],
        class_names: tuple[str, ...],
    ) -> None:
        self.data, self.name, self.stamp = data, name, stamp
        self.size, self.class_names = size, class_names
        self._next: tuple[int, Iterator[Example]] = (-1, iter(()))

    def __len__(self) -> int:
        return len(self.data)

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        place, rest = self._next
        if place != start:  # a stream cannot be looked up
            rest = (example for example, _ in islice(self.data.examples(seed=None), start, None))
        examples = list(islice(rest, stop - start))
        self._next = (stop, rest)
        if not examples:
            raise ValueError(f"{self.name} ends after {start} images, expected {len(self)}")
        size = -(-len(examples) // READERS) if self.data.decodes else len(examples)
        pieces = [examples[at : at + size] for at in range(0, len(examples), max(size, 1))]
        with ThreadPoolExecutor(READERS) as readers:
            batches = [loaded.batch for loaded in readers.map(self.data.read, pieces)]
        pixels = torch.cat([unit_pixels(batch[0]) for batch in batches])
        return pixels, torch.cat([batch[1] for batch in batches])


class FolderSource(Source):
    """Image files of a folder and those below it, in the order of their names."""

    def __init__(self, folder: Path, size: tuple[int, int] | None = None) -> None:
        kinds = tuple(Image.registered_extensions())
        self.files = [Path(file) for file in walk(str(folder)) if file.lower().endswith(kinds)]
        if not self.files:
            raise ValueError(f"{folder} holds no images")
        self.name, self.stamp = str(folder), digest([stamp(folder), size])
        self.size = size or _size(self.files[0])
        self.is_exact = size is None

    def __len__(self) -> int:
        return len(self.files)

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        with ThreadPoolExecutor(READERS) as readers:
            return torch.stack(list(readers.map(self._read, self.files[start:stop]))), None

    def _read(self, file: Path) -> Pixels:
        """An image as it is if no size was asked for; else its middle, in that size."""
        height, width = self.size
        if self.is_exact and (size := _size(file)) != self.size:
            raise ValueError(
                f"{file} has {size[0]} x {size[1]} pixels, and {self.files[0]} has "
                f"{height} x {width}, expected images of one size"
            )
        crop = partial(centre_box, aspect=width / height, part=1.0)
        try:
            return unit_pixels(decode(file, channels=3, height=height, width=width, crop=crop))
        except ValueError as error:
            raise ValueError(f"{file} {error}") from error


def data_at(path: str, size: tuple[int, int]) -> Source:
    """Open all images at a path: class folders, parquet files, or images in no folder of a class.

    Of data with splits it is what is called train, or else the first. The middle of an image is
    brought to `size`, as is the custom for reference statistics.

    Raises:
        ValueError: nothing is there that could be read.
    """
    if Path(path).is_dir() and not _has_classes(Path(path)):
        return FolderSource(Path(path), size)
    source = find_source(path, None)
    split = "train" if "train" in source.splits else source.splits[0]
    opened = source.open({"train": split}, streaming=False)["train"]
    table = image_table(opened, ColumnNames(None, None))
    raw = table.labels()
    classes = find_classes(path, table.label_type, (), raw)
    middle = ImageFormat(
        channels=3, height=size[0], width=size[1], mean=(0.0,) * 3, std=(1.0,) * 3, crop=1.0
    )
    data = ImageDataset(
        table=table,
        labels=classes.encode(raw, split),
        places=torch.arange(len(raw)),
        split=split,
        reader=ImageReader(format=middle, crop=None, on_error="raise"),
    )
    where = stamp(Path(path)) if Path(path).exists() else path
    name = path if len(source.splits) == 1 else f"{path}, {split}"
    return DataSource(
        data,
        name=name,
        stamp=digest([where, split, size]),
        size=size,
        class_names=classes.names,
    )


def _has_classes(folder: Path) -> bool:
    """Whether images are not right in the folder, or there are parquet files."""
    kinds = tuple(Image.registered_extensions())
    return not any(
        each.is_file() and each.name.lower().endswith(kinds) for each in folder.iterdir()
    )


def _size(file: Path) -> tuple[int, int]:
    try:
        with open_image(file) as image:
            return image.height, image.width
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as an image: {in_a_line(error)}") from error


DAMAGE = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)  # what is then raised


class NpzSource(Source):
    """Images as evaluators read them: arr_0 of bytes, `[images, height, width, channels]`.

    Labels are arr_1's, if that is there. The images are read piece by piece.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.name, self.stamp = file, file.name, stamp(file)
        self.content, self.shape = _open_array(file)
        self.begin, self.size = self.content.tell(), (self.shape[1], self.shape[2])
        labels = read_npz(file, "arr_1").get("arr_1")
        if labels is not None and (labels.shape != self.shape[:1] or labels.dtype.kind not in "iu"):
            raise ValueError(f"{file} holds arr_1 {labels.shape}, expected a label for each image")
        self.labels = None if labels is None else torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        count, each = min(stop, len(self)) - start, math.prod(self.shape[1:])
        try:
            if self.content.tell() != self.begin + start * each:
                self.content.seek(self.begin + start * each)
            piece = self.content.read(count * each)
        except DAMAGE as error:
            raise _damaged(self.file, error) from error
        if len(piece) < count * each:
            raise _damaged(self.file, "arr_0 ends early")
        flat = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        pixels = rearrange(flat.view(count, *self.shape[1:]), "b h w c -> b c h w")
        return unit_pixels(pixels), None if self.labels is None else self.labels[start:stop]


def read_npz(file: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read some arrays of a file, those of them that are there; nothing is unpickled.

    Raises:
        ValueError: it is no npz file, or is damaged.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except (AttributeError, TypeError, *DAMAGE) as error:  # of what is no archive
        raise _damaged(file, error) from error


def npz_names(file: Path) -> list[str]:
    """List the arrays of a file.

    Raises:
        ValueError: it is no npz file, or is damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except DAMAGE as error:
        raise _damaged(file, error) from error


def _open_array(file: Path) -> tuple[zipfile.ZipExtFile, tuple[int, int, int, int]]:
    """The bytes of arr_0, and its shape."""
    if "arr_0" not in npz_names(file):
        raise ValueError(f"{file} has no arr_0, expected images [images, height, width, channels]")
    try:
        content = zipfile.ZipFile(file).open("arr_0.npy")  # noqa: SIM115
        assert isinstance(content, zipfile.ZipExtFile)
        version = np.lib.format.read_magic(content)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, by_columns, dtype = readers[version](content)
    except (KeyError, *DAMAGE) as error:
        raise _damaged(file, error) from error
    match shape:
        case (count, height, width, 1 | 3 as channels) if dtype == np.uint8 and not by_columns:
            return content, (count, height, width, channels)
    raise ValueError(
        f"{file} holds arr_0 {shape} of {dtype}, expected bytes of [images, height, width, 3 or 1]"
    )


def _damaged(file: Path, why: Exception | str) -> ValueError:
    what = in_a_line(why) if isinstance(why, Exception) else why
    return ValueError(f"{file} is no npz file, or is damaged: {what}")


NPZ = ".npz"
CHANCES = 2**64  # seeds that there are


class Samples(ABC):
    """Images to judge, of which there may be several sets: one at each guidance scale."""

    name: str
    stamp: str
    size: tuple[int, int]
    class_names: tuple[str, ...] = ()
    guidances: tuple[float | None, ...] = (None,)
    sampler: str | None = None
    steps: int | None = None
    data: DataConfig | None = None
    """What a run was trained on."""
    is_made: bool = False
    """Whether a model makes them, from a seed."""

    @abstractmethod
    def at(self, guidance: float | None, frequencies: Sequence[int] | None) -> Source:
        """One set: the classes asked for come by turns, or as frequent as these numbers say."""


def open_samples(
    path: str | Path, asked: SamplesConfig, features: Features, device: torch.device
) -> Samples:
    """Open whatever can be judged.

    Args:
        path: a run's folder, or best.safetensors in it; a folder that `DenoiserPipeline`'s
            save_pretrained wrote; a .npz file; or a folder of images.
        asked: how images are made.
        features: whose classes labels in a .npz file are of.
        device: where images are made.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there is none of these; or images are there already, and something is
            asked for that would make others.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is nothing at {path}")
    if path.suffix != NPZ and (is_run(path) or (path / INDEX).is_file()):
        return DenoiserSamples(path, asked, device)
    usual = SamplesConfig()
    for field in ("guidance_scale", "sampler", "steps", "class_distribution", "seed"):
        if (value := getattr(asked, field)) != getattr(usual, field):
            raise ValueError(f"{field} is {value!r}, but the images of {path} are there already")
    if path.is_dir():
        return FileSamples(FolderSource(path))
    source = NpzSource(path)
    if source.labels is not None and source.labels.numel():
        least, most = source.labels.aminmax()
        if least >= 0 and most < len(features.class_names):
            source.class_names = features.class_names
    return FileSamples(source)


class FileSamples(Samples):
    """Images that were made before."""

    def __init__(self, source: Source) -> None:
        self.source, self.name, self.stamp = source, source.name, source.stamp
        self.size, self.class_names = source.size, source.class_names

    def at(self, guidance: float | None, frequencies: Sequence[int] | None) -> Source:
        del guidance, frequencies
        return self.source


class DenoiserSamples(Samples):
    """Images that a denoiser makes, in pixels or through its VAE."""

    is_made = True

    def __init__(self, path: Path, asked: SamplesConfig, device: torch.device) -> None:
        manifest = read_manifest(path if path.is_dir() else path.parent) if is_run(path) else None
        usual = default_sampler(path)
        self.pipeline = load_pipeline(path, sampler=asked.sampler).to(device)
        self.device, self.asked = device, asked
        self.name, self.size = short_name(path), self.pipeline.image_size
        self.class_names = _class_names(self.pipeline)
        self.guidances = tuple(sorted(asked.guidance_scale)) or (usual.guidance_scale,)
        if not self.class_names and set(self.guidances) == {1.0}:
            self.guidances = (None,)  # no class can be asked for
        self.sampler = asked.sampler or _usual_sampler(self.pipeline, manifest)
        self.steps: int = asked.steps or usual.steps
        self.data = manifest.run.data if manifest else None
        self.stamp = _model_key(path, manifest)

    def at(self, guidance: float | None, frequencies: Sequence[int] | None) -> Source:
        return _Drawn(self, 1.0 if guidance is None else guidance, frequencies)


class _Drawn(Source):
    """The images that come of one guidance scale: of image i, seed and class come of i alone."""

    def __init__(
        self, samples: DenoiserSamples, guidance: float, frequencies: Sequence[int] | None
    ) -> None:
        self.samples, self.guidance = samples, guidance
        self.name, self.stamp = samples.name, samples.stamp
        self.size, self.class_names = samples.size, samples.class_names
        self.ends = list(accumulate(frequencies)) if frequencies else None

    def __len__(self) -> int:
        return self.samples.asked.samples or 0

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        samples, seed = self.samples, self.samples.asked.seed
        labels = [self._label(i) for i in range(start, stop)] if self.class_names else None
        chance = [torch.Generator().manual_seed(sample_seed(seed, i)) for i in range(start, stop)]
        made = samples.pipeline(
            class_labels=labels,
            num_inference_steps=samples.steps,
            guidance_scale=self.guidance,
            generator=chance,
            batch_size=stop - start,
            output_type="pt",
            return_dict=False,
            callback=_unseen,
        )[0]
        return made, None if labels is None else torch.tensor(labels)

    def _label(self, i: int) -> int:
        if self.ends is None:
            return i % len(self.class_names)
        chance = derive_seed(self.samples.asked.seed, "label", i) / CHANCES
        return next(k for k, end in enumerate(self.ends) if chance * self.ends[-1] < end)


def _usual_sampler(pipeline: "DenoiserPipeline", manifest: Manifest | None) -> str:
    if manifest is None:
        return type(pipeline.scheduler).__name__
    assert isinstance(manifest.run.task, ImageGenerationConfig)
    return manifest.run.task.sampler.resolved(manifest.run.task.noise)


def _class_names(pipeline: "DenoiserPipeline") -> tuple[str, ...]:
    """A name for each class that the model can be asked for; its number where it has none."""
    count, names = pipeline.transformer.network.config.num_classes, pipeline.names
    return tuple(names.get(label, str(label)) for label in range(count))


def _model_key(path: Path, manifest: Manifest | None) -> str:
    """What another model has another of, wherever it lies."""
    if manifest is None:
        files = sorted(file for file in path.rglob("*") if file.suffix in (".safetensors", ".json"))
        return digest([[str(file.relative_to(path)), fingerprint(file, "")] for file in files])
    assert isinstance(manifest.run.task, ImageGenerationConfig)
    parts = (manifest.run.model, manifest.format, manifest.run.task.noise)
    settings = json.dumps([configs.to_dict(part) for part in parts])
    folder, weights = (path, WEIGHTS) if path.is_dir() else (path.parent, path.name)
    return fingerprint(folder / (weights if weights == BEST else WEIGHTS), settings)


def _unseen(step: int) -> None:
    """Stand in for a bar over the steps of a batch."""
    del step
