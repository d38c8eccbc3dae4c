"""Choosing a token from its logits."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from onescan.checks import check_positive


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The likeliest token; or, with a temperature, a chance for each in turn of likelihood."""

    temperature: float = 0.0
    """Divides the logits: 1 draws as they say, less is bolder, 0 takes the likeliest."""
    top_k: int | None = None
    """Draw from so many of the likeliest only."""
    top_p: float = 1.0
    """Draw from the fewest likeliest that together have this probability (nucleus)."""

    def check(self) -> None:
        """Raise ValueError for a number out of its range."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, expected 0 or more")
        if self.top_k is not None:
            check_positive(top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected above 0 and at most 1")

    def choose(
        self, logits: Float[Tensor, "B vocabulary"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " B"]:
        """One token for each sequence."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(1)

    def probabilities(self, logits: Float[Tensor, "B vocabulary"]) -> Float[Tensor, "B vocabulary"]:
        """Each token's chance; temperature is above 0.

        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> Sampling(temperature=1.0, top_p=0.6).probabilities(logits).tolist()
        [[0.625, 0.375, 0.0]]
        """
        shares, ids = (logits.float() / self.temperature).softmax(dim=-1).sort(-1, descending=True)
        if self.top_k is not None:
            shares[:, self.top_k :] = 0
        # a token stays as long as those before it have not reached top_p: the first always does
        shares = shares.masked_fill(shares.cumsum(-1) - shares >= self.top_p, 0)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        return torch.zeros_like(shares).scatter(1, ids, shares)
