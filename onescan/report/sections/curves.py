"""How training went: loss, accuracy, learning rate and gradients over epochs, every seed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from onescan.report.lines import LEAST, Line, line_chart, smoothed, thinned
from onescan.report.palette import BLUE, series
from onescan.report.runs import FinishedRun, RunGroup
from onescan.report.scales import from_zero, log_scale, share_scale
from onescan.report.section import Figure, Section
from onescan.report.words import metric_name, percent, significant
from onescan.tasks import (
    GlueConfig,
    ImageClassificationConfig,
    ImageGenerationConfig,
    LanguageModellingConfig,
    MaskedLanguageModellingConfig,
    RecallTaskConfig,
    TaskConfig,
)

TOP5, BITS = "top5_accuracy", "bits_per_byte"
AS_ASKED, DISTANCE = "label_accuracy", "feature_distance"


class Wording(NamedTuple):
    """What a task's numbers are of.

    Attributes:
        right: what accuracy is a share of.
        judged: what the model is judged on.
        learnt: what it learns from.
        loss: what is lowered.
        test_loss: what is told of held-out examples, where that is something else.
    """

    right: str
    judged: str
    learnt: str
    loss: str = "Cross-entropy"
    test_loss: str | None = None


IMAGES = Wording("held-out images that are classified right", "held-out images", "training images")
SEQUENCES = Wording(
    "held-out sequences that are classified right", "held-out sequences", "training sequences"
)
NEXT = Wording(
    "held-out tokens that the model finds the likeliest to follow", "held-out text", "text"
)
MASKED = Wording("masked tokens that the model finds the likeliest", "held-out text", "text")
RECALLED = Wording(
    "queries of held-out sequences that are answered right",
    "held-out sequences",
    "training sequences",
)
MADE = Wording(
    "images it makes that a classifier labels as asked",
    "held-out images",
    "training images",
    loss="Squared error, and where variances are told their bits on top,",
    test_loss="Squared error alone",
)
WORDINGS: dict[type[TaskConfig], Wording] = {
    ImageClassificationConfig: IMAGES,
    ImageGenerationConfig: MADE,
    LanguageModellingConfig: NEXT,
    MaskedLanguageModellingConfig: MASKED,
    RecallTaskConfig: RECALLED,
}


def section(study: RunGroup) -> Section:
    """Training loss, what held-out examples say, and what the optimizer did."""
    words = WORDINGS.get(type(study.config.task), SEQUENCES)
    metrics, is_glue = study.runs[0].result.metrics, isinstance(study.config.task, GlueConfig)
    loss = "Squared error" if is_glue and not study.class_names else words.loss
    further = [_top5_accuracy(study)] if TOP5 in metrics else []
    further += [_bits_per_byte(study)] if BITS in metrics else []
    further += [_label_accuracy(study, words)] if AS_ASKED in metrics else []
    further += [_feature_distance(study)] if DISTANCE in metrics else []
    return Section(
        "Training",
        (
            Figure(
                "Training loss",
                _batches(study, "loss", "training loss"),
                f"{loss} of the training batches, on a logarithmic axis: faint, each batch; "
                "strong, the running mean. Lower is better." + _smoothing(study),
            ),
            *([_accuracy(study, words)] if "accuracy" in metrics and not is_glue else []),
            Figure(
                "Test loss",
                _test(study, "loss"),
                f"{words.test_loss or loss} of the {words.judged}. If it rises while the "
                f"training loss falls, the model has begun to learn the {words.learnt} by heart.",
            ),
            *further,
            Figure(
                "Learning rate",
                _learning_rate(study),
                "How long a step the optimizer takes. It rises while warming up and then falls, as "
                "the recipe says, in the same way for every seed.",
            ),
            Figure(
                "Length of the gradient",
                _batches(study, "gradient_norm", "gradient norm", limit=_clip(study)),
                "How steep the loss is at each step, on a logarithmic axis: faint, each batch; "
                "strong, the running mean. Spikes are batches that pulled hard." + _clipping(study),
            ),
        ),
    )


def _accuracy(study: RunGroup, words: Wording) -> Figure:
    return Figure(
        "Test accuracy",
        _share(study, "accuracy"),
        f"Share of the {words.right}. The axis widens towards 100%, where the last mistakes would "
        "otherwise merge into a line.",
    )


def _bits_per_byte(study: RunGroup) -> Figure:
    return Figure(
        "Test bits per byte",
        _test(study, BITS),
        "The loss of the held-out text, in bits and spread over the text's bytes: it compares "
        "models of different tokenizers. Text as such has 8.",
    )


def _label_accuracy(study: RunGroup, words: Wording) -> Figure:
    return Figure("Labelled as asked", _share(study, AS_ASKED), f"Share of the {words.right}.")


def _feature_distance(study: RunGroup) -> Figure:
    return Figure(
        "Feature distance",
        _test(study, DISTANCE),
        "Frechet distance of the images it makes from as many held-out ones, in the features of "
        "the classifier: 0 where both have the same mean and spread, and too large where images "
        "are few. It compares runs with the same classifier and as many images, and is no FID.",
    )


def _top5_accuracy(study: RunGroup) -> Figure:
    return Figure(
        "Test top-5 accuracy",
        _share(study, TOP5),
        "Share of the held-out images whose class is among the five likeliest.",
    )


def _smoothing(study: RunGroup) -> str:
    smoothing = getattr(study.config.task, "label_smoothing", 0.0)
    if not smoothing:
        return ""
    return (
        f" The labels are smoothed by {smoothing:g}, in training only, so this "
        "loss cannot fall to 0 and may stay above the test loss."
    )


def _clip(study: RunGroup) -> float | None:
    return study.config.training.max_grad_norm


def _clipping(study: RunGroup) -> str:
    clip = _clip(study)
    return f" Dashed: what is longer than {clip:g} is shortened to it." if clip else ""


def _batches(study: RunGroup, name: str, what: str, *, limit: float | None = None) -> str:
    """A number of every training batch, and its running mean."""

    def line(run: FinishedRun, color: str) -> Line:
        epochs = run.column("train", "epoch")
        values = np.maximum(run.column("train", name), LEAST)
        places = thinned(len(values))
        x, y = epochs[places], smoothed(values, places)
        return Line(f"seed {run.seed}: {y[-1]:.3f}", color, x, y, raw=(x, values[places]))

    def finish(axes: Axes) -> None:
        if limit:
            axes.axhline(limit, color="gray", linestyle="--", linewidth=0.8)
        log_scale(axes)

    return line_chart(_seeds(study, line), x="epoch", y=what, finish=finish)


def _share(study: RunGroup, name: str) -> str:
    def line(run: FinishedRun, color: str) -> Line:
        y = run.column("test", name)
        end = f"seed {run.seed}: {percent(y[-1])}"
        return Line(end, color, run.column("test", "epoch"), y)

    lines = _seeds(study, line)
    arrays = study.runs[0].result.evaluation.arrays
    least = 0.5 / len(next(iter(arrays.values())))

    def finish(axes: Axes) -> None:
        low, high = min(line.y.min() for line in lines), max(line.y.max() for line in lines)
        share_scale(axes, low, high, least=least)

    return line_chart(lines, x="epoch", y=f"test {metric_name(name)}", finish=finish)


def _test(study: RunGroup, name: str) -> str:
    def line(run: FinishedRun, color: str) -> Line:
        y = np.maximum(run.column("test", name), LEAST)
        return Line(f"seed {run.seed}: {y[-1]:.3f}", color, run.column("test", "epoch"), y)

    lines = _seeds(study, line)
    return line_chart(lines, x="epoch", y=f"test {metric_name(name)}", finish=log_scale)


def _learning_rate(study: RunGroup) -> str:
    """Of the longest run: all follow the same plan."""
    run = max(study.runs, key=lambda run: run.result.steps)
    places = thinned(len(run.column("train", "step")))
    x, y = (run.column("train", name)[places] for name in ("epoch", "learning_rate"))
    line = Line(f"{y[-1]:.2g}", BLUE, x, y)

    def finish(axes: Axes) -> None:
        from_zero(axes, spell=significant)

    return line_chart([line], x="epoch", y="learning rate", finish=finish)


def _seeds(study: RunGroup, line: Callable[[FinishedRun, str], Line]) -> list[Line]:
    return [line(run, series(i)) for i, run in enumerate(study.runs)]
