"""Trained weights that are part of the package: small models from recipes, in half precision.

Each folder here is named after its model and holds a run's config.json and model.safetensors, a
model card (README.md), and card.json with the measured metrics and the SHA-256 of each file.
Commands and functions that load a run's folder also accept "zoo/NAME"; a path of that name in the
working directory has priority.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from onescan.checkpoint.files import check_digests, damaged, from_json
from onescan.messages import unknown_choice

PREFIX = "zoo"
CARD, README = "card.json", "README.md"
INDENT = 2
REMEDY = "install onescan again"
FOLDER = Path(__file__).parent

PathT = TypeVar("PathT", str, Path)


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known about the weights of one model."""

    name: str
    summary: str
    parameters: int
    metrics: Mapping[str, float]
    """Measured on the test data with the weights as they are stored."""
    files: Mapping[str, str]
    """SHA-256 by file name."""


def names() -> list[str]:
    """Return the names of the models, without the prefix "zoo/"."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{CARD}"))


def card(name: str) -> Card:
    """Return the measured metrics, the size and the digests of a model.

    Raises:
        ValueError: If there is no model of this name, or its card is damaged.
    """
    known = names()
    if name not in known:
        choices = [f"{PREFIX}/{each}" for each in known]
        raise unknown_choice("model", f"{PREFIX}/{name}", choices)
    return read_card(FOLDER / name)


def read_card(folder: Path) -> Card:
    """Read card.json of a folder; raise ValueError if it is damaged."""
    file = folder / CARD
    data: dict[str, Any] = from_json(file.read_bytes(), file, REMEDY, indent=INDENT)
    try:
        return Card(name=folder.name, **data)
    except TypeError as error:
        raise damaged(file, error, REMEDY) from error


def path(name: str) -> Path:
    """Return the folder of a model, after checking the SHA-256 of each of its files.

    Args:
        name: Name with or without the prefix "zoo/".

    Raises:
        ValueError: If there is no model of this name, or a file is damaged (names it).
    """
    name = name.removeprefix(f"{PREFIX}/")
    card(name)
    return _checked(FOLDER / name)


@cache
def _checked(folder: Path) -> Path:
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Check the files of a folder against the digests in its card.

    Raises:
        ValueError: If a file is missing, changed or not listed; names the file.
    """
    check_digests(folder, read_card(folder).files, REMEDY, but=CARD)


def resolve(checkpoint: PathT) -> PathT:
    """Return the folder of a model for "zoo/NAME", and the only run in a folder of runs.

    Other values are returned unchanged. A file or folder called "zoo/NAME" in the working directory
    has priority.

    Raises:
        ValueError: If there is no model of this name, or a file of it is damaged.
    """
    from onescan.checkpoint.run_folder import only_run  # imports torch

    folder, name = Path(checkpoint).parent, Path(checkpoint).name
    if Path(checkpoint).exists():
        return type(checkpoint)(only_run(Path(checkpoint)) or checkpoint)
    return checkpoint if folder != Path(PREFIX) else type(checkpoint)(path(name))
