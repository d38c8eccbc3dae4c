"""LDN: tokens diffuse, update themselves and attend, three parts side by side."""

from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive
from onescan.layers.diffusion import Diffusion, log_place
from onescan.layers.linear_attention import LinearAttention
from onescan.layers.local_update import ActivationName, LocalUpdate
from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.layers.norm import NormName, build_norm
from onescan.ops.decay_attention import DecayState
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.linear_diffusion import DiffusionState, Form, Scheme
from onescan.shapes import Grid, Hidden, Keep


@dataclass(frozen=True, kw_only=True)
class LinearDiffusionMixerConfig(MixerConfig):
    """LDN's layer; as its local update stands for an MLP, models need no other."""

    diffusion: bool = True
    """The first part: move towards tokens nearby."""
    local_update: bool = True
    """The second part: a gated update of each token on its own."""
    linear_attention: bool = True
    """The third part: hear of all tokens."""
    causal: bool = False
    """Read the past only."""
    separable: bool = False
    """Diffuse along each axis of the grid in turn; the paper's order is the tokens' as they lie."""
    kernels: int = 1
    """Diffusion kernels, each for its share of the channels; the paper has one."""
    sigmas: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """First widths, in tokens, that kernels take in turn; each block begins one further."""
    max_sigma: float = 32.0
    """No width grows beyond."""
    epsilon: float = 1e-4
    """Kernels end where their widest Gaussian falls below this."""
    scheme: Scheme = "explicit"
    """How a step in time is taken; see `linear_diffusion`."""
    feature_map: FeatureMapName = "relu"
    """What queries and keys pass through."""
    activation: ActivationName = "gelu"
    """Of the local update."""
    norm: NormName = "none"
    """What the second and the third part read through; what diffuses is never normalized."""
    input_residual: bool = False
    """Add the embedding in every block, by a learnt weight that starts at 0."""
    dropout: float = 0.0
    """Of the second and the third part, while training."""
    form: Form = "auto"
    """How the op evaluates its sum; see `linear_diffusion`."""

    @property
    def is_causal(self) -> bool:
        return self.causal

    @property
    def prefix_reads_grid(self) -> bool:
        mixes_all = self.linear_attention or (self.diffusion and not self.separable)
        return mixes_all and not self.causal

    @property
    def normalizes_itself(self) -> bool:
        return True

    @property
    def reads_embedding(self) -> bool:
        return self.local_update or self.input_residual

    @property
    def is_bounded(self) -> bool:
        return self.diffusion

    def for_layer(self, index: int) -> "LinearDiffusionMixerConfig":
        first = index % max(len(self.sigmas), 1)
        return replace(self, sigmas=self.sigmas[first:] + self.sigmas[:first])

    def build(self, *, width: int, axes: int) -> "LinearDiffusionMixer":
        self.head_width(width)  # raises where heads do not divide the width
        check_positive(kernels=self.kernels)
        if width % self.kernels:
            raise ValueError(f"width {width} is not a multiple of kernels {self.kernels}")
        if not self.sigmas:
            raise ValueError("sigmas is (), expected at least one first width")
        for sigma in self.sigmas:  # those too that another block begins with
            log_place(sigma, self.max_sigma)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, expected a chance from 0 to below 1")
        check_choice("scheme", self.scheme, get_args(Scheme))
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("activation", self.activation, get_args(ActivationName))
        check_choice("form", self.form, get_args(Form))
        if not (self.diffusion or self.local_update or self.linear_attention):
            raise ValueError(
                "diffusion, local_update and linear_attention are all False, expected at least one"
            )
        if self.causal and (self.separable or self.scheme != "explicit"):
            raise ValueError("causal=True goes with separable=False and scheme='explicit' only")
        if self.scheme != "explicit" and self.form == "fft":
            raise ValueError("form is 'fft' with scheme='crank_nicolson', which has none")
        return LinearDiffusionMixer(self, width, axes)


class LinearDiffusionState(NamedTuple):
    """What the causal mixer carries from call to call.

    Attributes:
        diffusion: the last tokens, as far back as the kernel reaches; None without diffusion.
        attention: the op's state; None without attention.
    """

    diffusion: DiffusionState | None
    attention: DecayState | None


class LinearDiffusionMixer(Mixer):
    """dt (K h - diag(K 1) h) + F(x, h) + A_lin(h), which a block adds to h.

    Source: LDN, arXiv:2502.12381, Sec. 3.3; along several axes ours.
    """

    def __init__(self, config: LinearDiffusionMixerConfig, width: int, axes: int) -> None:
        super().__init__()
        self.config = config
        self.diffusions = nn.ModuleList(
            Diffusion(
                [config.sigmas[i % len(config.sigmas)] for i in range(config.kernels)],
                max_sigma=config.max_sigma,
                epsilon=config.epsilon,
                causal=config.causal,
                scheme=config.scheme,
                form=config.form,
            )
            for _ in range((axes if config.separable else 1) if config.diffusion else 0)
        )
        self.norm = build_norm(config.norm, width)
        self.local_update = self.attention = self.input_weight = None
        if config.local_update:
            self.local_update = LocalUpdate(width, config.activation)
        if config.linear_attention:
            self.attention = LinearAttention(width, config.num_heads, config.feature_map)
        if config.input_residual:
            self.input_weight = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        state: LinearDiffusionState | None = None,
        embedding: Hidden | None = None,
    ) -> tuple[Hidden, LinearDiffusionState | None]:
        """Mix the tokens; see `Mixer.forward`.

        Args:
            x: tokens, not normalized.
            grid: how they lie.
            keep: True for real tokens.
            state: what a causal call before returned.
            embedding: the tokens before the first block; None is x.
        """
        config = self.config
        self.check_state(state, LinearDiffusionState, causal=config.causal)
        if keep is not None:  # what a masked token holds is nobody's, NaN included
            x = x.masked_fill(~keep.unsqueeze(-1), 0)
        embedding = x if embedding is None else embedding
        before = LinearDiffusionState(None, None) if state is None else state
        after = before
        parts: list[Tensor] = []
        if config.diffusion:
            parts.append(self._diffused(x, grid, keep, before.diffusion) - x)
            if config.causal:
                after = after._replace(diffusion=self._following(x, keep, before.diffusion))
        heard = self.norm(x)
        if self.local_update is not None:
            parts.append(self.dropout(self.local_update(embedding, heard)))
        if self.attention is not None:
            attended, leaving = self.attention(
                heard, causal=config.causal, keep=keep, state=before.attention
            )
            parts.append(self.dropout(attended))
            after = after._replace(attention=leaving)
        if self.input_weight is not None:
            parts.append(self.input_weight * embedding)
        change = sum(parts[1:], start=parts[0])
        if keep is not None:
            change = change.masked_fill(~keep.unsqueeze(-1), 0)
        return change, after if config.causal else None

    def _diffused(
        self, x: Hidden, grid: Grid, keep: Keep | None, state: DiffusionState | None
    ) -> Hidden:
        """The tokens after a step of each diffusion; the prefix has no place on an axis."""
        if not self.config.separable:
            (along_tokens,) = self.diffusions
            return along_tokens(x, keep=keep, state=state)
        if grid.tokens != x.shape[1] or len(grid.shape) != len(self.diffusions):
            raise ValueError(
                f"x has {x.shape[1]} tokens and {grid} {grid.tokens} on {len(grid.shape)} axes, "
                f"expected as many, on {len(self.diffusions)} axes"
            )
        h = x[:, grid.prefix :].unflatten(1, grid.shape)  # B axes D
        seen = None if keep is None else keep[:, grid.prefix :].unflatten(1, grid.shape)
        for axis, diffusion in enumerate(self.diffusions, start=1):
            lines = h.movedim(axis, -2)  # B others n D
            kept = None if seen is None else seen.movedim(axis, -1).flatten(0, -2)
            moved = diffusion(lines.flatten(0, -3), keep=kept)
            h = moved.view(lines.shape).movedim(-2, axis)
        return torch.cat([x[:, : grid.prefix], h.flatten(1, len(grid.shape))], dim=1)

    def _following(
        self, x: Hidden, keep: Keep | None, state: DiffusionState | None
    ) -> DiffusionState:
        (along_tokens,) = self.diffusions
        assert isinstance(along_tokens, Diffusion)
        return along_tokens.following(x, keep=keep, state=state)
