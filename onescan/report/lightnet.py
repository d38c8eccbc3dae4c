"""What a trained LightNet can be asked: which tokens its heads listen to."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onescan.layers.mixers import LightNetMixer
from onescan.shapes import Images

Shares = Float[Tensor, "B H T"]


def lightnet_mixers(model: nn.Module) -> list[LightNetMixer]:
    """Find the model's LightNet mixers, from the first block to the last."""
    return [module for module in model.modules() if isinstance(module, LightNetMixer)]


def key_shares(model: nn.Module, images: Images) -> list[Shares]:
    """The share of each head's context that every token has, mixer by mixer.

    A head's context is a weighted sum of values; a token's share is its weight, the softmax of
    its key over all tokens, averaged over the key's channels. The shares sum to 1.
    """
    shares: list[Shares] = []

    def catch(mixer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(mixer, LightNetMixer)
        shares.append(mixer.key_importance(arguments[0]))

    hooks = [mixer.register_forward_pre_hook(catch) for mixer in lightnet_mixers(model)]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return shares
