"""The residual blocks of all models, with or without conditioning, and weight initialization."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onescan.checks import can_look_at_values, check_choice, check_positive
from onescan.layers.basic import EPS, MLPConfig, NormName, NormPosition, build_norm
from onescan.layers.mixers import Mixer, MixerConfig
from onescan.layers.mixers.contract import call_mixer
from onescan.layers.position import sinusoidal_positions
from onescan.layers.tokens import Documents
from onescan.messages import named_type
from onescan.ops.collectives import from_first_rank
from onescan.ops.parallel import in_current_group
from onescan.shapes import Grid, Hidden, Keep, Labels, LowerBound, Pooled, Timesteps

FREQUENCIES = 256  # channels of the sinusoidal timestep embedding, as in DiT


def init_weights(module: nn.Module, *, std: float) -> None:
    """Initialize a linear layer or an embedding as in DeiT, or call a mixer's own `init_weights`.

    Weights are drawn from a normal distribution truncated at two standard deviations, and biases
    are zero. Intended for `nn.Module.apply`, which visits a mixer after its linear layers.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    elif isinstance(module, Mixer):
        module.init_weights()


class Block(nn.Module):
    """Residual block: a mixer, then an MLP, each with a norm.

    Pre-norm: x = x + mixer(norm(x)); x = x + mlp(norm(x)). Post-norm, as in the Transformer and
    BERT: x = norm(x + mixer(x)); x = norm(x + mlp(x)).

    Mixers that normalize their input have no norm in front and support only pre-norm. Without an
    MLP, the block consists of the mixer only. The output of a bounded mixer is never scaled up: the
    mixer applies its own dropout, and drop path scales its output down in evaluation instead.
    """

    recompute: bool = False
    """Recompute activations in the backward pass instead of storing them (gradient checkpointing).
    """

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
        mlp_norm_eps: float | None = None,
        norm_affine: bool = True,
        drop_path: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("norm_position", norm_position, get_args(NormPosition))
        if norm_position == "post" and mixer.normalizes_input:
            raise ValueError(
                f"norm_position is 'post' with {named_type(mixer)}, which normalizes its own "
                "input; expected 'pre'"
            )
        self.norm_position = norm_position
        mixer_norm: NormName = "none" if mixer.normalizes_input else norm
        self.mixer_norm = build_norm(mixer_norm, width, affine=norm_affine, eps=norm_eps)
        self.mixer = mixer.build(width=width, axes=axes)
        self.takes = mixer.takes
        self.mlp_norm = self.mlp = None
        if mlp is not None:
            eps = norm_eps if mlp_norm_eps is None else mlp_norm_eps
            self.mlp_norm = build_norm(norm, width, affine=norm_affine, eps=eps)
            self.mlp = mlp.build(width=width)
        bounded = mixer.output_is_bounded
        self.mixer_drop_path = DropPath(drop_path, scale_up=not bounded)
        self.mixer_dropout = nn.Dropout(0.0 if bounded else dropout)
        self.drop_path = DropPath(drop_path)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Hidden,
        grid: Grid,
        *,
        condition: Pooled | None = None,
        embedding: Hidden | None = None,
        keep: Keep | None = None,
        documents: Documents | None = None,
        state: Any = None,
        lower_bound: LowerBound | None = None,
    ) -> tuple[Hidden, Any]:
        """Return the tokens after the block and the state of its mixer; see `Mixer.forward`.

        `embedding` contains the tokens before the first block, and `lower_bound` the smallest decay
        of each channel, for mixers that read them. `documents` are mixed separately and have no
        state. Only a `ConditionedBlock` reads the condition.
        """
        return self.recomputed(
            self._forward, x, grid, condition=condition, embedding=embedding, keep=keep,
            documents=documents, state=state, lower_bound=lower_bound,
        )  # fmt: skip

    def recomputed(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Call a function, recomputing its activations in the backward pass if `recompute`."""
        if self.recompute and torch.is_grad_enabled():
            run = in_current_group(function)
            return checkpoint(run, *inputs, use_reentrant=False, **options)
        return function(*inputs, **options)

    def _forward(
        self, x: Hidden, grid: Grid, *, condition: Pooled | None, **options: Any
    ) -> tuple[Hidden, Any]:
        is_pre = self.norm_position == "pre"
        y, state = self.mix(self.mixer_norm(x) if is_pre else x, grid, **options)
        x = x + self.mixer_drop_path(self.mixer_dropout(y))
        x = x if is_pre else self.mixer_norm(x)
        if self.mlp is not None and self.mlp_norm is not None:
            y = self.mlp(self.mlp_norm(x) if is_pre else x)
            x = x + self.drop_path(self.dropout(y))
            x = x if is_pre else self.mlp_norm(x)
        return x, state

    def mix(
        self,
        x: Hidden,
        grid: Grid,
        *,
        embedding: Hidden | None = None,
        keep: Keep | None = None,
        documents: Documents | None = None,
        state: Any = None,
        lower_bound: LowerBound | None = None,
    ) -> tuple[Hidden, Any]:
        """Return the output and the state of the mixer alone; arguments are those of `forward`."""
        bound: dict[str, Any] = {"lower_bound": lower_bound} if "lower_bound" in self.takes else {}
        extra: dict[str, Any] = {"embedding": embedding} if "embedding" in self.takes else {}
        mix: Callable[..., Any] = partial(call_mixer, self.mixer, **bound)
        if documents is None:
            return mix(x, grid, keep=keep, state=state, **extra)
        if "cu_seqlens" in self.takes:
            y, _ = mix(x, grid, keep=keep, cu_seqlens=documents.packing, **extra)
        else:
            y = documents.mix_per_document(mix, x, keep=keep, **extra)
        return y, None


class ConditionedBlock(Block):
    """Residual block whose norms are modulated by a condition (adaLN-Zero).

    x = x + gate * mixer(modulate(norm(x))); x = x + gate * mlp(modulate(norm(x))). The norms have
    no weights of their own.

    Source: DiT, arXiv:2212.09748, Fig. 3.
    """

    def __init__(self, width: int, *, mlp: MLPConfig | None, **options: Any) -> None:
        for name, default in (("norm_position", "pre"), ("drop_path", 0.0), ("dropout", 0.0)):
            if options.get(name, default) != default:
                raise ValueError(
                    f"{name} is {options[name]!r}, which a ConditionedBlock does not support"
                )
        super().__init__(width, mlp=mlp, norm_affine=False, **options)
        self.modulation = Modulation(width, parts=3 if mlp is None else 6)

    def _forward(
        self, x: Hidden, grid: Grid, *, condition: Pooled | None, **options: Any
    ) -> tuple[Hidden, Any]:
        shift, scale, gate, *mlp_parts = self.modulation(condition)
        y, state = self.mix(modulate(self.mixer_norm(x), shift, scale), grid, **options)
        x = x + gate * y
        if self.mlp is not None and self.mlp_norm is not None:
            shift, scale, gate = mlp_parts
            x = x + gate * self.mlp(modulate(self.mlp_norm(x), shift, scale))
        return x, state


class DropPath(nn.Module):
    """In training, drop the branch of a sample with probability `rate`, and scale up the others.

    Source: stochastic depth, arXiv:1603.09382, Eq. 5, which scales all branches down in evaluation
    instead, as does this module with scale_up=False.
    """

    def __init__(self, rate: float, *, scale_up: bool = True) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path is {rate}, expected 0 or more and less than 1")
        self.rate, self.scale_up = rate, scale_up

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0:
            return x
        if not self.training:
            return x if self.scale_up else x * (1 - self.rate)
        draws = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device)
        is_kept = from_first_rank(draws >= self.rate)
        return x * (is_kept / (1 - self.rate if self.scale_up else 1)).to(x.dtype)


class TimestepEmbedding(nn.Module):
    """Embed the noise level, from 0 to 1000, as W_2 silu(W_1 [sin, cos](t n)).

    Timesteps may be fractional. See `sinusoidal_positions` for `inclusive`.

    Source: DiT, arXiv:2212.09748, Sec. 3.2.
    """

    def __init__(self, width: int, *, inclusive: bool = False) -> None:
        super().__init__()
        self.inclusive = inclusive
        self.in_proj = nn.Linear(FREQUENCIES, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, timesteps: Timesteps, dtype: torch.dtype) -> Pooled:
        """Embed timesteps, in the dtype of the tokens."""
        waves = sinusoidal_positions(timesteps, FREQUENCIES, inclusive=self.inclusive).to(dtype)
        return self.out_proj(F.silu(self.in_proj(waves)))


class LabelEmbedding(nn.Module):
    """Embed class labels; the last row of the table represents no class.

    In training, a label is replaced by "no class" with probability `dropout`, as classifier-free
    guidance requires. Source: arXiv:2207.12598, Sec. 3.2.
    """

    def __init__(self, num_classes: int, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        check_positive(num_classes=num_classes)
        if not 0 <= dropout <= 1:
            raise ValueError(f"label_dropout is {dropout}, expected a probability from 0 to 1")
        self.num_classes, self.dropout = num_classes, dropout
        self.table = nn.Embedding(num_classes + 1, width)

    def forward(self, labels: Labels) -> Pooled:
        """Embed labels from 0 to `num_classes`, where the latter represents no class.

        Raises:
            ValueError: If a label is out of range. Checked on CPU only.
        """
        if labels.numel() and can_look_at_values(labels):
            low, high = (int(bound) for bound in torch.aminmax(labels))
            if low < 0 or high > self.num_classes:
                raise ValueError(
                    f"labels contain {low if low < 0 else high}, expected classes from 0 to "
                    f"{self.num_classes - 1}, or {self.num_classes} for no class"
                )
        if self.training and self.dropout > 0:
            draws = torch.rand(labels.shape, device=labels.device)
            dropped = from_first_rank(draws < self.dropout)
            labels = labels.masked_fill(dropped, self.num_classes)
        return self.table(labels)


class Modulation(nn.Module):
    """Compute shifts, scales and gates from a condition (adaLN-Zero); all are initially zero.

    Source: DiT, arXiv:2212.09748, Sec. 3.2.
    """

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.proj = nn.Linear(width, parts * width)

    def forward(self, condition: Pooled) -> tuple[Tensor, ...]:
        """Return each part, of shape [B, 1, D]; it broadcasts over tokens."""
        return self.proj(F.silu(condition)).unsqueeze(1).chunk(self.parts, dim=-1)

    def init_weights(self) -> None:
        """Initialize the projection to zero, so that each block is initially the identity."""
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


def modulate(x: Hidden, shift: Float[Tensor, "B 1 D"], scale: Float[Tensor, "B 1 D"]) -> Hidden:
    """Return x * (1 + scale) + shift, which replaces a norm's own weight and bias."""
    return x * (1 + scale) + shift
