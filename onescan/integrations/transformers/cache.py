"""The state of a causal network as a cache of transformers, for `generate`."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from onescan.models.token_network import NetworkState, map_tensors


class Inputs(NamedTuple):
    """Inputs of a network: either ids or embeddings.

    Attributes:
        ids: Token ids [B, T].
        embeddings: Vectors [B, T, D].
        segments: Segments [B, T]; ``None`` for 0.
        keep: True for real tokens [B, T]; ``None`` if all are real.
    """

    ids: Tensor | None
    embeddings: Tensor | None
    segments: Tensor | None
    keep: Tensor | None

    @property
    def length(self) -> int:
        """Number of tokens, padding included."""
        tokens = self.ids if self.embeddings is None else self.embeddings
        assert tokens is not None
        return tokens.shape[1]


class StateLayer(CacheLayerMixin):
    """State of one block after a text of any length, and a snapshot of it at an earlier token."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    state: Any
    snapshot: Any
    inputs: Inputs | None  # tokens after the snapshot; only of the cache's `common`
    num_tokens: int
    state_tokens: int
    snapshot_tokens: int

    def __init__(self) -> None:
        super().__init__()
        self.reset()
        self.is_initialized = True  # nothing to allocate

    def replace(self, state: Any, new_tokens: int, *, snapshot: bool) -> None:
        """Store the state after `new_tokens` further tokens; move the snapshot to the old one."""
        if snapshot:
            self.snapshot, self.snapshot_tokens = self.state, self.num_tokens
        self.state = state
        self.num_tokens += new_tokens
        self.state_tokens = self.num_tokens

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of tokens read so far, padding included."""
        return self.num_tokens

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Return the length and the offset of a mask over all tokens."""
        length = query if isinstance(query, int) else len(query)  # a number since 5.4
        return self.num_tokens + length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1; the name of `get_max_length` until 5.13."""
        return -1

    def reset(self) -> None:
        """Drop the state."""
        self.state = self.snapshot = self.inputs = None
        self.num_tokens = self.state_tokens = self.snapshot_tokens = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the beams to continue."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences of the batch."""
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Do nothing, because the state is small and needed for every token."""

    def prefetch(self) -> None:
        """Do nothing, because the state is never offloaded."""

    def crop(self, tokens_to_remove: int) -> None:
        """Return to the snapshot; see `StateCache.crop`."""
        length = tokens_to_remove + (0 if tokens_to_remove > 0 else self.num_tokens)
        if length >= self.num_tokens:
            if self.state_tokens == self.num_tokens:
                self.snapshot, self.snapshot_tokens = self.state, self.num_tokens
                self.inputs = None
            return
        if length < self.snapshot_tokens:
            raise ValueError(
                f"the cache cannot be cropped to {length} tokens: it has read {self.num_tokens} "
                f"and keeps a snapshot at {self.snapshot_tokens}, where the last call with more "
                "than one token began or where the cache was last cropped"
            )
        self.state, self.state_tokens = self.snapshot, self.snapshot_tokens
        self.num_tokens = length
        self.inputs = map_tensors(lambda x: x[:, : length - self.snapshot_tokens], self.inputs)

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: there is nothing to allocate."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: there are no keys and values to add."""
        raise ValueError("a StateCache holds states, not keys and values")

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        parts = (self.state, self.snapshot, self.inputs)
        self.state, self.snapshot, self.inputs = map_tensors(function, parts)


class StateCache(Cache):
    """Cache of a causal model, of constant size, except that softmax attention's cache grows.

    There is one layer per block. `common` holds what belongs to no block: the state of the network
    without those of its blocks, and the ids that were read after the snapshot.

    Args:
        num_layers: Number of blocks. By default, the first forward determines it.
    """

    layers: Any

    def __init__(self, num_layers: int = 0) -> None:
        self.common = StateLayer()
        super().__init__(layers=[StateLayer() for _ in range(num_layers)])

    @property
    def state(self) -> NetworkState | None:
        """State of the network; None if no token was read."""
        if not self.common.state_tokens:
            return None
        return self.common.state._replace(blocks=tuple(layer.state for layer in self.layers))

    def resume(
        self, read: Callable[[Inputs, NetworkState | None], tuple[Any, NetworkState | None]]
    ) -> NetworkState | None:
        """Return the state after all tokens, reading those again that `crop` could only keep.

        Args:
            read: Computes the network's output and state from inputs and the state before them.
        """
        common = self.common
        if common.inputs is not None and common.state_tokens < common.num_tokens:
            _, state = read(common.inputs, self.state)
            assert state is not None
            self._replace(state, 0, snapshot=False)
            self.crop(0)  # moves the snapshot
        return self.state

    def write(self, state: NetworkState, inputs: Inputs) -> None:
        """Store the state after further inputs."""
        if len(self.layers) != len(state.blocks):
            self.layers = [StateLayer() for _ in state.blocks]
        joined = None if inputs.length > 1 else _join(self.common.inputs, inputs)
        self._replace(state, inputs.length, snapshot=joined is None)
        self.common.inputs = inputs if joined is None else joined

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read so far, padding included."""
        return self.common.num_tokens

    def reset(self) -> None:
        """Drop the state."""
        super().reset()
        self.common.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the beams to continue."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences of the batch."""
        super().batch_select_indices(indices)
        self.common.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        self.common.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last tokens.

        A state cannot be rolled back, so the cache keeps a snapshot: the state before the last call
        with more than one token, and the ids that were read since. Cropping returns to the snapshot
        and keeps the remaining ids, which the next forward reads again before its own tokens.
        Cropping moves the snapshot to the new end, even if no token is removed.

        Args:
            tokens_to_remove: Minus the number of tokens to remove. A positive number is the number
                of tokens to keep, as in earlier versions of transformers.

        Raises:
            ValueError: If tokens before the snapshot would have to be removed.
        """
        for layer in (self.common, *self.layers):
            layer.crop(int(tokens_to_remove))  # a tensor in some versions of transformers

    def _replace(self, state: NetworkState, new_tokens: int, *, snapshot: bool) -> None:
        self.common.replace(state._replace(blocks=()), new_tokens, snapshot=snapshot)
        for layer, part in zip(self.layers, state.blocks, strict=True):
            layer.replace(part, new_tokens, snapshot=snapshot)


def _join(first: Inputs | None, second: Inputs) -> Inputs | None:
    """Return both inputs as one; None if there is no first one or only one of them has ids."""
    if first is None or first.ids is None or second.ids is None:
        return None
    ids = torch.cat([first.ids, second.ids], dim=1)

    def join(one: Any, other: Any, default: int) -> Tensor | None:
        if one is None and other is None:
            return None
        example = other if one is None else one
        parts: Any = zip((one, other), (first.ids, second.ids), strict=True)
        full = [
            torch.full_like(i, default, dtype=example.dtype) if x is None else x for x, i in parts
        ]
        return torch.cat(full, dim=1)

    return Inputs(
        ids, None, join(first.segments, second.segments, 0), join(first.keep, second.keep, 1)
    )
