"""How near generated images come to real ones: distances and scores, over guidance scales."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from onescan import __version__, configs
from onescan.checkpoint.files import damaged, locked, parse_json, write_atomically
from onescan.data.images import unit_pixels
from onescan.evaluation.asked import SamplesConfig
from onescan.evaluation.generation.features import Features, open_features, same_classes
from onescan.evaluation.generation.gathering import STATE, Gathered, gather, open_gathered
from onescan.evaluation.generation.outcome import MOST_CONFUSED, GenerationScore, GenerationScores
from onescan.evaluation.generation.reference import Reference, open_reference
from onescan.evaluation.generation.samples import Samples, open_samples
from onescan.evaluation.generation.scores import NEAREST, precision_recall
from onescan.evaluation.generation.source import Source
from onescan.evaluation.generation.tally import Confusion, class_by_class
from onescan.tasks.feature_distance import frechet_distance
from onescan.training.distributed import Ranks, choose_device
from onescan.training.folder import write_json

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
