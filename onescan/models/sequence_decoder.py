"""A sequence in, encoded by any network; another one out, token by token."""

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
)
from onescan.configs import ModelConfig
from onescan.layers.basic import MLPConfig, NormName, build_norm
from onescan.layers.block import Block, init_weights
from onescan.layers.mixers import LinearDiffusionMixerConfig, MixerConfig
from onescan.layers.mixers.linear_diffusion import LinearCrossAttention
from onescan.layers.position import sinusoidal_positions
from onescan.ops.decay_attention import DecayState
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.shapes import Grid, Hidden, Memory, MemoryKeep, TokenLogits, Tokens, Written


@dataclass(frozen=True, kw_only=True)
class SequenceDecoderConfig(ModelConfig):
    """LDN's decoding head: causal LDN layers, each followed by attention to what was encoded."""

    vocab_size: int
    """Kinds of tokens that it writes."""
    width: int = 192
    """Of a token, of the encoder's too."""
    depth: int = 2
    """Blocks."""
    mixer: MixerConfig = field(
        default_factory=lambda: LinearDiffusionMixerConfig(num_heads=3, causal=True)
    )
    """How tokens hear of those before them; a causal one."""
    mlp: MLPConfig | None = None
    """What each token does on its own, after the mixer; None where the mixer sees to that too."""
    num_heads: int = 3
    """Of the attention to the encoder's tokens."""
    feature_map: FeatureMapName = "relu"
    """What that attention's queries and keys pass through."""
    norm: NormName = "layer"
    """Before that attention, and before the head."""
    init_std: float = 0.02
    """Spread of the first weights of linear maps and embeddings."""

    def build(self) -> "SequenceDecoder":
        """Build the network, with fresh weights from torch's global generator.

        Raises:
            ValueError: a size that is not positive, a mixer that is not causal, or what the mixer
                and the norm refuse.
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
        if not self.mixer.is_causal:
            raise ValueError("mixer is not causal: a token would read what is to be written")
        return SequenceDecoder(self)

    def example_inputs(self) -> tuple[Tokens, Memory]:
        """One token to go on from, and one of an encoder."""
        return torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, self.width)


class DecoderState(NamedTuple):
    """What a decoder carries from call to call; it does not grow.

    Attributes:
        position: tokens read so far.
        mixers: the state of each block's mixer.
        memories: what each block has kept of the encoder's tokens.
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
        self, x: Hidden, remembered: DecayState, *, embedding: Hidden, state: Any
    ) -> tuple[Hidden, Any]:
        x, state = self.block(x, Grid((x.shape[1],)), embedding=embedding, state=state)
        return x + self.attention(self.norm(x), remembered), state


class SequenceDecoder(nn.Module):
    """Embedding + position -> layers -> norm -> head.

    Source: LDN, arXiv:2502.12381, Sec. 3.6, which says no more than "dedicated decoding module":
    the layers, the linear attention and the added positions are the paper's.

    >>> decoder = SequenceDecoderConfig(vocab_size=9, width=24).build().eval()
    >>> encoded = torch.randn(2, 50, 24)
    >>> logits, state = decoder(torch.tensor([[1, 5, 2], [1, 4, 4]]), encoded)
    >>> logits.shape
    torch.Size([2, 3, 9])
    >>> decoder(torch.tensor([[7], [3]]), state=state)[0].shape  # goes on, at constant cost
    torch.Size([2, 1, 9])
    """

    def __init__(self, config: SequenceDecoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.depth))
        self.norm = build_norm(config.norm, width)
        self.head = nn.Linear(width, config.vocab_size)
        self.apply(self._init_weights)

    def forward(
        self,
        tokens: Tokens,
        memory: Memory | None = None,
        *,
        memory_keep: MemoryKeep | None = None,
        state: DecoderState | None = None,
    ) -> tuple[TokenLogits, DecoderState]:
        """Score what may follow each token.

        Args:
            tokens: what has been written, since the state if there is one.
            memory: the encoder's tokens; with a state None, as it holds what is needed of them.
            memory_keep: True for real ones among them.
            state: what a call before returned; None is the beginning.

        Returns:
            The logits of the next token after each, and the state after the last.

        Raises:
            ValueError: neither memory nor a state, or both; shapes disagree; or, on a CPU, an id
                that is not in the vocabulary.
        """
        self._check(tokens, memory, memory_keep, state)
        if state is None:
            memories = tuple(self._remembered(memory, memory_keep))
            state = DecoderState(0, (None,) * len(memories), memories)
        last = state.position + tokens.shape[1]
        places = torch.arange(state.position, last, device=tokens.device)
        x = self.embedding(tokens)  # B T D
        x = embedding = x + sinusoidal_positions(places, self.config.width).to(x.dtype)
        mixers = []
        for layer, mixer, remembered in zip(self.layers, state.mixers, state.memories, strict=True):
            x, mixer = layer(x, remembered, embedding=embedding, state=mixer)
            mixers.append(mixer)
        return self.head(self.norm(x)), DecoderState(last, tuple(mixers), state.memories)

    @torch.no_grad()
    def write(
        self,
        memory: Memory,
        *,
        start: int,
        end: int,
        most: int,
        memory_keep: MemoryKeep | None = None,
    ) -> Written:
        """Write the likeliest next token again and again, for a whole batch.

        Args:
            memory: the encoder's tokens.
            start: the id that every sequence begins with; it is not returned.
            end: the id that ends a sequence; what follows it is filled up with it.
            most: tokens after which all end.
            memory_keep: True for the encoder's real tokens.

        Returns:
            [B, up to most], the ids, the first `end` included.
        """
        check_positive(most=most)
        for name, token_id in (("start", start), ("end", end)):
            if not isinstance(token_id, int) or not 0 <= token_id < self.config.vocab_size:
                raise ValueError(
                    f"{name} is {token_id!r}, expected an id from 0 to {self.config.vocab_size - 1}"
                )
        token = torch.full((memory.shape[0], 1), start, device=memory.device)
        ended = torch.zeros_like(token, dtype=torch.bool)
        written: list[Tensor] = []
        state = None
        while len(written) < most and not ended.all():
            if state is None:
                logits, state = self(token, memory, memory_keep=memory_keep)
            else:
                logits, state = self(token, state=state)
            token = logits[:, -1:].argmax(dim=-1).masked_fill(ended, end)
            written.append(token)
            ended = ended | (token == end)
        return torch.cat(written, dim=1)

    def _remembered(self, memory: Any, keep: MemoryKeep | None) -> Iterator[DecayState]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer.attention.encode_memory(memory, keep)

    def _check(self, tokens: Any, memory: Any, memory_keep: Any, state: Any) -> None:
        # Any: these are what a user passed
        check_token_ids(tokens, self.config.vocab_size)
        check_positive(T=check_shapes(tokens=(tokens, "B T"))["T"])
        if (memory is None) == (state is None):
            given = "neither" if state is None else "both"
            raise ValueError(
                f"of memory and state {given} came, expected memory at the beginning, and after "
                "it the state, which holds what is needed of it"
            )
        if state is not None:
            self._check_state(tokens, memory_keep, state)
            return
        check_floating(memory=memory)
        check_devices(tokens=tokens, memory=memory, memory_keep=memory_keep)
        check_shapes(
            tokens=(tokens, "B T"),
            memory=(memory, f"B S {self.config.width}"),
            memory_keep=(memory_keep, "B S"),
        )
        if memory_keep is not None and memory_keep.dtype != torch.bool:
            raise ValueError(
                f"memory_keep has dtype {memory_keep.dtype}, expected torch.bool, True for real "
                "tokens"
            )

    def _check_state(self, tokens: Tensor, memory_keep: Any, state: Any) -> None:
        if not isinstance(state, DecoderState):
            raise ValueError(f"state is a {type(state).__name__}, expected a DecoderState")
        if memory_keep is not None:
            raise ValueError("memory_keep came with a state, expected it with memory alone")
        if any(mixer is None for mixer in state.mixers):
            raise ValueError("state.mixers holds None, expected what a call before returned")
        if not len(state.mixers) == len(state.memories) == len(self.layers):
            raise ValueError(
                f"state is of {len(state.mixers)} blocks and {len(state.memories)} memories, "
                f"expected {len(self.layers)} of each"
            )
        heads, width = self.config.num_heads, self.config.width // self.config.num_heads
        named = {f"state.memories[{i}].kv": each.kv for i, each in enumerate(state.memories)}
        check_shapes(
            tokens=(tokens, "B T"),
            **{name: (kv, f"B {heads} {width} {width}") for name, kv in named.items()},
        )

    def _init_weights(self, module: nn.Module) -> None:
        init_weights(module, std=self.config.init_std)
