"""Scores of generated images."""

import dataclasses
import logging
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from onescan import __version__, configs
from onescan.checkpoint.files import damaged, locked, parse_json, remove, write_atomically, writing
from onescan.checkpoint.weights import read_weights, save_weights
from onescan.data import DataConfig, ImageSplits
from onescan.data.decode import to_bytes
from onescan.data.images import unit_pixels
from onescan.data.text.cache import cache_folder
from onescan.evaluation.config import SamplesConfig
from onescan.evaluation.features import FeatureBatch, Features, open_features, same_classes
from onescan.evaluation.image_scores import (
    NEAREST,
    InceptionScore,
    Points,
    chosen_by_lot,
    precision_recall,
)
from onescan.evaluation.images import (
    NPZ,
    DataSource,
    NpzSource,
    Samples,
    Source,
    data_at,
    digest,
    in_steps,
    npz_names,
    open_samples,
    read_npz,
    stamp,
)
from onescan.shapes import Images, Labels
from onescan.tasks.feature_distance import FeatureStatistics, Gaussian, frechet_distance
from onescan.training.distributed import Interrupts, Ranks, choose_device
from onescan.training.folder import write_json

FID_50K = 50_000
MOST_CONFUSED = 20  # classes


@dataclass(frozen=True, kw_only=True)
class GenerationScore:
    """Of the images made with one guidance scale."""

    guidance: float | None
    """None where the images were made elsewhere, or no class can be asked for."""
    distance: float
    """Frechet distance to the real images; see `GenerationScores.distance_name`."""
    spatial_distance: float | None
    """The same of features that know places; None where there are none, on either side."""
    class_score: float | None
    """exp E KL(p(y|x) || p(y)); None where the features come without classes."""
    class_score_spread: float | None
    """Over ten parts of the images."""
    precision: float | None
    """None where there are no single real images, but statistics of them."""
    recall: float | None
    as_asked: float | None = None
    """Share of the images that the classifier tells to be of the class that was asked for."""
    asked: tuple[int, ...] = ()
    """Images of each class that was asked for, where a classifier tells which they are of."""
    right: tuple[int, ...] = ()
    """How many of them it tells to be of that class."""
    confusion: tuple[tuple[int, ...], ...] = ()
    """Images by the class asked for and the class told, where there are 20 classes at most."""
    folder: str = ""
    """What is kept of the images, below the outcome's folder."""


@dataclass(frozen=True, kw_only=True)
class RealScore:
    """Of the real images, as a measure for the others."""

    name: str
    count: int | None
    """None where statistics do not tell."""
    class_score: float | None
    as_labelled: float | None
    """Share that the classifier tells to be of the class that they are of."""


@dataclass(frozen=True, kw_only=True)
class GenerationScores:
    """Of one source of images."""

    name: str
    """Of the model, or the file or folder."""
    samples: int
    """At each guidance scale."""
    features: str
    """What compares images."""
    is_inception: bool
    """Whether they are the features of FID."""
    is_singular: bool
    """Whether there were no more images than features, on either side."""
    real: RealScore
    sampler: str | None
    """None where the images were made elsewhere."""
    steps: int | None
    labels: str | None
    seed: int | None
    class_names: tuple[str, ...]
    onescan: str
    scores: tuple[GenerationScore, ...]
    """From the smallest guidance scale to the largest."""

    @property
    def distance_name(self) -> str:
        """What the distance may be called: FID for Inception's features alone.

        It is FID-50K if 50,000 images were compared.
        """
        if not self.is_inception:
            return f"Frechet distance in features of {self.features}"
        return "FID-50K" if self.samples == FID_50K else "FID"

    @property
    def short_names(self) -> dict[str, str]:
        """What stands above the columns of tables, by field."""
        if self.is_inception:
            names = {"distance": self.distance_name, "spatial_distance": "sFID"}
            return names | {"class_score": "Inception Score"} | PLAIN
        names = {"distance": "Frechet distance", "spatial_distance": "spatial distance"}
        return names | {"class_score": "class score"} | PLAIN


PLAIN = {"precision": "precision", "recall": "recall", "as_asked": "as asked"}


FIRST = 100
UNKNOWN = -1  # a label

Confusion = Int64[Tensor, "asked told"]


class Shown(NamedTuple):
    """Images to look at.

    Attributes:
        images: as bytes.
        labels: the classes that were asked for; -1 where none was.
    """

    images: UInt8[Tensor, "B channels height width"]
    labels: Int64[Tensor, " B"]


def class_by_class(shown: Shown) -> Shown:
    """Put images of a class beside each other, else in the order they have."""
    order = shown.labels.argsort(stable=True)
    return Shown(shown.images[order], shown.labels[order])


class Tally:
    """Sums over images, in their order; `tensors` and `restore` keep it on disk."""

    def __init__(self, total: int, num_classes: int) -> None:
        self.total = total
        """Images that will be looked at, for the parts of the Inception Score."""
        self.place = 0
        """Where to go on."""
        self.pooled: FeatureStatistics | None = None
        self.spatial: FeatureStatistics | None = None
        self.score: InceptionScore | None = None
        self.confusion: Confusion | None = None
        """How often images of a class, or asked to be of it, are told to be of which."""
        self.frequencies = torch.zeros(num_classes, dtype=torch.int64)
        """Images of each class."""
        self.first: Shown | None = None

    @property
    def count(self) -> int:
        """Images that were looked at, fewer than `place` where some cannot be read."""
        return self.pooled.count if self.pooled else 0

    def add(self, images: Images, labels: Labels | None, found: FeatureBatch) -> None:
        """Take note of images in 256 steps from 0 to 1.

        Raises:
            ValueError: features are not finite, or a label is of no class.
        """
        start = self.count
        self.pooled = _added(self.pooled, found.pooled)
        if found.spatial is not None:
            self.spatial = _added(self.spatial, found.spatial)
        if found.probabilities is not None:
            classes = found.probabilities.shape[1]
            self.score = self.score or InceptionScore(self.total, classes)
            self.score.add(found.probabilities, start)
        if labels is not None and len(self.frequencies):
            self._add_labels(labels, found)
        self._keep_first(images, labels)

    def _add_labels(self, labels: Labels, found: FeatureBatch) -> None:
        classes = len(self.frequencies)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(
                f"labels are {labels.min()} to {labels.max()}, expected 0 to {classes - 1}"
            )
        self.frequencies += torch.bincount(labels.cpu(), minlength=classes)
        if found.probabilities is None or found.probabilities.shape[1] != classes:
            return
        if self.confusion is None:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64)
        told = found.probabilities.argmax(dim=1).cpu()
        cells = torch.bincount(labels.cpu() * classes + told, minlength=classes**2)
        self.confusion += cells.view(classes, classes)

    def _keep_first(self, images: Images, labels: Labels | None) -> None:
        missing = FIRST - (len(self.first.images) if self.first else 0)
        if missing <= 0 or not len(images):
            return
        shown = to_bytes(images[:missing]).cpu()
        asked = torch.full((len(shown),), UNKNOWN) if labels is None else labels[:missing].cpu()
        before = self.first or Shown(shown[:0], asked[:0])
        self.first = Shown(torch.cat([before.images, shown]), torch.cat([before.labels, asked]))

    def share_as_asked(self) -> float | None:
        """Of the images, the share whose told class is the one asked for; None if none was."""
        if self.confusion is None or not self.confusion.sum():
            return None
        return int(self.confusion.trace()) / int(self.confusion.sum())

    def tensors(self) -> dict[str, Tensor]:
        """All of it, to be written to a file."""
        kept: dict[str, Tensor] = {
            "place": torch.tensor([self.place, self.total]),
            "frequencies": self.frequencies,
        }
        for name, statistics in (("pooled", self.pooled), ("spatial", self.spatial)):
            if statistics is not None:
                kept[f"{name}.count"] = torch.tensor(statistics.count)
                kept[f"{name}.mean"] = statistics.mean
                kept[f"{name}.scatter"] = statistics.scatter
        if self.score is not None:
            kept["score.counts"] = self.score.counts
            kept["score.sums"] = self.score.sums
            kept["score.negative_entropies"] = self.score.negative_entropies
        if self.confusion is not None:
            kept["confusion"] = self.confusion
        if self.first is not None:
            kept |= {"first.images": self.first.images, "first.labels": self.first.labels}
        return kept

    @classmethod
    def restore(cls, kept: dict[str, Tensor]) -> "Tally":
        """Bring back what `tensors` gave.

        Raises:
            KeyError: something is missing.
        """
        place, total = kept["place"].tolist()
        tally = cls(total, 0)
        tally.place, tally.frequencies = place, kept["frequencies"]
        tally.pooled, tally.spatial = _restored(kept, "pooled"), _restored(kept, "spatial")
        if "score.sums" in kept:
            parts, classes = kept["score.sums"].shape
            tally.score = InceptionScore(total, classes, parts)
            tally.score.counts, tally.score.sums = kept["score.counts"], kept["score.sums"]
            tally.score.negative_entropies = kept["score.negative_entropies"]
        tally.confusion = kept.get("confusion")
        if "first.images" in kept:
            tally.first = Shown(kept["first.images"], kept["first.labels"])
        return tally


def _added(statistics: FeatureStatistics | None, features: Tensor) -> FeatureStatistics:
    statistics = statistics or FeatureStatistics.empty(features.shape[1])
    statistics.add(features)
    return statistics


def _restored(kept: dict[str, Tensor], name: str) -> FeatureStatistics | None:
    if f"{name}.count" not in kept:
        return None
    count = int(kept[f"{name}.count"])
    return FeatureStatistics(count, kept[f"{name}.mean"], kept[f"{name}.scatter"])


STATE, ROWS = "state.safetensors", "features.bin"
SAVE_EVERY_S = 60.0
WIDTH = 4  # bytes of a feature


class RowFile:
    """Features of some images, a row each, in a file that grows."""

    def __init__(self, path: Path, rows: int, features: int, checksum: int) -> None:
        self.path, self.rows, self.features, self.checksum = path, rows, features, checksum

    def add(self, features: Float[Tensor, "B F"]) -> None:
        """Write rows behind those that are there."""
        self.features = features.shape[1]
        content = features.detach().cpu().contiguous().numpy().tobytes()
        with writing(self.path.parent), self.path.open("r+b" if self.path.exists() else "w+b") as f:
            f.seek(self.rows * self.features * WIDTH)
            f.truncate()
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        self.checksum = zlib.crc32(content, self.checksum)
        self.rows += len(features)

    def is_whole(self) -> bool:
        """Whether the file holds the rows that were written."""
        if not self.rows:
            return True
        size = self.rows * self.features * WIDTH
        checksum = 0
        try:
            with self.path.open("rb") as content:
                while size and (piece := content.read(min(size, 1 << 20))):
                    checksum, size = zlib.crc32(piece, checksum), size - len(piece)
        except OSError:
            return False
        return not size and checksum == self.checksum

    def open(self) -> Points:
        """Map the rows into memory."""
        shape = (self.rows, self.features)
        # copy-on-write, as torch warns of arrays that cannot be written
        return torch.from_numpy(np.memmap(self.path, dtype=np.float32, mode="c", shape=shape))


class Gathered:
    """What a folder holds of images that were looked at."""

    def __init__(self, tally: Tally, rows: RowFile) -> None:
        self.tally, self.rows = tally, rows

    @property
    def is_done(self) -> bool:
        """Whether all images were looked at."""
        return self.tally.place == self.tally.total

    def save(self, folder: Path) -> None:
        """Keep it: what was kept before stays until this is whole."""
        rows = self.rows
        notes = {"rows": rows.rows, "features": rows.features, "checksum": rows.checksum}
        save_weights(folder / STATE, self.tally.tensors(), notes)


def gather(
    source: Source,
    features: Features,
    folder: Path,
    known: Gathered,
    *,
    rows: int,
    batch: int,
    device: torch.device,
    show: Callable[[int], object],
) -> Gathered:
    """Look at the images that `known` has not, and keep what is found in the folder.

    Args:
        source: where the images are from.
        features: what looks at them.
        folder: as `known` was opened from.
        known: what there is; it is changed.
        rows: images whose features are kept, drawn by lot among all.
        batch: images at once.
        device: of the features.
        show: called with the number of images after each batch.

    Raises:
        KeyboardInterrupt: it was asked for, and all that was found is saved.
        ValueError: an image cannot be read, or features are not finite.
        OSError: nothing can be written to the folder.
    """
    tally, saved = known.tally, monotonic()
    with Interrupts("stopping after this batch, with what was found") as interrupts:
        while not known.is_done:
            stop = min(tally.place + batch, tally.total)
            images, labels = source.images(tally.place, stop)
            if not bool(torch.isfinite(images).all()):
                raise ValueError(
                    f"{source.name}: images {tally.place} to {stop} hold NaN or infinity"
                )
            images = in_steps(images).to(device)
            found = features(images)
            chosen = _chosen(tally, len(images), rows)
            tally.add(images, labels, found)
            if bool(chosen.any()):
                known.rows.add(found.pooled[chosen.to(found.pooled.device)])
            show(stop - tally.place)
            tally.place = stop
            if known.is_done or interrupts.requested or monotonic() - saved >= SAVE_EVERY_S:
                known.save(folder)
                saved = monotonic()
            if interrupts.requested and not known.is_done:
                raise KeyboardInterrupt
    return known


def open_gathered(folder: Path, *, total: int, num_classes: int) -> Gathered:
    """Open what was found before; nothing, where the folder has no state.

    Raises:
        ValueError: a file is damaged; says which, and what to do.
    """
    path = folder / STATE
    if not path.exists():
        return Gathered(Tally(total, num_classes), RowFile(folder / ROWS, 0, 0, 0))
    remedy = f"remove {folder} to measure anew"
    try:
        tensors, notes = read_weights(path, remedy)
        tally = Tally.restore(tensors)
        rows = RowFile(folder / ROWS, notes["rows"], notes["features"], notes["checksum"])
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise damaged(path, error, remedy) from error
    if not rows.is_whole():
        raise damaged(rows.path, ValueError(f"it has not the {rows.rows} rows it had"), remedy)
    return Gathered(tally, rows)


def first_images(folder: Path) -> Shown | None:
    """The first images that were looked at."""
    return open_gathered(folder, total=0, num_classes=0).tally.first


def _chosen(tally: Tally, images: int, rows: int) -> Tensor:
    places = torch.arange(tally.count, tally.count + images)
    return chosen_by_lot(places, tally.total, min(rows, tally.total))


VERSION = 2  # of what is kept
SPLITS = ("train", "test")
MOMENTS = {"mu", "sigma"}

log = logging.getLogger("onescan")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What generated images are compared with."""

    pooled: Gaussian
    spatial: Gaussian | None
    rows: Points | None
    """Features of some images; None where there are no images."""
    frequencies: torch.Tensor | None
    """Images of each class; None where that is not known."""
    real: RealScore


def open_reference(
    name: str,
    data: DataConfig | None,
    features: Features,
    *,
    size: tuple[int, int],
    rows: int,
    batch: int,
    device: torch.device,
    progress: bool = False,
) -> Reference:
    """Sum up real images, or find what was summed up before.

    Args:
        name: train or test, of the data; or a path, as in `SamplesConfig`.
        data: of a run; None where images are not a run's.
        features: what looks at the images.
        size: height and width of the images that will be compared.
        rows: images whose features are kept.
        batch: images at once.
        device: of the features.
        progress: draw a bar on stderr.

    Raises:
        ValueError: there are no such images, one cannot be read, or the statistics are of other
            features.
        OSError: nothing can be kept; says where.
    """

    def summed_up(source: Source) -> Reference:
        if len(source) <= 1:
            raise ValueError(f"reference is {name!r}, of {len(source)} images, expected 2 at least")
        found = _gathered_reference(source, features, rows, batch, device, progress)
        return _reference(source, found, features)

    file = Path(name)
    if file.suffix != NPZ:
        return summed_up(_split(name, data) if name in SPLITS else _elsewhere(name, size))
    if not file.is_file():
        raise ValueError(f"reference is {name!r}, where there is no file")
    held = set(npz_names(file))
    if "arr_0" not in held and not held >= MOMENTS:
        raise ValueError(f"reference is {name!r}, which has neither arr_0 nor mu and sigma")
    if not held >= MOMENTS:
        return summed_up(NpzSource(file))
    given = read_statistics(file, features)
    if "arr_0" not in held:
        return given
    return dataclasses.replace(given, rows=summed_up(NpzSource(file)).rows)


def read_statistics(file: Path, features: Features) -> Reference:
    """Read mu and sigma, and mu_s and sigma_s if they are there, as ADM's evaluator writes them.

    Raises:
        ValueError: they are damaged, or not of Inception's features.
    """
    if not features.is_inception:
        raise ValueError(
            f"reference is '{file}', which holds statistics of Inception's features, but features "
            f"is {features.name!r}; expected a file with arr_0 alone, a folder or a data set"
        )
    arrays = read_npz(file, "mu", "sigma", "mu_s", "sigma_s")
    pooled = _gaussian(file, arrays, "mu", "sigma")
    spatial = _gaussian(file, arrays, "mu_s", "sigma_s") if "mu_s" in arrays else None
    real = RealScore(name=file.name, count=None, class_score=None, as_labelled=None)
    return Reference(pooled=pooled, spatial=spatial, rows=None, frequencies=None, real=real)


def reference_cache() -> Path:
    """Where what real images are summed up to is kept: below $ONESCAN_CACHE, or the user's home."""
    return cache_folder().parent / "generation"


def _gaussian(file: Path, arrays: dict[str, Any], mean: str, covariance: str) -> Gaussian:
    try:
        center = torch.from_numpy(arrays[mean]).double()
        square = torch.from_numpy(arrays[covariance]).double()
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"reference is '{file}', whose {mean} and {covariance} cannot be read"
        ) from error
    if center.ndim != 1 or square.shape != 2 * center.shape:
        raise ValueError(
            f"reference is '{file}', whose {mean} is {tuple(center.shape)} and {covariance} "
            f"{tuple(square.shape)}, expected [features] and [features, features]"
        )
    return Gaussian(center, square, None)


def _split(name: str, data: DataConfig | None) -> Source:
    """Images that a run learnt from, or was judged on."""
    if data is None:
        raise ValueError(
            f"reference is {name!r}, but the images are no run's, expected a folder, a data set or "
            "a .npz file"
        )
    splits = data.build()
    if not isinstance(splits, ImageSplits):
        raise ValueError(
            f"reference is {name!r}, but the run's data are {type(data).__name__}, which has no "
            "images, expected a folder, a data set or a .npz file"
        )
    chosen = splits.train if name == "train" else splits.test
    path = getattr(data, "path", None)
    where = stamp(Path(path)) if isinstance(path, str) and Path(path).exists() else None
    return DataSource(
        chosen,
        name=f"{name}, {plain_name(data)}",
        stamp=digest([configs.to_dict(data), type(data).__name__, name, len(chosen), where]),
        size=(splits.format.height, splits.format.width),
        class_names=splits.class_names,
    )


def _elsewhere(name: str, size: tuple[int, int]) -> Source:
    try:
        return data_at(name, size)
    except ValueError as error:
        raise ValueError(f"reference is {name!r}, which cannot be read: {error}") from error


def plain_name(data: DataConfig) -> str:
    """Say where data is from."""
    path = getattr(data, "path", None)
    return path if isinstance(path, str) else type(data).__name__.removesuffix("Config")


def _gathered_reference(
    source: Source,
    features: Features,
    rows: int,
    batch: int,
    device: torch.device,
    progress: bool,
) -> Gathered:
    """Look at all images, but those that were looked at before; what is damaged is made anew."""
    key = digest([VERSION, source.stamp, features.fingerprint, len(source), min(rows, len(source))])
    folder, classes = reference_cache() / key, len(source.class_names)
    with locked(folder):
        try:
            known = open_gathered(folder, total=len(source), num_classes=classes)
        except ValueError as error:
            log.warning("%s; it is made anew", error)
            for name in (STATE, ROWS):
                remove(folder / name)
            known = open_gathered(folder, total=len(source), num_classes=classes)
        with tqdm(
            total=len(source),
            initial=known.tally.place,
            unit=" images",
            desc="real images",
            disable=not progress or known.is_done,
        ) as bar:
            return gather(
                source,
                features,
                folder,
                known,
                rows=rows,
                batch=batch,
                device=device,
                show=bar.update,
            )


def _reference(source: Source, found: Gathered, features: Features) -> Reference:
    tally = found.tally
    if tally.pooled is None:
        raise ValueError(f"reference is {source.name!r}, which has no images")
    real = RealScore(
        name=source.name,
        count=tally.count,
        class_score=tally.score.score().mean if tally.score else None,
        as_labelled=tally.share_as_asked() if same_classes(source.class_names, features) else None,
    )
    return Reference(
        pooled=tally.pooled.gaussian(),
        spatial=tally.spatial.gaussian() if tally.spatial else None,
        rows=found.rows.open(),
        frequencies=tally.frequencies if len(tally.frequencies) else None,
        real=real,
    )


PLAN = "plan.json"
GRID = "samples.png"
COLUMNS = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What may not change while images are gathered in a folder."""

    samples: int
    images: str
    """What another model, or other images, have another of."""
    features: str
    """The same of the features."""
    precision_recall_samples: int
    sampler: str | None
    steps: int | None
    class_distribution: str | None
    seed: int | None
    frequencies: tuple[int, ...]
    """Of classes, where those of the reference are followed."""


def measure_generation(
    path: str | Path,
    asked: SamplesConfig,
    out: Path,
    *,
    device: str = "auto",
    progress: bool = False,
) -> GenerationScores:
    """Make or read images, and compare them with real ones.

    What the folder holds of the same measurement is gone on with, at each guidance scale.

    Args:
        path: what `open_samples` takes.
        asked: how many images, how they are made, and what they are compared with.
        out: folder for what is kept of the images.
        device: as `choose_device` has it.
        progress: draw bars on stderr.

    Raises:
        ValueError: something asked for is missing, out of range or does not fit; images cannot be
            read; or the folder holds what was measured otherwise: says where it differs.
        FileNotFoundError: there is no such model, file or folder.
        ImportError: diffusers, which makes the images, is not installed.
        OSError: nothing can be written.
        KeyboardInterrupt: it was asked for, and what was found is saved.
    """
    asked.check()
    assert asked.samples is not None
    chosen = choose_device(device, Ranks())
    features = open_features(asked.features, chosen)
    samples = open_samples(path, asked, features, chosen)
    with locked(out):
        if (
            asked.class_distribution == "uniform"
        ):  # to know before real images are looked at, which may take long
            _claim(out, _plan(asked, samples, features, ()))
        reference = open_reference(
            asked.reference,
            samples.data,
            features,
            size=samples.size,
            rows=asked.precision_recall_samples,
            batch=asked.batch_size,
            device=chosen,
            progress=progress,
        )
        _check_fit(reference, features, samples.size, asked, chosen)
        plan = _plan(asked, samples, features, _frequencies(asked, samples, reference))
        _claim(out, plan)
        found = [
            _gathered(
                samples.at(guidance, plan.frequencies or None),
                features,
                plan,
                out / folder_name(guidance),
                batch=asked.batch_size,
                device=chosen,
                progress=progress,
            )
            for guidance in samples.guidances
        ]
    judged = [
        _judge(each, reference, guidance, chosen, same_classes(samples.class_names, features))
        for guidance, each in zip(samples.guidances, found, strict=True)
    ]
    return GenerationScores(
        name=samples.name,
        samples=asked.samples,
        features=features.name,
        is_inception=features.is_inception,
        is_singular=any(singular for _, singular in judged),
        real=reference.real,
        sampler=samples.sampler,
        steps=samples.steps,
        labels=plan.class_distribution,
        seed=plan.seed,
        class_names=samples.class_names,
        onescan=__version__,
        scores=tuple(score for score, _ in judged),
    )


def folder_name(guidance: float | None) -> str:
    """Where, below the outcome's folder, images of a guidance scale are kept.

    >>> folder_name(1.5), folder_name(4.0), folder_name(None)
    ('guidance-1.5', 'guidance-4', 'images')
    """
    return "images" if guidance is None else f"guidance-{guidance!r}".removesuffix(".0")


def _check_fit(
    reference: Reference,
    features: Features,
    size: tuple[int, int],
    asked: SamplesConfig,
    device: torch.device,
) -> None:
    """Raise ValueError for a reference that nothing can be compared with, before any work."""
    name = f"reference is {asked.reference!r}"
    if reference.rows is not None and len(reference.rows) <= NEAREST:
        raise ValueError(
            f"{name}, of {len(reference.rows)} images, expected more than {NEAREST}: precision and "
            "recall look at as many neighbours"
        )
    blank = features(torch.zeros(2, 3, *size, device=device))
    for part, given in (("pooled", reference.pooled), ("spatial", reference.spatial)):
        found = getattr(blank, part)
        if given is not None and found is not None and len(given.mean) != found.shape[1]:
            raise ValueError(
                f"{name}, with {len(given.mean)} {part} features, but {features.name!r} gives "
                f"{found.shape[1]}; expected the same features"
            )


def _frequencies(asked: SamplesConfig, samples: Samples, reference: Reference) -> tuple[int, ...]:
    """Of classes in the reference, where labels follow it; else none."""
    if asked.class_distribution != "reference":
        return ()
    known = reference.frequencies
    if known is None or len(known) != len(samples.class_names) or not samples.class_names:
        there = "none that are known" if known is None else str(len(known))
        raise ValueError(
            f"labels is 'reference', but the model has {len(samples.class_names)} classes and the "
            f"reference {there}, expected the same classes"
        )
    return tuple(known.tolist())


def _plan(
    asked: SamplesConfig, samples: Samples, features: Features, frequencies: tuple[int, ...]
) -> Plan:
    assert asked.samples is not None
    is_made = samples.is_made
    return Plan(
        samples=asked.samples,
        images=samples.stamp,
        features=features.fingerprint,
        precision_recall_samples=min(asked.precision_recall_samples, asked.samples),
        sampler=samples.sampler,
        steps=samples.steps,
        class_distribution=asked.class_distribution if is_made and samples.class_names else None,
        seed=asked.seed if is_made else None,
        frequencies=frequencies,
    )


def _claim(out: Path, plan: Plan) -> None:
    """Write what is measured in the folder, or see that it is what was begun there."""
    path = out / PLAN
    if not path.exists():
        write_json(path, configs.to_dict(plan))
        return
    remedy = f"remove {out} to measure anew"
    data = parse_json(path.read_bytes(), path, remedy)
    try:
        there = configs.from_dict(Plan, data)
    except (ValueError, TypeError, AttributeError) as error:
        raise damaged(path, error, remedy) from error
    if found := configs.differences(there, plan):
        if not any(out.glob(f"*/{STATE}")):  # nothing was measured yet
            write_json(path, configs.to_dict(plan))
            return
        listed = ", ".join(f"{name} is {a!r} there and {b!r} here" for name, a, b in found)
        raise ValueError(f"{out} holds another measurement: {listed}; choose another --out")


def _gathered(
    source: Source,
    features: Features,
    plan: Plan,
    folder: Path,
    *,
    batch: int,
    device: torch.device,
    progress: bool,
) -> Gathered:
    """Look at the images of one guidance scale, but those that were looked at before."""
    if len(source) < plan.samples:
        raise ValueError(f"samples is {plan.samples}, but {source.name} has {len(source)} images")
    folder.mkdir(exist_ok=True)
    known = open_gathered(folder, total=plan.samples, num_classes=len(source.class_names))
    with tqdm(
        total=plan.samples,
        initial=known.tally.place,
        unit=" images",
        desc=folder.name.replace("-", " "),
        disable=not progress or known.is_done,
    ) as bar:
        gather(
            source,
            features,
            folder,
            known,
            rows=plan.precision_recall_samples,
            batch=batch,
            device=device,
            show=bar.update,
        )
    _keep_grid(known, folder)
    return known


def _judge(
    found: Gathered,
    reference: Reference,
    guidance: float | None,
    device: torch.device,
    has_classes: bool,
) -> tuple[GenerationScore, bool]:
    """The scores of one guidance scale, and whether there were too few images for them."""
    tally = found.tally
    assert tally.pooled is not None
    pooled = frechet_distance(tally.pooled.gaussian(), reference.pooled)
    spatial = None
    if tally.spatial is not None and reference.spatial is not None:
        spatial = frechet_distance(tally.spatial.gaussian(), reference.spatial)
    both = None
    if reference.rows is not None:
        double = device if device.type == "cuda" else torch.device("cpu")  # others lack float64
        both = precision_recall(reference.rows, found.rows.open(), device=double)
    score = tally.score.score() if tally.score else None
    told = tally.confusion if has_classes else None
    result = GenerationScore(
        guidance=guidance,
        distance=pooled.distance,
        spatial_distance=spatial.distance if spatial else None,
        class_score=score.mean if score else None,
        class_score_spread=score.spread if score else None,
        precision=both.precision if both else None,
        recall=both.recall if both else None,
        as_asked=tally.share_as_asked() if has_classes else None,
        asked=() if told is None else tuple(told.sum(dim=1).tolist()),
        right=() if told is None else tuple(told.diagonal().tolist()),
        confusion=() if told is None else _of_few(told),
        folder=folder_name(guidance),
    )
    return result, pooled.is_singular or (spatial is not None and spatial.is_singular)


def _of_few(told: Confusion) -> tuple[tuple[int, ...], ...]:
    """All cells; none where there are many, of which nobody would look at a million."""
    return tuple(map(tuple, told.tolist())) if len(told) <= MOST_CONFUSED else ()


def _keep_grid(found: Gathered, folder: Path) -> None:
    """Write the first images as a picture, class by class."""
    if found.tally.first is None or (folder / GRID).exists():
        return
    from onescan.data.image_grid import image_grid

    shown = class_by_class(found.tally.first)
    grid = image_grid(unit_pixels(shown.images), columns=COLUMNS)
    write_atomically(folder / GRID, lambda partial: grid.save(partial, format="png"))
