"""The page: the shortest and the longest rows in big numbers, curves, and all numbers."""

from onescan.evaluation.lengths import LengthScore, LengthScores
from onescan.report.cards import Card, big_numbers, fact_list
from onescan.report.lengths.pictures import pictures
from onescan.report.section import Figure, Section
from onescan.report.template import fill
from onescan.report.words import metric_value, plural

CAUSAL = (
    "How well the model tells each next token of a text that is cut into rows of several lengths. "
    "What it has read of a row is all the context that it has."
)
MASKED = (
    "How well the model tells masked tokens of a text that is cut into rows of several lengths. "
    "The rest of a row is all the context that it has."
)
METRICS = ("loss", "perplexity", "accuracy")


def render_lengths(scores: LengthScores) -> str:
    """Spell the page in HTML."""
    return fill(
        kind="lengths",
        title=scores.name,
        lead=CAUSAL if scores.is_causal else MASKED,
        summary=f"{_cards(scores)}\n{_facts(scores)}",
        sections=(pictures(scores), _numbers(scores)),
    )


def lengths_table(scores: LengthScores) -> str:
    """The numbers in columns, for a terminal."""
    lines = [f"{'length':>8}" + "".join(f"{name:>12}" for name in METRICS)]
    for score in scores.scores:
        cells = "".join(f"{getattr(score, name):>12.4f}" for name in METRICS)
        mark = "  as in training" * (score.length == scores.trained_length)
        lines.append(f"{score.length:>8}{cells}{mark}")
    return "\n".join(lines)


def _cards(scores: LengthScores) -> str:
    """The main measure in rows as in training, and in the longest."""
    name = "perplexity" if scores.is_causal else "accuracy"
    trained = [score for score in scores.scores if score.length == scores.trained_length]
    shown = [("as in training", score) for score in trained] + [("the longest", scores.scores[-1])]
    return big_numbers(_card(name, score, which) for which, score in shown)


def _card(name: str, score: LengthScore, which: str) -> Card:
    number = metric_value(name, getattr(score, name))
    return number, name, f"{which}: rows of {plural(score.length, 'token')}"


def _facts(scores: LengthScores) -> str:
    trained = scores.trained_length
    kind = "each but the first" if scores.is_causal else "those that are masked, as in training"
    facts = [
        ("Text", f"{scores.text}, {plural(scores.tokens, 'token')}"),
        ("Told", f"{kind}: {plural(scores.told, 'token')}, the same at every length"),
        (
            "Rows",
            "cut from one stream of all documents, each with its end; they are not kept apart",
        ),
        ("Training", "not known" if trained is None else f"in rows of {plural(trained, 'token')}"),
        ("Version", f"onescan {scores.onescan}"),
    ]
    return fact_list(facts)


def _numbers(scores: LengthScores) -> Section:
    rows = ["<th></th>" + "".join(f"<th>{name}</th>" for name in METRICS)]
    for score in scores.scores:
        cells = "".join(f"<td>{metric_value(m, getattr(score, m))}</td>" for m in METRICS)
        rows.append(f"<th>{score.length:,}</th>{cells}")
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<div class="scroll"><table class="groups">{body}</table></div>'
    caption = (
        "Rows are lengths in tokens; loss is in nats per token, and perplexity its exponential."
    )
    left_out = " ".join(f"Not measured: {left.length}, as {left.why}." for left in scores.left_out)
    return Section("Numbers", (Figure("Every length", table, caption, columns=3),), left_out)
