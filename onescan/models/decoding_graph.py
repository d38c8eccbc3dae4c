"""One decoding step as a CUDA graph, which the host launches as a whole.

With small batches, launching the operators of a step one by one takes longer than running them.
The graph has not been run on a GPU yet, so it is off by default.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onescan.models.token_network import (
    NetworkState,
    as_buffers,
    check_constant_size,
    flatten_state,
)
from onescan.shapes import TokenLogits, Tokens

WARM_UP = 3  # calls before the capture, during which libraries allocate and kernels are compiled


class DecodingGraph:
    """Compute logits token by token, with a state that each step overwrites.

    Args:
        model: `CausalLM` on a GPU, in evaluation mode, whose state has a constant size.
        tokens: Tokens of one step, [B, 1]; only their shape and device matter.
        state: State of the tokens so far. It is copied.

    Raises:
        ValueError: If the model is not on a GPU, or its state grows with the text.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, tokens: Tokens, state: NetworkState) -> None:
        self.model, self.tokens = model, tokens.clone()
        self.state = as_buffers(state, tokens.device)
        self._logits: TokenLogits
        self._replay = capture(self._step, self._forward, tokens.device)

    def __call__(self, tokens: Tokens, state: Any = None) -> tuple[TokenLogits, NetworkState]:
        """Return the logits of the next token, and the state; the next call overwrites both."""
        self.tokens.copy_(tokens)
        self._replay()
        return self._logits, self.state

    def _forward(self) -> NetworkState:
        """Run the model, and return the state after the token."""
        device = self.tokens.device.type
        enabled = torch.is_autocast_enabled(device)
        # A graph must not read weights from autocast's cache, which is freed with its context.
        with torch.autocast(device, enabled=enabled, cache_enabled=False):
            self._logits, after = self.model(self.tokens, self.state)
        check_constant_size(self.state, after)
        return after

    def _step(self) -> None:
        after = flatten_state(self._forward())
        for name, buffer in flatten_state(self.state).items():
            buffer.copy_(after[name])


def capture(
    step: Callable[[], None], warm_up: Callable[[], Any], device: torch.device
) -> Callable[[], None]:
    """Capture the operators of `step` without running them, and return a function that runs them.

    Raises:
        ValueError: If the device is not a GPU.
    """
    if device.type != "cuda":
        raise ValueError(f"cuda_graph is True with a model on {device}, expected a GPU")
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return graph.replay
