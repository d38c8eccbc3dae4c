"""The network of all language models, which maps token ids to vectors, and its state."""

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onescan.checks import check_devices, check_positive, check_shapes, check_token_ids
from onescan.configs import ModelConfig
from onescan.layers.basic import EPS, GLUConfig, MLPConfig, NormName, NormPosition, build_norm
from onescan.layers.block import Block, init_weights, lower_bound_of_each
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig, build_lower_bounds
from onescan.layers.position import (
    AbsolutePositionConfig,
    PositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
)
from onescan.layers.tokens import Documents
from onescan.messages import named_type
from onescan.ops.collectives import gather_tokens
from onescan.ops.packing import Packing, PackingShard, document_offsets
from onescan.ops.parallel import known_lengths, packing_over, sequence_group
from onescan.shapes import Grid, Hidden, Keep, ReadOuts, Tokens


@dataclass(frozen=True, kw_only=True)
class TokenNetworkConfig(ModelConfig, ABC):
    """Config fields shared by all language models; LightNet by default."""

    vocab_size: int = 50265
    """Number of token ids."""
    width: int = 512
    """Features per token."""
    depth: int = 6
    """Number of blocks."""
    mixer: MixerConfig = field(default_factory=lambda: LightNetMixerConfig(num_heads=8))
    """Layer that mixes information between tokens."""
    mlp: MLPConfig | None = field(default_factory=GLUConfig)
    """MLP after the mixer, applied to each token; None for mixers that need none."""
    position: PositionConfig | None = field(default_factory=ToeplitzPositionConfig)
    """Position encoding after the embedding; None for no encoding."""
    segment_types: int = 0
    """Number of segment embeddings: 2 for pairs of sentences, as in BERT; 0 for none."""
    embedding_norm: bool = False
    """Normalize the input of the first block."""
    norm: NormName = "layer"
    """Norm of every block, and after the last one if norm_position is "pre"."""
    norm_position: NormPosition = "pre"
    """"pre" normalizes the input of each branch and the output of the network; "post" normalizes
    each residual sum instead, as in BERT."""
    norm_eps: float = EPS
    """Epsilon added to the variance in every norm; 1e-12 in BERT."""
    dropout: float = 0.0
    """Dropout rate for the input of the first block and the output of each branch."""
    init_std: float = 0.02
    """Standard deviation of the initial weights of linear layers and embeddings."""

    def check(self) -> None:
        """Raise ValueError if a number is out of range, or the position encoding is for grids."""
        check_positive(
            vocab_size=self.vocab_size,
            width=self.width,
            depth=self.depth,
            init_std=self.init_std,
            norm_eps=self.norm_eps,
        )
        self.mixer.for_layer(0)  # raises if only one of a hybrid's mixers is causal
        if self.segment_types < 0:
            raise ValueError(f"segment_types is {self.segment_types}, expected 0 or more")
        if isinstance(self.position, AbsolutePositionConfig | SinusoidalPositionConfig):
            raise ValueError(
                f"position is {type(self.position).__name__}, which requires a grid of fixed size; "
                "expected TokenPositionConfig, ToeplitzPositionConfig or None"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, expected 0 or more and less than 1")

    def example_inputs(self) -> tuple[Tokens]:
        """Return a sequence of 128 tokens."""
        return (torch.zeros(1, 128, dtype=torch.long),)


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(TokenNetworkConfig, ABC):
    """BERT's vocabulary and size, with bidirectional LightNet mixers."""

    vocab_size: int = 30522
    width: int = 768
    depth: int = 12
    mixer: MixerConfig = field(default_factory=lambda: LightNetMixerConfig(num_heads=12))
    position: PositionConfig | None = field(
        default_factory=lambda: ToeplitzPositionConfig(bidirectional=True)
    )


class NetworkState(NamedTuple):
    """State of a causal network after some tokens.

    Attributes:
        position: State of the position encoding; ``None`` if it has none.
        blocks: State of each block's mixer.
    """

    position: Any
    blocks: tuple[Any, ...]


class TokenNetwork(nn.Module):
    """Embedding -> position encoding -> blocks -> norm; no final norm with post-norm blocks."""

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
        self.lower_bounds = build_lower_bounds(config.mixer, depth=config.depth, width=width)
        self.norm = self._build_norm(present=config.norm_position == "pre")
        self.apply(self.init_weights)

    def forward(
        self,
        tokens: Tokens,
        *,
        segments: Tokens | None = None,
        keep: Keep | None = None,
        documents: Tokens | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        state: NetworkState | None = None,
        read_outs: int = 1,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """Compute one vector per token.

        Args:
            tokens: Token ids.
            segments: Segment of each token, for networks with segment embeddings.
            keep: True for real tokens, False for padding on either side.
            documents: Number of the document that each token belongs to, for several documents in
                one row. Tokens read only their own document. Pass it on the CPU: a tensor on
                another device is copied to the CPU, which waits for that device once.
            cu_seqlens: Offsets of the documents instead of their numbers, as in flash-attention:
                int32, ``[S + 1]``, from 0 to T. With several rows, offsets count the tokens of all
                rows, up to B * T, and every row begins with a new document.
            state: State returned by a previous call of a causal network. Not with documents.
            read_outs: Number of last blocks whose outputs to return, concatenated along the batch
                in the order of the blocks.

        Returns:
            Vectors of shape ``[read_outs * B, T, D]``, and the state after the last token; ``None``
            with documents.

        Raises:
            ValueError: If shapes, dtypes or devices do not match, there are no tokens, the state is
                of another model, or an option does not apply to this network.
        """
        check_token_ids(tokens, self.config.vocab_size)
        check_shapes(tokens=(tokens, "B T"), segments=(segments, "B T"), keep=(keep, "B T"))
        x = self.embedding(tokens)
        return self.read(
            x,
            segments=segments,
            keep=keep,
            documents=documents,
            cu_seqlens=cu_seqlens,
            state=state,
            read_outs=read_outs,
        )

    def read(
        self,
        x: Hidden,
        *,
        segments: Tokens | None = None,
        keep: Keep | None = None,
        documents: Tokens | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        state: NetworkState | None = None,
        read_outs: int = 1,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """Apply the network to vectors instead of token ids; see `forward` for the arguments."""
        self._check(x, segments, keep, documents, cu_seqlens, state)
        if not 1 <= read_outs <= len(self.blocks):
            raise ValueError(f"read_outs is {read_outs}, expected 1 to {len(self.blocks)} blocks")
        with known_lengths(x):
            return self._read(x, segments, keep, documents, cu_seqlens, state, read_outs)

    def _read(
        self,
        x: Hidden,
        segments: Tokens | None,
        keep: Keep | None,
        documents: Tokens | None,
        cu_seqlens: Tensor | Packing | None,
        state: NetworkState | None,
        read_outs: int,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """Apply the network to checked arguments."""
        grid = Grid((x.shape[1],))
        is_packed = documents is not None or cu_seqlens is not None
        per_document = _separated(x, documents, cu_seqlens)
        position, mixers = (None, (None,) * len(self.blocks)) if state is None else state
        if self.segment_embedding is not None:
            kinds = x.new_zeros(x.shape[:2], dtype=torch.long) if segments is None else segments
            x = x + self.segment_embedding(kinds)
        if self.position is not None:
            packing = None if per_document is None else per_document.packing
            x, position = self.position(x, grid, position, keep, cu_seqlens=packing)
        x = embedding = self.dropout(self.embedding_norm(x))
        states: list[Any] = []
        outputs: list[Hidden] = []
        options = {"embedding": embedding, "keep": keep, "documents": per_document}
        bounds = lower_bound_of_each(self.blocks, self.lower_bounds)
        for block, mixer, bound in zip(self.blocks, mixers, bounds, strict=True):
            x, mixer = block(x, grid, state=mixer, lower_bound=bound, **options)
            states.append(mixer)
            outputs = [*outputs, x][-read_outs:]
        x = self.norm(x if read_outs == 1 else torch.cat(outputs))
        return x, None if is_packed else NetworkState(position, tuple(states))

    @property
    def device(self) -> torch.device:
        """The device for token ids: the device of the first parameter that is not offloaded.

        Offloaded parameters are on the meta device. If all parameters are offloaded, this is the
        CPU, because their hooks move inputs.
        """
        devices = (parameter.device for parameter in self.parameters())
        return next((d for d in devices if d.type != "meta"), torch.device("cpu"))

    def set_embedding(self, embedding: nn.Embedding) -> None:
        """Replace the token embedding, possibly changing the vocabulary size."""
        self.embedding = embedding
        self.config = dataclasses.replace(self.config, vocab_size=embedding.num_embeddings)

    def init_weights(self, module: nn.Module) -> None:
        """Initialize a layer's weights; also for heads on top of this network."""
        init_weights(module, std=self.config.init_std)

    def _build_norm(self, *, present: bool) -> nn.Module:
        name: NormName = self.config.norm if present else "none"
        return build_norm(name, self.config.width, eps=self.config.norm_eps)

    def _check(
        self,
        x: Hidden,
        segments: Any,
        keep: Any,
        documents: Any,
        cu_seqlens: Any,
        state: Any,
    ) -> None:  # Any: user input
        alike = {"segments": segments, "keep": keep}
        patterns = {name: (tensor, "B T") for name, tensor in alike.items()}
        sizes = check_shapes(x=(x, "B T D"), **patterns, documents=(documents, "B T"))
        if sequence_group(None) is None:
            check_positive(T=sizes["T"])
        check_devices(x=x, **alike)
        if documents is not None and documents.device not in (x.device, torch.device("cpu")):
            raise ValueError(f"documents is on {documents.device}, expected cpu or {x.device}")
        if x.shape[-1] != self.config.width:
            raise ValueError(f"x is of width {x.shape[-1]}, expected {self.config.width}")
        if documents is not None and documents.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"documents has dtype {documents.dtype}, expected torch.int64")
        options = {"documents": documents, "cu_seqlens": cu_seqlens, "state": state}
        given = [name for name, value in options.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} were both given, expected only one of them")
        if segments is not None and not self.config.segment_types:
            raise ValueError("segments were given, but the model has none: segment_types is 0")
        if segments is not None:
            check_token_ids(segments, self.config.segment_types, name="segments")
        if keep is not None and keep.dtype != torch.bool:
            raise ValueError(
                f"keep has dtype {keep.dtype}, expected torch.bool, True for real tokens"
            )
        if state is None:
            return
        if not isinstance(state, NetworkState):
            raise ValueError(f"state is {named_type(state)}, expected a NetworkState")
        if self.config.mixer.state_block is None:
            raise ValueError("state was given to a bidirectional model")
        if len(state.blocks) != len(self.blocks):
            raise ValueError(
                f"state is from a model with {len(state.blocks)} blocks, expected "
                f"{len(self.blocks)}"
            )
        for path, part in flatten_state(state).items():
            if part.ndim and part.shape[0] != x.shape[0]:
                raise ValueError(
                    f"state has batch size {len(part)}, expected {len(x)}: {path} has shape "
                    f"{tuple(part.shape)}"
                )


def _separated(
    x: Hidden, documents: Tokens | None, cu_seqlens: Tensor | Packing | None
) -> Documents | None:
    """Return the documents of a batch; None if each is a whole row, which is faster."""
    group = sequence_group(None)
    if documents is not None and group is not None:
        documents = gather_tokens(group, documents.to(x.device), group.lengths(x))
    if documents is not None:
        cu_seqlens = document_offsets(documents)
    packing = packing_over(group, cu_seqlens, x)
    if packing is None:
        return None
    whole = packing.whole if isinstance(packing, PackingShard) else packing
    return None if whole.sequences == len(x) else Documents(packing)


# A state is a tree of nested tuples; its leaves are tensors, numbers and None.


def map_tensors(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply a function to each tensor of a state, and return a state of the same structure.

    >>> map_tensors(lambda x: 2 * x, (torch.ones(1), None, 3))
    (tensor([2.]), None, 3)
    """
    return _map_leaves(
        lambda leaf, _: function(leaf) if isinstance(leaf, Tensor) else leaf, state, ""
    )


def select_rows(state: Any, rows: Tensor) -> Any:
    """Select sequences of a batch, for example to reorder them in beam search.

    Args:
        state: State returned by a model.
        rows: Indices into the batch; may repeat.
    """
    return map_tensors(lambda x: x.index_select(0, rows), state)


def as_buffers(state: Any, device: torch.device) -> Any:
    """Return a copy of a state on a device, with numbers converted to tensors.

    >>> as_buffers((torch.ones(1), None, 3), torch.device("cpu"))
    (tensor([1.]), None, tensor(3))
    """

    def copied(leaf: Any, _: str) -> Any:
        return None if leaf is None else torch.as_tensor(leaf).to(device, copy=True)

    return _map_leaves(copied, state, "")


def check_constant_size(before: Any, after: Any) -> None:
    """Raise ValueError if the state grows with the number of tokens, as in softmax attention."""
    longer = flatten_state(after)
    for name, x in flatten_state(before).items():
        if x.shape != longer[name].shape:
            raise ValueError(
                f"model has a state that grows with the text: {name}; expected a constant size, as "
                "of linear mixers and of softmax attention with a window"
            )


def flatten_state(state: Any) -> dict[str, Tensor]:
    """Return the tensors and numbers of a state by path, such as "blocks.0.attention.kv".

    >>> flatten_state((torch.ones(1), None, (3,)))
    {'0': tensor([1.]), '2.0': tensor(3)}
    """
    return {path: torch.as_tensor(leaf) for path, leaf in _leaves(state, "")}


def unflatten_state(like: Any, flat: Mapping[str, Tensor]) -> Any:
    """Rebuild a state from the output of `flatten_state`.

    Args:
        like: A state of the same structure.
        flat: Tensors by path.

    Raises:
        ValueError: If the paths differ from those of `like`; names the first.
    """
    expected = {path for path, _ in _leaves(like, "")}
    for path in sorted(expected ^ set(flat)):
        found = "is missing" if path in expected else "does not exist in this model's state"
        raise ValueError(f"{path} {found}")

    def fill(leaf: Any, path: str) -> Any:
        if leaf is None:
            return None
        return flat[path] if isinstance(leaf, Tensor) else type(leaf)(flat[path].item())

    return _map_leaves(fill, like, "")


def _map_leaves(function: Callable[[Any, str], Any], state: Any, path: str) -> Any:
    if not isinstance(state, tuple):
        return function(state, path)
    parts = [_map_leaves(function, part, at) for at, part in _parts(state, path)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def _leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, tuple):
        for at, part in _parts(state, path):
            yield from _leaves(part, at)
    elif state is not None:
        yield path, state


def _parts(state: tuple[Any, ...], path: str) -> Iterator[tuple[str, Any]]:
    names = getattr(state, "_fields", range(len(state)))
    for name, part in zip(names, state, strict=True):
        yield f"{path}.{name}" if path else str(name), part
