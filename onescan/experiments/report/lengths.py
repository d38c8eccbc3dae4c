"""Evaluation of a language model at several context lengths: a table in text, and a page."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onescan.experiments.report.format import metric_value, percent, plain_table
from onescan.experiments.report.page import Card, Figure, Page, Section, fragment
from onescan.experiments.report.plots import Line, Scale, line_figure, series
from onescan.messages import plural

if TYPE_CHECKING:
    from onescan.experiments.evaluation.lengths import LengthScores, PlaceScore

CAUSAL = (
    "How well the model predicts the next token. The text is cut into rows of several lengths; the "
    "context of a token is the preceding tokens of its row."
)
MASKED = (
    "How well the model predicts masked tokens. The text is cut into rows of several lengths; the "
    "context of a token is the rest of its row."
)
METRICS = ("loss", "perplexity", "accuracy")


def lengths_table(scores: "LengthScores") -> str:
    """Format the metrics at every length as a plain-text table."""
    rows = [["length", *METRICS, ""]]
    for score in scores.scores:
        cells = [f"{getattr(score, name):.4f}" for name in METRICS]
        mark = "as in training" if score.length == scores.trained_length else ""
        rows.append([str(score.length), *cells, mark])
    return plain_table(rows, left=0)


def write_lengths(scores: "LengthScores", path: Path) -> Path:
    """Write a self-contained page with curves over lengths, and all numbers.

    Args:
        scores: Result of `measure_lengths`.
        path: HTML file. An existing page of onescan is replaced.

    Returns:
        The path.

    Raises:
        ValueError: If another file exists at the path.
        OSError: If the page cannot be written. An existing page stays intact.
    """
    page = Page(
        kind="context lengths",
        title=scores.name,
        lead=CAUSAL if scores.is_causal else MASKED,
        cards=_cards(scores),
        facts=_facts(scores),
        sections=[_curves(scores), _numbers(scores)],
    )
    return page.write(path)


def loss_by_position(scores: "LengthScores") -> "list[PlaceScore]":
    """Return the loss at every position of the longest rows.

    Each is taken from the shortest rows that reach the position, because there are more of those.
    """
    shortest = {
        (score.begin, score.end): score
        for length_score in reversed(scores.scores)
        for score in length_score.places
    }
    return [shortest[score.begin, score.end] for score in scores.scores[-1].places]


def _cards(scores: "LengthScores") -> list[Card]:
    """Return the main metric at the training length and at the longest one."""
    name = "perplexity" if scores.is_causal else "accuracy"
    trained = [each for each in scores.scores if each.length == scores.trained_length]
    longest = "the longest" if len(scores.scores) > 1 else "the only length"
    shown = [("as in training", each) for each in trained] + [(longest, scores.scores[-1])]
    return [
        Card(
            metric_value(name, getattr(score, name)),
            name,
            f"{which}: rows of {plural(score.length, 'token')}",
        )
        for which, score in shown
    ]


def _facts(scores: "LengthScores") -> list[tuple[str, str]]:
    trained = scores.trained_length
    which = "all but the first" if scores.is_causal else "the masked ones, masked as in training"
    count = plural(scores.predicted_tokens, "token")
    return [
        ("Text", f"{scores.text}, {plural(scores.tokens, 'token')}"),
        ("Scored tokens", f"{which}: {count}, the same ones at every length"),
        ("Rows", "cut from the concatenated documents; a row may span several"),
        ("Training", "unknown" if trained is None else f"in rows of {plural(trained, 'token')}"),
        ("Version", f"onescan {scores.onescan}"),
    ]


def _curves(scores: "LengthScores") -> Section:
    """Return the metrics over lengths, if there are several, and the loss by position."""
    lengths = [score.length for score in scores.scores]
    trained = " The dashed line marks the row length in training." * bool(scores.trained_length)
    captions = {
        "accuracy": f"Share of masked tokens predicted correctly.{trained}",
        "loss": f"Of the masked tokens, in nats per token; lower is better.{trained}",
    }
    if scores.is_causal:
        captions = {"perplexity": f"Over all tokens of the rows; lower is better.{trained}"}
    figures = [
        _curve(scores, lengths, [getattr(score, name) for score in scores.scores], caption, y=name)
        for name, caption in captions.items()
        if len(lengths) > 1
    ]
    if scores.is_causal:
        places = loss_by_position(scores)
        ends, losses = [place.end for place in places], [place.loss for place in places]
        title, x = "Loss by position in the row", "tokens of context"
        caption = (
            "In nats per token. Each dot covers the positions after the previous dot, taken from "
            "the shortest rows that reach them, because there are more of those. If there are "
            "few rows, the loss also depends on the text at these positions."
        )
        caption += trained
        figures.append(_curve(scores, ends, losses, caption, y="loss", x=x, title=title))
    return Section("Over lengths", figures, "Only one length was evaluated." * (len(lengths) == 1))


def _curve(
    scores: "LengthScores",
    x_values: list[int],
    values: list[float],
    caption: str,
    *,
    y: str,
    x: str = "tokens of a row",
    title: str = "",
) -> Figure:
    is_share = y == "accuracy"
    name = percent(values[-1]) if is_share else f"{values[-1]:.3g}"
    line = Line(name, series(0), np.array(x_values, float), np.array(values), dots=True)
    scale: Scale = "share" if is_share else "linear"
    log = {"log_x": True, "mark_x": scores.trained_length}
    return line_figure([line], caption, title=title, x=x, y=y, scale=scale, **log)


def _numbers(scores: "LengthScores") -> Section:
    rows = [["length", *METRICS]]
    for score in scores.scores:
        cells = [metric_value(name, getattr(score, name)) for name in METRICS]
        rows.append([f"{score.length:,}", *cells])
    table = fragment("table", rows, "numbers lined")
    caption = "Lengths are in tokens, the loss is in nats per token. Perplexity is its exponential."
    left_out = [
        f"Not evaluated: {left.length:,} tokens, because {left.why}." for left in scores.left_out
    ]
    return Section(
        "Numbers", [Figure("All lengths", table, caption, columns=3)], " ".join(left_out)
    )
