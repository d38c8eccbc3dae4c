"""The state of a causal network as a cache of transformers, for `generate`."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from onescan.models.token_network import NetworkState, map_tensors, select_rows


class StateLayer(CacheLayerMixin):
    """State of all layers of a network, after a text of any length."""

    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: NetworkState | None = None
        self.num_tokens = 0
        self.is_initialized = True  # nothing to allocate

    def replace(self, state: NetworkState, new_tokens: int) -> None:
        """Store the state after `new_tokens` further tokens."""
        self.state = state
        self.num_tokens += new_tokens

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
        self.state, self.num_tokens = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the beams to continue."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences of the batch."""
        if self.state is not None:
            self.state = select_rows(self.state, indices.to(_device(self.state)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        self.state = map_tensors(lambda x: x.repeat_interleave(repeats, dim=0), self.state)

    def offload(self) -> None:
        """Do nothing, because the state is small and needed for every token."""

    def prefetch(self) -> None:
        """Do nothing, because the state is never offloaded."""

    def crop(self, *_: Any) -> NoReturn:
        """Raise ValueError: a state cannot be rolled back."""
        raise ValueError("a state cannot be cropped: it summarizes all tokens read so far")

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: there is nothing to allocate."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: there are no keys and values to add."""
        raise ValueError("a StateCache holds states, not keys and values")


class StateCache(Cache):
    """Cache of a causal model, of constant size, except that softmax attention's cache grows."""

    def __init__(self) -> None:
        self.layer = StateLayer()
        super().__init__(layers=[self.layer])


def _device(state: Any) -> torch.device:
    devices: list[torch.device] = []
    map_tensors(lambda x: devices.append(x.device) or x, state)  # type: ignore[func-returns-value]
    return devices[0]
