"""How large a model is: parameters, and multiply-accumulates of one forward."""

from typing import NamedTuple

import torch
from torch import Tensor
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
    with torch.device("meta"):
        inputs = config.example_inputs()
        parameters = sum(p.numel() for p in config.build().parameters())
    return Size(parameters, count_macs(config, *inputs))


def count_macs(config: ModelConfig, *inputs: Tensor | None) -> int:
    """Multiply-accumulates of one forward on inputs of these shapes, without allocating."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        config.build().eval()(*(None if x is None else x.to("meta") for x in inputs))
    return counter.get_total_flops() // 2
