"""The network of all language models, which maps token ids to vectors, and its state."""

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onescan.checks import (
    can_look_at_values,
    check_devices,
    check_positive,
    check_shapes,
    check_token_ids,
    is_known,
)
from onescan.configs import ModelConfig
from onescan.layers.basic import EPS, GLUConfig, MLPConfig, NormName, NormPosition, build_norm
from onescan.layers.block import init_weights
from onescan.layers.convolution import RealFirst
from onescan.layers.mixers import LightNetMixerConfig, MixerConfig
from onescan.layers.mixers.contract import Mixer, masked, rows_where
from onescan.layers.position import (
    AbsolutePositionConfig,
    PositionConfig,
    SinusoidalPositionConfig,
    ToeplitzPositionConfig,
    TokenPosition,
    TokenPositionConfig,
)
from onescan.layers.stack import apply_blocks, build_blocks
from onescan.layers.tokens import Documents
from onescan.messages import named_type
from onescan.ops.collectives import gather_tokens
from onescan.ops.packing import Packing, PackingShard, document_offsets
from onescan.ops.parallel import (
    SequenceGroup,
    known_lengths,
    packing_over,
    sequence_group,
)
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
    """Position encoding after the embedding; None for no encoding. MD-TPE starts with half-lives of
    0.5 to 2 tokens, regardless of the length of the texts, unless position.init_length is set."""
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
        """Raise ValueError if a number is out of range, or the position encoding does not fit."""
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
        blocks = [self.mixer.for_layer(i).state_block for i in range(self.depth)]
        if self.state_block is None and any(block is not None and block > 1 for block in blocks):
            raise ValueError(
                f"mixer has causal_block={max(block or 1 for block in blocks)}, but "
                f"{self._what_reads_later_blocks()}, so tokens would read later blocks"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, expected 0 or more and less than 1")

    def _what_reads_later_blocks(self) -> str:
        if self.mixer.state_block is None:
            return "another mixer of the hybrid reads all tokens"
        return "position.bidirectional is True"

    @property
    def state_block(self) -> int | None:
        """Number of tokens per block, 1 if causal: a call can continue after any whole block.

        None if tokens read later ones.
        """
        position = self.position
        if isinstance(position, ToeplitzPositionConfig) and position.bidirectional:
            return None
        return self.mixer.state_block

    @property
    def skips_padding(self) -> bool:
        """Whether padding between real tokens has no effect even if it stays where it is."""
        has_no_distances = self.position is None or isinstance(self.position, TokenPositionConfig)
        return has_no_distances and self.mixer.skips_padding

    def example_inputs(self) -> tuple[Tokens]:
        """Return a sequence of 128 tokens."""
        return (torch.zeros(1, 128, dtype=torch.long),)


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(TokenNetworkConfig, ABC):
    """Config of text encoders: BERT's vocabulary and size, with bidirectional LightNet mixers."""

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
        continues: Whether a call can continue a blockwise causal one, which must consist of whole
            blocks without padding; ``None`` in causal networks.
    """

    position: Any
    blocks: tuple[Any, ...]
    continues: bool | None = None


class _PaddingPermutation:
    """Moves the real tokens of each text together, and back.

    Args:
        keep: Mask of the tokens of all ranks.
        order: Their order.
        lengths: Number of tokens on each rank; None without a group.
    """

    def __init__(self, keep: Keep, order: RealFirst, lengths: list[int] | None) -> None:
        self.order, self.lengths = order, lengths
        self.keep = self._of_this_rank(keep.gather(1, order.token))

    @classmethod
    def of(
        cls,
        keep: Keep,
        documents: Documents | None,
        *,
        at_end: bool,
        either_end: bool,
    ) -> "_PaddingPermutation | None":
        """Return how to move tokens; None if padding is known to be where it has no effect.

        Args:
            keep: True for real tokens.
            documents: Packed documents, each of which keeps its place.
            at_end: Whether padding comes before the real tokens instead of after them.
            either_end: Whether padding may also stay at the other end.
        """
        group, lengths = sequence_group(None), None
        packing = None if documents is None else documents.packing
        if group is not None:
            lengths, keep = group.lengths(keep), _gather_mask(group, keep)
            packing = packing.whole if isinstance(packing, PackingShard) else packing
        sequence = None if packing is None else packing.sequence.to(keep.device)
        if is_known(keep.shape[1]) and keep.shape[1] == 1:
            return None
        if group is not None or can_look_at_values(keep):
            before, after = keep[:, :-1], keep[:, 1:]
            is_same: Any = True if sequence is None else sequence[:, 1:] == sequence[:, :-1]
            begins, ends = ~before & after & is_same, before & ~after & is_same
            if either_end:
                needs_moving = begins.any(dim=1) & ends.any(dim=1)
            else:
                needs_moving = ends if at_end else begins
            if not needs_moving.any():
                return None
        return cls(keep, RealFirst.of(keep, sequence, at_end=at_end), lengths)

    def collect(self, x: Hidden) -> Hidden:
        """Move real tokens together."""
        return self._reordered(x, self.order.collect)

    def restore(self, x: Hidden) -> Hidden:
        """Move all tokens back."""
        return self._reordered(x, self.order.restore)

    def _reordered(self, x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        if (group := sequence_group(None)) is not None:
            x = gather_tokens(group, x, self.lengths)
        return self._of_this_rank(move(x))

    def _of_this_rank(self, x: Tensor) -> Tensor:
        """Return the tokens of this rank."""
        group = sequence_group(None)
        if group is None or self.lengths is None:
            return x
        return x.split(self.lengths, dim=1)[group.rank]


class TokenNetwork(nn.Module):
    """Embedding -> position encoding -> blocks -> norm; no final norm with post-norm blocks."""

    def __init__(self, config: TokenNetworkConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.segment_embedding = None
        if config.segment_types:
            self.segment_embedding = nn.Embedding(config.segment_types, width)
        self.position = None
        if config.position is not None:
            # Texts have no fixed length, so MD-TPE starts with short half-lives (see init_length).
            self.position = config.position.build(width=width, grid=Grid((1,)))
        self.embedding_norm = self._build_norm(present=config.embedding_norm)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks, self.lower_bounds = build_blocks(
            config.depth, width, axes=1, mixer=config.mixer, mlp=config.mlp, norm=config.norm,
            norm_position=config.norm_position, norm_eps=config.norm_eps, dropout=config.dropout,
        )  # fmt: skip
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
        outputs: list[Hidden] | None = None,
        ends: bool = False,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """Compute one vector per token.

        Args:
            tokens: Token ids.
            segments: Segment of each token, for networks with segment embeddings.
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
            state: State returned by a previous call of a causal network, or of a blockwise causal
                one after whole blocks. Not with documents.
            read_outs: Number of last blocks whose outputs to return, concatenated along the batch
                in the order of the blocks.
            outputs: List to which the input of the first block and the output of each block are
                appended.
            ends: True if no real token follows padding in later calls. Tokens after a state are
                then read together, even if some are padding.

        Returns:
            Vectors of shape ``[read_outs * B, T, D]``, and the state after the last token; ``None``
            with documents. Vectors of padding are meaningless.

        Raises:
            ValueError: If shapes, dtypes or devices do not match, there are no tokens, the state
                belongs to another model, or an option does not apply to this network.
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
            outputs=outputs,
            ends=ends,
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
        outputs: list[Hidden] | None = None,
        ends: bool = False,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """Apply the network to vectors instead of token ids; see `forward` for the arguments.

        Args:
            x: Vectors, which may be NaN where `keep` is False.
            segments: As in `forward`.
            keep: As in `forward`.
            documents: As in `forward`.
            cu_seqlens: As in `forward`.
            state: As in `forward`.
            read_outs: As in `forward`.
            outputs: As in `forward`.
            ends: As in `forward`.
        """
        self._check(x, segments, keep, documents, cu_seqlens, state)
        if not 1 <= read_outs <= len(self.blocks):
            raise ValueError(f"read_outs is {read_outs}, expected 1 to {len(self.blocks)} blocks")
        with known_lengths(x):
            if state is not None and keep is not None and not ends and self._must_step(keep):
                return self._read_steps(x, segments, keep, state, read_outs, outputs)
            return self._read(x, segments, keep, documents, cu_seqlens, state, read_outs, outputs)

    def _must_step(self, keep: Keep) -> bool:
        """Return whether to read the tokens after a state one by one, because some are padding."""
        if self.config.skips_padding or self.config.state_block != 1:
            return False
        if sequence_group(None) is not None and not keep.all():
            raise ValueError(
                "keep contains padding, which is not supported with a state over several ranks"
            )
        return keep.shape[1] == 1 or not keep.all()

    def _read_steps(
        self,
        x: Hidden,
        segments: Tokens | None,
        keep: Keep,
        state: NetworkState,
        read_outs: int,
        outputs: list[Hidden] | None,
    ) -> tuple[ReadOuts, NetworkState]:
        """Apply the network to one token after another, without positions for masked ones."""
        read: list[Tensor] = []
        after: list[list[Tensor]] = []
        for t in range(x.shape[1]):
            token, segment = slice(t, t + 1), None if segments is None else segments[:, t : t + 1]
            hidden: list[Hidden] = []
            y, new = self._read(
                x[:, token], segment, keep[:, token], None, None, state, read_outs, hidden
            )
            assert new is not None
            state = self._state_after_step(keep[:, token], state, new)
            read.append(y)
            after.append(hidden)
        if outputs is not None:
            outputs += [torch.cat(steps, dim=1) for steps in zip(*after, strict=True)]
        return torch.cat(read, dim=1), state

    def _read(
        self,
        x: Hidden,
        segments: Tokens | None,
        keep: Keep | None,
        documents: Tokens | None,
        cu_seqlens: Tensor | Packing | None,
        state: NetworkState | None,
        read_outs: int,
        outputs: list[Hidden] | None,
    ) -> tuple[ReadOuts, NetworkState | None]:
        """Apply the network to checked arguments."""
        grid = Grid((x.shape[1],))
        is_packed = documents is not None or cu_seqlens is not None
        per_document = _documents_of(x, documents, cu_seqlens)
        previous: Any = NetworkState(None, (None,) * len(self.blocks)) if state is None else state
        position = previous.position
        if self.segment_embedding is not None:
            segment_ids = (
                x.new_zeros(x.shape[:2], dtype=torch.long) if segments is None else segments
            )
            x = x + self.segment_embedding(segment_ids)
        order = None
        if keep is not None:
            x = masked(x, keep)
            if not self.config.skips_padding:
                size = self.config.state_block
                # Causal networks need padding before the first real token, because the next call
                # continues after the last token; others, if at all, after the last real token.
                order = _PaddingPermutation.of(
                    keep,
                    per_document,
                    at_end=size == 1 and not is_packed and state is None,
                    either_end=size is None or is_packed,
                )
            if order is not None:
                x, keep = order.collect(x), order.keep
        if self.position is not None:
            packing = None if per_document is None else per_document.packing
            x, position = self.position(x, grid, position, keep, cu_seqlens=packing)
        embedding, depth = self.dropout(self.embedding_norm(x)), len(self.blocks)
        first = depth - read_outs if outputs is None else 0
        _, states, after = apply_blocks(
            self.blocks, self.lower_bounds, embedding, grid, keep=keep, documents=per_document,
            states=previous.blocks, selected=range(first, depth),
        )  # fmt: skip
        after = after if outputs is None else [embedding, *after]
        if order is not None:
            after = [order.restore(y) for y in after]
        if outputs is not None:
            outputs += after
        x = self.norm(after[-1] if read_outs == 1 else torch.cat(after[-read_outs:]))
        if is_packed:
            return x, None
        return x, NetworkState(position, states, self._continues(embedding, keep))

    def _continues(self, x: Hidden, keep: Keep | None) -> bool | None:
        """Return whether a call can continue a blockwise causal one with these tokens."""
        block, group = self.config.state_block, sequence_group(None)
        if block is None or block == 1:
            return None
        if keep is not None and can_look_at_values(keep) and not keep.all():
            return False
        return (x.shape[1] if group is None else sum(group.lengths(x))) % block == 0

    def _state_after_step(
        self, keep: Keep, before: NetworkState, after: NetworkState
    ) -> NetworkState:
        """Return the state after one token, where masked ones have not taken a position."""
        position = after.position
        if self.position is not None and not isinstance(self.position, TokenPosition):
            position = rows_where(keep, after.position, before.position)
        blocks = [
            cast(Mixer, block.mixer).after_masked(previous, current, keep)
            for block, previous, current in zip(
                self.blocks, before.blocks, after.blocks, strict=True
            )
        ]
        return NetworkState(position, tuple(blocks))

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
        per_token = {"segments": segments, "keep": keep}
        patterns = {name: (tensor, "B T") for name, tensor in per_token.items()}
        sizes = check_shapes(x=(x, "B T D"), **patterns, documents=(documents, "B T"))
        if sequence_group(None) is None:
            check_positive(T=sizes["T"])
        check_devices(x=x, **per_token)
        if documents is not None and documents.device not in (x.device, torch.device("cpu")):
            raise ValueError(f"documents is on {documents.device}, expected cpu or {x.device}")
        if x.shape[-1] != self.config.width:
            raise ValueError(f"x has width {x.shape[-1]}, expected {self.config.width}")
        if documents is not None and documents.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"documents has dtype {documents.dtype}, expected torch.int32 or torch.int64"
            )
        options = {"documents": documents, "cu_seqlens": cu_seqlens, "state": state}
        given = [name for name, value in options.items() if value is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} were given together, expected only one of them"
            )
        if segments is not None and not self.config.segment_types:
            raise ValueError(
                "segments were given, but the model has segment_types=0, expected None"
            )
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
            raise ValueError("state was given to a bidirectional model, expected None")
        if self.config.state_block is None:
            raise ValueError(
                "state was given to a model with position.bidirectional=True, whose tokens read "
                "later ones; expected a position encoding with bidirectional=False"
            )
        if state.continues is False:
            raise ValueError(
                "state is from a call that ended within a block or contained padding, expected "
                f"one with whole blocks of {self.config.state_block} real tokens"
            )
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


def _gather_mask(group: SequenceGroup, keep: Tensor) -> Tensor:
    """Return the mask of the tokens of all ranks."""
    return gather_tokens(group, keep.byte(), group.lengths(keep)).bool()


def _documents_of(
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
    full_packing = packing.whole if isinstance(packing, PackingShard) else packing
    return None if full_packing.sequences == len(x) else Documents(packing)


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
    return map_tensors(lambda x: x.index_select(0, rows) if x.ndim else x, state)


def as_buffers(state: Any, device: torch.device) -> Any:
    """Return a copy of a state on a device, with numbers converted to tensors.

    >>> as_buffers((torch.ones(1), None, 3), torch.device("cpu"))
    (tensor([1.]), None, tensor(3))
    """

    def copy_leaf(leaf: Any, _: str) -> Any:
        return None if leaf is None else torch.as_tensor(leaf).to(device, copy=True)

    return _map_leaves(copy_leaf, state, "")


def check_constant_size(before: Any, after: Any) -> None:
    """Raise ValueError if the state grows with the number of tokens, as in softmax attention."""
    longer = flatten_state(after)
    for name, x in flatten_state(before).items():
        if x.shape != longer[name].shape:
            raise ValueError(
                f"the model's state grows with the text: {name}; expected a constant size, as with "
                "linear mixers or softmax attention with a window"
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
        problem = "is missing" if path in expected else "does not exist in this model's state"
        raise ValueError(f"{path} {problem}")

    def fill(leaf: Any, path: str) -> Any:
        if leaf is None:
            return None
        return flat[path] if isinstance(leaf, Tensor) else type(leaf)(flat[path].item())

    return _map_leaves(fill, like, "")


def _map_leaves(function: Callable[[Any, str], Any], state: Any, path: str) -> Any:
    if not isinstance(state, tuple):
        return function(state, path)
    parts = [_map_leaves(function, part, part_path) for part_path, part in _parts(state, path)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def _leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, tuple):
        for part_path, part in _parts(state, path):
            yield from _leaves(part, part_path)
    elif state is not None:
        yield path, state


def _parts(state: tuple[Any, ...], path: str) -> Iterator[tuple[str, Any]]:
    names = getattr(state, "_fields", range(len(state)))
    for name, part in zip(names, state, strict=True):
        yield f"{path}.{name}" if path else str(name), part
