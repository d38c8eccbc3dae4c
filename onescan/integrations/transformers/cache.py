"""The state of a causal network as the cache that `generate` hands on."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from onescan.models.token_network import NetworkState, map_tensors, select_rows


class StateLayer(CacheLayerMixin):
    """All of a network's state, which stands for a text of any length."""

    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: NetworkState | None = None
        self.tokens = 0
        self.is_initialized = True  # nothing to make room for

    def take(self, state: NetworkState, tokens: int) -> None:
        """Hold the state after so many further tokens."""
        self.state = state
        self.tokens += tokens

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens it stands for, padding included."""
        return self.tokens

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """The length of a mask over all tokens, and where it begins."""
        length = query if isinstance(query, int) else len(query)  # a number since 5.4
        return self.tokens + length, 0

    def get_max_length(self) -> int:
        """No end: -1."""
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length`'s name until 5.13."""
        return -1

    def reset(self) -> None:
        """Forget all."""
        self.state, self.tokens = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these beams."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence so many times."""
        self.state = map_tensors(lambda x: x.repeat_interleave(repeats, dim=0), self.state)

    def offload(self) -> None:
        """Nothing: it is small, and needed at each token."""

    def prefetch(self) -> None:
        """Nothing, as nothing was moved away."""

    def crop(self, *_: Any) -> NoReturn:
        """Raise ValueError: a state does not tell what it was before."""
        raise ValueError(
            "a state cannot be cropped: tokens cannot be taken out of what sums them up"
        )

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to make room for."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ValueError: there are no keys and values to add."""
        raise ValueError("a StateCache holds states, and no keys and values")

    def _select(self, rows: Tensor) -> None:
        if self.state is not None:
            self.state = select_rows(self.state, rows.to(_device(self.state)))


class StateCache(Cache):
    """What a CausalLM has read; of one size, however long the text (softmax attention's grows)."""

    def __init__(self) -> None:
        self.whole = StateLayer()
        super().__init__(layers=[self.whole])


def _device(state: Any) -> torch.device:
    devices: list[torch.device] = []
    map_tensors(lambda x: devices.append(x.device) or x, state)  # type: ignore[func-returns-value]
    return devices[0]
