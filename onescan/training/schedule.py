"""When things happen in a run, as pure functions of the step."""

import math
from typing import NamedTuple

from onescan.training.run import TrainingConfig


class Plan(NamedTuple):
    """A run's length and its events, in steps."""

    steps: int
    steps_per_epoch: int
    evaluate_every: int
    save_every: int

    @classmethod
    def of(cls, config: TrainingConfig, steps_per_epoch: int) -> "Plan":
        """Turn epochs into steps."""
        return cls(
            steps=config.steps or config.epochs * steps_per_epoch,
            steps_per_epoch=steps_per_epoch,
            evaluate_every=max(1, round(config.evaluate_every * steps_per_epoch)),
            save_every=max(1, round(config.checkpoint_every * steps_per_epoch)),
        )

    def evaluates(self, step: int) -> bool:
        """Whether the model is judged after `step` updates."""
        return step == self.steps or step > 0 == step % self.evaluate_every

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` updates."""
        return step == self.steps or step > 0 == step % self.save_every


def learning_rate(step: int, steps: int, config: TrainingConfig) -> float:
    """Return the learning rate of update `step`, counted from 0, out of `steps`.

    >>> config = TrainingConfig(learning_rate=8.0, warmup=4.0, final_lr_ratio=0.5)
    >>> [learning_rate(step, 8, config) for step in (0, 1, 2, 3, 4, 6)]
    [2.0, 4.0, 6.0, 8.0, 8.0, 6.0]
    """
    warmup = round(config.warmup * steps if config.warmup < 1 else config.warmup)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * math.sqrt(max(warmup, 1) / (step + 1))
    done = (step - warmup) / max(steps - warmup, 1)
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    share = config.final_lr_ratio + (1 - config.final_lr_ratio) * left[config.schedule]
    return config.learning_rate * share
