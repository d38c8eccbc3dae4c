"""Scores of generated images: Fréchet distance, Inception Score, precision and recall.

Images are generated or read in batches, and only sums and a fixed number of features are kept. The
sums are saved every minute, so an interrupted evaluation resumes. Those of real images are cached.
"""

import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from onescan import __version__, configs
from onescan.cache import cache_root
from onescan.checkpoint.files import damaged, parse_json, remove, write_atomically
from onescan.checkpoint.weights import read_weights
from onescan.experiments.data import DataConfig, ImageSplits
from onescan.experiments.data.image_grid import image_grid
from onescan.experiments.evaluation.config import SamplesConfig
from onescan.experiments.evaluation.features import FeatureExtractor, open_features
from onescan.experiments.evaluation.image_scores import (
    NEIGHBORS,
    STATE,
    Accumulator,
    Features,
    precision_recall,
    remedy,
)
from onescan.experiments.evaluation.images import (
    NPZ,
    DataSource,
    DenoiserSource,
    NpzSource,
    Source,
    cache_key,
    files_state,
    npz_names,
    open_dataset,
    open_samples,
    read_npz,
)
from onescan.experiments.locks import locked
from onescan.experiments.tasks.feature_distance import Gaussian, frechet_distance
from onescan.experiments.training.distributed import Ranks, choose_device
from onescan.experiments.training.folder import write_json
from onescan.inputs.images import unit_pixels

FID_50K = 50_000
MOST_CONFUSED = 20  # classes of a confusion matrix in the results
SETTINGS, GRID = "plan.json", "samples.png"
CACHE_VERSION = 3
COLUMNS = 10  # of the grid

log = logging.getLogger("onescan")


@dataclass(frozen=True, kw_only=True)
class GenerationScore:
    """Scores of images generated with one guidance scale."""

    guidance: float | None
    """None if the images already existed or the model is unconditional."""
    distance: float
    """Fréchet distance to the real images; see `GenerationScores.distance_name`."""
    spatial_distance: float | None
    """Fréchet distance of spatial features; None if there are none."""
    class_score: float | None
    """Inception Score formula; None if the extractor is not a classifier."""
    class_score_std: float | None
    """Standard deviation over ten splits of the images."""
    precision: float | None
    """None if the reference consists of statistics without images."""
    recall: float | None
    class_accuracy: float | None = None
    """Fraction of images classified as the requested class."""
    requested: tuple[int, ...] = ()
    """Number of images requested of each class, if a classifier of these classes evaluates them."""
    right: tuple[int, ...] = ()
    """How many of them are classified as that class."""
    confusion: tuple[tuple[int, ...], ...] = ()
    """Images by requested and predicted class, for at most 20 classes."""
    folder: str = ""
    """Subfolder of the results in which the sums and the first images are kept."""


@dataclass(frozen=True, kw_only=True)
class RealScore:
    """Scores of the real images, for comparison."""

    name: str
    count: int | None
    """None if unknown, as for statistics."""
    class_score: float | None
    class_accuracy: float | None
    """Fraction of images classified as their label."""


@dataclass(frozen=True, kw_only=True)
class GenerationScores:
    """Scores of generated images, over guidance scales."""

    name: str
    """Name of the model, file or folder."""
    samples: int
    """Number of images per guidance scale."""
    features: str
    """Name of the feature extractor."""
    is_inception: bool
    """Whether it is Inception-v3, so that distances may be called FID."""
    is_singular: bool
    """Whether a set had no more images than features."""
    real: RealScore
    sampler: str | None
    """None if the images already existed; so are `steps`, `labels` and `seed`."""
    steps: int | None
    labels: str | None
    """Distribution of the classes."""
    seed: int | None
    class_names: tuple[str, ...]
    onescan: str
    """Version."""
    scores: tuple[GenerationScore, ...]
    """By increasing guidance scale."""

    @property
    def distance_name(self) -> str:
        """Name of the distance: FID only in Inception-v3's features, FID-50K for 50,000 images."""
        if not self.is_inception:
            return f"Frechet distance in features of {self.features}"
        return "FID-50K" if self.samples == FID_50K else "FID"

    @property
    def short_names(self) -> dict[str, str]:
        """Column headings of tables, by field."""
        others = {"precision": "precision", "recall": "recall", "class_accuracy": "class accuracy"}
        if self.is_inception:
            names = {"distance": self.distance_name, "spatial_distance": "sFID"}
            return names | {"class_score": "Inception Score"} | others
        names = {"distance": "Frechet distance", "spatial_distance": "spatial distance"}
        return names | {"class_score": "class score"} | others


class Shown(NamedTuple):
    """Images to show.

    Attributes:
        images: Bytes.
        labels: Requested classes, or -1.
    """

    images: UInt8[Tensor, "B channels height width"]
    labels: Int64[Tensor, " B"]


def first_images(folder: Path) -> Shown | None:
    """Return the first images of an evaluation; None if it has not begun.

    Args:
        folder: Folder of a guidance scale.

    Raises:
        ValueError: If the state in the folder is damaged.
    """
    path = folder / STATE
    if not path.exists():
        return None
    tensors, _ = read_weights(path, remedy(folder))
    try:
        count = int(tensors["pooled.count"])
        return Shown(tensors["images"][:count], tensors["labels"][:count])
    except (KeyError, RuntimeError) as error:
        raise damaged(path, error, remedy(folder)) from error


def class_by_class(shown: Shown) -> Shown:
    """Sort images by class, keeping their order within each class."""
    order = shown.labels.argsort(stable=True)
    return Shown(shown.images[order], shown.labels[order])


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Statistics of real images."""

    pooled: Gaussian
    spatial: Gaussian | None
    rows: Features | None
    """Features of some images; None if there are only statistics."""
    frequencies: tuple[int, ...]
    """Number of images of each class; empty if unknown."""
    real: RealScore
    class_names: tuple[str, ...] = ()
    """Names of the classes; empty if unknown."""


def open_reference(
    config: SamplesConfig,
    data: DataConfig | None,
    features: FeatureExtractor,
    size: tuple[int, int],
    *,
    progress: bool = False,
) -> Reference:
    """Compute statistics of real images, or read them from the cache.

    Args:
        config: Which images, how many of their features to keep, and the batch size.
        data: Data of the run that generates images, for train and test; None if there is no run.
        features: Feature extractor.
        size: Height and width of the generated images.
        progress: Whether to show a progress bar on stderr.

    Raises:
        ValueError: If there are no such images, one cannot be read, or the statistics are of other
            features.
        OSError: If the cache cannot be written.
    """
    name, file = config.reference, Path(config.reference)
    if name in ("train", "test"):
        return _summarize(_split_of(name, data), features, config, progress)
    if file.suffix != NPZ:
        try:
            source = open_dataset(name, size)
        except ValueError as error:
            raise ValueError(f"reference is {name!r}, which cannot be read: {error}") from error
        return _summarize(source, features, config, progress)
    if not file.is_file():
        raise ValueError(f"reference is {name!r}, which does not exist")
    arrays = npz_names(file)
    has_images, has_statistics = "arr_0" in arrays, arrays >= {"mu", "sigma"}
    if not has_images and not has_statistics:
        raise ValueError(f"reference is {name!r}, which has neither arr_0 nor mu and sigma")
    if not has_statistics:
        return _summarize(NpzSource(file), features, config, progress)
    statistics = read_statistics(file, features, size)
    if not has_images:
        return statistics
    images = _summarize(NpzSource(file), features, config, progress)
    return dataclasses.replace(statistics, rows=images.rows)


def read_statistics(file: Path, features: FeatureExtractor, size: tuple[int, int]) -> Reference:
    """Read mu and sigma, and mu_s and sigma_s if they exist, as ADM's evaluator writes them.

    Raises:
        ValueError: If they are damaged, or of other features.
    """
    if not features.is_inception:
        raise ValueError(
            f"reference is '{file}', which holds statistics of Inception-v3, but features is "
            f"{features.name!r}; expected a file with arr_0 only, a folder or a dataset"
        )
    arrays, sizes = read_npz(file, "mu", "sigma", "mu_s", "sigma_s"), features.sizes(size)

    def gaussian(mean: str, covariance: str, count: int) -> Gaussian:
        try:
            mu = torch.from_numpy(arrays[mean]).double()
            sigma = torch.from_numpy(arrays[covariance]).double()
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"reference is '{file}', whose {mean} and {covariance} cannot be read"
            ) from error
        if mu.shape != (count,) or sigma.shape != (count, count):
            raise ValueError(
                f"reference is '{file}', whose {mean} is {tuple(mu.shape)} and {covariance} "
                f"{tuple(sigma.shape)}, expected the {count} features of {features.name!r}"
            )
        if not (mu.isfinite().all() and sigma.isfinite().all()):
            raise ValueError(f"reference is '{file}', whose {mean} or {covariance} is not finite")
        return Gaussian(mu, sigma, None)

    has_spatial = sizes.spatial and "mu_s" in arrays
    return Reference(
        pooled=gaussian("mu", "sigma", sizes.pooled),
        spatial=gaussian("mu_s", "sigma_s", sizes.spatial) if has_spatial else None,
        rows=None,
        frequencies=(),
        real=RealScore(name=file.name, count=None, class_score=None, class_accuracy=None),
    )


def _split_of(name: str, data: DataConfig | None) -> Source:
    """Return the training or test images of a run's data."""
    splits = data.build() if data is not None else None
    if not isinstance(splits, ImageSplits):
        reason = "there is no run" if data is None else f"the run's data are {type(data).__name__}"
        raise ValueError(
            f"reference is {name!r}, but {reason}, expected a folder, a dataset or an .npz file"
        )
    chosen = splits.train if name == "train" else splits.test
    path, kind = getattr(data, "path", None), type(data).__name__
    where = files_state(Path(path)) if isinstance(path, str) and Path(path).exists() else None
    return DataSource(
        chosen,
        name=f"{name}, {path if isinstance(path, str) else kind.removesuffix('Config')}",
        cache_key=cache_key(configs.to_dict(data), kind, name, len(chosen), where),
        size=(splits.format.height, splits.format.width),
        class_names=splits.class_names,
    )


def _summarize(
    source: Source, features: FeatureExtractor, config: SamplesConfig, progress: bool
) -> Reference:
    """Accumulate all images of a source, in the cache; a damaged entry is computed again."""
    total, rows = len(source), config.precision_recall_samples
    _check_count(config.reference, total)
    key = cache_key(CACHE_VERSION, source.cache_key, features.cache_key, total, min(rows, total))
    folder = reference_cache() / key
    with locked(folder):
        try:
            accumulator = Accumulator(source, total, features, rows, folder)
        except ValueError as error:
            log.warning("%s; it is computed again", error)
            remove(folder / STATE)
            accumulator = Accumulator(source, total, features, rows, folder)
        accumulator.read(
            source, batch_size=config.batch_size, name="real images", progress=progress
        )
    _check_count(config.reference, accumulator.count)  # without unreadable images
    has_classes = _has_same_classes(source, features)
    return Reference(
        pooled=accumulator.pooled.gaussian(),
        spatial=accumulator.spatial.gaussian() if accumulator.spatial else None,
        rows=accumulator.kept_features(),
        frequencies=tuple(accumulator.frequencies.tolist()),
        real=RealScore(
            name=source.name,
            count=accumulator.count,
            class_score=accumulator.inception.score().mean if accumulator.inception else None,
            class_accuracy=accumulator.label_accuracy() if has_classes else None,
        ),
        class_names=source.class_names,
    )


def _check_count(reference: str, count: int) -> None:
    """Raise ValueError if precision and recall cannot be computed from so few images."""
    if count <= NEIGHBORS:
        raise ValueError(
            f"reference is {reference!r}, which has {count} images, expected more than {NEIGHBORS}"
        )


def reference_cache() -> Path:
    """Return the folder of cached statistics: below $ONESCAN_CACHE, or the user's home."""
    return cache_root() / "generation"


def measure_generation(
    path: str | Path,
    config: SamplesConfig,
    out: Path,
    *,
    device: str = "auto",
    progress: bool = False,
) -> GenerationScores:
    """Generate or read images, and compare them with real ones, at each guidance scale.

    An interrupted evaluation resumes from its folder.

    Args:
        path: Model or images, as for `open_samples`.
        config: Number of images, how they are generated, and what they are compared with.
        out: Folder of the results.
        device: As for `choose_device`.
        progress: Whether to show progress bars on stderr.

    Raises:
        ValueError: If a setting is out of range, images cannot be read, or the folder holds images
            with other settings; names the setting.
        FileNotFoundError: If there is no such model, file or folder.
        ImportError: If diffusers is required but not installed.
        OSError: If the folder cannot be written to.
        KeyboardInterrupt: If interrupted, after the results so far were saved.
    """
    config.check()
    assert config.samples is not None
    chosen = choose_device(device, Ranks())
    features = open_features(config.features, chosen)
    samples = open_samples(path, config, features, chosen)
    if len(samples) < config.samples:
        raise ValueError(
            f"samples is {config.samples}, but {samples.name} has {len(samples)} images"
        )
    denoiser = samples if isinstance(samples, DenoiserSource) else None
    sampler, steps, seed, data = (
        (denoiser.sampler, denoiser.steps, config.seed, denoiser.data) if denoiser else (None,) * 4
    )
    reference: Reference | None = None
    frequencies: tuple[int, ...] = ()
    with locked(out):
        if config.class_distribution == "reference":
            reference = open_reference(config, data, features, samples.size, progress=progress)
            frequencies = _reference_frequencies(reference, samples)
        rows = min(config.precision_recall_samples, config.samples)
        settings = {
            "samples": config.samples,
            "images": samples.cache_key,
            "features": features.cache_key,
            "precision_recall_samples": rows,
            "sampler": sampler,
            "steps": steps,
            "seed": seed,
            "class_distribution": config.class_distribution,
            "frequencies": list(frequencies),
        }
        _check_settings(out, settings)
        open_accumulator = partial(Accumulator, samples, config.samples, features, rows)
        scales = denoiser.guidance_scales if denoiser else (None,)
        for scale in scales:  # raises if a state is damaged, before any image is generated
            open_accumulator(out / folder_name(scale))
        if reference is None:  # after the settings were compared, because it may take long
            reference = open_reference(config, data, features, samples.size, progress=progress)
        scores = {}
        for scale in scales:
            accumulator = open_accumulator(out / folder_name(scale))
            source = denoiser.at(scale, frequencies) if denoiser else samples
            name = folder_name(scale).replace("-", " ")
            accumulator.read(source, batch_size=config.batch_size, name=name, progress=progress)
            _save_grid(out / folder_name(scale))
            scores[scale] = _score(
                accumulator, reference, scale, chosen, _has_same_classes(samples, features)
            )
    return GenerationScores(
        name=samples.name,
        samples=config.samples,
        features=features.name,
        is_inception=features.is_inception,
        is_singular=any(is_singular for _, is_singular in scores.values()),
        real=reference.real,
        sampler=sampler,
        steps=steps,
        labels=config.class_distribution if denoiser and samples.class_names else None,
        seed=seed,
        class_names=samples.class_names,
        onescan=__version__,
        scores=tuple(score for score, _ in scores.values()),
    )


def folder_name(guidance: float | None) -> str:
    """Return the subfolder of a guidance scale.

    >>> folder_name(1.5), folder_name(4.0), folder_name(None)
    ('guidance-1.5', 'guidance-4', 'images')
    """
    return "images" if guidance is None else f"guidance-{guidance!r}".removesuffix(".0")


def _score(
    accumulator: Accumulator,
    reference: Reference,
    guidance: float | None,
    device: torch.device,
    has_classes: bool,
) -> tuple[GenerationScore, bool]:
    """Return the scores of one guidance scale, and whether a covariance is singular."""
    distances = [frechet_distance(accumulator.pooled.gaussian(), reference.pooled)]
    if accumulator.spatial is not None and reference.spatial is not None:
        distances.append(frechet_distance(accumulator.spatial.gaussian(), reference.spatial))
    neighborhoods = None
    if reference.rows is not None:
        float64_device = device if device.type == "cuda" else torch.device("cpu")
        neighborhoods = precision_recall(
            reference.rows, accumulator.kept_features(), device=float64_device
        )
    inception = accumulator.inception.score() if accumulator.inception else None
    confusion = accumulator.confusion.tolist() if has_classes else []
    score = GenerationScore(
        guidance=guidance,
        distance=distances[0].distance,
        spatial_distance=distances[1].distance if distances[1:] else None,
        class_score=inception.mean if inception else None,
        class_score_std=inception.std if inception else None,
        precision=neighborhoods.precision if neighborhoods else None,
        recall=neighborhoods.recall if neighborhoods else None,
        class_accuracy=accumulator.label_accuracy() if has_classes else None,
        requested=tuple(map(sum, confusion)),
        right=tuple(row[label] for label, row in enumerate(confusion)),
        confusion=tuple(map(tuple, confusion)) if len(confusion) <= MOST_CONFUSED else (),
        folder=folder_name(guidance),
    )
    return score, any(each.is_singular for each in distances)


def _check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Save the settings in a new folder, or compare them with those of the images that it has.

    Raises:
        ValueError: If a setting differs, or the file is damaged or missing.
    """
    path = out / SETTINGS
    if not any(out.glob(f"*/{STATE}")):
        write_json(path, settings)
        return
    saved = parse_json(path.read_bytes(), path, remedy(out)) if path.exists() else None
    if not isinstance(saved, dict):
        raise damaged(path, saved, remedy(out))
    for name, value in settings.items():
        if (saved_value := saved.get(name)) != value:
            raise ValueError(
                f"{out} holds images with {name} {saved_value!r}, expected {value!r}: choose "
                "another folder"
            )


def _reference_frequencies(reference: Reference, samples: Source) -> tuple[int, ...]:
    """Return the frequencies of the reference's classes, which must be those of the model.

    The reference may name all classes differently. If any name is equal, all have to be, in the
    same order.
    """
    reference_classes, model_classes = reference.class_names, samples.class_names
    if not reference.frequencies or len(reference_classes) != len(model_classes):
        raise ValueError(
            "class_distribution is 'reference', but the reference has "
            f"{len(reference_classes)} known classes and the model has {len(model_classes)}; "
            "expected the same classes"
        )
    for i, (reference_name, model_name) in enumerate(
        zip(reference_classes, model_classes, strict=True)
    ):
        if reference_name != model_name and not {*reference_classes}.isdisjoint(model_classes):
            raise ValueError(
                f"class_distribution is 'reference', but class {i} is {reference_name!r} in the "
                f"reference and {model_name!r} in the model; expected the same order of classes"
            )
    return reference.frequencies


def _has_same_classes(source: Source, features: FeatureExtractor) -> bool:
    return bool(source.class_names) and source.class_names == features.class_names


def _save_grid(folder: Path) -> None:
    """Save the first images, sorted by class, as a PNG file."""
    shown = first_images(folder)
    if shown is not None and not (folder / GRID).exists():
        grid = image_grid(unit_pixels(class_by_class(shown).images), columns=COLUMNS)
        write_atomically(folder / GRID, lambda partial: grid.save(partial, format="png"))
