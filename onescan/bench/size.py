"""How large a model is: parameters, and multiply-accumulates of one forward."""

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from onescan.configs import ModelConfig


class Size(NamedTuple):
    """Of a model, counted and not estimated.

    Attributes:
        parameters: how many numbers are learnt.
        macs: multiply-accumulates in the matrix products of one forward on an example of the
            usual size; elementwise work is not counted, as is the custom.
    """

    parameters: int
    macs: int


def model_size(config: ModelConfig) -> Size:
    """Count without allocating: the model is built on the meta device."""
    with torch.device("meta"), torch.no_grad():
        model = config.build().eval()
        with FlopCounterMode(display=False) as counter:
            model(*config.example_inputs())
    return Size(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)
