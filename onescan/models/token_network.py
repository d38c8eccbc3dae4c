"""What all language models share: token ids in, one vector a token out."""

import dataclasses
from abc import ABC
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from onescan.checks import check_devices, check_positive, check_shapes, check_token_ids
from onescan.configs import ModelConfig
from onescan.layers.basic import EPS, GLUConfig, MLPConfig, NormName, NormPosition, build_norm
from onescan.layers.block import Block, init_weights
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.position import (
    AbsolutePositionConfig,
    PositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
)
from onescan.layers.tokens import Documents
from onescan.models.states import flatten
from onescan.shapes import Grid, Hidden, Keep, ReadOuts, Tokens


@dataclass(frozen=True, kw_only=True)
class TokenNetworkConfig(ModelConfig, ABC):
    """The fields that all language models share; LightNet's by default."""

    vocab_size: int = 50265
    """Kinds of tokens."""
    width: int = 512
    """Of a token."""
    depth: int = 6
    """Blocks."""
    mixer: MixerConfig = field(default_factory=lambda: LightNetMixerConfig(num_heads=8))
    """How tokens exchange what they know."""
    mlp: MLPConfig | None = field(default_factory=GLUConfig)
    """What each token does on its own, after the mixer; None where the mixer sees to that too."""
    position: PositionConfig | None = field(default_factory=ToeplitzPositionConfig)
    """How tokens learn where they are, once, after the embedding; None leaves it out."""
    segment_types: int = 0
    """Kinds of segments, each with a learnt vector: 2 for pairs of sentences, as BERT has them."""
    embedding_norm: bool = False
    """Normalize what enters the first block."""
    norm: NormName = "layer"
    """Norm of every block, and after the last one if norm_position is "pre"."""
    norm_position: NormPosition = "pre"
    """"pre" normalizes the input of each branch and the output of the network; "post" normalizes
    each residual sum instead, as in BERT."""
    norm_eps: float = EPS
    """Added to the variance in every norm; 1e-12 in BERT."""
    dropout: float = 0.0
    """Of what enters the first block and of what each branch adds, while training."""
    init_std: float = 0.02
    """Spread of the first weights of linear maps and embeddings."""

    def check(self) -> None:
        """Raise ValueError for a number out of range or a position encoding for grids."""
        check_positive(
            vocab_size=self.vocab_size,
            width=self.width,
            depth=self.depth,
            init_std=self.init_std,
            norm_eps=self.norm_eps,
        )
        if self.segment_types < 0:
            raise ValueError(f"segment_types is {self.segment_types}, expected 0 or more")
        if isinstance(self.position, AbsolutePositionConfig | SinusoidalPositionConfig):
            raise ValueError(
                f"position is {type(self.position).__name__}, which requires a grid of fixed size; "
                "expected TokenPositionConfig, ToeplitzPositionConfig or None"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, expected a chance from 0 to below 1")

    def example_inputs(self) -> tuple[Tokens]:
        """A sequence of 128 tokens."""
        return (torch.zeros(1, 128, dtype=torch.long),)


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(TokenNetworkConfig, ABC):
    """BERT's vocabulary and size, with LightNet's mixers, which read both ways."""

    vocab_size: int = 30522
    width: int = 768
    depth: int = 12
    mixer: MixerConfig = field(default_factory=lambda: LightNetMixerConfig(num_heads=12))
    position: PositionConfig | None = field(
        default_factory=lambda: ToeplitzPositionConfig(bidirectional=True)
    )


class NetworkState(NamedTuple):
    """What a causal network carries from call to call.

    Attributes:
        position: the position encoding's state; None if it has none.
        blocks: each block's mixer's.
    """

    position: Any
    blocks: tuple[Any, ...]


class TokenNetwork(nn.Module):
    """Embedding -> position -> blocks -> norm; no final norm with post-norm blocks."""

    def __init__(self, config: TokenNetworkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.segment_embedding = None
        if config.segment_types:
            self.segment_embedding = nn.Embedding(config.segment_types, width)
        self.position = None
        if config.position is not None:
            self.position = config.position.build(width=width, grid=Grid((1,)))
        self.embedding_norm = self._build_norm(present=config.embedding_norm)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                width,
                axes=1,
                mixer=config.mixer.for_layer(i),
                mlp=config.mlp,
                norm=config.norm,
                norm_position=config.norm_position,
                norm_eps=config.norm_eps,
                dropout=config.dropout,
            )
            for i in range(config.depth)
        )
        self.norm = self._build_norm(present=config.norm_position == "pre")
        self.apply(self.init_weights)

    def forward(
        self,
        tokens: Tokens,
        *,
        segments: Tokens | None = None,
        keep: Keep | None = None,
        documents: Tokens | None = None,
        state: NetworkState | None = None,
        read_outs: int = 1,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """One vector a token, and the state after the last; only causal networks take one.

        Args:
            tokens: ids.
            segments: kinds of segments, for networks that tell them apart.
            keep: True for real tokens; padding may be on either side.
            documents: a number for each token, another one for each of the texts that a row
                holds one after the other; none of them reads another. There is no state then.
            state: what a call before returned.
            read_outs: of how many of the last blocks to return the vectors, one batch after the
                other, [read_outs * B, T, D], the last block's last.
        """
        check_token_ids(tokens, self.config.vocab_size)
        check_shapes(tokens=(tokens, "B T"), segments=(segments, "B T"), keep=(keep, "B T"))
        x = self.embedding(tokens)
        return self.read(
            x, segments=segments, keep=keep, documents=documents, state=state, read_outs=read_outs
        )

    def read(
        self,
        x: Hidden,
        *,
        segments: Tokens | None = None,
        keep: Keep | None = None,
        documents: Tokens | None = None,
        state: NetworkState | None = None,
        read_outs: int = 1,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """As `forward`, from vectors in place of embedded tokens."""
        self._check(x, segments, keep, documents, state)
        if not 1 <= read_outs <= len(self.blocks):
            raise ValueError(f"read_outs is {read_outs}, expected 1 to {len(self.blocks)} blocks")
        grid = Grid((x.shape[1],))
        apart = None if documents is None or not len(x) else Documents(documents)
        position, mixers = (None, (None,) * len(self.blocks)) if state is None else state
        if self.segment_embedding is not None:
            kinds = x.new_zeros(x.shape[:2], dtype=torch.long) if segments is None else segments
            x = x + self.segment_embedding(kinds)
        if apart is not None:
            x = apart.mix_per_document(self._placed, x, keep=keep)
        elif self.position is not None:
            x, position = self.position(x, grid, position, keep)
        x = embedding = self.dropout(self.embedding_norm(x))
        after: list[Any] = []
        left: list[Hidden] = []
        for block, mixer in zip(self.blocks, mixers, strict=True):
            options = {"embedding": embedding, "keep": keep, "documents": apart}
            x, mixer = block(x, grid, state=mixer, **options)
            after.append(mixer)
            left = [*left, x][-read_outs:]
        x = self.norm(x if read_outs == 1 else torch.cat(left))
        return x, None if apart is not None else NetworkState(position, tuple(after))

    @property
    def device(self) -> torch.device:
        """Device for token ids: that of the first parameter that is not offloaded.

        Offloaded parameters are on the meta device. Their hooks move inputs, so if all are
        offloaded, this is the CPU.
        """
        devices = (parameter.device for parameter in self.parameters())
        return next((d for d in devices if d.type != "meta"), torch.device("cpu"))

    def set_embedding(self, embedding: nn.Embedding) -> None:
        """Take the vectors of another vocabulary."""
        self.embedding = embedding
        self.config = dataclasses.replace(self.config, vocab_size=embedding.num_embeddings)

    def init_weights(self, module: nn.Module) -> None:
        """Set a part's first weights; for heads that are added, too."""
        init_weights(module, std=self.config.init_std)

    def _build_norm(self, *, present: bool) -> nn.Module:
        name: NormName = self.config.norm if present else "none"
        return build_norm(name, self.config.width, eps=self.config.norm_eps)

    def _placed(self, x: Hidden, grid: Grid, *, keep: Keep | None) -> Hidden:
        return x if self.position is None else self.position(x, grid, None, keep)[0]

    def _check(self, x: Hidden, segments: Any, keep: Any, documents: Any, state: Any) -> None:
        # Any: these are what a user passed
        alike = {"segments": segments, "keep": keep, "documents": documents}
        patterns = {name: (tensor, "B T") for name, tensor in alike.items()}
        sizes = check_shapes(x=(x, "B T D"), **patterns)
        check_positive(T=sizes["T"])
        check_devices(x=x, **alike)
        if x.shape[-1] != self.config.width:
            raise ValueError(f"x is of width {x.shape[-1]}, expected {self.config.width}")
        if documents is not None and documents.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"documents has dtype {documents.dtype}, expected torch.int64")
        if documents is not None and state is not None:
            raise ValueError("documents came with a state, which only the first could go on from")
        if segments is not None and not self.config.segment_types:
            raise ValueError("segments came to a model that tells none apart: segment_types is 0")
        if segments is not None:
            check_token_ids(segments, self.config.segment_types, name="segments")
        if keep is not None and keep.dtype != torch.bool:
            raise ValueError(
                f"keep has dtype {keep.dtype}, expected torch.bool, True for real tokens"
            )
        if state is None:
            return
        if not isinstance(state, NetworkState):
            raise ValueError(f"state is a {type(state).__name__}, expected a NetworkState")
        if not self.config.mixer.is_causal:
            raise ValueError("state was given to a model that reads both ways")
        if len(state.blocks) != len(self.blocks):
            raise ValueError(
                f"state is of a model with {len(state.blocks)} blocks, expected {len(self.blocks)}"
            )
        for path, part in flatten(state).items():
            if part.ndim and part.shape[0] != x.shape[0]:
                raise ValueError(
                    f"state is of a batch of {len(part)}, expected {len(x)}: {path} has shape "
                    f"{tuple(part.shape)}"
                )
