"""Bytes that a rank receives in sequence parallelism: counted, and calculated by formula."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from onescan.layers.mixers import (
    DeltaRuleMixerConfig,
    GatedDeltaNetMixerConfig,
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import PositionConfig, ToeplitzPositionConfig
from onescan.ops.parallel import SequenceGroup, sequence_parallel
from onescan.shapes import Grid

DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes
FLOAT64 = 8  # bytes, of log-normalizers
RADIUS = 138  # of LDN's kernels
WINDOW = 128  # tokens
HIDDEN_STATES = 64  # exponentials per channel of MD-TPE


class Communication:
    """Count the bytes that a rank receives from other ranks, and record the collectives.

    An all-reduce counts as the size of its result; a ring all-reduce moves nearly twice as much.
    """

    bytes: int
    calls: list[str]

    def __enter__(self) -> Self:
        self.bytes, self.calls = 0, []
        sizes = {
            "all_reduce": lambda x, *_, **__: x.nbytes,
            "all_gather": lambda outputs, own, **_: sum(x.nbytes for x in outputs) - own.nbytes,
            "all_to_all_single": _exchanged,
        }
        self._functions = {name: getattr(dist, name) for name in sizes}
        for name, size in sizes.items():
            setattr(dist, name, self._counting(name, size))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._functions.items():
            setattr(dist, name, function)

    def _counting(self, name: str, size: Callable[..., int]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            self.bytes += size(*arguments, **options)
            return self._functions[name](*arguments, **options)

        return call


def _exchanged(
    output: Tensor, sent: Tensor, counts: list[int] | None = None, *_: Any, group: Any
) -> int:
    """Return the bytes received in an all-to-all, except those that a rank sends to itself."""
    sent_to_self = len(output) // group.size() if counts is None else counts[group.rank()]
    return output.nbytes - output[:sent_to_self].nbytes


class Sizes(NamedTuple):
    """Sizes of a layer whose tokens are sharded equally across ranks.

    Attributes:
        ranks: Number of ranks.
        tokens: Number of tokens on all ranks.
        width: Features per token.
        heads: Number of heads.
        wide: Bytes per number in states.
        narrow: Bytes per number in activations.
        node: Ranks per node, if states are merged within nodes before they are exchanged.
    """

    ranks: int
    tokens: int
    width: int
    heads: int
    wide: int = 4
    narrow: int = 4
    node: int | None = None

    @property
    def head(self) -> int:
        """Channels per head."""
        return self.width // self.heads

    def gathered(self, numbers: float) -> float:
        """Return how many numbers a rank receives if each rank sends `numbers` to all others."""
        return (self.ranks - 1) * numbers

    def carried(self, numbers: float) -> float:
        """Do the same for states, which can be merged within a node."""
        node = self.node or self.ranks
        return (node - 1 + self.ranks // node - 1) * numbers

    def exchanged(self, numbers: float) -> float:
        """Return how many numbers a rank receives in an all-to-all of `numbers`."""
        return numbers * (self.ranks - 1) / self.ranks


class Layer(NamedTuple):
    """A layer, and the bytes that a rank receives in its forward and backward pass.

    Attributes:
        config: Returns the config for a number of heads.
        received: Returns the bytes of both passes for one sequence. Ranks between the first and the
            last one receive the most.
        is_image: Whether the tokens are the patches of a square image.
    """

    config: Callable[[int], Any]
    received: Callable[[Sizes], tuple[float, float]]
    is_image: bool = False


def _both(received: Callable[[Sizes], float]) -> Callable[[Sizes], tuple[float, float]]:
    """Use one formula for both passes, for layers that receive the same number of bytes in each."""
    return lambda sizes: (received(sizes),) * 2


def _additive(s: Sizes) -> tuple[float, float]:
    """Additive decay: an all-reduce of the maximum, and one of sums and states."""
    sums = s.wide * s.width * (1 + 2 * s.head)  # LRPE doubles the key channels
    return FLOAT64 * s.width + sums, sums


def _causal_additive(s: Sizes) -> float:
    return s.carried(s.width * (FLOAT64 + 2 * s.wide * s.head))


def _decay(s: Sizes) -> float:
    """Both directions of one decay per head; a state has a column of sums of keys."""
    return s.carried(2 * s.wide * s.heads * (s.head * (s.head + 1) + 1))


def _natural(s: Sizes) -> float:
    """Exchange projections, decays and outputs of the scan along columns, and states of both scans.

    A column of ones is appended to the values; its outputs are the row sums.
    """
    states = s.carried(4 * s.wide * s.heads * (s.head * (s.head + 2) + 1))
    inputs = 3 * s.width * s.narrow + s.heads * s.wide
    outputs = (s.width + s.heads) * s.wide
    return states + s.exchanged((inputs + outputs) * s.tokens / s.ranks)


def _diffusion(s: Sizes) -> float:
    """Neighboring tokens, and the state of linear attention over all tokens."""
    sides = min(s.ranks - 1, 2)
    attention = s.carried(2 * s.wide * s.heads * (s.head * (s.head + 1) + 1))
    return sides * RADIUS * s.width * s.narrow + attention


def _toeplitz(s: Sizes, *, lines: int = 1, directions: int = 1) -> float:
    """Gather the sums of each line and the factors, or exchange all tokens if they are smaller."""
    sums = directions * HIDDEN_STATES
    if 2 * s.tokens // s.ranks < s.ranks * lines * sums:
        return 2 * s.exchanged(s.narrow * s.width * s.tokens / s.ranks)
    return s.carried(s.wide * s.width * sums * (lines + 1))


def _image_toeplitz(s: Sizes) -> float:
    return _toeplitz(s, lines=math.isqrt(s.tokens), directions=2)


def _delta(s: Sizes) -> float:
    """DeltaNet; its heads have the same number of key and value channels."""
    return s.carried(2 * s.wide * s.width * s.head)


def _gated_delta(s: Sizes) -> float:
    """Heads have twice as many value channels; the convolution reads three earlier tokens."""
    window = s.narrow * 3 * (4 * s.width + 1)
    return s.carried(3 * s.wide * s.width * s.head) + s.gathered(window)


def _window(s: Sizes) -> float:
    """Gather the last keys and values of each rank, with two masks."""
    return s.gathered(WINDOW * 2 * (s.width + 1) * s.narrow)


def _softmax(s: Sizes) -> float:
    """Gather all keys and values, with a mask."""
    return s.exchanged(s.tokens * (2 * s.width + 1) * s.narrow)


LAYERS = {
    "LightNet": Layer(lambda heads: LightNetMixerConfig(num_heads=heads), _additive),
    "LightNet, causal": Layer(
        lambda heads: LightNetMixerConfig(num_heads=heads, direction="forward"),
        _both(_causal_additive),
    ),
    "LION-s": Layer(lambda heads: LionMixerConfig(num_heads=heads), _both(_decay)),
    "LION-s natural, on an image": Layer(
        lambda heads: LionMixerConfig(num_heads=heads, scan="natural"),
        _both(_natural),
        is_image=True,
    ),
    "LDN, explicit": Layer(
        lambda heads: LinearDiffusionMixerConfig(num_heads=heads), _both(_diffusion)
    ),
    "DeltaNet": Layer(
        lambda heads: DeltaRuleMixerConfig(num_heads=heads, direction="forward"), _both(_delta)
    ),
    "Gated DeltaNet": Layer(
        lambda heads: GatedDeltaNetMixerConfig(num_heads=heads, direction="forward"),
        _both(_gated_delta),
    ),
    "sliding window, causal": Layer(
        lambda heads: SoftmaxMixerConfig(num_heads=heads, direction="forward", window=WINDOW),
        _both(_window),
    ),
    "softmax, causal": Layer(
        lambda heads: SoftmaxMixerConfig(num_heads=heads, direction="forward"), _both(_softmax)
    ),
    "MD-TPE on text": Layer(
        lambda _: ToeplitzPositionConfig(hidden_states=HIDDEN_STATES),
        _both(_toeplitz),
    ),
    "MD-TPE on an image": Layer(
        lambda _: ToeplitzPositionConfig(hidden_states=HIDDEN_STATES, bidirectional=True),
        _both(_image_toeplitz),
        is_image=True,
    ),
}


def _ulysses(s: Sizes) -> tuple[float, float] | None:
    """Exchange queries, keys, values and outputs; each rank has whole heads."""
    received = s.exchanged(4 * s.tokens * s.width / s.ranks * s.narrow)
    return None if s.ranks > s.heads else (received, received)


def _ring(s: Sizes) -> tuple[float, float]:
    """Pass keys and values through all ranks; in the backward pass, with their gradients."""
    forward = s.exchanged(2 * s.tokens * s.width * s.narrow)
    return forward, 2 * forward


def _all_gather(s: Sizes) -> tuple[float, float]:
    """Gather keys and values; the backward pass reduces and scatters their gradients."""
    received = s.exchanged(2 * s.tokens * s.width * s.narrow)
    return received, received


BASELINES = {
    "softmax, Ulysses": _ulysses,
    "softmax, ring attention": _ring,
    "softmax, all-gather of keys and values": _all_gather,
}


def count(layer: Layer, sizes: Sizes, group: Any, nodes: Any = None) -> tuple[int, int]:
    """Return the bytes that this rank receives in a forward and in a backward pass.

    See `SequenceGroup` for `nodes`.
    """
    tokens, side = sizes.tokens // sizes.ranks, math.isqrt(sizes.tokens)
    shape = (side // sizes.ranks, side) if layer.is_image else (tokens,)
    config = layer.config(sizes.heads)
    if isinstance(config, PositionConfig):
        module = config.build(width=sizes.width, grid=Grid(shape))
    else:
        module = config.build(width=sizes.width, axes=len(shape))
    dtype = DTYPES[sizes.narrow]
    x = torch.randn(1, tokens, sizes.width, dtype=dtype, requires_grad=True)
    with sequence_parallel(SequenceGroup(group, [tokens] * sizes.ranks, nodes=nodes)):
        with Communication() as forward:
            y, _ = module.to(dtype)(x, Grid(shape))
        with Communication() as backward:
            y.sum().backward()
    return forward.bytes, backward.bytes
