"""Normalization over the model width."""

from typing import Literal, get_args

from torch import nn

from onescan.checks import check_choice

NormName = Literal["layer", "rms", "simple_rms", "none"]
NormPosition = Literal["pre", "post"]

# below the variance of a mean over 100,000 tokens
EPS = 1e-6


def build_norm(name: NormName, width: int, *, affine: bool = True, eps: float = EPS) -> nn.Module:
    """Build a LayerNorm, an RMSNorm, an RMSNorm without parameters ("simple_rms"), or an identity.

    With affine=False, for conditioned norms, none has parameters.
    """
    check_choice("norm", name, get_args(NormName))
    if name == "layer":
        return nn.LayerNorm(width, eps=eps, elementwise_affine=affine)
    if name == "none":
        return nn.Identity()
    return nn.RMSNorm(width, eps=eps, elementwise_affine=affine and name == "rms")
