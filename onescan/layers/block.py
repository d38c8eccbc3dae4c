"""The residual block of all models: a mixer, then an MLP, each with a norm."""

from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onescan.checks import check_choice
from onescan.layers.documents import Documents
from onescan.layers.mixers import MixerConfig
from onescan.layers.mlp import MLPConfig
from onescan.layers.norm import EPS, NormName, NormPosition, build_norm
from onescan.shapes import Grid, Hidden, Keep


class Block(nn.Module):
    """Residual block.

    Pre-norm: x = x + mixer(norm(x)); x = x + mlp(norm(x)). Post-norm, as in the Transformer and
    BERT: x = norm(x + mixer(x)); x = norm(x + mlp(x)).

    Mixers that normalize their input get no norm and support only pre-norm. Without an MLP, the
    block consists of the mixer. The output of a bounded mixer is never scaled up: it applies its
    own dropout, and drop path scales it down in evaluation instead.
    """

    recompute: bool = False
    """Compute all inside again for gradients, instead of keeping it: less memory, more time."""

    def __init__(
        self,
        width: int,
        *,
        axes: int,
        mixer: MixerConfig,
        mlp: MLPConfig | None,
        norm: NormName,
        norm_position: NormPosition = "pre",
        norm_eps: float = EPS,
        drop_path: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("norm_position", norm_position, get_args(NormPosition))
        if norm_position == "post" and mixer.normalizes_itself:
            raise ValueError(
                f"norm_position is 'post' with a {type(mixer).__name__}, which normalizes its own "
                "input; expected 'pre'"
            )
        self.norm_position = norm_position
        mixer_norm: NormName = "none" if mixer.normalizes_itself else norm
        self.mixer_norm = build_norm(mixer_norm, width, eps=norm_eps)
        self.mixer = mixer.build(width=width, axes=axes)
        self.reads_embedding = mixer.reads_embedding
        self.mlp_norm = self.mlp = None
        if mlp is not None:
            self.mlp_norm = build_norm(norm, width, eps=norm_eps)
            self.mlp = mlp.build(width=width)
        self.mixer_drop_path = DropPath(drop_path, scale_up=not mixer.is_bounded)
        self.mixer_dropout = nn.Dropout(0.0 if mixer.is_bounded else dropout)
        self.drop_path = DropPath(drop_path)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        embedding: Hidden | None = None,
        keep: Keep | None = None,
        documents: Documents | None = None,
        state: Any = None,
    ) -> tuple[Hidden, Any]:
        """The tokens after the block, and its mixer's state; see `Mixer.forward`.

        `embedding`, the tokens before the first block, is for mixers that read it. `documents` are
        mixed each on its own; of these there is no state.
        """
        options = {"embedding": embedding, "keep": keep, "documents": documents, "state": state}
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, x, grid, use_reentrant=False, **options)
        return self._forward(x, grid, **options)

    def _forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        embedding: Hidden | None,
        keep: Keep | None,
        documents: Documents | None,
        state: Any,
    ) -> tuple[Hidden, Any]:
        beside: dict[str, Any] = {"embedding": embedding} if self.reads_embedding else {}
        is_pre = self.norm_position == "pre"
        y = self.mixer_norm(x) if is_pre else x
        if documents is None:
            y, state = self.mixer(y, grid, keep=keep, state=state, **beside)
        else:
            y = documents.apart(self._mix, y, keep=keep, **beside)
        x = x + self.mixer_drop_path(self.mixer_dropout(y))
        x = x if is_pre else self.mixer_norm(x)
        if self.mlp is not None and self.mlp_norm is not None:
            y = self.mlp(self.mlp_norm(x) if is_pre else x)
            x = x + self.drop_path(self.dropout(y))
            x = x if is_pre else self.mlp_norm(x)
        return x, state

    def _mix(self, x: Hidden, grid: Grid, **options: Any) -> Hidden:
        mixed, _ = self.mixer(x, grid, **options)
        return mixed


class DropPath(nn.Module):
    """While training, drop a sample's whole branch with probability `rate`; scale up the rest.

    Source: stochastic depth, arXiv:1603.09382, which scales down all when judging instead, Eq. 5;
    so does this one without `scale_up`.
    """

    def __init__(self, rate: float, *, scale_up: bool = True) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path is {rate}, expected a probability from 0 to below 1")
        self.rate, self.scale_up = rate, scale_up

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0:
            return x
        if not self.training:
            return x if self.scale_up else x * (1 - self.rate)
        kept = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device) >= self.rate
        return x * (kept / (1 - self.rate if self.scale_up else 1)).to(x.dtype)
