"""A text's next token, from those before it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.sampling import Sampling
from onescan.models.token_network import NetworkState, TokenNetwork, TokenNetworkConfig
from onescan.shapes import Keep, TokenLogits, Tokens, Written


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(TokenNetworkConfig):
    """LightNet's causal language model by default; LION-s's, GPT-2's by changing fields."""

    mixer: MixerConfig = field(
        default_factory=lambda: LightNetMixerConfig(num_heads=8, causal=True)
    )
    tie_embeddings: bool = True
    """Score tokens by the vectors that they are embedded with."""

    def build(self) -> "CausalLM":
        """Build the network, with fresh weights from torch's global generator.

        Raises:
            ValueError: a size that is not positive, a mixer or a position that looks ahead, or what
                the mixer, the norm and the position refuse.
        """
        self.check()
        if not self.mixer.is_causal:
            raise ValueError(
                "mixer is not causal: a token would read the next, which is to be told"
            )
        if isinstance(self.position, ToeplitzPositionConfig) and self.position.bidirectional:
            raise ValueError("position.bidirectional is True, so a token would read the next")
        return CausalLM(self)


class CausalLM(nn.Module):
    """TokenNetwork -> head, which is the embedding's matrix, or one of its own.

    >>> model = CausalLMConfig(vocab_size=11, width=24, depth=1, mixer=LightNetMixerConfig(
    ...     num_heads=2, causal=True)).build().eval()
    >>> tokens = torch.randint(11, (2, 9))
    >>> logits, state = model(tokens)
    >>> logits.shape
    torch.Size([2, 9, 11])
    >>> more, state = model(torch.randint(11, (2, 1)), state=state)  # at constant cost
    >>> more.shape
    torch.Size([2, 1, 11])
    """

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        self.config = config
        self.network = TokenNetwork(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.network.init_weights(self.head)
        if config.tie_embeddings:
            self.head.weight = self.network.embedding.weight

    def forward(
        self,
        tokens: Tokens,
        state: NetworkState | None = None,
        *,
        keep: Keep | None = None,
        documents: Tokens | None = None,
        last_only: bool = False,
    ) -> tuple[TokenLogits, NetworkState | None]:
        """Score what may follow each token.

        Args:
            tokens: ids, those after the state's.
            state: what a call before returned; None is the beginning.
            keep: True for real tokens; padding may be on either side, but on the right only where
                nothing is to follow, as it counts as places.
            documents: numbers that tell apart the texts of a row, which read nothing of each other.
            last_only: score what follows the last token alone, which spares memory.

        Returns:
            [B, T or 1, vocabulary] logits, and the state after the last token; None of documents.

        Raises:
            ValueError: shapes disagree, no tokens, a state of another model, or, on a CPU, an id
                that is not in the vocabulary.
        """
        x, state = self.network(tokens, keep=keep, documents=documents, state=state)
        return self.head(x[:, -1:] if last_only else x), state

    @torch.no_grad()
    def stream(
        self,
        tokens: Tokens,
        sampling: Sampling | None = None,
        *,
        most: int,
        end: int | None = None,
        keep: Keep | None = None,
        state: NetworkState | None = None,
        ids_below: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[Tensor, NetworkState]]:
        """Write on, a token at a time, at a cost that does not grow.

        Args:
            tokens: what there is, at least one; padding, if any, on the left.
            sampling: how the next is chosen; None takes the likeliest.
            most: tokens to write.
            end: an id that ends a sequence, after which it is repeated.
            keep: True for real tokens.
            state: what came before tokens.
            ids_below: write no others; a vocabulary may be larger than its tokenizer's.
            generator: where chance comes from; None is torch's own.

        Yields:
            The next token of each sequence, [B], and the state before it was read.
        """
        check_positive(most=most)
        sampling = Sampling() if sampling is None else sampling
        sampling.check()
        logits, state = self(tokens, state, keep=keep, last_only=True)
        ended = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
        for i in range(most):
            token = sampling.choose(logits[:, -1, :ids_below], generator)
            if end is not None:
                token = token.masked_fill(ended, end)
                ended = ended | (token == end)
            yield token, state
            if bool(ended.all()) or i + 1 == most:
                return
            logits, state = self(token.unsqueeze(1), state)

    def generate(self, tokens: Tokens, sampling: Sampling | None = None, **options: Any) -> Written:
        """What `stream` writes, as [B, up to most] ids; it says what the options are."""
        written = [token for token, _ in self.stream(tokens, sampling, **options)]
        return torch.stack(written, dim=1)
