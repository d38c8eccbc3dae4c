"""Infer the settings of a run from its data: sizes of data, model and batches, and epochs."""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from onescan import configs
from onescan.experiments.data import (
    AffineConfig,
    ArrayDatasetConfig,
    Example,
    ForecastDatasetConfig,
    ImageDataset,
    ImageDatasetConfig,
    ImageSet,
    MaskFolderConfig,
    NiftiFolderConfig,
    TextDatasetConfig,
    TextTableConfig,
)
from onescan.experiments.data.array_maps import WHITE
from onescan.experiments.data.base import HeldOutError, listed
from onescan.experiments.data.glue import GlueSet
from onescan.experiments.data.pairs import paired_images
from onescan.experiments.data.ragged import size_range
from onescan.experiments.data.sources import find_source, walk
from onescan.experiments.tasks import (
    DenseRegressionConfig,
    ForecastingConfig,
    ImageClassificationConfig,
    MultilabelClassificationConfig,
    RegressionConfig,
    SegmentationConfig,
)
from onescan.experiments.tasks.base import fitting_batch_size
from onescan.experiments.tasks.dense import DenseTaskConfig
from onescan.experiments.tasks.grid import NOUNS, UNITS
from onescan.experiments.training import RunConfig
from onescan.experiments.training.runs import model_config
from onescan.inputs import ArrayFormat, ImageFormat
from onescan.inputs.arrays import IMAGE_AXES
from onescan.inputs.image_files import Pixels, is_image_name, read_header
from onescan.inputs.images import unit_pixels
from onescan.inputs.targets import CLASSES, MapKind, TargetKind
from onescan.inputs.tokenizer import BYTES
from onescan.inputs.volumes import is_volume_name
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.messages import named_type, plural
from onescan.models.denoiser import DenoiserConfig
from onescan.models.dense_predictor import DensePredictorConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

SMALL = 2_000  # training examples below which models and images are small
SMALL_SIDE, MAX_SIDE = 32, 64  # pixels of the longer side of an inferred image size
MAX_TOKENS = 256  # patches per example
WHOLE_VOXELS = 64**3  # of the largest volume that is read as a whole
WINDOW_VOXELS, WINDOW_STEP = 48**3, 8  # of a window of a larger volume, and a divisor of its sides
WINDOW_PATCHES = ((16, 512), (8, 128), (4, 24), (1, 1))  # patch and the smallest window that has it
PATCHES = ((4, 24), (2, 8), (1, 1))  # smallest patch for a longest axis of at least this size
MIN_STD = 1e-3  # a channel with less is constant
SAMPLE = 256  # images read to infer sizes, channels, mean and standard deviation
AUGMENT = AffineConfig(translate=0.2, scale=0.2, color_jitter=0.3)  # no flips: they mirror text
MAX_SHOWN = 10  # names of classes
MIN_LENGTH, MAX_LENGTH = 16, 512  # tokens of a text
SAMPLED_TEXTS = 2_000  # to infer the length
ROW, MIN_ROWS = 128, 64  # tokens per row of text; with fewer rows, they get shorter
HALF = 0.5  # mean and standard deviation that map pixels from [0, 1] to [-1, 1]
INFERRED = frozenset(  # fields that `infer` sets for data of some kind, in any part of the config
    (
        *("channels", "image_size", "mean", "std", "labeled", "fill", "length", "vocab_size"),
        *(
            "patch_size",
            "num_classes",
            "out_channels",
            "width",
            "depth",
            "num_heads",
            "batch_size",
            "epochs",
        ),
    )
)
EVALUATIONS = 10  # of denoisers and language models
TASKS: dict[TargetKind, Any] = {
    "class": ImageClassificationConfig,
    "multilabel": MultilabelClassificationConfig,
    "value": RegressionConfig,
    "class_map": SegmentationConfig,
    "value_map": DenseRegressionConfig,
}
DENSE_MODEL = DensePredictorConfig(
    width=64,
    depth=4,
    mixer=LightNetMixerConfig(num_heads=4, gate_rank=16),
    position=ToeplitzPositionConfig(hidden_states=16, bidirectional=True),
    drop_path=0.0,
    init_std=0.1,
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How model size, batch size and epochs depend on the number of training examples."""

    sizes: tuple[tuple[int | float, int, int, int], ...]
    """Rows (examples, width, depth, heads): the model for fewer than that many examples."""
    seen: int
    """Examples seen in training, over all epochs, if `epochs` permits."""
    epochs: tuple[int, int]
    """Smallest and largest number of epochs."""
    batch_size: int = 64
    """Largest batch size."""


CLASSIFIER = Scale(
    sizes=((SMALL, 64, 4, 4), (20_000, 128, 6, 4), (math.inf, 192, 6, 6)),
    seen=12_000,
    epochs=(20, 120),
)


DENSE_PREDICTOR = Scale(
    sizes=((SMALL, 64, 4, 4), (20_000, 128, 6, 4), (math.inf, 192, 6, 6)),
    seen=6_000,
    epochs=(20, 120),
    batch_size=16,
)


DENOISER = Scale(  # the first row has the size of digits_denoiser
    sizes=((20_000, 128, 6, 4), (math.inf, 256, 12, 4)), seen=144_000, epochs=(20, 1000)
)


LANGUAGE_MODEL = Scale(  # the second row and the rows seen are those of shakespeare_lightnet
    sizes=((1_500, 64, 4, 4), (150_000, 128, 4, 4), (math.inf, 256, 8, 8)),
    seen=38_400,
    epochs=(1, 20),
    batch_size=16,
)


FORECASTER = Scale(
    sizes=((20_000, 64, 4, 4), (math.inf, 128, 4, 4)), seen=20_000, epochs=(1, 200), batch_size=32
)


def adapt(run: RunConfig, given: Mapping[str, str]) -> RunConfig:
    """Adapt the run to the user's data, the option data.path; `infer` reports a missing path."""
    path, target = given.get("data.path"), given.get("data.target")
    known: Any = target if target in TASKS else None  # the parser of the options reports others
    return for_path(run, path, known) if path else run


def for_path(run: RunConfig, path: str, target: TargetKind | None = None) -> RunConfig:
    """Return the run with the config that reads the data at `path`, and the task for its targets.

    Args:
        run: Config of a recipe.
        path: Path of the data.
        target: Kind of the targets of arrays; None infers it.
    """
    if isinstance(run.task, SegmentationConfig) and (images := paired_images(path)):
        are_volumes = any(is_volume_name(file.name) for file in images.iterdir())
        folder = NiftiFolderConfig if are_volumes else MaskFolderConfig
        return dataclasses.replace(run, data=folder(path=path))
    if isinstance(run.data, ImageDatasetConfig) and _holds_arrays(path):
        data = ArrayDatasetConfig(path=path, test_fraction=run.data.test_fraction)
        run = dataclasses.replace(run, data=data)
    run = _replace(run, ["data", "path"], path)
    if not isinstance(run.data, ArrayDatasetConfig):
        return run
    with contextlib.suppress(ValueError):  # `infer` reports it
        return _for_target(run, target or run.data.infer_target())
    return run


def _for_target(run: RunConfig, kind: TargetKind) -> RunConfig:
    """Return the run with a task that learns targets of a kind, unless it has one or is a denoiser.

    Images are not augmented if the targets are values, such as an angle, which could change. A
    classifier becomes a dense predictor for targets at each position, but not the reverse.
    """
    if not isinstance(run.task, tuple(TASKS.values())) or isinstance(run.task, TASKS[kind]):
        return run
    if kind in get_args(MapKind):
        model = DENSE_MODEL if isinstance(run.model, ImageClassifierConfig) else run.model
        return dataclasses.replace(run, task=TASKS[kind](), model=model)
    if isinstance(run.task, DenseTaskConfig):
        return run  # whose `build` reports the other targets
    augment = None if kind == "value" else getattr(run.task, "augment", None)
    return dataclasses.replace(run, task=TASKS[kind](augment=augment))


def infer(run: RunConfig, given: Collection[str] = ()) -> tuple[RunConfig, list[str]]:
    """Infer the settings of a run from its data.

    Args:
        run: Config from `for_path`, with the user's changes.
        given: Dotted names of the fields that the user set, such as "model.width", which are kept.
            If the run starts from a trained model, so are the sizes of this model.

    Returns:
        The config with inferred values, and lines that describe them.

    Raises:
        ValueError: If `data.path` is empty, or the data cannot be read; see `DataConfig.build`.
    """
    if not run.data.path:  # type: ignore[attr-defined]
        raise ValueError(
            f"data.path is missing, expected the path of your data: onescan train {run.name} "
            "--data.path PATH"
        )
    if run.init_from:
        sizes = _sizes_in(run.init_from)
        run, given = _changed(run, sizes, given), {*given, *sizes}
    try:
        return _infer(run, given)
    except HeldOutError as error:
        if "data.test_fraction" in given:
            raise
        run, lines = _infer(_replace(run, ["data", "test_fraction"], error.fraction), given)
        return run, [
            *lines,
            f"held out: {error.fraction:.1%}, because each class needs a test example",
        ]


def _sizes_in(init_from: str) -> dict[str, Any]:
    """Return the sizes of a trained model that another model with its weights must have."""
    model = model_config(init_from)
    sizes = {name: getattr(model, name, None) for name in ("width", "depth", "patch_size")}
    sizes["mixer.num_heads"] = getattr(getattr(model, "mixer", None), "num_heads", None)
    return {f"model.{name}": size for name, size in sizes.items() if size is not None}


def _infer(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    if isinstance(run.data, TextTableConfig):
        return _infer_texts(run, given)
    if isinstance(run.data, TextDatasetConfig):
        return _infer_rows(run, given)
    if isinstance(run.data, MaskFolderConfig):
        return _infer_masks(run, run.data, given)
    if isinstance(run.data, NiftiFolderConfig):
        return _infer_volumes(run, given)
    if isinstance(run.data, ForecastDatasetConfig):
        return _infer_windows(run, given)
    infer_data = _infer_arrays if isinstance(run.data, ArrayDatasetConfig) else _infer_images
    return infer_data(run, given)


def infer_vocabulary(run: RunConfig, given: Collection[str]) -> RunConfig:
    """Set the model's vocabulary size to that of a tokenizer that the user chose, if it is free.

    Raises:
        ValueError: If there is no such tokenizer.
        ImportError: If transformers is required and not installed.
    """
    is_free = "data.tokenizer" in given and "model.vocab_size" not in given
    if not (is_free and hasattr(run.model, "vocab_size")):
        return run
    from onescan.inputs.tokenizer import load_tokenizer

    size = load_tokenizer(run.data.tokenizer).size  # type: ignore[attr-defined]
    return _replace(run, ["model", "vocab_size"], size)


def _infer_images(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Infer the settings for image files or parquet files."""
    model: Any = run.model
    if not isinstance(run.data, ImageDatasetConfig):
        raise ValueError(f"data is {named_type(run.data)}, expected an ImageDatasetConfig")
    is_denoiser = isinstance(model, DenoiserConfig)
    if is_denoiser:
        run = _changed(run, {"data.labeled": _has_classes(run.data)}, given)
    splits = run.data.build()
    if not isinstance(train := splits.train, ImageDataset):
        return run, []
    if "data.channels" not in given or "data.image_size" not in given:
        sizes, channel_count = _survey(train)
        changes: dict[str, Any] = {"data.channels": channel_count}
        size = model.image_size if "model.image_size" in given else None
        patch = model.patch_size if "model.patch_size" in given else (4, 4)
        longest = SMALL_SIDE if len(train) < SMALL or is_denoiser else MAX_SIDE
        changes["data.image_size"] = size or _fit(sizes, longest, patch)
        run = _changed(run, changes, given)
    channels: int = run.data.channels  # type: ignore[attr-defined]
    shape: tuple[int, ...] = run.data.image_size  # type: ignore[attr-defined]
    if is_denoiser:
        run = _changed(run, _halves(channels), given)
    elif "data.mean" not in given or "data.std" not in given:
        neutral: Any = {"mean": (0.0,) * channels, "std": (1.0,) * channels}
        data: Any = configs.replace(run.data, neutral)
        mean, std = _statistics(dataclasses.replace(train, reader=data.reader()))
        run = _changed(run, {"data.mean": mean, "data.std": std}, given)
    if isinstance(run.task, ImageClassificationConfig):
        brightness = round(sum(run.data.mean) / channels, 2)  # type: ignore[attr-defined]
        if isinstance(run.task.augment, AffineConfig):
            fill = min(max(brightness, 0.0), 1.0)
            run = _changed(run, {"task.augment.fill": fill}, given)
    return _sized(run, splits, shape, channels, given)


def _infer_arrays(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Infer the settings for arrays, which are not resized."""
    data = run.data
    if not isinstance(data, ArrayDatasetConfig):
        raise ValueError(f"data is {named_type(data)}, expected an ArrayDatasetConfig")
    fields = {name.removeprefix("data.") for name in given}
    data, layout = data.infer_layout(fields)
    run = dataclasses.replace(run, data=data)
    splits = data.build()
    run = _for_target(run, splits.target.kind)
    format = splits.format
    shape = format.shape if isinstance(format, ArrayFormat) else (format.height, format.width)
    constants = {"data.mean": format.mean, "data.std": format.std}
    if isinstance(run.model, DenoiserConfig):
        constants = _halves(format.channels)
    run = _changed(run, constants, given)
    augment = getattr(run.task, "augment", None)
    if isinstance(format, ArrayFormat) and augment == AUGMENT:  # which is for pixels
        run = _replace(run, ["task", "augment"], None)
    run, (first, *others) = _sized(run, splits, shape, format.channels, given)
    lines = [f"{first}, {layout}", *others]
    if splits.target.kind == "value" and isinstance(format, ImageFormat) and augment is None:
        lines.append("augmentation: none, because moving an image could change its values")
    if splits.target.kind != "class":
        return run, lines
    train: Any = splits.train
    counts = train.labels[train.indices].bincount(minlength=len(splits.class_names))
    if empty := [name for name, count in zip(splits.class_names, counts, strict=True) if not count]:
        lines.append(f"warning: no training examples of class {listed(empty)}; labels start at 0")
    return run, lines


def _infer_masks(
    run: RunConfig, data: MaskFolderConfig, given: Collection[str]
) -> tuple[RunConfig, list[str]]:
    """Infer the settings for images with masks, whose classes are read once and then kept."""
    lines = []
    train, _, _ = data.split()
    training, testing = data.values()
    if training == {0, WHITE} and "data.binary" not in given:
        run = _changed(run, {"data.binary": True}, given)
        lines.append(
            f"masks: {WHITE} is class 1; if it marks pixels without a class, pass "
            f"--data.no-binary --data.ignore-index {WHITE}"
        )
    masks: Any = run.data
    run = _changed(run, {"data.class_names": masks.names(training, testing)}, given)
    run.data.build()  # names images that cannot be read
    headers = [read_header(pair.image) for pair in (train[i] for i in _sample(len(train)))]
    channels = 1 if all(header.is_gray for header in headers) else 3
    run = _changed(run, {"data.channels": channels}, given)
    size = _fit([(header.height, header.width) for header in headers], MAX_SIDE, (4, 4))
    run = _changed(run, {"data.image_size": size}, given)
    neutral = {"mean": (0.0,), "std": (1.0,)}
    whole: Any = configs.replace(run.data, neutral)
    mean, std = _statistics(whole.build().train)
    run = _changed(run, {"data.mean": mean, "data.std": std}, given)
    splits = run.data.build()
    shape = (splits.format.height, splits.format.width)
    run, described = _sized(run, splits, shape, splits.format.channels, given)
    return run, [*described, *lines]


def _infer_volumes(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Infer the settings for volumes with masks; training reads windows of large ones."""
    splits: Any = run.data.build()
    format, names = splits.format, splits.class_names
    constants = {"mean": format.mean, "std": format.std, "class_names": names}
    run = _changed(run, {f"data.{name}": value for name, value in constants.items()}, given)
    lines = []
    if math.prod(format.shape) > WHOLE_VOXELS:
        run = _changed(run, {"task.window": volume_window(format.shape)}, given)
    # Volumes of different sizes are evaluated one by one, so larger batches only cost memory.
    run = _changed(run, {"task.evaluation_batch_size": 1}, given)
    window: tuple[int, ...] = run.task.window  # type: ignore[attr-defined]
    if window:
        lines.append(
            f"windows: {' x '.join(map(str, window))} voxels; volumes are up to "
            f"{' x '.join(map(str, format.shape))}"
        )
    shape = tuple(map(min, window, format.shape)) if window else format.shape
    run, described = _sized(run, splits, shape, format.channels, given)
    return run, [*described, *lines]


def volume_window(shape: Sequence[int]) -> tuple[int, ...]:
    """Choose the size of the windows in which large volumes are read.

    >>> volume_window((512, 512, 300)), volume_window((512, 512, 20))
    ((48, 48, 48), (72, 72, 20))
    """
    side = WINDOW_STEP
    while math.prod(min(n, side + WINDOW_STEP) for n in shape) <= WINDOW_VOXELS:
        side += WINDOW_STEP
    return tuple(min(n, side) for n in shape)


def _infer_texts(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Infer the settings for texts: the vocabulary, the classes and the length."""
    splits = run.data.build()
    vocab_size, names = splits.format.vocab_size, splits.class_names
    run = _changed(run, {"model.vocab_size": vocab_size, "model.num_classes": len(names)}, given)
    lengths = _text_lengths(splits.train)
    length = min(max(2 ** math.ceil(math.log2(max(lengths))), MIN_LENGTH), MAX_LENGTH)
    run = _changed(run, {"data.length": length}, given)
    run = _scaled(run, len(splits.train), CLASSIFIER, given)
    data, model = run.data, run.model
    if not (isinstance(data, TextTableConfig) and isinstance(model, SequenceClassifierConfig)):
        return run, []
    tokens = "bytes" if data.tokenizer == BYTES else "tokens"
    longer = sum(length > data.length for length in lengths) / len(lengths)
    truncated = f" ({longer:.1%} of the texts are longer and truncated)" if longer else ""
    counts = _counts(len(splits.train), len(splits.test), "texts", names)
    return run, [
        f"data: {counts}, up to {data.length} {tokens}{truncated}",
        f"{_described(model)}, vocabulary of {model.vocab_size}",
        _training(run),
    ]


def _text_lengths(train: GlueSet) -> list[int]:
    """Return the number of tokens of a sample of texts, not truncated."""
    count = min(len(train), SAMPLED_TEXTS)
    texts = [train.rows[i * len(train) // count].texts[0] for i in range(count)]
    encoder = train.encoder
    special = len(encoder.before) + len(encoder.after)
    return [len(ids) + special for ids in encoder.tokenizer.encode_many(texts)]


def _infer_rows(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Infer the settings of a language model: the vocabulary and the tokens per row."""
    splits = run.data.build()
    rows = len(splits.train)
    if "data.length" not in given and rows < MIN_ROWS:
        length = 2 ** int(math.log2(max(rows * ROW / MIN_ROWS, 1)))
        run = _changed(run, {"data.length": min(max(length, MIN_LENGTH), ROW)}, given)
        splits = run.data.build()
    run = _changed(run, {"model.vocab_size": splits.tokenizer.size}, given)
    run = _scaled(run, len(splits.train), LANGUAGE_MODEL, given)
    data, model = run.data, run.model
    assert isinstance(data, TextDatasetConfig)
    tokens = "bytes" if data.tokenizer == BYTES else "tokens"
    return run, [
        f"data: {len(splits.train):,} training and {len(splits.test):,} test rows of {data.length} "
        f"{tokens}",
        f"{_described(model)}, vocabulary of {model.vocab_size}",  # type: ignore[attr-defined]
        _training(run),
    ]


def _infer_windows(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Infer the settings of a forecaster: windows, and the size of the model and the training."""
    data, task = run.data, run.task
    assert isinstance(data, ForecastDatasetConfig)
    assert isinstance(task, ForecastingConfig)
    data = data.resolved()
    run = dataclasses.replace(run, data=data)
    splits = data.build()
    series, channels, _ = splits.train.values.shape
    length, windows = splits.train.context + splits.train.horizon, len(splits.train)
    changes = {
        "model.image_size": (length,),
        "model.channels": 2 * channels,
        "model.out_channels": channels * len(task.quantiles),
        "model.patch_size": (next(p for p, least in WINDOW_PATCHES if length >= least),),
    }
    run = _scaled(_changed(run, changes, given), windows, FORECASTER, given)
    if windows > FORECASTER.seen and "training.epochs" not in given:
        steps = FORECASTER.seen // run.training.batch_size
        every = FORECASTER.seen / windows / EVALUATIONS
        changes = {"steps": steps, "evaluate_every": every, "checkpoint_every": every}
        run = _changed(run, {f"training.{name}": x for name, x in changes.items()}, given)
    model: Any = run.model
    of_channels = f" of {channels} channels" * (channels > 1)
    season = f"seasons of {data.seasonality} steps" if splits.seasonality > 1 else "no season"
    return run, [
        f"data: {series:,} series{of_channels}, {windows:,} training and {len(splits.test):,} test "
        "windows",
        f"windows: {data.context} steps of context and {data.horizon} of forecast, {season}",
        f"{_described(model)}, patches of {model.patch_size[0]}",
        _training(run),
    ]


def _sized(
    run: RunConfig, splits: Any, shape: tuple[int, ...], channels: int, given: Collection[str]
) -> tuple[RunConfig, list[str]]:
    """Choose model and training from the shape and number of the examples; describe the run."""
    train, test, names = len(splits.train), len(splits.test), splits.class_names
    is_denoiser = isinstance(run.model, DenoiserConfig)
    is_dense = isinstance(run.model, DensePredictorConfig)
    patch_size = patches(shape, finest=is_denoiser)
    classes = 0 if is_denoiser and len(names) == 1 else len(names)
    run = _changed(run, {"model.image_size": shape, "model.patch_size": patch_size}, given)
    run = _changed(run, {"model.channels": channels, "model.num_classes": classes}, given)
    run = _changed(run, {"model.out_channels": classes}, given)
    if is_denoiser and not classes:
        run = _changed(run, {"task.sampler.guidance_scale": 1.0}, given)
    scale = DENOISER if is_denoiser else DENSE_PREDICTOR if is_dense else CLASSIFIER
    run = _scaled(run, train, scale, given)
    are_volumes = isinstance(run.data, NiftiFolderConfig)
    sizes = _sizes(splits, shape).removeprefix("ragged: " * are_volumes)
    unit = "pixels" if len(shape) == IMAGE_AXES else "voxels" if are_volumes else "values"
    if isinstance(run.data, ImageDatasetConfig | MaskFolderConfig):
        is_whole = isinstance(run.data, MaskFolderConfig) or run.data.test_crop is None
        unit += " (whole images, resized)" if is_whole else " (cropped to the center)"
    noun = "volumes" if are_volumes else UNITS.get(len(shape), "examples")
    of_channels = f"{channels} channel{'s' * (channels > 1)}"
    model: Any = run.model
    patch = " x ".join(map(str, model.patch_size))
    kind = getattr(splits, "target", CLASSES).kind
    counts = _counts(train, test, noun, names, kind)
    return run, [
        f"data: {counts}, {sizes} {unit}, {of_channels}",
        f"{_described(model)}, patches of {patch}",
        _training(run),
    ]


def _sizes(splits: Any, shape: tuple[int, ...]) -> str:
    """Describe the size of the examples, or the range of their sizes."""
    if not splits.format.is_ragged:
        return " x ".join(map(str, shape))
    return f"ragged: {size_range(np.concatenate([splits.train.sizes, splits.test.sizes]))}"


def _scaled(run: RunConfig, train: int, scale: Scale, given: Collection[str]) -> RunConfig:
    """Choose model size, batch size and epochs from the number of training examples."""
    _, width, depth, heads = next(row for row in scale.sizes if train < row[0])
    run = _changed(run, {"model.width": width, "model.depth": depth}, given)
    width = run.model.width  # type: ignore[attr-defined]
    heads = next(n for n in range(heads, 0, -1) if width % n == 0)
    run = _changed(run, {"model.mixer.num_heads": heads}, given)
    batch = fitting_batch_size(train, scale.batch_size)
    fewest, most = scale.epochs
    epochs = min(max(math.ceil(scale.seen / train), fewest), most)
    run = _changed(run, {"training.batch_size": batch, "training.epochs": epochs}, given)
    if scale in (CLASSIFIER, DENSE_PREDICTOR):
        return run
    every = run.training.epochs / EVALUATIONS
    return _changed(
        run, {"training.evaluate_every": every, "training.checkpoint_every": every}, given
    )


def _described(model: Any) -> str:
    mixer = type(model.mixer).__name__.removesuffix("MixerConfig")
    return f"model: {mixer}, {model.depth} blocks of width {model.width}"


def _counts(
    train: int, test: int, noun: str, names: Sequence[str], kind: TargetKind = "class"
) -> str:
    shown = ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
    counts = f"{train:,} training and {test:,} test {noun}"
    if kind == "class_map":
        return f"{counts} with one of {len(names)} classes at each position ({shown})"
    if kind != "class":
        each = "at each position" if kind == "value_map" else "each"
        return f"{counts} with {plural(len(names), NOUNS[kind])} {each} ({shown})"
    return f"{counts} in {len(names)} classes ({shown})" if len(names) > 1 else counts


def _training(run: RunConfig) -> str:
    settings = run.training
    length = f"{settings.epochs} epochs" if settings.steps is None else f"{settings.steps} steps"
    return f"training: {length}, batch size {settings.batch_size}"


def _changed(run: RunConfig, changes: dict[str, Any], given: Collection[str]) -> RunConfig:
    """Return the run with those changes, by dotted name, that the user did not give."""
    for name, value in changes.items():
        if name not in given:
            run = _replace(run, name.split("."), value)
    return run


def _replace(config: Any, path: list[str], value: Any) -> Any:
    name, *below = path
    if below:
        value = _replace(getattr(config, name), below, value)
    return dataclasses.replace(config, **{name: value}) if hasattr(config, name) else config


def patches(shape: tuple[int, ...], *, finest: bool = False) -> tuple[int, ...]:
    """Choose patch sizes that give at most `MAX_TOKENS` patches; they need not divide the sizes.

    Equal sizes are preferred: at least 2 if the longest axis has 8 values or more, and at least 4
    from 24 values on, unless `finest`. If an axis is neither divided by them nor twice as long, the
    axis with the most patches gets larger ones.

    >>> patches((48, 64)), patches((1237,)), patches((3, 200, 200))
    ((4, 4), (8,), (1, 32, 32))
    """
    sizes = PATCHES[1:] if finest else PATCHES
    smallest = next(patch for patch, longest in sizes if max(shape) >= longest)
    for patch in (1, 2, 4, 8, 16, 32):
        fits = all(size % patch == 0 or size >= 2 * patch for size in shape)
        if fits and patch >= smallest and _count(shape, [patch] * len(shape)) <= MAX_TOKENS:
            return (patch,) * len(shape)
    patch_size = [1] * len(shape)
    while _count(shape, patch_size) > MAX_TOKENS:
        axis = max(range(len(shape)), key=lambda i: shape[i] / patch_size[i])
        patch_size[axis] *= 2
    return tuple(patch_size)


def _count(shape: Sequence[int], patch_size: Sequence[int]) -> int:
    """Return the number of patches of a grid; the last one along an axis may be incomplete."""
    return math.prod(-(-size // patch) for size, patch in zip(shape, patch_size, strict=True))


def _holds_arrays(path: str) -> bool:
    source = Path(path).expanduser()
    return source.suffix == ".npz" or (source.is_dir() and any(source.glob("*.npy")))


def _has_classes(data: ImageDatasetConfig) -> bool:
    """Return whether all training images are in subfolders, of which there are several."""
    source = find_source(data.path, data.name)
    if source.builder != "imagefolder" or source.files is None:
        return True
    (folder,) = source.files[source.choose(data.train_split, data.test_split)["train"]]
    images = (Path(file) for file in walk(folder) if is_image_name(file))
    classes = {image.relative_to(folder).parts[:-1][:1] for image in images}
    return () not in classes and len(classes) > 1


def _halves(channels: int) -> dict[str, Any]:
    """Return the constants that map pixels to the range from -1 to 1, for denoisers."""
    return {"data.mean": (HALF,) * channels, "data.std": (HALF,) * channels}


def _survey(train: ImageDataset) -> tuple[list[tuple[int, int]], int]:
    """Return height and width of a sample of images, and 1 channel if all are grayscale, or 3.

    Sizes are those of the upright images.
    """
    sizes, is_gray = [], True
    for encoded in train.encoded(_sample(len(train))):
        try:
            header = read_header(encoded.open())
        except (OSError, ValueError) as error:
            if train.reader.on_error == "raise":
                raise ValueError(
                    f"{encoded.name} {error} (--data.on-error skip skips such images)"
                ) from error
            continue
        sizes.append((header.height, header.width))
        is_gray = is_gray and header.is_gray
    if not sizes:
        raise _nothing_readable(train)
    return sizes, 1 if is_gray else 3


def _nothing_readable(train: ImageSet) -> ValueError:
    return ValueError(f"none of {len(_sample(len(train)))} sampled images can be read")


def _sample(count: int) -> list[int]:
    """Return indices spread evenly over a dataset."""
    size = min(count, SAMPLE)
    return [i * count // size for i in range(size)]


def _fit(sizes: list[tuple[int, int]], longest: int, patch: tuple[int, ...]) -> tuple[int, int]:
    """Return the median size, scaled down to the longest side, as multiples of the patch."""
    height, width = (sorted(side)[len(side) // 2] for side in zip(*sizes, strict=True))
    scale = min(1.0, longest / max(height, width))
    fitted = (
        max(round(side * scale / multiple), 1) * multiple
        for side, multiple in zip((height, width), patch, strict=True)
    )
    first, second = fitted
    return first, second


def _statistics(train: ImageSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel over a sample of training images."""
    indices = _sample(len(train))
    groups = [indices[start : start + 32] for start in range(0, len(indices), 32)]
    batches = (train.read([Example(i) for i in group]).batch[0] for group in groups)
    values: Pixels = torch.cat([unit_pixels(batch) for batch in batches])
    if not len(values):
        raise _nothing_readable(train)
    per_channel = values.transpose(0, 1).flatten(1).double()
    mean, std = per_channel.mean(dim=1), per_channel.std(dim=1, correction=0)
    std = torch.where(std > MIN_STD, std, 1.0)
    return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in std.tolist())
