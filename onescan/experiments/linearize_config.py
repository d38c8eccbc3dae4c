"""Settings of `onescan linearize`, in a separate module so that --help does not import torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LinearizeConfig:
    """How to linearize a saved model. The data is divided into training and held-out examples."""

    kind: str = "lightnet"
    """Kind of linear attention: lightnet, lion or delta."""
    decay: str | None = None
    """Decay of lion or delta, such as fixed. By default, it depends on the kind."""
    softmax_every: int | None = None
    """Keep the softmax attention of every n-th layer. By default, all layers are replaced."""
    exclude: tuple[str, ...] = ()
    """Names of modules to leave as they are."""
    transfer_steps: int = 300
    """Steps of attention transfer."""
    transfer_learning_rate: float = 1e-3
    """Peak learning rate of attention transfer."""
    steps: int = 1000
    """Steps of training on the task after attention transfer."""
    learning_rate: float = 2e-4
    """Peak learning rate of training on the task."""
    batch_size: int = 32
    """Examples per step."""
    length: int | None = None
    """Maximum tokens per text. By default 128, or the maximum of the model if that is smaller."""
    text_column: str = "text"
    """Column of the texts, in tables."""
    label_column: str | None = None
    """Column of the labels, in tables and parquet files. By default label or, for images, the only
    column of class labels."""
    test_fraction: float = 0.1
    """Fraction of the examples held out if the data has no test part."""
    on_error: Literal["raise", "skip"] = "raise"
    """On an unreadable image or text, end the command (raise), or skip and report it (skip)."""
    augment: bool = True
    """Flip and shift training images at random."""
    seed: int = 0
    """Random seed for the order of examples, the masks and the new weights."""
