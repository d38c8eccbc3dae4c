"""The page of a training run: results, curves, and what the model learned."""

import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from onescan.checkpoint.weights import AVERAGE, BEST, WEIGHTS
from onescan.experiments.recipes import RECIPES, find_recipe
from onescan.experiments.report import (
    decays,
    diffusion,
    forecasting,
    images,
    maps,
    mixers,
    targets,
    texts,
)
from onescan.experiments.report.format import (
    ACCURACY,
    GIB,
    TIMES,
    duration,
    large,
    memory,
    metric_name,
    metric_value,
    percent,
    significant,
)
from onescan.experiments.report.page import (
    Card,
    Figure,
    Page,
    Section,
    check_report_path,
    fragment,
)
from onescan.experiments.report.plots import (
    BLUE,
    SMALLEST,
    Line,
    Scale,
    half_window,
    line_figure,
    percent_tick,
    series,
    smoothed,
    thinned,
)
from onescan.experiments.report.runs import (
    Column,
    FinishedRun,
    RunGroup,
    SeedValues,
    config_differences,
    has_training_accuracy,
    read_run_group,
)
from onescan.experiments.tasks import (
    DenseRegressionConfig,
    ForecastingConfig,
    GlueConfig,
    ImageClassificationConfig,
    ImageGeneration,
    ImageGenerationConfig,
    LanguageModellingConfig,
    MaskedLanguageModellingConfig,
    MultilabelClassificationConfig,
    RecallTaskConfig,
    RegressionConfig,
    SegmentationConfig,
    SequenceClassificationConfig,
    TaskConfig,
)
from onescan.experiments.tasks.grid import NOUNS, GridTask
from onescan.experiments.training.config import RunResult
from onescan.experiments.training.folder import Environment
from onescan.experiments.training.logging import Split
from onescan.messages import plural
from onescan.models.causal_lm import CausalLM
from onescan.models.denoiser import Denoiser
from onescan.models.dense_predictor import DensePredictor
from onescan.models.image_classifier import ImageClassifier
from onescan.models.masked_lm import MaskedLM
from onescan.models.presets import ABLATIONS
from onescan.models.sequence_classifier import SequenceClassifier

SectionOf = Callable[[RunGroup], Section]
_over_epochs = partial(line_figure, x="epoch")


def write_report(runs: Sequence[str | Path | RunResult], path: str | Path) -> Path:
    """Write a self-contained page about finished runs of one recipe.

    Args:
        runs: Folders of finished runs, or results of `train`. They may differ in seed and
            machine. Figures of a single model show the first run.
        path: HTML file. An existing page of onescan is replaced.

    Returns:
        The path.

    Raises:
        ValueError: If a run is not finished, the runs are not seeds of one recipe, their data has
            changed, there is no report for their task, or another file exists at the path.
        OSError: If the page cannot be written. An existing page stays intact.
    """
    path = Path(path)
    check_report_path(path)
    return page_of(read_run_group(runs)).write(path)


def page_of(group: RunGroup) -> Page:
    """Collect what the page shows.

    Raises:
        ValueError: If there is no report for the runs' task.
    """
    task = type(group.config.task)
    if task not in SECTIONS:
        known = ", ".join(config.__name__ for config in SECTIONS)
        raise ValueError(f"there is no report for task {task.__name__}; available: {known}")
    return Page(
        kind="training report",
        title=page_title(group),
        lead=_lead(group),
        cards=_cards(group),
        table=fragment("table", _seeds(group)),
        facts=_facts(group),
        sections=[section(group) for section in SECTIONS[task]],
    )


# Summary


def page_title(group: RunGroup) -> str:
    """Return the name of the recipe, and of the data if the user chose their own."""
    name, base = group.config.name, group.config.name.partition("/")[0]
    path = getattr(group.config.data, "path", None)
    if not path or base not in RECIPES or path == getattr(find_recipe(base)().data, "path", None):
        return name
    return f"{name} on {Path(path).resolve().name}"


def _lead(group: RunGroup) -> str:
    """Describe model and data in a few sentences."""
    task, model, unit = group.task, group.model, group.task.unit
    noun = images.noun(group)
    kind_of_target = task.target.kind
    predictors = {
        "value": "regression model",
        "class_map": "segmentation model",
        "value_map": "dense regression model",
    }
    predictor = predictors.get(kind_of_target, "classifier")
    classifier = predictor if noun == "example" else f"{noun} {predictor}"
    kinds = {
        ImageClassifier: f"This {classifier}",
        DensePredictor: f"This {classifier}",
        Denoiser: "This denoiser turns noise into images, step by step. It",
        CausalLM: "This language model predicts the next token. It",
        MaskedLM: "This language model predicts masked tokens. It",
        SequenceClassifier: "This sequence classifier",
    }
    kind = kinds.get(type(model), "This model")
    if isinstance(group.config.task, RecallTaskConfig):
        kind = "This model reads pairs of a key and a value, and then recalls values by key. It"
    classes = f" of {plural(len(group.class_names), 'class')}" * bool(group.class_names)
    if kind_of_target == "class_map":
        classes = f" with one of {plural(len(group.class_names), 'class')} at each position"
    elif kind_of_target != "class":
        where = "at each position" if kind_of_target == "value_map" else "each"
        classes = f" with {plural(len(group.class_names), NOUNS[kind_of_target])} {where}"
    held_out = len(task.test)
    if isinstance(group.config.task, ImageClassificationConfig):
        held_out = len(images.held_out_labels(group))  # unreadable ones are left out
    lead = (
        f"{kind} was trained on {len(task.train):,} {unit}{classes}, "
        f"and evaluated on {held_out:,} held-out {unit}."
    )
    if isinstance(task, ImageGeneration):
        targets = {"noise": "the added noise", "v": "the velocity", "flow": "the flow to the image"}
        lead += f" It was trained to predict {targets[task.config.noise.prediction]}."
    if type(model) not in kinds:
        return lead
    config: Any = model.config
    mixers = [config.mixer.for_layer(i) for i in range(config.depth)]
    kinds_of_mixers = dict.fromkeys(
        f"{type(mixer).__name__.removesuffix('MixerConfig')} mixers of "
        f"{plural(mixer.num_heads, 'head')}"
        for mixer in mixers
    )
    lead += (
        f" It has {plural(config.depth, 'block')} of width {config.width} with "
        f"{' and '.join(kinds_of_mixers)}"
    )
    if not isinstance(model, ImageClassifier | Denoiser | DensePredictor):
        return f"{lead}, and a vocabulary of {config.vocab_size:,} tokens."
    patches = math.prod(images.patch_grid(model))
    size, patch = (f" {TIMES} ".join(map(str, n)) for n in (config.image_size, config.patch_size))
    up_to = "up to " * (isinstance(group.task, GridTask) and group.task.format.is_ragged)
    return (
        f"{lead}, and splits each {noun} of {up_to}{size} into {up_to}{patches} patches of {patch}."
    )


def _cards(group: RunGroup) -> list[Card]:
    """The main metric, parameters, time and speed."""
    seeds, name = len(group.runs), next(iter(group.runs[0].result.metrics))
    score = SeedValues(tuple(group.metric(name)))
    parameters = sum(parameter.numel() for parameter in group.model.parameters())
    device = group.runs[0].manifest.environments[0].device
    return [
        Card(
            metric_value(name, score.mean),
            f"test {metric_name(name)}",
            f"mean and standard deviation of {seeds} seeds"
            if seeds > 1
            else f"after the last step; best: {_best(group, group.runs[0])}",
            "" if score.std is None else metric_value(name, score.std),
        ),
        Card(large(parameters), "parameters", f"{parameters:,} in total"),
        Card(
            duration(statistics.mean(run.seconds for run in group.runs)),
            "training time",
            "per seed, without evaluation",
        ),
        Card(
            large(statistics.mean(run.throughput for run in group.runs)),
            f"{group.task.unit} per second",
            f"at the median step, on {device}",
        ),
    ]


def _seeds(group: RunGroup) -> list[list[str]]:
    names = list(group.runs[0].result.metrics)
    tests = [f"test {metric_name(name)}" for name in names]
    best = f"best {metric_name(names[0])}"
    head = ["seed", *tests, best, "training time", f"{group.task.unit}/s"]
    rows = [
        [
            str(run.seed),
            *(metric_value(name, run.result.metrics[name]) for name in names),
            _best(group, run),
            duration(run.seconds),
            large(run.throughput),
        ]
        for run in group.runs
    ]
    return [head, *rows]


def _best(group: RunGroup, run: FinishedRun) -> str:
    """Format the main metric of the best evaluation, and its epoch."""
    name, best = next(iter(run.result.metrics)), run.best(group.task.score)
    return f"{metric_value(name, best[name])}, epoch {best['epoch']:.3g}"


def _facts(group: RunGroup) -> list[tuple[str, str]]:
    first, *later = group.runs[0].manifest.environments
    facts = [("Data", note) for note in group.runs[0].manifest.notes]
    precision = group.runs[0].manifest.used_precision
    facts += [("Device", f"{_device(first)}, {precision}"), ("Versions", _versions(first))]
    if first.commit:
        facts.append(("Commit", first.commit))
    for environment in later:
        commit = f", commit {environment.commit}" if environment.commit else ""
        description = f"{_device(environment)}, {_versions(environment)}{commit}"
        facts.append((f"From step {environment.since_step:,}", description))
    return [
        *facts,
        ("Runs", ", ".join(str(run.result.folder) for run in group.runs)),
        ("Weights", _weights(group)),
        ("Command", _command(group)),
    ]


def _weights(group: RunGroup) -> str:
    """Describe the files with weights."""
    text = f"{WEIGHTS} has those of the last step, {BEST} those of the best evaluation"
    is_raw = group.config.training.reported_weights == "raw"
    return f"{text}, both without EMA; {AVERAGE} has the EMA of the last step" if is_raw else text


def _command(group: RunGroup) -> str:
    """The command that repeats the runs; lines break between its words only."""
    if (words := repeat_command(group)) is None:
        return "No recipe: the settings are in each run's config.json."
    spans = Markup(" ").join(Markup("<span>{}</span>").format(word) for word in words)
    return Markup("<code>{}</code>").format(spans)


def _device(environment: Environment) -> str:
    several = f"{environment.processes} {TIMES} " if environment.processes > 1 else ""
    return f"{several}{environment.device}, {environment.platform}"


def _versions(environment: Environment) -> str:
    return f"onescan {environment.onescan}, torch {environment.torch}, Python {environment.python}"


def repeat_command(group: RunGroup) -> list[str] | None:
    """Return the command that trains the same runs, quoted for a shell.

    None if the runs are not of a recipe, or have other components than the recipe.
    """
    name = group.config.name
    base, *ablations = name.split("/")
    if base not in RECIPES or not ABLATIONS.keys() >= {*ablations}:
        return None
    argv = ["onescan", "train", name, "--seeds", *(str(run.seed) for run in group.runs)]
    if (out := _out(group)) not in (None, Path("runs") / name):
        argv += ["--out", str(out)]
    for path, old, new in config_differences(find_recipe(name)(), group.config):
        if path.endswith("type") or not (_is_plain(old) and _is_plain(new)):
            return None
        argv += _flag(path, new)
    return [shlex.quote(word) for word in argv]


def _out(group: RunGroup) -> Path | None:
    """Return the folder that `onescan train` wrote the runs to, if there is one."""
    folder = group.runs[0].result.folder.parent
    expected = [folder / f"seed-{run.seed}" for run in group.runs]
    return folder if [run.result.folder for run in group.runs] == expected else None


def _flag(path: str, value: Any) -> list[str]:
    """Return the command-line flag that sets a field.

    >>> _flag("model.mixer.num_heads", 8), _flag("model.mixer.lrpe", False)
    (['--model.mixer.num-heads', '8'], ['--model.mixer.no-lrpe'])
    """
    *parents, name = path.replace("_", "-").split(".")
    if isinstance(value, bool):
        return ["--" + ".".join([*parents, name if value else f"no-{name}"])]
    values = value if isinstance(value, tuple) else (value,)
    return ["--" + ".".join([*parents, name]), *map(str, values)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple)


# Curves

MEANINGS = {  # by the end of a metric's name
    "mean_iou": "Intersection of the predicted and the true positions of a class over their union. "
    "Mean over classes.",
    "mean_dice": "Harmonic mean of precision and recall over the positions of a class. Mean over "
    "classes.",
    "top5_accuracy": "Share of held-out {unit} whose class is among the five most likely.",
    "label_accuracy": "Share of generated images that a classifier assigns to the requested class.",
    "accuracy": "Share of {right}.",
    "bits_per_byte": "Loss in bits per byte of held-out text, which is comparable between "
    "tokenizers. Uncompressed text has 8.",
    "feature_distance": "Frechet distance between generated and held-out images in the features "
    "of the classifier; 0 if their mean and covariance agree. It is biased upwards for few images, "
    "is comparable only for the same classifier and number of images, and is not an FID.",
    "macro_f1": "Mean over labels of F1, the harmonic mean of precision and recall.",
    "micro_f1": "Harmonic mean of precision and recall of all labels pooled.",
    "mean_average_precision": "Mean over labels of the area under the curve of precision over "
    "recall.",
    "r2": "Share of the variance of held-out values that is explained: 1 is exact, and 0 is as "
    "good as predicting their mean. With several values, the mean over them.",
    "rmse": "Root of the mean squared error in the units of the values. With several values, the "
    "mean over them.",
    "mae": "Mean absolute error in the units of the values. With several values, the mean over "
    "them.",
    "mase": "Mean absolute error, divided by the error of the seasonal naive forecast in the "
    "training period.",
    "weighted_quantile_loss": "Quantile loss over the sum of absolute values.",
    "f1": "Harmonic mean of precision and recall of class 1.",
    "matthews_correlation": "Correlation of predictions with labels: 0 for guessing, 1 if all are "
    "correct.",
    "pearson": "Linear correlation of predictions with scores.",
    "spearman": "Correlation of the ranks of predictions and scores.",
}
VALUE_ERRORS = ("r2", "rmse", "mae", "mase", "weighted_quantile_loss")
RIGHT: dict[type[TaskConfig], str] = {  # what accuracy is a share of
    SegmentationConfig: "held-out positions whose class is predicted",
    LanguageModellingConfig: "held-out tokens that the model ranks first",
    MaskedLanguageModellingConfig: "masked tokens that the model ranks first",
    RecallTaskConfig: "queries in held-out sequences that are answered correctly",
}


def training(group: RunGroup) -> Section:
    """Loss, metrics, learning rate and gradient norm."""
    task, metrics = group.config.task, group.runs[0].result.metrics
    loss, test_loss = "Cross-entropy", "Cross-entropy"
    if isinstance(task, ImageGenerationConfig):
        learns_variance = getattr(group.config.model, "learn_sigma", False)
        loss = "Squared error and variational bound" if learns_variance else "Squared error"
        test_loss = "Squared error"
    elif isinstance(task, GlueConfig) and not group.class_names:
        loss = test_loss = "Squared error"
    elif isinstance(task, MultilabelClassificationConfig):
        loss = test_loss = "Binary cross-entropy"
    elif isinstance(task, SegmentationConfig) and task.dice_weight:
        loss = test_loss = "Cross-entropy plus Dice loss"
    elif isinstance(task, RegressionConfig | DenseRegressionConfig):
        names = {"l2": "Squared error", "l1": "Absolute error", "huber": "Huber loss"}
        loss = test_loss = f"{names[task.loss]} of standardized values"
    elif isinstance(task, ForecastingConfig):
        loss = test_loss = "Quantile loss of standardized values"
    smoothing = getattr(task, "label_smoothing", 0.0)
    smoothed_labels = (
        f" Labels are smoothed by {smoothing:g} in training only, so this loss stays above 0 and "
        "may exceed the test loss."
    ) * bool(smoothing)
    clip = group.config.training.max_grad_norm
    clipped = f" Norms above the dashed line, {clip:g}, are clipped." if clip else ""
    measured = [_metric_figure(group, name) for name in metrics if _meaning(name)]
    longest = max(group.runs, key=lambda run: run.result.steps)
    rates = longest.column("train", "learning_rate")
    shown = thinned(len(rates))
    rate = Line(f"{rates[-1]:.2g}", BLUE, longest.column("train", "epoch")[shown], rates[shown])
    return Section(
        "Training",
        [
            *([_transfer_loss(group)] if group.runs[0].has_transfer else []),
            _over_epochs(
                _batches(group, "loss"),
                f"{loss} {_per_batch(group)}; lower is better.{smoothed_labels}",
                y="training loss",
                scale="log",
            ),
            *measured,
            *([_training_accuracy(group)] if has_training_accuracy(group.config) else []),
            _evaluations(
                group,
                "loss",
                "log",
                f"{test_loss} on held-out {group.task.unit}. The model overfits where it rises "
                "while the training loss falls.",
            ),
            _over_epochs(
                [rate],
                "The schedule of the recipe, which all seeds share.",
                y="learning rate",
                scale="zero",
            ),
            _over_epochs(
                _batches(group, "gradient_norm"),
                f"Norm of the gradient {_per_batch(group)}. Spikes are batches with large "
                f"gradients.{clipped}",
                y="gradient norm",
                scale="log",
                threshold=clip,
            ),
        ],
    )


def _transfer_loss(group: RunGroup) -> Figure:
    """The loss of the first phase, in which only the mixers are trained."""
    return _over_epochs(
        _batches(group, "loss", "transfer"),
        "Squared error of the mixers' outputs, divided by the squared norm of the teacher's and "
        "averaged over layers. Only the mixers are trained in this phase; the other figures start "
        "after it.",
        y="attention transfer loss",
        scale="log",
    )


def _training_accuracy(group: RunGroup) -> Figure:
    """Return the figure of the training accuracy, as in LDN's Fig. 2."""
    augmented = " Augmentation, which is used in training only, lowers it." * (
        getattr(group.config.task, "augment", None) is not None
    )
    return _over_epochs(
        _running(group, lambda run: run.column("train", "accuracy"), percent),
        f"Share of training {group.task.unit} that are classified correctly, {_per_batch(group)}, "
        f"before the batch updates the model.{augmented}",
        y="training accuracy",
        scale="share",
        format=percent_tick,
    )


def _meaning(name: str) -> str:
    """The caption of a metric's figure; empty for metrics that other figures show."""
    if name.endswith("_pairs_accuracy"):  # in the section on recall
        return ""
    error_suffixes = tuple(f"_{error}" for error in VALUE_ERRORS)
    if name.removeprefix("ema_").endswith(error_suffixes):  # in the table of values
        return ""
    return next((text for end, text in MEANINGS.items() if name.endswith(end)), "")


def _metric_figure(group: RunGroup, name: str) -> Figure:
    unit = group.task.unit
    right = RIGHT.get(type(group.config.task), f"held-out {unit} that are classified correctly")
    scale: Scale = "linear"
    if name.endswith(ACCURACY):
        scale = "share"
    elif name in ("bits_per_byte", "feature_distance"):
        scale = "log"
    return _evaluations(group, name, scale, _meaning(name).format(right=right, unit=unit))


def _per_batch(group: RunGroup) -> str:
    """Explain the two curves, or the one curve of a short run."""
    batches = max(len(run.column("train", "loss")) for run in group.runs)
    return "per batch (light) and its running mean (dark)" if half_window(batches) else "per batch"


def _batches(group: RunGroup, name: str, split: Split = "train") -> list[Line]:
    """A recorded number of every batch of training, or of attention transfer."""

    def values(run: FinishedRun) -> Column:
        return np.maximum(run.column(split, name), SMALLEST)

    return _running(group, values, "{:.3f}".format, split=split)


def _running(
    group: RunGroup,
    values: Callable[[FinishedRun], Column],
    format: Callable[[float], str],
    *,
    split: Split = "train",
    statistic: Callable[[Column], float] = np.mean,
    with_raw: bool = True,
) -> list[Line]:
    """A line for each run: the running mean, or another statistic, of a number of every batch."""
    lines = []
    for i, run in enumerate(group.runs):
        y, epochs = values(run), run.column(split, "epoch")
        shown = thinned(len(y))
        smooth = smoothed(y, shown, statistic)
        raw = y[shown] if with_raw and half_window(len(y)) else None
        label = f"seed {run.seed}: {format(smooth[-1])}"
        lines.append(Line(label, series(i), epochs[shown], smooth, raw))
    return lines


def _evaluations(group: RunGroup, name: str, scale: Scale, caption: str) -> Figure:
    """A metric of every evaluation."""
    lines = []
    for i, run in enumerate(group.runs):
        y = run.column("test", name)
        label = f"seed {run.seed}: {metric_value(name, y[-1])}"
        y = np.maximum(y, SMALLEST) if scale == "log" else y
        lines.append(Line(label, series(i), run.column("test", "epoch"), y))
    tick = percent_tick if scale == "share" else significant
    return _over_epochs(lines, caption, y=f"test {metric_name(name)}", scale=scale, format=tick)


# Speed

MIN_AXIS_END = 0.1  # the axis of waiting reaches at least this share
CPU = "cpu"  # name of the device in an environment


def speed(group: RunGroup) -> Section:
    """Examples per second, time spent waiting for data, and memory."""
    several = max(environment.processes for environment in group.runs[0].manifest.environments) > 1
    lead = "Waiting and memory are those of the first process." * several
    return Section("Speed and memory", [_speed(group), _waiting(group), *_memory(group)], lead)


def _speed(group: RunGroup) -> Figure:
    def values(run: FinishedRun) -> Column:
        return run.batch_sizes / run.column("train", "seconds")

    unit, lines = group.task.unit, _running(group, values, large, statistic=np.median)
    two = " (light) and its running median (dark)" * (lines[0].raw is not None)
    return _over_epochs(
        lines,
        f"Training {unit} per second of each step{two}, without evaluations and checkpoints. Drops "
        "are often caused by other programs on the same machine.",
        y=f"{unit} per second",
        scale="zero",
        format=large,
    )


def _waiting(group: RunGroup) -> Figure:
    def values(run: FinishedRun) -> Column:
        return run.column("train", "waiting_seconds") / run.column("train", "seconds")

    waited = sum(run.waiting * run.seconds for run in group.runs)
    total = sum(run.seconds for run in group.runs)
    over = " over all seeds" if len(group.runs) > 1 else ""
    return _over_epochs(
        _running(group, values, "{:.0%}".format, with_raw=False),
        f"Share of each step spent waiting for a batch. In total {percent(waited / total)} of the "
        f"time, {duration(waited)} of {duration(total)}{over}. If it is high, use more workers "
        "(machine.workers).",
        title="Waiting for data",
        y="time spent waiting",
        scale="zero",
        format=percent_tick,
        at_least=MIN_AXIS_END,
    )


def _memory(group: RunGroup) -> list[Figure]:
    peak = max(run.memory_mib for run in group.runs)
    if math.isnan(peak):  # not every operating system reports it
        return []
    on_cpu = group.runs[0].manifest.environments[0].device == CPU
    what = "Memory of the process, libraries and data included" if on_cpu else "Peak GPU memory"
    size, unit = (GIB, "GiB") if peak > GIB else (1, "MiB")

    def values(run: FinishedRun) -> Column:
        return run.column("train", "memory_mib") / size

    lines = _running(group, values, lambda amount: f"{amount:.3g} {unit}", with_raw=False)
    caption = f"{what}; at most {memory(peak)}. A steady rise indicates a leak."
    return [_over_epochs(lines, caption, title="Memory", y=f"memory, {unit}", scale="zero")]


LAYERS: tuple[SectionOf, ...] = (
    mixers.position_kernels,
    mixers.frequencies,
    decays.learned_decays,
    diffusion.section,
)
TEXT: tuple[SectionOf, ...] = (training, speed, texts.generated, decays.learned_decays)
SECTIONS: dict[type[TaskConfig], tuple[SectionOf, ...]] = {
    ImageClassificationConfig: (
        training,
        speed,
        images.confusion,
        images.predictions,
        mixers.key_importance,
        *LAYERS,
    ),
    ImageGenerationConfig: (
        images.generated,
        training,
        images.noise_errors,
        speed,
        mixers.position_kernels,
        mixers.frequencies,
    ),
    LanguageModellingConfig: TEXT,
    MaskedLanguageModellingConfig: TEXT,
    RecallTaskConfig: (training, speed, texts.recall, decays.learned_decays),
    GlueConfig: (training, speed, texts.glue_errors, decays.learned_decays),
    SequenceClassificationConfig: (training, speed, decays.learned_decays),
    MultilabelClassificationConfig: (training, speed, targets.labels, *LAYERS),
    RegressionConfig: (training, speed, targets.values, *LAYERS),
    SegmentationConfig: (training, speed, maps.classes, *LAYERS),
    DenseRegressionConfig: (training, speed, maps.values, *LAYERS),
    ForecastingConfig: (forecasting.section, training, speed, *LAYERS),
}
