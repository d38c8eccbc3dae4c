"""The first weights that all models have."""

from torch import nn

from onescan.layers.mixers import Mixer


def init_weights(module: nn.Module, *, std: float) -> None:
    """Draw what a linear map or an embedding begins with; a mixer then sets what it wants else.

    For `nn.Module.apply`, which comes to a mixer after the linear maps in it. DeiT's: a normal
    distribution of this spread, cut at twice as much, and biases of 0.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    elif isinstance(module, Mixer):
        module.init_weights()
