"""What a denoiser is told beside the image: how noisy it is, and of which class it shall be."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from onescan.checks import can_look_at_values, check_positive
from onescan.layers.position import sinusoidal_positions
from onescan.shapes import Hidden, Labels, Pooled, Timesteps

FREQUENCIES = 256  # of a timestep, as in DiT


class TimestepEmbedding(nn.Module):
    """W_2 silu(W_1 [sin, cos](t n)): how far the noise has come, from 0 to 1000, as one vector.

    Source: DiT, arXiv:2212.09748, Sec. 3.2. A timestep need not be whole.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_hidden = nn.Linear(FREQUENCIES, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, timesteps: Timesteps, dtype: torch.dtype) -> Pooled:
        """Embed timesteps, in the dtype of the tokens."""
        waves = sinusoidal_positions(timesteps, FREQUENCIES).to(dtype)
        return self.to_out(F.silu(self.to_hidden(waves)))


class LabelEmbedding(nn.Module):
    """A learnt vector for each class, and a last one for no class at all.

    While training, a label is dropped with probability `dropout`, so that the model learns to do
    without; guidance compares the two. Source: arXiv:2207.12598, Sec. 3.2.
    """

    def __init__(self, num_classes: int, width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        check_positive(num_classes=num_classes)
        if not 0 <= dropout <= 1:
            raise ValueError(f"label_dropout is {dropout}, expected a chance from 0 to 1")
        self.num_classes, self.dropout = num_classes, dropout
        self.table = nn.Embedding(num_classes + 1, width)

    def forward(self, labels: Labels) -> Pooled:
        """The vectors of labels from 0 on; `num_classes` stands for no class.

        Raises:
            ValueError: a label is neither a class nor `num_classes`.
        """
        if labels.numel() and can_look_at_values(labels):
            low, high = (int(bound) for bound in torch.aminmax(labels))
            if low < 0 or high > self.num_classes:
                raise ValueError(
                    f"labels hold {low if low < 0 else high}, expected 0 to "
                    f"{self.num_classes - 1}, the classes, or {self.num_classes} for none"
                )
        if self.training and self.dropout > 0:
            dropped = torch.rand(labels.shape, device=labels.device) < self.dropout
            labels = labels.masked_fill(dropped, self.num_classes)
        return self.table(labels)


class Modulation(nn.Module):
    """AdaLN-Zero: shifts, scales and gates of tokens, from one vector; all 0 at the start.

    Source: DiT, arXiv:2212.09748, Sec. 3.2.
    """

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.to_parts = nn.Linear(width, parts * width)

    def forward(self, condition: Pooled) -> tuple[Tensor, ...]:
        """Each part, [B, 1, D], for all tokens alike."""
        return self.to_parts(F.silu(condition)).unsqueeze(1).chunk(self.parts, dim=-1)

    def init_weights(self) -> None:
        """Let a block be the identity at first."""
        nn.init.zeros_(self.to_parts.weight)
        nn.init.zeros_(self.to_parts.bias)


def modulate(x: Hidden, shift: Float[Tensor, "B 1 D"], scale: Float[Tensor, "B 1 D"]) -> Hidden:
    """Return x (1 + scale) + shift: what stands in for a norm's own weight and bias."""
    return x * (1 + scale) + shift
