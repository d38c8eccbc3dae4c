"""The interface of input formats: how raw input becomes a model's input."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


class Format:
    """How raw input becomes a model's input; saved with the model. Subclasses are configs."""

    _folder: ClassVar[Path | None] = None  # set in the instances that `saved_in` returns

    def saved_in(self, folder: Path) -> "Format":
        """Return this format with the files that `save` wrote into a run's folder, if any."""
        format = copy.copy(self)
        object.__setattr__(format, "_folder", folder)
        return format

    def save(self, folder: Path) -> None:
        """Write the files that reading input requires besides this config, if any."""
        del folder


@dataclass(frozen=True)
class UnknownFormat(Format):
    """The format of a model that was saved without one."""

    def model_input(self, inputs: Any) -> Any:
        """Raise ValueError.

        Raises:
            ValueError: Always.
        """
        del inputs
        raise ValueError(
            "the model was saved without its input format; convert inputs yourself, or pass format "
            "to save_pretrained"
        )
