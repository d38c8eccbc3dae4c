"""LDN: the sum of diffusion along a sequence, a gated local update and linear attention.

Source: LDN, arXiv:2502.12381. This file contains the mixer's config, state and module, then its
parts (Sec. 3.3), and the cross-attention of its decoder (Sec. 3.6).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import check_choice, check_positive, check_whole
from onescan.layers.basic import NormName, build_norm
from onescan.layers.mixers.contract import (
    DirectedMixerConfig,
    Direction,
    Mixer,
    check_packing,
    check_tokens,
    masked,
)
from onescan.ops.decay_attention import DecayState, decay_attention, read, write
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.linear_diffusion import (
    DiffusionState,
    Form,
    Scheme,
    gaussian_kernel,
    gaussian_radius,
    linear_diffusion,
    next_state,
    stable_step,
)
from onescan.ops.linear_diffusion.kernel import longest_step
from onescan.ops.numerics import (
    disable_autocast,
    product_dtype,
    to_accumulation_dtype,
)
from onescan.ops.packing import Packing
from onescan.ops.parallel import refuse_group, sequence_group, sequence_parallel
from onescan.shapes import (
    DiffusionKernels,
    Grid,
    Hidden,
    Keep,
    Memory,
    MemoryMask,
    Operators,
    StepSizes,
)

MIN_SIGMA = 0.25  # the weight of a neighbor is exp(-8); a smaller sigma would disable diffusion
# Fraction of the longest stable step. The token keeps the rest, because two tokens that swap would
# never mix.
MAX_STEP_FRACTION = 0.999
MAX_RADIUS = 1 << 20  # longer than any sequence
MAX_SIGMA_LOGIT = 5.0

KernelName = Literal["gaussian", "free", "dense"]
ActivationName = Literal["gelu", "silu", "tanh"]
ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, kw_only=True)
class LinearDiffusionMixerConfig(DirectedMixerConfig):
    """LDN's layer. Its local update replaces the MLP, so models do not need one."""

    diffusion: bool = True
    """Diffuse between neighboring tokens (the first part)."""
    local_update: bool = True
    """Update each token separately, with a gate (the second part)."""
    linear_attention: bool = True
    """Attend to all tokens (the third part)."""
    directions: ClassVar[tuple[Direction, ...]] = ("both", "forward")

    direction: Direction = "both"
    """Tokens to read: all ("both") or earlier ones ("forward")."""
    separable: bool = False
    """Diffuse along one axis of the grid after another, instead of in row-major order as in the
    paper."""
    kernel: KernelName = "gaussian"
    """What the weights of diffusion depend on: "gaussian" on the distance by a formula, "free" on
    the distance, with a learned weight for each lag, and "dense" on both tokens, with a learned
    weight for each pair of tokens of a grid of one size. The paper leaves it open; all start as
    Gaussians."""
    kernels: int | None = 1
    """Number of diffusion kernels, each for an equal share of the channels; 1 in the paper. None is
    one per head. Shares of dense kernels may differ by one channel."""
    tokens: int | None = None
    """Number of tokens of the grid, only for dense kernels, which have a weight for each pair.
    Models of images and other grids set it to that of their default size."""
    sigmas: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Initial standard deviations in tokens, assigned to kernels cyclically. The cycle is shifted
    by one in each block."""
    max_sigma: float = 32.0
    """Upper bound of the learned standard deviations."""
    epsilon: float = 1e-4
    """Kernels are cut off where their widest Gaussian falls below this value. Free and dense
    kernels start with at least this weight."""
    scheme: Scheme = "explicit"
    """Time-stepping scheme; see `linear_diffusion`. With "crank_nicolson", the largest absolute
    value of the tokens may grow, although the scheme is stable for any step."""
    feature_map: FeatureMapName = "relu"
    """Feature map of queries and keys."""
    activation: ActivationName = "gelu"
    """Activation of the local update."""
    norm: NormName = "none"
    """Norm of the input of the second and third parts; the input of diffusion is not normalized."""
    input_residual: bool = False
    """Add the embedding in every block, with a learned weight that is initially 0."""
    dropout: float = 0.0
    """Dropout probability of the second and third parts."""
    form: Form = "auto"
    """Algorithm of the op; see `linear_diffusion`."""

    @property
    def prefix_reads_grid(self) -> bool:
        diffuses = self.diffusion and not self.separable and not self.is_dense
        return (self.linear_attention or diffuses) and not self.is_causal

    @property
    def is_dense(self) -> bool:
        """Whether diffusion has a weight for each pair of tokens."""
        return self.diffusion and self.kernel == "dense"

    @property
    def fits_any_grid(self) -> bool:
        return not self.is_dense

    @property
    def normalizes_input(self) -> bool:
        return True

    @property
    def skips_padding(self) -> bool:
        return not self.diffusion

    @property
    def takes(self) -> frozenset[str]:
        is_explicit = self.scheme == "explicit" and self.form != "fft" and not self.separable
        is_local = is_explicit and not self.is_dense
        arguments = {
            "embedding": self.local_update or self.input_residual,
            "cu_seqlens": is_local or not self.diffusion,
        }
        return frozenset(name for name, is_taken in arguments.items() if is_taken)

    @property
    def output_is_bounded(self) -> bool:
        return self.diffusion

    def check_padding(self, grid: Grid) -> None:
        if self.is_dense:
            raise ValueError(
                "keep was given with kernel='dense', whose weights fit grids of one size; expected "
                "another kernel"
            )
        if self.diffusion and not self.separable and len(grid.shape) > 1:
            raise ValueError(
                "keep was given with separable=False, where padding changes the distance between "
                "the rows of a grid; expected separable=True"
            )

    def for_layer(self, index: int) -> "LinearDiffusionMixerConfig":
        first = index % max(len(self.sigmas), 1)
        return replace(self, sigmas=self.sigmas[first:] + self.sigmas[:first])

    def for_grid(self, grid: Grid) -> "LinearDiffusionMixerConfig":
        if not self.is_dense:
            return self
        tokens = grid.tokens - grid.prefix
        if self.tokens not in (None, tokens):
            raise ValueError(
                f"mixer.tokens is {self.tokens}, but the model's default grid {grid.shape} has "
                f"{tokens} tokens; expected {tokens} or None"
            )
        return replace(self, tokens=tokens)

    def build(self, *, width: int, axes: int) -> "LinearDiffusionMixer":
        self.check_direction()
        self.head_width(width)  # raises if num_heads does not divide the width
        check_choice("kernel", self.kernel, get_args(KernelName))
        if self.kernels is not None:
            check_positive(kernels=self.kernels)
        if self.is_dense:
            self._check_dense(width)
        elif self.kernel != "dense" and self.tokens is not None:
            raise ValueError(
                f"tokens is {self.tokens} with kernel={self.kernel!r}, expected None: only dense "
                "kernels have a fixed number of tokens"
            )
        elif self.kernel != "dense" and self.kernels is not None and width % self.kernels:
            raise ValueError(f"width {width} is not a multiple of kernels {self.kernels}")
        if not self.sigmas:
            raise ValueError("sigmas is (), expected at least one initial standard deviation")
        for sigma in self.sigmas:  # including those of other blocks
            sigma_fraction(sigma, self.max_sigma)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, expected 0 or more and less than 1")
        check_choice("scheme", self.scheme, get_args(Scheme))
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("activation", self.activation, get_args(ActivationName))
        check_choice("form", self.form, get_args(Form))
        if not (self.diffusion or self.local_update or self.linear_attention):
            raise ValueError(
                "diffusion, local_update and linear_attention are all False, expected at least one"
            )
        if self.is_causal and (self.separable or self.scheme != "explicit"):
            raise ValueError(
                f"direction is 'forward' with separable={self.separable} and "
                f"scheme={self.scheme!r}, expected separable=False and scheme='explicit'"
            )
        if self.scheme != "explicit" and self.form == "fft":
            raise ValueError(
                "form is 'fft' with scheme='crank_nicolson', expected 'auto', 'dense' or 'banded'"
            )
        return LinearDiffusionMixer(self, width, axes)

    def _check_dense(self, width: int) -> None:
        """Raise ValueError for fields that do not fit dense kernels."""
        expected = {"direction": "both", "separable": False, "scheme": "explicit", "form": "auto"}
        for name, value in expected.items():
            if (given := getattr(self, name)) != value:
                raise ValueError(
                    f"{name} is {given!r} with kernel='dense', expected {value!r}: each token "
                    "reads all others, in one product"
                )
        if self.kernels is not None and self.kernels > width:
            raise ValueError(f"kernels is {self.kernels}, expected at most the width {width}")
        if self.tokens is None:
            raise ValueError(
                "tokens is None with kernel='dense', which has a weight for each pair of tokens; "
                "expected the number of tokens (image models set it, text models do not)"
            )
        check_whole(1, tokens=self.tokens)
        gaussian_radius(self.max_sigma, self.epsilon)  # raises if one is out of range

    def build_diffusion(self) -> "Diffusion | DenseDiffusion":
        """Build the diffusion along one line of tokens."""
        count = self.num_heads if self.kernels is None else self.kernels
        sigmas = [self.sigmas[i % len(self.sigmas)] for i in range(count)]
        if self.kernel == "dense":
            assert self.tokens is not None
            return DenseDiffusion(sigmas, self.tokens, epsilon=self.epsilon)
        kind = FreeDiffusion if self.kernel == "free" else GaussianDiffusion
        return kind(
            sigmas,
            max_sigma=self.max_sigma,
            epsilon=self.epsilon,
            causal=self.is_causal,
            scheme=self.scheme,
            form=self.form,
        )


class LinearDiffusionState(NamedTuple):
    """State of the causal mixer, of constant size.

    Attributes:
        diffusion: The last tokens; None without diffusion.
        attention: State of the linear attention; None without it.
    """

    diffusion: DiffusionState | None
    attention: DecayState | None


class LinearDiffusionMixer(Mixer):
    """dt (K h - diag(K 1) h) + F(x, h) + A_lin(h), which a block adds to its tokens h.

    x is the embedding, the tokens before the first block. Diffusion along several axes is not in
    the paper.

    Source: LDN, arXiv:2502.12381, Sec. 3.3.
    """

    def __init__(self, config: LinearDiffusionMixerConfig, width: int, axes: int) -> None:
        super().__init__()
        self.config = config
        self.diffusions = nn.ModuleList(
            config.build_diffusion()
            for _ in range((axes if config.separable else 1) if config.diffusion else 0)
        )
        self.norm = build_norm(config.norm, width)
        self.local_update = self.attention = self.input_weight = None
        if config.local_update:
            self.local_update = LocalUpdate(width, config.activation)
        if config.linear_attention:
            self.attention = LinearSelfAttention(width, config.num_heads, config.feature_map)
        if config.input_residual:
            self.input_weight = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        keep: Keep | None = None,
        cu_seqlens: Packing | None = None,
        state: LinearDiffusionState | None = None,
        embedding: Hidden | None = None,
    ) -> tuple[Hidden, LinearDiffusionState | None]:
        """Mix the tokens; see `Mixer.forward`.

        Args:
            x: Tokens, not normalized.
            grid: Layout of the tokens.
            keep: True for real tokens.
            cu_seqlens: Offsets of packed sequences.
            state: State returned by a previous call, for causal mixers only.
            embedding: The tokens before the first block. None uses x.
        """
        config = self.config
        check_tokens(x, grid, keep)
        check_packing(cu_seqlens, config)
        if state is not None:
            self.check_state(state, LinearDiffusionState, causal=config.is_causal)
        x = masked(x, keep)
        embedding = x if embedding is None else masked(embedding, keep)
        old = new = LinearDiffusionState(None, None) if state is None else state
        parts: list[Tensor] = []
        if config.diffusion:
            parts.append(self._diffuse(x, grid, keep, cu_seqlens, old.diffusion) - x)
            if config.is_causal:
                (diffusion,) = self.diffusions
                assert isinstance(diffusion, Diffusion)
                new = new._replace(diffusion=diffusion.next_state(x, keep, old.diffusion))
        y = self.norm(x)
        if self.local_update is not None:
            parts.append(self.dropout(self.local_update(embedding, y)))
        if self.attention is not None:
            attended, attention = self.attention(
                y, causal=config.is_causal, keep=keep, cu_seqlens=cu_seqlens, state=old.attention
            )
            parts.append(self.dropout(attended))
            new = new._replace(attention=attention)
        if self.input_weight is not None:
            parts.append(self.input_weight * embedding)
        change = sum(parts[1:], start=parts[0])
        if keep is not None:
            change = change.masked_fill(~keep.unsqueeze(-1), 0)
        return change, new if config.is_causal else None

    def _diffuse(
        self,
        x: Hidden,
        grid: Grid,
        keep: Keep | None,
        cu_seqlens: Packing | None,
        state: DiffusionState | None,
    ) -> Hidden:
        """Return the tokens after one step of each diffusion.

        If `separable` or with dense kernels, prefix tokens are unchanged.
        """
        if self.config.is_dense:
            (diffusion,) = self.diffusions
            real = None if keep is None else keep[:, grid.prefix :]
            h = diffusion(x[:, grid.prefix :], keep=real)
            return torch.cat([x[:, : grid.prefix], h], dim=1) if grid.prefix else h
        if not self.config.separable:
            (diffusion,) = self.diffusions
            return diffusion(x, keep=keep, cu_seqlens=cu_seqlens, state=state)
        if len(grid.shape) != len(self.diffusions):
            raise ValueError(
                f"{grid} has {len(grid.shape)} axes, but the mixer was built for "
                f"{len(self.diffusions)}"
            )
        h = x[:, grid.prefix :].unflatten(1, grid.shape)  # B axes D
        real = None if keep is None else keep[:, grid.prefix :].unflatten(1, grid.shape)
        group = sequence_group(None)
        for axis, diffusion in enumerate(self.diffusions, start=1):
            lines = h.movedim(axis, -2)  # B others n D
            line_keep = None if real is None else real.movedim(axis, -1).flatten(0, -2)
            ranks = None
            if group is not None and axis == 1:  # the only axis that is sharded
                ranks = group.with_lengths(group.positions(grid.shape, x.device))
            with nullcontext() if group is None else sequence_parallel(ranks):
                diffused = diffusion(lines.flatten(0, -3), keep=line_keep)
            h = diffused.view(lines.shape).movedim(-2, axis)
        return torch.cat([x[:, : grid.prefix], h.flatten(1, len(grid.shape))], dim=1)


class Diffusion(nn.Module, ABC):
    """h + dt (K h - diag(K 1) h), with weights K_ts that depend on the distance t - s.

    Each kernel is applied to its share of the channels. For every value of the parameters, an
    explicit step is between 0 and the bound of Sec. 4.4.

    Source: LDN, arXiv:2502.12381, Sec. 3.3.

    Args:
        sigmas: Initial standard deviation of each kernel, in tokens.
        max_sigma: Upper bound of the standard deviations; with epsilon, it sets the radius.
        epsilon: Value at which the widest Gaussian is cut off.
        causal: Whether each token reads only earlier tokens.
        scheme: As in `linear_diffusion`.
        form: As in `linear_diffusion`.

    Attributes:
        radius: Largest distance with a weight, R.
        raw_step: Logit of the step of each kernel, [H].
    """

    def __init__(
        self,
        sigmas: Sequence[float],
        *,
        max_sigma: float,
        epsilon: float,
        causal: bool,
        scheme: Scheme,
        form: Form,
    ) -> None:
        super().__init__()
        self.radius, self.max_sigma = kernel_radius(max_sigma, epsilon), max_sigma
        self.causal, self.scheme, self.form = causal, scheme, form
        self.add_weights(sigmas, epsilon)
        self.raw_step = initial_step(len(sigmas))

    @abstractmethod
    def add_weights(self, sigmas: Sequence[float], epsilon: float) -> None:
        """Add the parameters of the weights, which start as Gaussians."""

    @abstractmethod
    def weights(self) -> DiffusionKernels:
        """Return the current kernels, for lags t - s = -R ... R."""

    def forward(
        self,
        x: Hidden,
        *,
        keep: Keep | None = None,
        cu_seqlens: Packing | None = None,
        state: DiffusionState | None = None,
    ) -> Hidden:
        """Return the tokens after one step."""
        weights = self.weights()
        diffused = linear_diffusion(
            x.unflatten(-1, (len(weights), -1)), weights, self.dt(weights),
            scheme=self.scheme, keep=keep, cu_seqlens=cu_seqlens, state=state, form=self.form,
        )  # fmt: skip
        return diffused.flatten(-2)

    def next_state(
        self, x: Hidden, keep: Keep | None, state: DiffusionState | None
    ) -> DiffusionState:
        """Return the state after these tokens, for the next call."""
        heads = x.unflatten(-1, (len(self.raw_step), -1))
        return next_state(state, heads, keep, radius=self.radius)

    def dt(self, weights: DiffusionKernels) -> StepSizes:
        """Return the step of each kernel.

        In the explicit scheme, it is a fraction of the longest stable step. In implicit schemes, it
        can be any multiple of that step.
        """
        (step,) = to_accumulation_dtype(self.raw_step)
        if self.scheme == "explicit":
            return MAX_STEP_FRACTION * torch.sigmoid(step) * stable_step(weights)
        return F.softplus(step) * stable_step(weights)


class GaussianDiffusion(Diffusion):
    """Diffusion with K_ts = phi(t - s) exp(-(t - s)^2 / 2 sigma^2).

    phi = softplus(raw_past) for t > s and softplus(raw_future) for t < s. The parametrization
    guarantees MIN_SIGMA < sigma < max_sigma.

    Source: LDN, arXiv:2502.12381, Sec. 3.3.
    """

    def add_weights(self, sigmas: Sequence[float], epsilon: float) -> None:
        del epsilon  # weights become smaller than it where a Gaussian is narrow
        fractions = [sigma_fraction(sigma, self.max_sigma) for sigma in sigmas]
        # Clamp, because the gradient of the sigmoid vanishes for large logits.
        logits = torch.tensor(fractions, dtype=torch.float64).logit()
        logits = logits.clamp(-MAX_SIGMA_LOGIT, MAX_SIGMA_LOGIT)
        self.raw_sigma = nn.Parameter(logits.to(torch.get_default_dtype()))
        raw_one = math.log(math.e - 1)  # where softplus is 1
        self.raw_past = nn.Parameter(torch.full((len(sigmas),), raw_one))
        self.raw_future = None if self.causal else nn.Parameter(torch.full((len(sigmas),), raw_one))

    def weights(self) -> DiffusionKernels:
        (past,) = to_accumulation_dtype(self.raw_past)
        if self.raw_future is None:
            future = torch.zeros_like(past)
        else:
            (future,) = to_accumulation_dtype(self.raw_future)
            future = F.softplus(future)
        return gaussian_kernel(F.softplus(past), future, self.sigma(), self.radius)

    def sigma(self) -> StepSizes:
        """Return the current standard deviation of each Gaussian, in tokens."""
        (logit,) = to_accumulation_dtype(self.raw_sigma)
        return MIN_SIGMA * (self.max_sigma / MIN_SIGMA) ** torch.sigmoid(logit)


class FreeDiffusion(Diffusion):
    """Diffusion with K_ts = softplus(raw_weight) of the lag t - s: a learned weight for each lag.

    raw_weight has shape [H, 2R], for the lags -R ... -1 and 1 ... R, or [H, R] if causal, for the
    positive ones. Weights start as those of `GaussianDiffusion`, but at least epsilon, because the
    gradient of softplus vanishes with its value.

    Source: LDN, arXiv:2502.12381, Sec. 3.3, which asks for a "learnable diffusion kernel" and for
    softplus; that every lag is learned is our choice.
    """

    no_weight_decay = frozenset({"raw_weight"})

    def add_weights(self, sigmas: Sequence[float], epsilon: float) -> None:
        past = torch.arange(1, self.radius + 1)
        lags = past if self.causal else torch.cat([-past.flip(0), past])
        self.raw_weight = nn.Parameter(initial_weights(sigmas, lags, epsilon))

    def weights(self) -> DiffusionKernels:
        (raw,) = to_accumulation_dtype(self.raw_weight)
        weights = F.softplus(raw)
        if self.causal:
            return F.pad(weights, (self.radius + 1, 0))
        future, past = weights.chunk(2, dim=1)
        return torch.cat([future, F.pad(past, (1, 0))], dim=1)


class DenseDiffusion(nn.Module):
    """h + dt (K h - diag(K 1) h) with K = softplus(raw_kernel): a weight for each pair of tokens.

    raw_kernel has shape [H, T, T]; its diagonal has no effect. Each kernel is applied to its share
    of the channels, and its step to all tokens: MAX_STEP_FRACTION sigmoid(raw_step) times the bound
    of Sec. 4.4, 1 / max_t sum_s K_ts. Weights start as those of `FreeDiffusion` along the order of
    the tokens. A step takes O(T^2), and its weights fit sequences of T tokens only.

    Source: LDN, arXiv:2502.12381, Sec. 4.4, which has K in R^(T x T); that all of its entries are
    learned is our choice.

    Args:
        sigmas: Standard deviation of the Gaussian that each kernel starts as, in tokens.
        tokens: Number of tokens, T.
        epsilon: Smallest initial weight.
    """

    no_weight_decay = frozenset({"raw_kernel"})

    def __init__(self, sigmas: Sequence[float], tokens: int, *, epsilon: float) -> None:
        super().__init__()
        self.tokens = tokens
        position = torch.arange(tokens)
        lags = position.unsqueeze(1) - position
        self.raw_kernel = nn.Parameter(initial_weights(sigmas, lags, epsilon))
        self.raw_step = initial_step(len(sigmas))

    def forward(self, x: Hidden, *, keep: Keep | None = None) -> Hidden:
        """Return the tokens after one step; masked tokens, which must be 0, are not read."""
        if (group := sequence_group(None)) is not None:
            refuse_group(group, "kernel='dense'", "its weights fit the tokens of one process")
        if x.shape[1] != self.tokens:
            raise ValueError(
                f"x has {x.shape[1]} tokens without the prefix, but kernel='dense' has weights for "
                f"{self.tokens}"
            )
        with disable_autocast(x):
            rates = self.rates()
            factors = rates.to(product_dtype(x))
            rates = factors.to(rates.dtype)  # row sums are those of the rounded weights
            if keep is None:
                row_sums = rates.sum(-1).unsqueeze(1)  # H 1 T
            else:
                row_sums = keep.to(rates.dtype) @ rates.mT  # H B T
            shares = x.to(factors.dtype).tensor_split(len(rates), dim=-1)
            diffused = [
                torch.addcmul(factor @ share, 1 - row_sum.unsqueeze(-1), share)
                for factor, row_sum, share in zip(factors, row_sums, shares, strict=True)
            ]
            return torch.cat(diffused, dim=-1).to(x.dtype)

    def weights(self) -> Operators:
        """Return the current kernels K, without their diagonals."""
        (raw,) = to_accumulation_dtype(self.raw_kernel)
        diagonal = torch.eye(self.tokens, dtype=torch.bool, device=raw.device)
        return F.softplus(raw).masked_fill(diagonal, 0)

    def rates(self) -> Operators:
        """Return dt K, whose row sums are below 1."""
        weights = self.weights()
        longest = longest_step(weights.sum(-1).amax(-1), terms=self.tokens)
        (step,) = to_accumulation_dtype(self.raw_step)
        dt = MAX_STEP_FRACTION * torch.sigmoid(step) * longest
        return dt[:, None, None] * weights


def initial_step(kernels: int) -> nn.Parameter:
    """Return logits of half of the longest stable step."""
    return nn.Parameter(torch.zeros(kernels))


def initial_weights(sigmas: Sequence[float], lags: Tensor, epsilon: float) -> Tensor:
    """Return what softplus maps to Gaussians of the lags, at least epsilon; one for each sigma."""
    distance = lags.double()
    gaussians = [(-0.5 * (distance / sigma).square()).exp() for sigma in sigmas]
    weights = torch.stack(gaussians).clamp(min=epsilon)
    return weights.expm1().log().to(torch.get_default_dtype())


def kernel_radius(max_sigma: float, epsilon: float) -> int:
    """Return the radius of kernels that depend on the distance.

    Raises:
        ValueError: If an argument is out of range, or the radius is longer than any sequence.
    """
    radius = gaussian_radius(max_sigma, epsilon)
    if radius > MAX_RADIUS:
        raise ValueError(
            f"max_sigma is {max_sigma}, which gives kernels a radius of {radius} tokens, "
            f"expected a radius of at most {MAX_RADIUS}"
        )
    return radius


def sigma_fraction(sigma: float, max_sigma: float) -> float:
    """Return the position of sigma between its bounds, on a logarithmic scale from 0 to 1.

    Raises:
        ValueError: If sigma is not strictly between its bounds.
    """
    check_positive(max_sigma=max_sigma)
    if not MIN_SIGMA < sigma < max_sigma:
        raise ValueError(
            f"sigmas contains {sigma}, expected more than {MIN_SIGMA} and less than "
            f"max_sigma={max_sigma}"
        )
    return math.log(sigma / MIN_SIGMA) / math.log(max_sigma / MIN_SIGMA)


class LocalUpdate(nn.Module):
    """F(x, h) = sigmoid(W_g [x; h]) * act(W_u [x; h]).

    Source: LDN, arXiv:2502.12381, Sec. 3.3, which describes F only as a "gating or residual
    module". The 4 D^2 weights used here match the parameter counts of its Table 1.
    """

    def __init__(self, width: int, activation: ActivationName) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.proj = nn.Linear(2 * width, 2 * width, bias=False)  # gate, update

    def forward(self, x: Hidden, h: Hidden) -> Hidden:
        gate, update = self.proj(torch.cat([x, h], dim=-1)).chunk(2, dim=-1)
        return torch.sigmoid(gate) * self.activation(update)


class LinearSelfAttention(nn.Module):
    """phi(Q) (phi(K)^T V) / (phi(Q) (phi(K)^T 1)), multi-head, without an output projection.

    If phi maps a query or all keys to zero, the paper's quotient is 0 / 0. Here it is 0, with
    finite gradients.

    Source: LDN, arXiv:2502.12381, Sec. 3.3.
    """

    def __init__(self, width: int, num_heads: int, feature_map: FeatureMapName) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.feature_map = FEATURE_MAPS[feature_map]
        self.in_proj = nn.Linear(width, 3 * width, bias=False)  # q, k, v

    def forward(
        self,
        x: Hidden,
        *,
        causal: bool = False,
        keep: Keep | None = None,
        cu_seqlens: Packing | None = None,
        state: DecayState | None = None,
    ) -> tuple[Hidden, DecayState | None]:
        """Attend to all tokens, or only to earlier ones if causal, with a state."""
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self.in_proj(x).chunk(3, dim=-1))
        o, new_state = decay_attention(
            self.feature_map(q), self.feature_map(k), v, causal=causal, normalize="sum", keep=keep,
            cu_seqlens=cu_seqlens, state=state, return_state=causal,
        )  # fmt: skip
        assert new_state is None or isinstance(new_state, DecayState)
        return o.flatten(-2), new_state


class LinearCrossAttention(nn.Module):
    """`LinearSelfAttention`, but to the tokens of another sequence, the memory.

    `encode_memory` reads the memory once and returns a state of constant size.
    """

    def __init__(self, width: int, num_heads: int, feature_map: FeatureMapName) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.feature_map = FEATURE_MAPS[feature_map]
        self.q_proj = nn.Linear(width, width, bias=False)
        self.kv_proj = nn.Linear(width, 2 * width, bias=False)

    def encode_memory(self, memory: Memory, memory_mask: MemoryMask | None = None) -> DecayState:
        """Return phi(K)^T V and phi(K)^T 1 of the memory.

        Args:
            memory: Tokens of the other sequence.
            memory_mask: True for real tokens.
        """
        kv = self.kv_proj(masked(memory, memory_mask))
        k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in kv.chunk(2, dim=-1))
        return write(self.feature_map(k), v, keep=memory_mask)

    def forward(self, x: Hidden, memory: DecayState) -> Hidden:
        """Attend to a memory encoded by `encode_memory`."""
        q = self.feature_map(self.q_proj(x).unflatten(-1, (self.num_heads, -1)))
        return read(q, memory, normalize="sum").flatten(-2)
