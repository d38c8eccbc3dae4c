"""A decoder that generates a sequence from the tokens of any encoder."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onescan.checks import (
    check_choice,
    check_devices,
    check_floating,
    check_positive,
    check_shapes,
    check_token_ids,
    check_whole,
)
from onescan.configs import ModelConfig
from onescan.layers.basic import MLPConfig, NormName, build_norm
from onescan.layers.block import Block, init_weights
from onescan.layers.mixers import LinearDiffusionMixerConfig, MixerConfig, build_lower_bounds
from onescan.layers.mixers.linear_diffusion import LinearCrossAttention
from onescan.layers.position import sinusoidal_positions
from onescan.layers.stack import lower_bound_of_each
from onescan.messages import named_type
from onescan.models.pretrained import Pretrained
from onescan.ops.decay_attention import DecayState
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.parallel import without_group
from onescan.shapes import (
    GeneratedTokens,
    Grid,
    Hidden,
    LowerBound,
    Memory,
    MemoryMask,
    TokenLogits,
    Tokens,
)


@dataclass(frozen=True, kw_only=True)
class SequenceDecoderConfig(ModelConfig):
    """Config of LDN's decoder: causal LDN layers, each followed by cross-attention to a memory."""

    vocab_size: int
    """Number of token ids."""
    width: int = 192
    """Features per token, of the decoder and the encoder."""
    depth: int = 2
    """Number of layers."""
    mixer: MixerConfig = field(
        default_factory=lambda: LinearDiffusionMixerConfig(num_heads=3, direction="forward")
    )
    """Causal layer that mixes information between tokens."""
    mlp: MLPConfig | None = None
    """MLP after the mixer, applied to each token; None for mixers that need none."""
    num_heads: int = 3
    """Number of heads of the cross-attention to the encoder's tokens."""
    feature_map: FeatureMapName = "relu"
    """Feature map of the queries and keys of the cross-attention."""
    norm: NormName = "layer"
    """Norm before the cross-attention, and before the output layer."""
    init_std: float = 0.02
    """Standard deviation of the initial weights of linear layers and embeddings."""

    def build(self) -> "SequenceDecoder":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If a size is not positive, the mixer is not causal, or the mixer or the norm
                rejects its config.
        """
        check_positive(
            vocab_size=self.vocab_size,
            width=self.width,
            depth=self.depth,
            num_heads=self.num_heads,
            init_std=self.init_std,
        )
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        self.mixer.for_layer(0)  # raises if only one of a hybrid's mixers is causal
        if not self.mixer.is_causal:
            raise ValueError(
                "mixer is not causal: a token would read the next one, which it has to predict"
            )
        return SequenceDecoder(self)

    def example_inputs(self) -> tuple[Tokens, Memory]:
        """Return one token, and one token of an encoder."""
        return torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, self.width)


class DecoderState(NamedTuple):
    """State of a decoder after some tokens, of constant size.

    Attributes:
        position: Number of tokens read so far.
        mixers: State of each block's mixer.
        memories: Each layer's summary of the encoder's tokens.
    """

    position: int
    mixers: tuple[Any, ...]
    memories: tuple[DecayState, ...]


class DecoderLayer(nn.Module):
    """A causal block, then x += attention(norm(x)) to the encoder's tokens."""

    def __init__(self, config: SequenceDecoderConfig, index: int) -> None:
        super().__init__()
        mixer = config.mixer.for_layer(index)
        self.block = Block(config.width, axes=1, mixer=mixer, mlp=config.mlp, norm=config.norm)
        self.norm = build_norm(config.norm, config.width)
        self.attention = LinearCrossAttention(config.width, config.num_heads, config.feature_map)

    def forward(
        self,
        x: Hidden,
        memory: DecayState,
        *,
        embedding: Hidden,
        state: Any,
        lower_bound: LowerBound | None,
    ) -> tuple[Hidden, Any]:
        grid = Grid((x.shape[1],))
        x, state = self.block(x, grid, embedding=embedding, state=state, lower_bound=lower_bound)
        return x + self.attention(self.norm(x), memory), state


class SequenceDecoder(Pretrained, nn.Module):
    """Embedding + position encoding -> layers -> norm -> linear output layer.

    Source: LDN, arXiv:2502.12381, Sec. 3.6, which does not describe its "dedicated decoding module"
    in detail. The layers, the linear attention and the added position encoding are the paper's.

    >>> decoder = SequenceDecoderConfig(vocab_size=9, width=24).build().eval()
    >>> encoded = torch.randn(2, 50, 24)
    >>> logits, state = decoder(torch.tensor([[1, 5, 2], [1, 4, 4]]), encoded)
    >>> logits.shape
    torch.Size([2, 3, 9])
    >>> decoder(torch.tensor([[7], [3]]), state=state)[0].shape  # in constant time
    torch.Size([2, 1, 9])
    """

    def __init__(self, config: SequenceDecoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.depth))
        self.lower_bounds = build_lower_bounds(config.mixer, depth=config.depth, width=width)
        self.norm = build_norm(config.norm, width)
        self.head = nn.Linear(width, config.vocab_size)
        self.apply(self._init_weights)

    def forward(
        self,
        tokens: Tokens,
        memory: Memory | None = None,
        *,
        memory_mask: MemoryMask | None = None,
        state: DecoderState | None = None,
    ) -> tuple[TokenLogits, DecoderState]:
        """Compute the logits of the token after each token.

        Args:
            tokens: Token ids; with a state, the tokens after those already read.
            memory: Output of the encoder. Over several ranks, the memory is sharded, but `tokens`
                are the same on every rank. Must be ``None`` with a state, which contains a summary.
            memory_mask: True for the encoder's real tokens, False for padding.
            state: State returned by a previous call. ``None`` starts a new sequence.

        Returns:
            Logits of shape ``[B, T, vocab_size]``, and the state after the last token.

        Raises:
            ValueError: If not exactly one of memory and state is given, shapes do not match, or, on
                a CPU, an id is outside the vocabulary.
        """
        self._check(tokens, memory, memory_mask, state)
        if state is None:
            memories = tuple(self._summaries(memory, memory_mask))
            state = DecoderState(0, (None,) * len(memories), memories)
        end = state.position + tokens.shape[1]
        positions = torch.arange(state.position, end, device=tokens.device)
        x = self.embedding(tokens)  # B T D
        x = embedding = x + sinusoidal_positions(positions, self.config.width).to(x.dtype)
        bounds = lower_bound_of_each(self.layers, self.lower_bounds)
        mixers = []
        with without_group():
            layers = zip(self.layers, state.mixers, state.memories, bounds, strict=True)
            for layer, mixer, summary, bound in layers:
                x, mixer = layer(x, summary, embedding=embedding, state=mixer, lower_bound=bound)
                mixers.append(mixer)
        return self.head(self.norm(x)), DecoderState(end, tuple(mixers), state.memories)

    @torch.no_grad()
    def generate(
        self,
        memory: Memory,
        *,
        start: int,
        end: int,
        max_new_tokens: int,
        memory_mask: MemoryMask | None = None,
    ) -> GeneratedTokens:
        """Generate sequences greedily, always choosing the most likely token.

        Args:
            memory: Output of the encoder.
            start: Id of the start-of-sequence token; it is not returned.
            end: Id of the end-of-sequence token; a sequence that has ended repeats it.
            max_new_tokens: Maximum number of tokens to generate.
            memory_mask: True for the encoder's real tokens, False for padding.

        Returns:
            Token ids of shape ``[B, up to max_new_tokens]``, including the first `end`.
        """
        check_floating(memory=memory)
        check_whole(1, max_new_tokens=max_new_tokens)
        for name, token_id in (("start", start), ("end", end)):
            if not isinstance(token_id, int) or not 0 <= token_id < self.config.vocab_size:
                raise ValueError(
                    f"{name} is {token_id!r}, expected an id from 0 to {self.config.vocab_size - 1}"
                )
        token = torch.full((memory.shape[0], 1), start, device=memory.device)
        ended = torch.zeros_like(token, dtype=torch.bool)
        generated: list[Tensor] = []
        state = None
        while len(generated) < max_new_tokens and not ended.all():
            if state is None:
                logits, state = self(token, memory, memory_mask=memory_mask)
            else:
                logits, state = self(token, state=state)
            token = logits[:, -1:].argmax(dim=-1).masked_fill(ended, end)
            generated.append(token)
            ended = ended | (token == end)
        return torch.cat(generated, dim=1)

    def _summaries(self, memory: Any, mask: MemoryMask | None) -> Iterator[DecayState]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer.attention.encode_memory(memory, mask)

    def _check(self, tokens: Any, memory: Any, memory_mask: Any, state: Any) -> None:
        # Any: user input
        check_token_ids(tokens, self.config.vocab_size)
        check_positive(T=check_shapes(tokens=(tokens, "B T"))["T"])
        if (memory is None) == (state is None):
            given = (
                "neither memory nor state was" if state is None else "memory and state were both"
            )
            raise ValueError(
                f"{given} given, expected memory in the first call and, in later calls, only the "
                "state, which contains a summary of it"
            )
        if state is not None:
            self._check_state(tokens, memory_mask, state)
            return
        check_floating(memory=memory)
        check_devices(tokens=tokens, memory=memory, memory_mask=memory_mask)
        check_shapes(
            tokens=(tokens, "B T"),
            memory=(memory, f"B S {self.config.width}"),
            memory_mask=(memory_mask, "B S"),
        )
        if memory_mask is not None and memory_mask.dtype != torch.bool:
            raise ValueError(
                f"memory_mask has dtype {memory_mask.dtype}, expected torch.bool, True for real "
                "tokens"
            )

    def _check_state(self, tokens: Tensor, memory_mask: Any, state: Any) -> None:
        if not isinstance(state, DecoderState):
            raise ValueError(f"state is {named_type(state)}, expected a DecoderState")
        if memory_mask is not None:
            raise ValueError("memory_mask was given with a state; pass it only with memory")
        if any(mixer is None for mixer in state.mixers):
            raise ValueError("state.mixers contains None, expected the state of a previous call")
        if not len(state.mixers) == len(state.memories) == len(self.layers):
            raise ValueError(
                f"state has {len(state.mixers)} blocks and {len(state.memories)} memories, "
                f"expected {len(self.layers)} of each"
            )
        heads, width = self.config.num_heads, self.config.width // self.config.num_heads
        pattern = f"B {heads} {width} {width}"
        summaries = {
            f"state.memories[{i}].kv": (memory.kv, pattern)
            for i, memory in enumerate(state.memories)
        }
        check_shapes(tokens=(tokens, "B T"), **summaries)

    def _init_weights(self, module: nn.Module) -> None:
        init_weights(module, std=self.config.init_std)
