"""What is known of a named config."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onescan.configs import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named config, and what its paper prints of it."""

    config: ModelConfig
    printed_millions: float | int | None
    """Parameters as printed, in millions; an int where those are cut off after the point, None
    where no number is printed."""
    source: str
    printed_gmacs: float | None = None
    """Billions of multiply-accumulates of one forward as printed; None where they are not."""
    printed_ablations: Mapping[str, float] = field(default_factory=dict)
    """Rows of `ABLATIONS` that the paper prints parameters of, in millions."""
