"""Check that a mixer behaves as models, training and streaming expect."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onescan import configs
from onescan.checks import check_whole
from onescan.layers.mixers.contract import Mixer, MixerConfig, call_mixer, check_is_config
from onescan.messages import named_type
from onescan.ops.packing import Packing
from onescan.shapes import Grid

BATCH, TOKENS, PREFIX = 3, 12, 2
RTOL, ATOL = 1e-7, 1e-9  # in float64
REAL = 0.7  # fraction of the tokens that are real in masks


def check_mixer(config: MixerConfig, *, width: int = 24, axes: int = 2) -> tuple[str, ...]:
    """Check that a custom mixer does what its config promises.

    The mixer is built with random weights and called on random tokens on the CPU. Weights and
    tokens are float64, and the mixer should compute everything in float64 too, so that errors can
    be distinguished from rounding.

    Args:
        config: Config of the mixer, for one block of a model.
        width: Width of the tokens, which `num_heads` must divide.
        axes: Number of axes of the grid. Every mixer is also called on one axis.

    Returns:
        The names of the checks, such as "two calls equal one".

    Raises:
        ValueError: If a check fails; the message names it.

    >>> from onescan.layers.mixers import LionMixerConfig
    >>> check_mixer(LionMixerConfig(direction="forward"))[-1]
    'the state keeps its size'
    """
    check_whole(1, width=width, axes=axes)
    check_is_config(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        checked = [
            name for number in dict.fromkeys((1, axes)) for name in _checked(config, width, number)
        ]
        return tuple(dict.fromkeys(checked))


def _checked(config: MixerConfig, width: int, axes: int) -> Iterator[str]:
    """Run all checks that apply to a mixer, and yield their names."""
    case = Case(config, width, axes)
    for name, (applies, check) in CHECKS.items():
        if applies(config, axes):
            try:
                check(case)
            except Exception as error:  # whatever a mixer raises
                why = f"{type(error).__name__}: " * (not isinstance(error, BrokenPromiseError))
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
        """Build the mixer and perturb its weights, as training would."""
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

    @property
    def keep(self) -> Tensor:
        """A mask with padding on the left, on the right, in between, and in a whole row."""
        count = self.grid.tokens
        keep = torch.rand(BATCH, count) < REAL
        keep[0, : count // 4], keep[1, -(count // 4) :] = False, False
        keep[2] = False
        return keep

    def call(self, x: Tensor, grid: Grid | None = None, **options: Any) -> tuple[Tensor, Any]:
        """Call the mixer with all arguments that its config takes."""
        grid = self.grid if grid is None else grid
        takes = self.config.takes
        if "embedding" in takes and "embedding" not in options:
            options["embedding"] = torch.sin(x)
        if "lower_bound" in takes:
            options["lower_bound"] = torch.full((self.width,), 0.2, dtype=x.dtype)
        original = x.detach().clone()
        result = call_mixer(self.mixer, x, grid, **options)
        is_unchanged = torch.equal(x.nan_to_num(), original.nan_to_num())
        _expect(is_unchanged, "forward changed its input in place")
        return result

    def parts(self, cuts: Sequence[int]) -> Iterator[tuple[slice, Grid]]:
        """Yield the slice and the grid of each part of the tokens, split along the first axis."""
        per_step = self.grid.tokens // self.grid.shape[0]
        for start, stop in itertools.pairwise(cuts):
            grid = Grid((stop - start, *self.grid.shape[1:]))
            yield slice(start * per_step, stop * per_step), grid

    def in_parts(self, cuts: Sequence[int], **options: Any) -> tuple[Tensor, Any]:
        """Call the mixer on one part of the tokens after another; return outputs and last state."""
        state, outputs = None, []
        for tokens, grid in self.parts(cuts):
            part_options = {name: x[:, tokens] for name, x in options.items()}
            y, state = self.call(self.x[:, tokens], grid, state=state, **part_options)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state


def _grid(config: MixerConfig, axes: int) -> Grid:
    """Return a grid of whole blocks that can be split into four along the first axis."""
    block = config.state_block or 1
    if axes == 1:
        return Grid((block * max(4, TOKENS // block),))
    return Grid((4, 3 * block, *(2,) * (axes - 2)))


class BrokenPromiseError(Exception):
    """A mixer does not do what its config promises."""


def _expect(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise BrokenPromiseError(message)


def _close(actual: Tensor, expected: Tensor, what: str) -> None:
    _expect(
        actual.shape == expected.shape,
        f"{what} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}",
    )
    error = (actual - expected).abs().max().item() if actual.numel() else 0.0
    _expect(
        torch.allclose(actual, expected, rtol=RTOL, atol=ATOL),
        f"{what} differs by up to {error:.3g}",
    )


def _shape(case: Case) -> None:
    y, state = case.call(case.x)
    _expect(
        y.shape == case.x.shape,
        f"outputs have shape {tuple(y.shape)}, unlike x, {tuple(case.x.shape)}",
    )
    promised = case.config.state_block is not None
    _expect(
        (state is not None) == promised,
        f"state is {named_type(state)}, but state_block is {case.config.state_block}",
    )
    _close(case.call(case.x)[0], y, "the output of a second call")


def _dtypes(case: Case) -> None:
    mixer, x = case.mixer, case.x
    try:
        for dtype in (torch.float32, torch.bfloat16):
            case.mixer = copy.deepcopy(mixer).to(dtype)
            y, _ = case.call(x.to(dtype))
            _expect(y.dtype == dtype, f"outputs have dtype {y.dtype} for inputs of {dtype}")
            _expect(y.isfinite().all(), f"outputs in {dtype} are not finite")
    finally:
        case.mixer = mixer


def _samples(case: Case) -> None:
    for mode in (case.mixer.train, case.mixer.eval):
        mode()
        if case.mixer.training and _is_random(case):
            continue
        batch_output, _ = case.call(case.x)
        for i in range(BATCH):
            _close(
                case.call(case.x[i : i + 1])[0],
                batch_output[i : i + 1],
                f"the output of sample {i} alone",
            )


def _is_random(case: Case) -> bool:
    return not torch.equal(case.call(case.x)[0], case.call(case.x)[0])


def _gradients(case: Case) -> None:
    parameters = {name: p for name, p in case.mixer.named_parameters() if p.requires_grad}
    grids = [case.grid]
    if _may_have_prefix(case.config, case.axes):
        grids.append(Grid(case.grid.shape, PREFIX))
    reached: set[str] = set()
    for grid in grids:
        x = case.tokens(grid.tokens).requires_grad_()
        masks: list[dict[str, Any]] = [{}, {"keep": case.keep}] if grid == case.grid else [{}]
        for options in masks:
            y, _ = case.call(x, grid, **options)
            leaves = {"x": x, **parameters}
            gradients = torch.autograd.grad(y.square().sum(), [*leaves.values()], allow_unused=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    reached.add(name)
                    _expect(gradient.isfinite().all(), f"the gradient of {name} is not finite")
    missing = [name for name in ("x", *parameters) if name not in reached]
    _expect(not missing, f"no gradient reaches {', '.join(missing)}")


def _weights(case: Case) -> None:
    expected, _ = case.call(case.x)
    mixer, case.mixer = case.mixer, case.built()
    case.mixer.load_state_dict(mixer.state_dict())
    _close(case.call(case.x)[0], expected, "the output after loading the weights")
    case.mixer = mixer


def _config(case: Case) -> None:
    data = configs.to_dict(case.config)
    _expect(
        configs.from_dict(type(case.config), data) == case.config,
        "the loaded config differs from the saved one",
    )


def _masks(case: Case) -> None:
    keep = case.keep
    extra: dict[str, Any] = {}
    if "embedding" in case.config.takes:
        extra = {"embedding": torch.sin(case.x)}
    expected, _ = case.call(case.x, keep=keep, **extra)
    _expect(not expected[~keep].any(), "outputs of masked tokens are not zero")
    for value in (7.0, torch.nan):
        other = case.x.masked_fill(~keep.unsqueeze(-1), value)
        _close(
            case.call(other, keep=keep, **extra)[0],
            expected,
            f"the output with {value} in masked tokens",
        )
    no_padding = torch.ones_like(keep)
    _close(case.call(case.x, keep=no_padding)[0], case.call(case.x)[0], "the output with keep=True")


def _skips_padding(case: Case) -> None:
    keep = case.keep
    actual, _ = case.call(case.x, keep=keep)
    for i in range(BATCH):
        real_tokens = case.x[i : i + 1, keep[i]]
        if real_tokens.shape[1]:
            expected, _ = case.call(real_tokens, Grid((real_tokens.shape[1],)))
            _close(
                actual[i : i + 1, keep[i]], expected, "the output of real tokens among masked ones"
            )


def _cuts(case: Case) -> None:
    steps, block = case.grid.shape[0], case.config.state_block or 1
    unit = 1 if case.axes > 1 else block
    keep = case.keep
    padded: list[dict[str, Any]] = [{}, {"keep": keep}] if block == 1 else [{}]
    for options in padded:
        expected, _ = case.call(case.x, **options)
        for cut in range(unit, steps, unit):
            y, _ = case.in_parts([0, cut, steps], **options)
            with_mask = " with a mask" * bool(options)
            _close(y, expected, f"the output of two calls{with_mask}, split at {cut} of {steps}")
        y, _ = case.in_parts([0, unit, 2 * unit, 3 * unit, steps], **options)
        _close(y, expected, "the output of several calls")
    _, state = case.in_parts([0, unit])
    tokens, grid = list(case.parts([0, unit, 2 * unit]))[1]
    first, again = (case.call(case.x[:, tokens], grid, state=state)[0] for _ in range(2))
    _close(again, first, "the output of a second call with the same state (changed in place)")


def _no_later_tokens(case: Case) -> None:
    block = case.config.state_block or 1
    expected, _ = case.call(case.x)
    for stop in range(block, case.grid.tokens, block):
        other = case.x.clone()
        other[:, stop:] = torch.randn_like(other[:, stop:])
        actual = case.call(other)[0][:, :stop]
        _close(
            actual,
            expected[:, :stop],
            f"the output of the first {stop} tokens, if later ones change,",
        )


def _state_size(case: Case) -> None:
    steps = case.grid.shape[0]
    unit = 1 if case.axes > 1 else case.config.state_block or 1
    _, state = case.in_parts([0, unit])
    _, later = case.in_parts([0, unit, steps])
    sizes, after = (list(_sizes(y)) for y in (state, later))
    _expect(sizes == after, f"the state grows from {sizes} to {after}")


def _sizes(state: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a state's tensors; raise an error for other kinds of states."""
    if isinstance(state, tuple):
        for part in state:
            yield from _sizes(part)
    elif isinstance(state, Tensor):
        batched = not state.ndim or len(state) == BATCH
        _expect(
            batched, f"the state has a tensor of shape {tuple(state.shape)}, without a batch axis"
        )
        yield tuple(state.shape)
    else:
        is_number = state is None or isinstance(state, int | float)
        _expect(is_number, f"the state contains {named_type(state)}, expected nested tuples")


def _packing(case: Case) -> None:
    tokens = case.grid.tokens
    inner = [(i + 1) * tokens // (i + 2) for i in range(BATCH)]  # one cut in each row
    cuts = [0, *(row * tokens + at for row, cut in enumerate(inner) for at in (cut, tokens))]
    packing = Packing(torch.tensor(cuts, dtype=torch.int32), batch=BATCH, tokens=tokens)
    actual, _ = case.call(case.x, cu_seqlens=packing)
    flat, outputs = case.x.flatten(0, 1), actual.flatten(0, 1)
    for start, stop in itertools.pairwise(cuts):
        expected, _ = case.call(flat[start:stop].unsqueeze(0), Grid((stop - start,)))
        _close(outputs[start:stop], expected[0], "the output of a packed document")


def _prefix(case: Case) -> None:
    grid = Grid(case.grid.shape, PREFIX)
    x = case.tokens(grid.tokens)
    other = x.clone()
    other[:, PREFIX:] = torch.randn_like(other[:, PREFIX:])
    (y, _), (z, _) = case.call(x, grid), case.call(other, grid)
    reads = not torch.allclose(y[:, :PREFIX], z[:, :PREFIX], rtol=RTOL, atol=ATOL)
    promised = case.config.prefix_reads_grid
    does = "reads" if reads else "does not read"
    _expect(reads == promised, f"prefix_reads_grid is {promised}, but the prefix {does} the grid")


def _continued_prefix(case: Case) -> None:
    steps, rest = case.grid.shape[0], case.grid.shape[1:]
    per_step = case.grid.tokens // steps
    x = case.tokens(case.grid.tokens + PREFIX)
    expected, _ = case.call(x, Grid(case.grid.shape, PREFIX))
    for cut in range(1, steps):
        end = PREFIX + cut * per_step
        before, state = case.call(x[:, :end], Grid((cut, *rest), PREFIX))
        after, _ = case.call(x[:, end:], Grid((steps - cut, *rest)), state=state)
        actual = torch.cat([before, after], dim=1)
        _close(
            actual, expected, f"the output of two calls with a prefix, split at {cut} of {steps}"
        )


def _always(config: MixerConfig, axes: int) -> bool:
    return True


def _has_state(config: MixerConfig, axes: int) -> bool:
    return config.state_block is not None


def _may_have_prefix(config: MixerConfig, axes: int) -> bool:
    """Whether a prefix may come before the grid; blocks begin at the first token."""
    return config.state_block in (None, 1)


Applies = Callable[[MixerConfig, int], bool]
CHECKS: dict[str, tuple[Applies, Callable[[Case], None]]] = {
    "outputs and state are as promised": (_always, _shape),
    "outputs have the dtype of inputs": (_always, _dtypes),
    "samples do not mix": (_always, _samples),
    "gradients are finite": (_always, _gradients),
    "weights can be saved and loaded": (_always, _weights),
    "the config can be saved and loaded": (_always, _config),
    "masked tokens are not read": (_always, _masks),
    "padding may be anywhere": (
        lambda config, axes: config.skips_padding and axes == 1,
        _skips_padding,
    ),
    "the prefix reads the grid as promised": (_may_have_prefix, _prefix),
    "packed documents are separate": (
        lambda config, axes: "cu_seqlens" in config.takes and axes == 1,
        _packing,
    ),
    "no later token is read": (_has_state, _no_later_tokens),
    "two calls equal one": (_has_state, _cuts),
    "a state remembers the prefix": (lambda config, axes: config.is_causal, _continued_prefix),
    "the state keeps its size": (
        lambda config, axes: _has_state(config, axes) and not config.state_grows,
        _state_size,
    ),
}
