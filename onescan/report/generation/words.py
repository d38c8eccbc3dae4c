"""Scores as a reader wants them."""

from onescan.evaluation.generation import GenerationScore, GenerationScores
from onescan.report.words import percent

SHARES = ("precision", "recall", "as_asked")


def best(scores: GenerationScores) -> GenerationScore:
    """The guidance scale that comes nearest to the real images."""
    return min(scores.scores, key=lambda score: score.distance)


def short_names(scores: GenerationScores) -> dict[str, str]:
    """What stands above the columns, by field; without what was measured nowhere."""
    return {
        field: name
        for field, name in scores.short_names.items()
        if any(getattr(score, field) is not None for score in scores.scores)
    }


def guidance_name(score: GenerationScore) -> str:
    """What stands before a row."""
    return "-" if score.guidance is None else f"{score.guidance:g}"


def cell(score: GenerationScore, field: str) -> str:
    """Spell a number; nothing where it was not measured."""
    number = getattr(score, field)
    if number is None:
        return ""
    if field in SHARES:
        return percent(number)
    if field == "class_score":
        return f"{number:.2f} \N{PLUS-MINUS SIGN} {score.class_score_spread:.2f}"
    return f"{number:.2f}" if number >= 1 else f"{number:.4f}"
