"""Layers for your own networks: linear attention and position encodings, for any number of axes.

Layers take tokens ``[B, T, dim]``, those of a grid in row-major order. `key_padding_mask` is True
for padding, as in `torch.nn.MultiheadAttention`; `keep`, the mask of `onescan.ops`, is its
opposite.

>>> import torch
>>> from onescan.nn import LightNetAttention
>>> layer = LightNetAttention(64, num_heads=4, axes=2)
>>> layer(torch.randn(2, 12, 64), shape=(3, 4)).shape
torch.Size([2, 12, 64])
"""

from typing import TYPE_CHECKING

from onescan.lazy import lazy_attributes

if TYPE_CHECKING:
    from onescan.nn.attention import DeltaAttention as DeltaAttention
    from onescan.nn.attention import LightNetAttention as LightNetAttention
    from onescan.nn.attention import LinearDiffusion as LinearDiffusion
    from onescan.nn.attention import LionAttention as LionAttention
    from onescan.nn.multihead import MultiheadAttention as MultiheadAttention
    from onescan.nn.position import MDLRPE as MDLRPE
    from onescan.nn.position import MDTPE as MDTPE
    from onescan.nn.replace import replace_attention as replace_attention

# name -> module that defines it
_MODULES = {
    "DeltaAttention": "attention",
    "LightNetAttention": "attention",
    "LinearDiffusion": "attention",
    "LionAttention": "attention",
    "MDLRPE": "position",
    "MDTPE": "position",
    "MultiheadAttention": "multihead",
    "replace_attention": "replace",
}

__all__ = list(_MODULES)
__getattr__ = lazy_attributes(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
