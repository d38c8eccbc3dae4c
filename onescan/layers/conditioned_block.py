"""The block of a denoiser that is told its condition in every norm, as in DiT."""

import torch
from torch.utils.checkpoint import checkpoint

from onescan.layers.block import Block
from onescan.layers.condition import Modulation, modulate
from onescan.layers.mixers import MixerConfig
from onescan.layers.mlp import MLPConfig
from onescan.layers.norm import NormName, build_norm
from onescan.shapes import Grid, Hidden, Pooled


class ConditionedBlock(Block):
    """x += gate mixer(modulated norm(x)); x += gate mlp(modulated norm(x)), told by a condition.

    Source: DiT, arXiv:2212.09748, Fig. 3, adaLN-Zero. The norms have no weights of their own.
    """

    def __init__(
        self, width: int, *, axes: int, mixer: MixerConfig, mlp: MLPConfig | None, norm: NormName
    ) -> None:
        super().__init__(width, axes=axes, mixer=mixer, mlp=mlp, norm=norm)
        if not mixer.normalizes_itself:
            self.mixer_norm = build_norm(norm, width, affine=False)
        if mlp is not None:
            self.mlp_norm = build_norm(norm, width, affine=False)
        self.modulation = Modulation(width, parts=3 if mlp is None else 6)

    def forward(  # type: ignore[override]  # a condition, and nothing of what sequences have
        self, x: Hidden, grid: Grid, *, condition: Pooled, embedding: Hidden | None = None
    ) -> tuple[Hidden, None]:
        """The tokens after the block; it has no state."""
        if self.recompute and torch.is_grad_enabled():
            again = (self._conditioned, x, grid, condition, embedding)
            return checkpoint(*again, use_reentrant=False), None
        return self._conditioned(x, grid, condition, embedding), None

    def _conditioned(
        self, x: Hidden, grid: Grid, condition: Pooled, embedding: Hidden | None
    ) -> Hidden:
        beside = {"embedding": embedding} if self.reads_embedding else {}
        shift, scale, gate, *of_mlp = self.modulation(condition)
        x = x + gate * self._mix(modulate(self.mixer_norm(x), shift, scale), grid, **beside)
        if self.mlp is not None and self.mlp_norm is not None:
            shift, scale, gate = of_mlp
            x = x + gate * self.mlp(modulate(self.mlp_norm(x), shift, scale))
        return x
