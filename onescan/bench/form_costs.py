"""What forms.json holds: what forms cost, and what they were measured on."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from onescan import configs
from onescan.checkpoint.files import damaged, parse_json
from onescan.configs import ModelConfig

ANEW = "remove it to measure anew, or choose another folder"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A form, with its chunk size if it has one."""

    form: str
    chunk_size: int | None = None

    @property
    def name(self) -> str:
        """As in "chunk 64"."""
        return self.form if self.chunk_size is None else f"{self.form} {self.chunk_size}"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one forward on images of one size."""

    variant: Variant
    size: int
    median_ms: float
    peak_mib: float
    """Beyond the model and the images, which were there before."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What was asked for and not measured: images of this size, and larger ones."""

    variant: Variant
    size: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What compares only with itself."""

    device: str
    platform: str
    threads: int
    torch: str
    onescan: str


@dataclass(frozen=True, kw_only=True)
class FormCosts:
    """What forms.json holds: the costs of one model on one machine."""

    name: str
    model: ModelConfig
    """As it was given; `configured` tells what was measured."""
    batch_size: int
    machine: Machine
    costs: tuple[Cost, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    """By the last call alone."""

    def gave_up(self, variant: Variant) -> bool:
        """Whether nothing larger of a variant is measured."""
        return any(left.variant == variant for left in self.left_out)

    def of(self, variant: Variant) -> list[Cost]:
        """What a variant costs, from the smallest images to the largest."""
        costs = [cost for cost in self.costs if cost.variant == variant]
        return sorted(costs, key=lambda cost: cost.size)


def going_on(path: Path, fresh: FormCosts) -> FormCosts:
    """What is known before the first measurement: `fresh`, with what the file holds of it.

    Raises:
        ValueError: the file is damaged, or holds measurements of something else.
    """
    if not path.exists():
        return fresh
    there = dataclasses.replace(_read(path), left_out=())
    for where, x, y in configs.differences(dataclasses.replace(there, costs=()), fresh):
        raise ValueError(
            f"{path} holds what was measured with {where} {x!r}, and not {y!r}: choose another "
            "folder"
        )
    return there


def _read(path: Path) -> FormCosts:
    data = parse_json(path.read_bytes(), path, ANEW)
    if not isinstance(data, dict):
        raise damaged(path, data, ANEW)
    try:
        return configs.from_dict(FormCosts, data)
    except ValueError as error:
        raise damaged(path, error, ANEW) from error
