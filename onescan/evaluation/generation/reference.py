"""What real images are summed up to, once, and kept in a cache."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from onescan import configs
from onescan.checkpoint.files import locked, remove
from onescan.data import DataConfig, ImageSplits
from onescan.data.text.corpus import cache_folder
from onescan.evaluation.generation.features import Features, same_classes
from onescan.evaluation.generation.folders import DataSource, data_at
from onescan.evaluation.generation.gathering import ROWS, STATE, Gathered, gather, open_gathered
from onescan.evaluation.generation.npz import NpzSource, npz_names, read_npz
from onescan.evaluation.generation.outcome import RealScore
from onescan.evaluation.generation.scores import Points
from onescan.evaluation.generation.source import Source
from onescan.evaluation.generation.stamp import digest, stamp
from onescan.tasks.feature_distance import Gaussian

VERSION = 2  # of what is kept
NPZ = ".npz"
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
        found = _gathered(source, features, rows, batch, device, progress)
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


def _gathered(
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
