"""A running mean of the weights, which often does better than the last of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightMean:
    """mean = d mean + (1 - d) weights after every update, with d rising to `decay`.

    d is (1 + step) / (10 + step) at first, so that the random first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}

    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after `step` updates; counters and the like are copied."""
        keep = min(self.decay, (1 + step) / (10 + step))
        pairs = [(local(self.tensors[k]), local(t)) for k, t in model.state_dict().items()]
        means = [mean for mean, _ in pairs if mean.is_floating_point()]
        weights = [weight for mean, weight in pairs if mean.is_floating_point()]
        torch._foreach_lerp_(means, weights, 1 - keep)
        for mean, value in pairs:
            if not mean.is_floating_point():
                mean.copy_(value)

    @contextmanager
    def worn_by(self, model: nn.Module) -> Iterator[None]:
        """Let the model have the mean as its weights for a while."""
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self.tensors)
        try:
            yield
        finally:
            model.load_state_dict(own)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that may be split over several."""
    to_local = getattr(tensor, "to_local", None)  # DTensor's, whose import takes half a second
    return to_local() if to_local else tensor
