"""What lengths.json holds: how well a model tells a text, in rows of several lengths."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlaceScore:
    """Of what is told after more than `begin` tokens of a row, and up to `end`."""

    begin: int
    end: int
    loss: float
    """Nats per token."""


@dataclass(frozen=True, kw_only=True)
class LengthScore:
    """Of rows of one length."""

    length: int
    loss: float
    """Nats per token."""
    perplexity: float
    accuracy: float
    places: tuple[PlaceScore, ...] = ()
    """What more context gives: by how much was read of a row before; of causal models."""


@dataclass(frozen=True, kw_only=True)
class LeftOutLength:
    """A length that was asked for and not measured."""

    length: int
    why: str


@dataclass(frozen=True, kw_only=True)
class LengthScores:
    """One model on one text."""

    name: str
    """Of the model."""
    is_causal: bool
    """Whether it tells next tokens, or masked ones."""
    trained_length: int | None
    """Tokens of a row in training; None where that is not known."""
    text: str
    """Where the text is from."""
    tokens: int
    """Tokens of the text that rows were cut from."""
    told: int
    """How many of them were told, the same ones at every length."""
    onescan: str
    """Version."""
    scores: tuple[LengthScore, ...]
    """From the shortest to the longest."""
    left_out: tuple[LeftOutLength, ...] = ()
