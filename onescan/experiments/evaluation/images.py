"""Sources of images: datasets, folders, .npz files, and denoisers that generate them."""

import copy
import json
import math
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray

from onescan import configs, zoo
from onescan.checkpoint.run_folder import locate
from onescan.checks import in_a_line
from onescan.experiments.data import DataConfig, DataSet, Example, ImageDataset, derive_seed
from onescan.experiments.data.image_dataset import find_classes, image_table
from onescan.experiments.data.images import ImageReader
from onescan.experiments.data.sources import find_source, images_below, walk
from onescan.experiments.evaluation.config import SamplesConfig, short_name
from onescan.experiments.evaluation.features import FeatureExtractor, file_key
from onescan.experiments.tasks import ImageGenerationConfig
from onescan.experiments.training.folder import read_manifest
from onescan.experiments.training.sampling import INDEX, default_sampler, load_pipeline, sample_seed
from onescan.inference.loading import is_run
from onescan.inputs import ImageFormat
from onescan.inputs.image_files import Box, Pixels, is_image_name, read_header
from onescan.inputs.images import to_bytes, unit_pixels
from onescan.shapes import Images, Labels

if TYPE_CHECKING:
    from onescan.integrations.diffusers import DenoiserPipeline

NPZ = ".npz"
READERS = 8  # threads
SEEDS = 2**64
NPZ_ERRORS = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)  # if damaged


class Source(ABC):
    """Images that can be read by index."""

    name: str
    cache_key: str
    """Identifies the images."""
    size: tuple[int, int]
    """Height and width."""
    class_names: tuple[str, ...] = ()
    """Classes of the labels; empty if there are no labels, or their names are unknown."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        """Return images, pixels from 0 to 1 in 1 or 3 channels, and their classes.

        The same indices give the same images. Unreadable images may be left out.
        """


class DataSource(Source):
    """Images of a dataset, in stored order."""

    def __init__(
        self,
        data: DataSet,
        *,
        name: str,
        cache_key: str,
        size: tuple[int, int],
        class_names: tuple[str, ...],
    ) -> None:
        self.data, self.name, self.cache_key = data, name, cache_key
        self.size, self.class_names = size, class_names
        self._next: tuple[int, Iterator[Example]] = (-1, iter(()))

    def __len__(self) -> int:
        return len(self.data)

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        position, examples_left = self._next
        if position != start:  # streams have no random access
            examples_left = (
                example for example, _ in islice(self.data.examples(seed=None), start, None)
            )
        examples = list(islice(examples_left, stop - start))
        self._next = (stop, examples_left)
        if not examples:
            raise ValueError(f"{self.name} ends after {start} images, expected {len(self)}")
        size = -(-len(examples) // READERS) if self.data.decodes else len(examples)
        parts = [examples[i : i + size] for i in range(0, len(examples), size)]
        with ThreadPoolExecutor(READERS) as readers:
            batches = [loaded.batch for loaded in readers.map(self.data.read, parts)]
        pixels = torch.cat([unit_pixels(batch[0]) for batch in batches])
        return pixels, torch.cat([batch[1] for batch in batches])


class FolderSource(Source):
    """Image files in a folder and its subfolders, sorted by name.

    Without a size, all images must have the same one. With a size, they are cropped to its aspect
    ratio at the center and resized.
    """

    def __init__(self, folder: Path, size: tuple[int, int] | None = None) -> None:
        self.files = [Path(file) for file in images_below(str(folder))]
        if not self.files:
            raise ValueError(f"{folder} contains no images")
        self.name, self.cache_key = str(folder), cache_key(files_state(folder), size)
        self.size, self.is_resized = size or _size_of(self.files[0]), size is not None
        self.format = pixel_format(self.size)

    def __len__(self) -> int:
        return len(self.files)

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        with ThreadPoolExecutor(READERS) as readers:
            return torch.stack(list(readers.map(self._read, self.files[start:stop]))), None

    def _read(self, file: Path) -> Pixels:
        size = self.size

        def crop(width: int, height: int) -> Box:
            nonlocal size
            size = height, width
            return self.format.box(width, height)

        try:
            pixels = unit_pixels(self.format.decode(file, crop))
        except ValueError as error:
            raise ValueError(f"{file} {error}") from error
        if not self.is_resized and size != self.size:
            raise ValueError(f"{file} has size {size}, but {self.files[0]} has {self.size}")
        return pixels


class NpzSource(Source):
    """Images of an .npz file: bytes `arr_0` `[images, height, width, channels]`, read in parts.

    `arr_1`, if it exists, contains the labels.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.name, self.cache_key = file, file.name, cache_key(files_state(file))
        self.content, self.shape = _open_array(file)
        self.start, self.size = self.content.tell(), (self.shape[1], self.shape[2])
        labels = read_npz(file, "arr_1").get("arr_1")
        if labels is not None and (labels.shape != self.shape[:1] or labels.dtype.kind not in "iu"):
            raise ValueError(f"{file} holds arr_1 {labels.shape}, expected one label per image")
        self.labels = None if labels is None else torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        count, image = min(stop, len(self)) - start, math.prod(self.shape[1:])
        try:
            if self.content.tell() != self.start + start * image:
                self.content.seek(self.start + start * image)
            part = self.content.read(count * image)
        except NPZ_ERRORS as error:
            raise _damaged_npz(self.file, error) from error
        if len(part) < count * image:
            raise _damaged_npz(self.file, "arr_0 ends early")
        flat = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        pixels = rearrange(flat.view(count, *self.shape[1:]), "b h w c -> b c h w")
        return unit_pixels(pixels), None if self.labels is None else self.labels[start:stop]


class DenoiserSource(Source):
    """Images that a denoiser generates; seed and class of each depend only on its index."""

    sampler: str
    data: DataConfig | None = None
    """Data that the denoiser was trained on, if it is a run."""
    guidance_scale: float | None = None
    frequencies: Sequence[int] = ()
    """Relative frequencies of the classes; equal if empty."""

    def __init__(self, path: Path, config: SamplesConfig, device: torch.device) -> None:
        defaults = default_sampler(path)
        self.pipeline = load_pipeline(path, sampler=config.sampler).to(device)
        try:
            height, width = self.pipeline.image_size
        except ValueError:
            axes = len(self.pipeline.image_size)
            raise ValueError(f"'{path}' generates grids of {axes} axes, expected images") from None
        self.name, self.size = short_name(path), (height, width)
        self.class_names = _class_names(self.pipeline)
        self.count, self.seed, self.steps = (
            config.samples,
            config.seed,
            config.steps or defaults.steps,
        )
        scales: tuple[float | None, ...] = tuple(sorted(config.guidance_scale))
        scales = scales or (defaults.guidance_scale,)
        is_unconditional = not self.class_names and set(scales) == {1.0}
        self.guidance_scales = (None,) if is_unconditional else scales
        if is_run(path):
            self._describe_run(path, config)
        else:
            self.sampler = config.sampler or type(self.pipeline.scheduler).__name__
            files = [file for file in path.rglob("*") if file.suffix in (".safetensors", ".json")]
            named = [[str(file.relative_to(path)), file_key(file, "")] for file in sorted(files)]
            self.cache_key = cache_key(named)

    def _describe_run(self, path: Path, config: SamplesConfig) -> None:
        folder, weights = locate(path)
        manifest = read_manifest(folder)
        run, task = manifest.run, manifest.run.task
        assert isinstance(task, ImageGenerationConfig)
        self.sampler, self.data = config.sampler or task.sampler.resolved(task.noise), run.data
        settings = [configs.to_dict(part) for part in (run.model, manifest.format, task.noise)]
        self.cache_key = file_key(weights, settings)

    def at(self, guidance_scale: float | None, frequencies: Sequence[int]) -> "DenoiserSource":
        """Return the same source with another guidance scale and distribution of classes."""
        source = copy.copy(self)
        source.guidance_scale, source.frequencies = guidance_scale, frequencies
        return source

    def __len__(self) -> int:
        return self.count or 0

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        labels = [self._label(i) for i in range(start, stop)] if self.class_names else None
        seeds = [sample_seed(self.seed, i) for i in range(start, stop)]
        images = self.pipeline(
            class_labels=labels,
            num_inference_steps=self.steps,
            guidance_scale=1.0 if self.guidance_scale is None else self.guidance_scale,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            batch_size=stop - start,
            output_type="pt",
            return_dict=False,
            callback=lambda step: None,  # instead of a progress bar for each batch
        )[0]
        return images, None if labels is None else torch.tensor(labels)

    def _label(self, i: int) -> int:
        if not self.frequencies:
            return i % len(self.class_names)
        ends = list(accumulate(self.frequencies))
        draw = derive_seed(self.seed, "label", i) / SEEDS
        return next(label for label, end in enumerate(ends) if draw * ends[-1] < end)


def open_samples(
    path: str | Path, config: SamplesConfig, features: FeatureExtractor, device: torch.device
) -> Source:
    """Open images to evaluate.

    Args:
        path: A run's folder, or best.safetensors in it; "zoo/NAME"; a folder that
            `DenoiserPipeline`'s save_pretrained wrote; an .npz file; or a folder of images.
        config: How images are generated.
        features: Labels of an .npz file are assumed to be of its classes.
        device: Device to generate on.

    Raises:
        FileNotFoundError: If the path does not exist.
        ValueError: If it is none of these, or the images already exist and `config` sets how to
            generate them.
    """
    path = zoo.resolve(Path(path))
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix != NPZ and (is_run(path) or (path / INDEX).is_file()):
        return DenoiserSource(path, config, device)
    for field in ("guidance_scale", "sampler", "steps", "class_distribution", "seed"):
        if (value := getattr(config, field)) != getattr(SamplesConfig(), field):
            raise ValueError(f"{field} is {value!r}, but the images of {path} already exist")
    if path.is_dir():
        return FolderSource(path)
    source = NpzSource(path)
    if source.labels is not None and source.labels.numel():
        lowest, highest = source.labels.aminmax()
        if lowest >= 0 and highest < len(features.class_names):
            source.class_names = features.class_names
    return source


def open_dataset(path: str, size: tuple[int, int]) -> Source:
    """Open all images of a dataset: a folder, with or without class folders, or parquet files.

    If there are several splits, the one named train is used, or else the first. Images are cropped
    at the center and resized to `size`, as is usual for reference statistics.

    Raises:
        ValueError: If the data does not exist or cannot be read.
    """
    folder = Path(path)
    if folder.is_dir() and any(is_image_name(f.name) for f in folder.iterdir() if f.is_file()):
        return FolderSource(folder, size)
    source = find_source(path, None)
    split = "train" if "train" in source.splits else source.splits[0]
    rows = source.open({"train": split}, streaming=False)["train"]
    table = image_table(rows)
    raw = table.labels()
    classes = find_classes(path, table.label_type, (), raw)
    data = ImageDataset(
        table=table,
        labels=classes.encode(raw, split),
        indices=torch.arange(len(raw)),
        split=split,
        reader=ImageReader(format=pixel_format(size), crop=None, on_error="raise"),
    )
    return DataSource(
        data,
        name=path if len(source.splits) == 1 else f"{path}, {split}",
        cache_key=cache_key(files_state(folder) if folder.exists() else path, split, size),
        size=size,
        class_names=classes.names,
    )


def read_npz(file: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read those of the named arrays that exist; nothing is unpickled.

    Raises:
        ValueError: If it is damaged or not an .npz file.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names if name in arrays}
    except (AttributeError, TypeError, *NPZ_ERRORS) as error:  # if it is not an archive
        raise _damaged_npz(file, error) from error


def npz_names(file: Path) -> set[str]:
    """Return the names of the arrays in an .npz file.

    Raises:
        ValueError: If it is damaged or not an .npz file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except NPZ_ERRORS as error:
        raise _damaged_npz(file, error) from error


def round_to_bytes(images: Images) -> Images:
    """Clip pixels to 0 to 1 and round them to 256 levels, as image files do."""
    return unit_pixels(to_bytes(images.float().clamp(0, 1)))


def pixel_format(size: tuple[int, int]) -> ImageFormat:
    """Return the format of RGB images cropped at the center, with pixels from 0 to 1."""
    return ImageFormat(
        channels=3, height=size[0], width=size[1], mean=(0.0,) * 3, std=(1.0,) * 3, crop=1.0
    )


def files_state(path: Path) -> list[Any]:
    """Return path, size and modification time of a file, or of all files in a folder."""
    files = [Path(file) for file in walk(str(path))] if path.is_dir() else [path]
    states = [(str(file), file.stat()) for file in files]
    return [str(path.resolve()), *((name, s.st_size, s.st_mtime_ns) for name, s in states)]


def cache_key(*parts: Any) -> str:
    """Hash values of JSON types.

    >>> cache_key(1, "a") == cache_key(1, "a") != cache_key(1, "b")
    True
    """
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _class_names(pipeline: "DenoiserPipeline") -> tuple[str, ...]:
    """Return the names of the classes that can be requested; a number if it has no name."""
    count = pipeline.transformer.network.config.num_classes
    return tuple(pipeline.names.get(label, str(label)) for label in range(count))


def _size_of(file: Path) -> tuple[int, int]:
    """Return height and width of the upright image."""
    try:
        header = read_header(file)
    except ValueError as error:
        raise ValueError(f"{file} {error}") from error
    return header.height, header.width


def _open_array(file: Path) -> tuple[zipfile.ZipExtFile, tuple[int, int, int, int]]:
    """Open `arr_0` after its header, and return it with its shape."""
    if "arr_0" not in npz_names(file):
        raise ValueError(f"{file} has no arr_0, expected images [images, height, width, channels]")
    try:
        content = zipfile.ZipFile(file).open("arr_0.npy")  # noqa: SIM115
        assert isinstance(content, zipfile.ZipExtFile)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, is_fortran, dtype = readers[np.lib.format.read_magic(content)](content)
    except (KeyError, *NPZ_ERRORS) as error:
        raise _damaged_npz(file, error) from error
    match shape:
        case (count, height, width, 1 | 3 as channels) if dtype == np.uint8 and not is_fortran:
            return content, (count, height, width, channels)
    raise ValueError(
        f"{file} holds arr_0 {shape} of {dtype}, expected bytes of shape [images, height, width, 3 "
        "or 1]"
    )


def _damaged_npz(file: Path, cause: Exception | str) -> ValueError:
    reason = in_a_line(cause) if isinstance(cause, Exception) else cause
    return ValueError(f"{file} is damaged or not an .npz file: {reason}")
