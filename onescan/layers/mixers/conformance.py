"""Check that a mixer does what models, training and streaming rely on."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onescan import configs
from onescan.checks import check_whole
from onescan.layers.mixers.contract import Mixer, MixerConfig
from onescan.messages import named_type
from onescan.ops.packing import Packing
from onescan.shapes import Grid

BATCH, TOKENS, PREFIX = 2, 12, 2
PAIR = 2  # outputs and state
RTOL, ATOL = 1e-7, 1e-9  # in float64
REAL = 0.7  # share of tokens that a mask keeps


def check_mixer(config: MixerConfig, *, width: int = 24, axes: int = 2) -> tuple[str, ...]:
    """Check a mixer of your own against everything that its config promises.

    The mixer is built with random weights and called on random tokens, in float64 on the CPU.

    Args:
        config: Config of the mixer, for one block of a model.
        width: Width of the tokens, which `num_heads` must divide.
        axes: Number of axes of the grid. Every mixer is also called on one axis.

    Returns:
        What was checked, such as "two calls equal one".

    Raises:
        ValueError: If the mixer breaks a promise; says which.

    >>> from onescan.layers.mixers import LionMixerConfig
    >>> check_mixer(LionMixerConfig(direction="forward"))[-1]
    'the state keeps its size'
    """
    check_whole(1, width=width, axes=axes)
    if not isinstance(config, MixerConfig):
        raise ValueError(f"config is {named_type(config)}, expected a MixerConfig")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tuple(name for number in {1, axes} for name in _checked(config, width, number))


def _checked(config: MixerConfig, width: int, axes: int) -> Iterator[str]:
    """Run all checks that apply to a mixer, and yield their names."""
    case = Case(config, width, axes)
    for name, (applies, check) in CHECKS.items():
        if applies(config, axes):
            try:
                check(case)
            except Exception as error:  # whatever a mixer raises
                why = f"{type(error).__name__}: " * (not isinstance(error, AssertionError))
                where = f"{type(case.mixer).__name__} on {axes} {'axis' if axes == 1 else 'axes'}"
                raise ValueError(f'{where}: "{name}" does not hold: {why}{error}') from error
            yield name


class Case:
    """A mixer with random weights, and tokens for it."""

    def __init__(self, config: MixerConfig, width: int, axes: int) -> None:
        self.config, self.width, self.axes = config, width, axes
        self.mixer = self.built()
        self.grid = _grid(config, axes)
        self.x = self.tokens(self.grid.tokens)

    def built(self) -> Mixer:
        """Build the mixer with weights as training may leave them."""
        mixer = self.config.build(width=self.width, axes=self.axes)
        if not isinstance(mixer, Mixer):
            raise ValueError(f"build returned {named_type(mixer)}, expected a Mixer")
        mixer = mixer.double().eval()
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return mixer

    def tokens(self, count: int) -> Tensor:
        return torch.randn(BATCH, count, self.width, dtype=torch.float64)

    def mask(self, count: int) -> Tensor:
        """Return a mask with real and masked tokens in each row, and real ones at both ends."""
        keep = torch.rand(BATCH, count) < REAL
        keep[:, 0] = keep[:, -1] = True
        keep[0, 1 : 1 + count // 4] = False
        return keep

    def call(self, x: Tensor, grid: Grid | None = None, **options: Any) -> tuple[Tensor, Any]:
        """Call the mixer with all that its config says it takes."""
        grid = self.grid if grid is None else grid
        takes = self.config.takes
        if "embedding" in takes and "embedding" not in options:
            options["embedding"] = torch.sin(x)
        if "lower_bound" in takes:
            options["lower_bound"] = torch.full((self.width,), 0.2, dtype=x.dtype)
        made = self.mixer(x, grid, **options)
        assert isinstance(made, tuple) and len(made) == PAIR, (  # noqa: PT018
            f"forward returned {named_type(made)}, expected a pair of outputs and state, such as "
            "(x, None)"
        )
        return made

    def part(self, start: int, stop: int) -> tuple[Tensor, Grid]:
        """Return the tokens of some places along the first axis, and their grid."""
        per_step = self.grid.tokens // self.grid.shape[0]
        x = self.x[:, start * per_step : stop * per_step]
        return x, Grid((stop - start, *self.grid.shape[1:]))


def _grid(config: MixerConfig, axes: int) -> Grid:
    """Return a grid whose tokens are whole blocks along the first axis."""
    block = config.state_block or 1
    if axes == 1:
        return Grid((block * max(1, TOKENS // block),))
    rest = (2,) * (axes - 2)
    return Grid((4 * block, 3, *rest))


def _close(got: Tensor, want: Tensor, what: str) -> None:
    error = (got - want).abs().max().item() if got.shape == want.shape and got.numel() else 0.0
    assert got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert torch.allclose(got, want, rtol=RTOL, atol=ATOL), f"{what} differs by up to {error:.3g}"


def _shape(case: Case) -> None:
    y, state = case.call(case.x)
    assert y.shape == case.x.shape, f"outputs have shape {tuple(y.shape)}"
    assert y.dtype == case.x.dtype, f"outputs have dtype {y.dtype} for inputs of {case.x.dtype}"
    promised = case.config.state_block is not None
    assert (state is not None) == promised, (
        f"state is {named_type(state)} with state_block={case.config.state_block}"
    )
    _close(case.call(case.x)[0], y, "a second call")


def _samples(case: Case) -> None:
    _close(case.call(case.x[:1])[0], case.call(case.x)[0][:1], "a sample alone")


def _gradients(case: Case) -> None:
    x = case.x.clone().requires_grad_()
    y, _ = case.call(x)
    named = dict(case.mixer.named_parameters())
    found = torch.autograd.grad(y.square().sum(), [x, *named.values()], allow_unused=True)
    for name, gradient in zip(("x", *named), found, strict=True):
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.isfinite().all(), f"the gradient of {name} is not finite"


def _weights(case: Case) -> None:
    other = case.built()
    other.load_state_dict(case.mixer.state_dict())
    want, _ = case.call(case.x)
    case.mixer = other
    _close(case.call(case.x)[0], want, "a mixer with the same weights")


def _config(case: Case) -> None:
    data = configs.to_dict(case.config)
    assert configs.from_dict(type(case.config), data) == case.config, "the config changes"


def _masks(case: Case) -> None:
    keep = case.mask(case.grid.tokens)
    want, _ = case.call(case.x, keep=keep)
    assert not want[~keep].any(), "outputs of masked tokens are not zero"
    for value in (7.0, torch.nan):
        other = case.x.masked_fill(~keep.unsqueeze(-1), value)
        extra: dict[str, Any] = (
            {"embedding": torch.sin(case.x)} if "embedding" in case.config.takes else {}
        )
        _close(case.call(other, keep=keep, **extra)[0], want, f"with {value} at masked tokens, y")
    whole = torch.ones_like(keep)
    _close(case.call(case.x, keep=whole)[0], case.call(case.x)[0], "with a mask of True, y")


def _skips_padding(case: Case) -> None:
    keep = case.mask(case.grid.tokens)[:1]
    alone = case.x[:1, keep[0]]
    want, _ = case.call(alone, Grid((alone.shape[1],)))
    got, _ = case.call(case.x[:1], keep=keep)
    _close(got[:1, keep[0]], want, "y of real tokens among masked ones")


def _cuts(case: Case) -> None:
    steps = case.grid.shape[0]
    want, _ = case.call(case.x)
    per_cut = 1 if case.axes > 1 else case.config.state_block or 1
    for cut in range(per_cut, steps, per_cut):
        (a, first), (b, rest) = case.part(0, cut), case.part(cut, steps)
        before, state = case.call(a, first)
        after, _ = case.call(b, rest, state=state)
        _close(
            torch.cat([before, after], dim=1), want, f"y of two calls, cut after {cut} of {steps}"
        )


def _no_later_tokens(case: Case) -> None:
    block = case.config.state_block or 1
    want, _ = case.call(case.x)
    for stop in range(block, case.grid.tokens, block):
        other = case.x.clone()
        other[:, stop:] += 1
        _close(case.call(other)[0][:, :stop], want[:, :stop], f"y of the first {stop} tokens")


def _state_size(case: Case) -> None:
    x, grid = case.part(0, case.grid.shape[0])
    _, state = case.call(x, grid)
    _, later = case.call(x, grid, state=state)
    sizes, after = (list(_sizes(y)) for y in (state, later))
    assert sizes == after, f"the state grows from {sizes} to {after}"


def _sizes(state: Any) -> Iterator[tuple[int, ...]]:
    for part in state if isinstance(state, tuple) else [state]:
        if isinstance(part, tuple):
            yield from _sizes(part)
        elif isinstance(part, Tensor):
            yield tuple(part.shape)


def _packing(case: Case) -> None:
    tokens = case.grid.tokens
    cuts = [0, tokens // 3, tokens, tokens + 1, 2 * tokens]
    packing = Packing(torch.tensor(cuts, dtype=torch.int32), batch=BATCH, tokens=tokens)
    got, _ = case.call(case.x, cu_seqlens=packing)
    for row in range(BATCH):
        for start, stop in itertools.pairwise(cuts):
            if start // tokens != row:
                continue
            at = slice(start - row * tokens, stop - row * tokens)
            one = case.x[row : row + 1, at]
            _close(
                got[row : row + 1, at], case.call(one, Grid((one.shape[1],)))[0], "y of a document"
            )


def _prefix(case: Case) -> None:
    grid = Grid(case.grid.shape, PREFIX)
    x = case.tokens(grid.tokens)
    other = x.clone()
    other[:, PREFIX:] += 1
    (y, _), (z, _) = case.call(x, grid), case.call(other, grid)
    reads = not torch.allclose(y[:, :PREFIX], z[:, :PREFIX], rtol=RTOL, atol=ATOL)
    promised = case.config.prefix_reads_grid
    assert reads == promised, f"prefix_reads_grid is {promised}, but is {reads}"


def _always(config: MixerConfig, axes: int) -> bool:
    return True


def _has_state(config: MixerConfig, axes: int) -> bool:
    return config.state_block is not None


Applies = Callable[[MixerConfig, int], bool]
CHECKS: dict[str, tuple[Applies, Callable[[Case], None]]] = {
    "outputs and state are as promised": (_always, _shape),
    "samples do not mix": (_always, _samples),
    "gradients are finite": (_always, _gradients),
    "weights can be saved and loaded": (_always, _weights),
    "the config can be saved and loaded": (_always, _config),
    "masked tokens are not read": (_always, _masks),
    "padding may be anywhere": (
        lambda config, axes: config.skips_padding and axes == 1,
        _skips_padding,
    ),
    "the prefix reads the grid as promised": (
        lambda config, axes: config.state_block is None or config.is_causal,
        _prefix,
    ),
    "packed documents are separate": (
        lambda config, axes: "cu_seqlens" in config.takes and axes == 1,
        _packing,
    ),
    "no later token is read": (_has_state, _no_later_tokens),
    "two calls equal one": (_has_state, _cuts),
    "the state keeps its size": (
        lambda config, axes: _has_state(config, axes) and not config.state_grows,
        _state_size,
    ),
}
