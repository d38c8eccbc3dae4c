"""The interface of input formats: how raw input becomes a model's input."""

from pathlib import Path


class Format:
    """How raw input becomes a model's input; saved with the model. Subclasses are configs."""

    def save(self, folder: Path) -> None:
        """Write the files that reading input requires besides this config, if any."""
        del folder
