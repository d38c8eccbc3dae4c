"""Causal language models: next-token logits, generation, and the loss on long texts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onescan.checks import check_whole
from onescan.configs import check_types
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.decoding_graph import DecodingGraph
from onescan.models.pretrained import Pretrained
from onescan.models.token_network import NetworkState, TokenNetwork, TokenNetworkConfig
from onescan.ops.collectives import last_token
from onescan.ops.packing import Packing
from onescan.ops.parallel import sequence_group, without_group
from onescan.shapes import GeneratedTokens, Keep, TokenLogits, Tokens

IGNORE_INDEX = -100  # label of tokens without a loss, as in torch's cross_entropy
CHUNK_TOKENS = 2048  # tokens of a batch whose logits are in memory at a time
MIN_TEMPERATURE = 1e-30  # logits divided by a smaller number would overflow
MAX_LOSS = 700  # nats; the exponential of a larger number overflows a float


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(TokenNetworkConfig):
    """Config of causal language models: LightNet by default; LION-s, GPT-2 by changing fields."""

    mixer: MixerConfig = field(
        default_factory=lambda: LightNetMixerConfig(num_heads=8, direction="forward")
    )
    tie_embeddings: bool = True
    """Share the weights of the token embedding and the output layer."""

    def build(self) -> "CausalLM":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If a size is not positive, the mixer or the position is not causal, or the
                mixer, the norm or the position rejects its config.
        """
        self.check()
        if not self.mixer.is_causal:
            raise ValueError(
                "mixer is not causal: a token would read the next one, which it has to predict"
            )
        if isinstance(self.position, ToeplitzPositionConfig) and self.position.bidirectional:
            raise ValueError("position.bidirectional is True, so a token would read the next one")
        return CausalLM(self)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose the next token: greedily, or by sampling."""

    temperature: float = 0.0
    """Divides the logits. 1.0 samples from the model's distribution; lower is more conservative, 0
    always takes the most likely token."""
    top_k: int | None = None
    """Sample only from the k most likely tokens."""
    top_p: float = 1.0
    """Sample only from the smallest set of most likely tokens whose probabilities sum to at least
    this (nucleus sampling)."""

    def check(self) -> None:
        """Raise ValueError if a field is out of range or has the wrong type."""
        check_types(self)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, expected 0 or more")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}, expected 0 or at least {MIN_TEMPERATURE}"
            )
        if self.top_k is not None:
            check_whole(1, top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected above 0 and at most 1")

    def choose(
        self, logits: Float[Tensor, "B vocabulary"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " B"]:
        """Choose one token for each sequence."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(1)

    def probabilities(self, logits: Float[Tensor, "B vocabulary"]) -> Float[Tensor, "B vocabulary"]:
        """Return each token's probability; requires a temperature above 0.

        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> Sampling(temperature=1.0, top_p=0.6).probabilities(logits).tolist()
        [[0.625, 0.375, 0.0]]
        """
        probs, ids = (logits.float() / self.temperature).softmax(dim=-1).sort(-1, descending=True)
        if self.top_k is not None:
            probs[:, self.top_k :] = 0
        # Drop a token if the more likely ones already sum to top_p; the first is always kept.
        is_dropped = probs.cumsum(-1) - probs >= self.top_p
        is_dropped[:, 0] = False  # also if float32 rounds top_p to 0
        probs = probs.masked_fill(is_dropped, 0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probs).scatter(1, ids, probs)


class CausalLM(Pretrained, nn.Module):
    """TokenNetwork -> linear output layer, which may share the embedding's weights.

    >>> model = CausalLMConfig(vocab_size=11, width=24, depth=1, mixer=LightNetMixerConfig(
    ...     num_heads=2, direction="forward")).build().eval()
    >>> tokens = torch.randint(11, (2, 9))
    >>> logits, state = model(tokens)
    >>> logits.shape
    torch.Size([2, 9, 11])
    >>> more, state = model(torch.randint(11, (2, 1)), state=state)  # in constant time and memory
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
        cu_seqlens: Tensor | Packing | None = None,
        last_only: bool = False,
    ) -> tuple[TokenLogits, NetworkState | None]:
        """Compute the logits of the token after each token.

        Args:
            tokens: Token ids; with a state, the tokens after those already read.
            state: State returned by a previous call. ``None`` starts a new sequence.
            keep: True for real tokens, False for padding. Padding may be anywhere and does not
                affect real tokens, because positions count only real tokens. With a state, a call
                waits for the device, and reads padded inputs token by token unless padding has no
                effect on the mixers.
            documents: Number of the document that each token belongs to, for several documents in
                one row. Tokens read only their own document. Pass it on the CPU: a tensor on
                another device is copied to the CPU, which waits for that device once.
            cu_seqlens: Offsets of the documents instead of their numbers, as in flash-attention:
                int32, ``[S + 1]``, from 0 to T. With several rows, offsets count the tokens of all
                rows, up to B * T, and every row begins with a new document.
            last_only: Compute only the logits after the last real token, which saves memory.

        Returns:
            Logits of shape ``[B, T, vocab_size]``, or ``[B, 1, vocab_size]`` with ``last_only``,
            and the state after the last token; ``None`` with documents.

        Raises:
            ValueError: If shapes do not match, there are no tokens, the state belongs to another
                model, or, on a CPU, an id is outside the vocabulary.
        """
        x, state = self.network(
            tokens, keep=keep, documents=documents, cu_seqlens=cu_seqlens, state=state
        )
        if last_only:
            group = sequence_group(None)
            if group is not None:
                x = last_token(group, x)
            elif keep is None:
                x = x[:, -1:]
            else:
                last = (keep * torch.arange(x.shape[1], device=x.device)).argmax(dim=1)
                x = x[torch.arange(x.shape[0], device=x.device), last].unsqueeze(1)
        return self.head(x), state

    @torch.no_grad()
    def stream(
        self,
        tokens: Tokens,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int,
        end: int | None = None,
        keep: Keep | None = None,
        state: NetworkState | None = None,
        vocab_size: int | None = None,
        generator: torch.Generator | None = None,
        cuda_graph: bool = False,
    ) -> Iterator[tuple[Tensor, NetworkState]]:
        """Generate token by token, in constant time and memory per token.

        Args:
            tokens: Prompt of at least one token.
            sampling: How to choose the next token. ``None`` takes the most likely one.
            max_new_tokens: Maximum number of tokens to generate.
            end: Id of the end-of-sequence token; a sequence that has ended repeats it.
            keep: True for real tokens, False for padding.
            state: State after the tokens before the prompt.
            vocab_size: Generate only ids below this number, for a tokenizer with fewer tokens than
                the model. ``None`` allows all ids.
            generator: Source of randomness. ``None`` is torch's global generator.
            cuda_graph: Run each step after the prompt as a CUDA graph, launched as a whole.
                Requires a GPU and a state of constant size. Not tested on a GPU yet.

        Yields:
            The next token of each sequence, of shape ``[B]``, and the state before that token. With
            `cuda_graph`, the next step overwrites that state.

        Raises:
            ValueError: See `forward`; or if `max_new_tokens`, `vocab_size` or `sampling` is out of
                range, or `cuda_graph` cannot be used.
        """
        check_whole(1, max_new_tokens=max_new_tokens)
        if vocab_size is not None:
            check_whole(1, vocab_size=vocab_size)
        sampling = Sampling() if sampling is None else sampling
        sampling.check()
        logits, state = self(tokens, state, keep=keep, last_only=True)
        ended = tokens.new_zeros(len(tokens), dtype=torch.bool)
        step: Any = self
        if cuda_graph:
            with without_group():
                step = DecodingGraph(self, tokens.new_zeros(len(tokens), 1), state)
        for i in range(max_new_tokens):
            token = sampling.choose(logits[:, -1, :vocab_size], generator)
            if end is not None:
                token = token.masked_fill(ended, end)
                ended = ended | (token == end)
            yield token, state
            if i + 1 == max_new_tokens or (end is not None and bool(ended.all())):
                return
            with without_group():  # every rank has the state of the whole prompt
                logits, state = step(token.unsqueeze(1), state)

    def generate(
        self, tokens: Tokens, sampling: Sampling | None = None, **options: Any
    ) -> GeneratedTokens:
        """Return the tokens that `stream` generates, of shape ``[B, up to max_new_tokens]``.

        Args:
            tokens: Prompt of at least one token.
            sampling: How to choose the next token.
            options: Further arguments of `stream`.
        """
        generated = [token for token, _ in self.stream(tokens, sampling, **options)]
        return torch.stack(generated, dim=1)


class TokenScores(NamedTuple):
    """How well a model predicts each token.

    Attributes:
        losses: Cross-entropy in nats; 0 where the label is `IGNORE_INDEX`.
        correct: Whether the label is the most likely token.
    """

    losses: Float[Tensor, "B T"]
    correct: Bool[Tensor, "B T"]


@torch.no_grad()
def token_losses(
    model: CausalLM,
    tokens: Tokens,
    labels: Tokens,
    state: NetworkState | None = None,
    *,
    keep: Keep | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Score the label of each token, in chunks, so that memory for logits stays bounded.

    The result equals that of one call, except for rounding. Over several ranks, each rank reads all
    of its tokens at once, and only logits are computed in chunks.

    Args:
        model: Model in evaluation mode.
        tokens: Token ids; with a state, the tokens after those already read. May be empty.
        labels: The token that follows each token, or `IGNORE_INDEX`.
        state: State returned by a previous call of the model.
        keep: True for real tokens, False for padding, which must be on the right.
        chunk_tokens: Maximum number of tokens, over all rows, whose logits are in memory.
    """
    step = max(1, chunk_tokens // max(1, len(tokens)))
    empty = labels[:, :0]
    parts = [TokenScores(empty.float(), empty.bool())]
    over_ranks = sequence_group(None) is not None
    if over_ranks:  # a rank's chunks are not consecutive in the whole sequence
        x, _ = model.network(tokens, state=state, keep=keep, ends=True)
    for begin in range(0, tokens.shape[1], step):
        chunk = slice(begin, begin + step)
        if over_ranks:
            logits = model.head(x[:, chunk])
        else:
            real = None if keep is None else keep[:, chunk]
            x, state = model.network(tokens[:, chunk], state=state, keep=real, ends=True)
            logits = model.head(x)
        parts.append(score_logits(logits, labels[:, chunk]))
    return TokenScores(*(torch.cat(chunks, dim=1) for chunks in zip(*parts, strict=True)))


def score_logits(logits: TokenLogits, labels: Tokens) -> TokenScores:
    """Compute the loss and correctness of logits for given labels."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORE_INDEX
    )
    return TokenScores(losses, logits.argmax(dim=-1) == labels)


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss in nats, without overflow.

    >>> perplexity(0.0), perplexity(9999.0) < float("inf")
    (1.0, True)
    """
    return math.exp(min(loss, MAX_LOSS))
