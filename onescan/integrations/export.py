"""Export models to torch.export programs and to ONNX files, which run without onescan.

Batch size and length are dynamic, and so are the sides of images. Mixers that choose a form
by length use one that works for every length: chunks of a fixed size, whose number is dynamic.
"""

import contextlib
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from onescan.checkpoint.files import write_atomically
from onescan.checks import check_positive
from onescan.configs import to_dict
from onescan.layers.mixers import LinearDiffusionMixerConfig, MixerConfig
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPosition
from onescan.messages import expected_model, missing_package
from onescan.models.causal_lm import CausalLM
from onescan.models.denoiser import Denoiser
from onescan.models.dense_predictor import DensePredictor
from onescan.models.image_classifier import ImageClassifier
from onescan.models.masked_lm import MaskedLM
from onescan.models.sequence_classifier import SequenceClassifier
from onescan.models.sequence_decoder import SequenceDecoder
from onescan.models.token_network import flatten_state, unflatten_state

__all__ = [
    "ExtraInput",
    "decompose_for_onnx",
    "export_onnx",
    "export_onnx_step",
    "export_program",
    "export_step",
    "initial_state",
]

ExtraInput = Literal["keep", "segments", "memory_mask"]
EXTRA_INPUTS: dict[type[nn.Module], tuple[ExtraInput, ...]] = {
    ImageClassifier: ("keep",),
    DensePredictor: ("keep",),
    Denoiser: (),
    MaskedLM: ("keep", "segments"),
    SequenceClassifier: ("keep", "segments"),
    CausalLM: ("keep",),
    SequenceDecoder: ("memory_mask",),
}

BATCH, TOKENS, MEMORY, PATCHES = 2, 37, 11, (3, 5)  # sizes of the example inputs for tracing
MAX_BYTES = 2**31 - 2**24  # a protobuf file is limited to 2 GiB, including the graph
SIDES = {1: ("samples",), 2: ("height", "width"), 3: ("frames", "height", "width")}
DynamicSizes = dict[int, Any]  # by axis
Inputs = dict[str, tuple[Tensor, DynamicSizes]]  # example and dynamic sizes of each input
FIXED_FORMS = ("full", "recurrent")  # their loops depend on the length
NEXT = "next."  # name prefix of the state returned by a step


def export_program(
    model: nn.Module, *, extra_inputs: tuple[ExtraInput, ...] = ()
) -> ExportedProgram:
    """Trace a model with torch.export; the program has the model's inputs and outputs.

    The inputs, in this order, are

    - `images` of an image classifier or dense predictor,
    - `noisy`, `timesteps` and, with classes, `labels` of a denoiser,
    - `tokens` of a language model or text classifier,
    - `tokens` and `memory` of a `SequenceDecoder`,

    and then the extra inputs. Batch size and length are dynamic, and so are the sides of images,
    which have at least two patches each; with absolute positions or dense diffusion kernels, images
    have the default size. Causal language models and decoders return only logits.

    Args:
        model: A model in evaluation mode.
        extra_inputs: Masks and segments that the model's forward takes, in this order: "keep" for
            all but denoisers and decoders, "segments" for BERT-like models that have them, and
            "memory_mask" for a `SequenceDecoder`.

    Raises:
        ValueError: If the model has another class or is in training mode, does not take an extra
            input, or has a mixer with the form "full" or "recurrent", which fix the length.
    """
    _check(model)
    examples, sizes = _inputs_of(model, extra_inputs)
    return _traced(model, _Whole(model, list(examples)), tuple(examples.values()), sizes)


def export_step(model: CausalLM, *, any_length: bool = False) -> ExportedProgram:
    """Trace one step of a causal language model, from (tokens, state) to (logits, state).

    The state is a dict of tensors with the names of `onescan.models.token_network.flatten_state`;
    `initial_state` returns the state before the first token. Its batch size is dynamic, and so is
    the number of tokens in the cache of softmax attention.

    Args:
        model: A `CausalLM` in evaluation mode.
        any_length: Whether to take any number of tokens, such as a prompt, instead of one, [B, 1].

    Raises:
        ValueError: If the model is not a `CausalLM` or is in training mode, or, with any_length,
            has a form that `export_program` rejects.
    """
    _check_causal(model)
    example, sizes = _step_inputs(model, any_length)
    return _traced(model, _Step(model), example, sizes)


@torch.no_grad()
def initial_state(model: CausalLM, batch: int = 1) -> dict[str, Tensor]:
    """Return the state before the first token, for the program of `export_step`.

    It is computed as the state after one masked token, with zeros in place of masked contents.

    Raises:
        ValueError: If the model is not a `CausalLM` or is in training mode, or batch is not
            positive.
    """
    _check_causal(model)
    check_positive(batch=batch)
    return {name: _without_contents(x) for name, x in _masked_state(model, batch, 1).items()}


def export_onnx(
    model: nn.Module, path: str | os.PathLike[str], *, extra_inputs: tuple[ExtraInput, ...] = ()
) -> None:
    """Write the program of `export_program` to an ONNX file, with the config in its metadata.

    The output is `logits`, or `prediction` of a denoiser or dense predictor. Dynamic sizes are
    named batch, length, height and width; for signals, samples, and for video also frames.

    Raises:
        ValueError: As for `export_program`; also for Crank-Nicolson diffusion, which solves a
            linear system, for joint Toeplitz positions, and for weights that exceed the 2 GiB of an
            ONNX file.
        OSError: If the file cannot be written.
    """
    _check(model)
    _check_onnx(model)
    examples, sizes = _inputs_of(model, extra_inputs)
    names = list(examples)
    with _OperatorsOfOnnx():
        program = _traced(model, _Whole(model, names), tuple(examples.values()), sizes)
    output = "prediction" if isinstance(model, Denoiser | DensePredictor) else "logits"
    _write(model, program, Path(path), names, [output], {})


def export_onnx_step(
    model: CausalLM, path: str | os.PathLike[str], *, any_length: bool = False
) -> None:
    """Write the program of `export_step` to an ONNX file.

    The inputs are `tokens` and the named tensors of the state. The outputs are `logits` and the
    same names with the prefix "next.". The metadata contains the config and, in "initial_state",
    the shape, type and constant value of each tensor of the state before the first token.

    Raises:
        ValueError: As for `export_step` and `export_onnx`.
        OSError: If the file cannot be written.
    """
    _check_causal(model)
    _check_onnx(model)
    example, sizes = _step_inputs(model, any_length)
    with _OperatorsOfOnnx():
        program = _traced(model, _Step(model), example, sizes)
    state = list(example[1])
    outputs = ["logits", *(NEXT + name for name in state)]
    first = {
        name: {
            "shape": ["batch", *x.shape[1:]] if x.ndim else [],
            "type": str(x.dtype).removeprefix("torch."),
            "value": x.flatten()[0].item(),
        }
        for name, x in initial_state(model).items()
    }
    _write(model, program, Path(path), ["tokens", *state], outputs, {"initial_state": first})


class _Whole(nn.Module):
    """A model that maps named inputs to its first output."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.names, inputs, strict=True)))
        return output[0] if isinstance(output, tuple) else output


class _Step(nn.Module):
    """A causal language model with its state as a flat dict of tensors."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model
        self.like = _as_tensors(_after_masked(model, 1, 1))

    def forward(
        self, tokens: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits, after = self.model(tokens, unflatten_state(self.like, state))
        return logits, flatten_state(after)


def _traced(model: nn.Module, program: nn.Module, example: Any, sizes: Any) -> ExportedProgram:
    with _without_gradients(model):
        return torch.export.export(program.eval(), example, dynamic_shapes=sizes)


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Disable gradients: torch cannot differentiate a scan over a dynamic number of chunks."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.no_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _inputs_of(
    model: Any, extra_inputs: tuple[ExtraInput, ...]
) -> tuple[dict[str, Tensor], tuple[tuple[DynamicSizes, ...]]]:
    """Return an example of each input by name, and their dynamic sizes."""
    _check_form(model)
    known = next(names for kind, names in EXTRA_INPUTS.items() if isinstance(model, kind))
    if "segments" in known and not model.config.segment_types:
        known = tuple(name for name in known if name != "segments")
    for name in extra_inputs:
        if name not in known:
            raise ValueError(
                f"extra_inputs contains {name!r}, but this {type(model).__name__} takes "
                f"{' and '.join(map(repr, known)) or 'no extra inputs'}"
            )
    if isinstance(model, ImageClassifier | DensePredictor | Denoiser):
        inputs = _image_inputs(model)
    elif isinstance(model, SequenceDecoder):
        inputs = _decoder_inputs(model)
    else:
        inputs = _text_inputs(model)
    optional = get_args(ExtraInput)
    names = [name for name in inputs if name not in optional] + list(extra_inputs)
    examples, sizes = zip(*(inputs[name] for name in names), strict=True)
    return dict(zip(names, examples, strict=True)), (sizes,)


def _text_inputs(model: nn.Module) -> Inputs:
    tokens, free = _tokens(model, BATCH, TOKENS), {0: Dim("batch"), 1: Dim("length")}
    # separate tensors, because a tensor passed twice would be traced as a single input
    keep, segments = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    return {"tokens": (tokens, free), "keep": (keep, free), "segments": (segments, free)}


def _decoder_inputs(model: SequenceDecoder) -> Inputs:
    batch = Dim("batch")
    memory = next(model.parameters()).new_zeros(BATCH, MEMORY, model.config.width)
    mask = torch.ones_like(memory[..., 0], dtype=torch.bool)
    free = {0: batch, 1: Dim("memory_length")}
    return {
        "tokens": (_tokens(model, BATCH, TOKENS), {0: batch, 1: Dim("length")}),
        "memory": (memory, free),
        "memory_mask": (mask, free),
    }


def _image_inputs(model: ImageClassifier | DensePredictor | Denoiser) -> Inputs:
    batch = Dim("batch")
    images, sides = _images_of(model)
    free = {0: batch, **dict(enumerate(sides, start=2))}
    if not isinstance(model, Denoiser):
        keep = torch.ones_like(images[:, 0], dtype=torch.bool)
        return {
            "images": (images, free),
            "keep": (keep, {0: batch, **dict(enumerate(sides, start=1))}),
        }
    timesteps = images.new_zeros(BATCH)
    inputs = {"noisy": (images, free), "timesteps": (timesteps, {0: batch})}
    if model.config.num_classes:
        inputs["labels"] = timesteps.long(), {0: batch}
    return inputs


def _images_of(model: ImageClassifier | DensePredictor | Denoiser) -> tuple[Tensor, list[Any]]:
    """Return an example of images, and the dynamic sizes of their sides; none if they are fixed."""
    config = model.config
    parameter = next(model.parameters())
    is_fixed = isinstance(config.position, AbsolutePositionConfig)
    if is_fixed or not config.mixer.fits_any_grid:
        return parameter.new_zeros(BATCH, config.channels, *config.image_size), []
    axes = len(config.patch_size)
    counts = [PATCHES[axis % len(PATCHES)] for axis in range(axes)]
    sides = [n * patch for n, patch in zip(counts, config.patch_size, strict=True)]
    free = [
        patch * Dim(f"{side}_in_patches", min=2) if patch > 1 else Dim(side, min=2)
        for side, patch in zip(_side_names(axes), config.patch_size, strict=True)
    ]
    return parameter.new_zeros(BATCH, config.channels, *sides), free


def _side_names(axes: int) -> tuple[str, ...]:
    """Return the names of the sizes of an image, or of a grid with another number of axes."""
    return SIDES.get(axes) or tuple(f"size_{axis}" for axis in range(axes))


def _step_inputs(model: CausalLM, any_length: bool) -> tuple[Any, Any]:
    if any_length:
        _check_form(model)
    batch = Dim("batch")
    tokens = _tokens(model, BATCH, TOKENS if any_length else 1)
    sizes = {0: batch, 1: Dim("length")} if any_length else {0: batch}
    state, longer = (_masked_state(model, BATCH, count) for count in (3, 4))
    growing = Dim("cached")
    of_state: dict[str, dict[int, Any]] = {}
    for name, x in state.items():
        pairs = enumerate(zip(x.shape, longer[name].shape, strict=True))
        grows = {axis: growing for axis, (a, b) in pairs if a != b}
        of_state[name] = grows | ({0: batch} if x.ndim else {})
    return (tokens, state), (sizes, of_state)


def _tokens(model: nn.Module, batch: int, count: int) -> Tensor:
    return torch.zeros(batch, count, dtype=torch.long, device=next(model.parameters()).device)


@torch.no_grad()
def _after_masked(model: CausalLM, batch: int, count: int) -> Any:
    """Return the state after masked tokens."""
    tokens = _tokens(model, batch, count)
    return model(tokens, keep=torch.zeros_like(tokens, dtype=torch.bool))[1]


def _masked_state(model: CausalLM, batch: int, count: int) -> dict[str, Tensor]:
    return flatten_state(_after_masked(model, batch, count))


def _without_contents(x: Tensor) -> Tensor:
    """Return x if it is constant, otherwise zeros, for counts and contents."""
    return x if x.ndim and bool((x == x.flatten()[0]).all()) else torch.zeros_like(x)


def _as_tensors(state: Any) -> Any:
    """Convert the numbers in a state to tensors, so that a program can take them as inputs."""
    if isinstance(state, tuple):
        parts = [_as_tensors(part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return None if state is None else torch.as_tensor(state)


def _write(
    model: Any,
    program: ExportedProgram,
    path: Path,
    inputs: list[str],
    outputs: list[str],
    metadata: dict[str, Any],
) -> None:
    onnx = _to_onnx(program, inputs, outputs)
    _name_sizes(onnx.model.graph)
    config = {"type": type(model.config).__name__} | to_dict(model.config)
    for name, value in {"config": config, **metadata}.items():
        onnx.model.metadata_props[name] = json.dumps(value)
    write_atomically(path, onnx.save)


def _to_onnx(program: ExportedProgram, inputs: list[str], outputs: list[str]) -> Any:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise missing_package("writing ONNX", "onnx and onnxscript", "export", error) from error
    with warnings.catch_warnings(), _errors_only("torch.onnx", "onnxscript"):
        # torch uses a class that it has deprecated itself
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        written = torch.onnx.export(
            program,
            (),
            input_names=inputs,
            output_names=outputs,
            dynamo=True,
            verbose=False,
            optimize=False,
        )
        _simplify(written)
    return written


def _simplify(written: Any) -> None:
    """Compute constants and remove what is unused.

    The exporter's own optimization also looks for patterns, which takes minutes for large graphs.
    Runtimes find these patterns when they load the file.
    """
    from onnxscript import ir, optimizer
    from onnxscript.ir.passes import common

    optimizer.fold_constants(written.model)
    steps = [
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
    ]
    ir.passes.Sequential(*steps)(written.model)


@contextlib.contextmanager
def _errors_only(*names: str) -> Iterator[None]:
    """Silence warnings of loggers, which concern the exporter and not the model."""
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _name_sizes(graph: Any) -> None:
    """Replace the symbols of dynamic sizes from tracing by their names.

    Unknown sizes stay without a name: runtimes share memory between sizes of the same name.
    """
    names: dict[str, str] = {}
    for value in graph.inputs:
        axes = ("batch", *["cached"] * len(value.shape))
        if value.name == "tokens":
            axes = ("batch", "length")
        elif value.name in ("memory", "memory_mask"):
            axes = ("batch", "memory_length")
        elif value.name in ("images", "noisy"):
            axes = ("batch", "channels", *_side_names(len(value.shape) - 2))
        for size, name in zip(value.shape, axes, strict=False):
            if not isinstance(size, int):
                names.setdefault(str(size), name)
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                value.shape[axis] = _renamed(str(size), names)


def _renamed(size: str, names: Mapping[str, str]) -> str:
    """Replace the symbols in the expression of a size by their names."""
    return names.get(size) or re.sub(r"\b\w+\b", lambda found: names.get(found[0], found[0]), size)


def _check(model: Any) -> None:
    if not any(isinstance(model, kind) for kind in EXTRA_INPUTS):
        known = ", ".join(kind.__name__ for kind in EXTRA_INPUTS)
        raise expected_model(model, f"one of {known}")
    if model.training:
        raise ValueError("model is in training mode, expected evaluation mode: call model.eval()")


def _check_causal(model: Any) -> None:
    if not isinstance(model, CausalLM):
        raise expected_model(model, "a CausalLM")
    _check(model)


def _mixers(model: Any) -> list[MixerConfig]:
    """Return the config of each block's mixer."""
    return [model.config.mixer.for_layer(i) for i in range(model.config.depth)]


def _check_form(model: Any) -> None:
    for form in (getattr(mixer, "form", "auto") for mixer in _mixers(model)):
        if form in FIXED_FORMS:
            raise ValueError(
                f"mixer.form is {form!r}, expected 'auto': this form needs a fixed length, but the "
                "length of an exported model is dynamic"
            )


def _check_onnx(model: Any) -> None:
    for mixer in _mixers(model):
        if isinstance(mixer, LinearDiffusionMixerConfig) and mixer.scheme != "explicit":
            raise ValueError(
                f"mixer.scheme is {mixer.scheme!r}, expected 'explicit': ONNX has no linear solver"
            )
    if any(isinstance(part, ToeplitzPosition) and part.joint for part in model.modules()):
        raise ValueError(
            "position.joint is True, expected False: ONNX has no FFT over several axes"
        )
    size = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    if size > MAX_BYTES:
        raise ValueError(
            f"model has {size:,} bytes, expected at most {MAX_BYTES:,} in an ONNX file"
        )


def decompose_for_onnx(program: ExportedProgram) -> ExportedProgram:
    """Replace operators that ONNX lacks, or that overflow or lose precision in ONNX.

    `export_onnx` does the same. Call it before ``torch.onnx.export`` for a network of your own.

    Args:
        program: Program that ``torch.export.export`` returned for a module with layers of onescan.
    """
    aten = torch.ops.aten
    replacements: dict[Any, Callable[..., Tensor]] = {
        aten.logaddexp.default: logaddexp,
        aten.logcumsumexp.default: logcumsumexp,
        aten.cumprod.default: cumprod,
        aten.linalg_solve_triangular.default: solve_unit_triangular,
    }
    parts = [part for part in program.graph_module.modules() if isinstance(part, GraphModule)]
    if not any(node.target in replacements for part in parts for node in part.graph.nodes):
        return program
    return program.run_decompositions(replacements)


class _OperatorsOfOnnx(TorchFunctionMode):
    """Replace the operators of `decompose_for_onnx` in a model while it is traced.

    This is faster than replacing them in its program, which traces the program again.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _replacements().get(func, func)(*args, **(kwargs or {}))


@cache
def _replacements() -> Mapping[Any, Callable[..., Tensor]]:
    return {
        torch.logaddexp: logaddexp,
        torch.Tensor.logaddexp: logaddexp,
        torch.logcumsumexp: logcumsumexp,
        torch.Tensor.logcumsumexp: logcumsumexp,
        torch.cumprod: cumprod,
        torch.Tensor.cumprod: cumprod,
        torch.linalg.solve_triangular: solve_unit_triangular,
    }


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Compute log(exp(a) + exp(b)) for finite a and b.

    >>> logaddexp(torch.tensor(1e4), torch.tensor(-1e30)).item()
    10000.0
    """
    return torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs()))


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Compute log sum_{s <= t} exp(x_s) for finite x, doubling the length of sums in each step.

    Along an axis of symbolic length, which is a short axis of chunks, all pairs are computed.
    """
    x = x.movedim(dim, -1)
    if isinstance(x.shape[-1], torch.SymInt):
        return _by_pairs(x).movedim(-1, dim)
    span = 1
    while span < x.shape[-1]:
        sums = logaddexp(x[..., span:], x[..., :-span])
        x, span = torch.cat([x[..., :span], sums], dim=-1), 2 * span
    return x.movedim(-1, dim)


def _by_pairs(x: Tensor) -> Tensor:
    position = torch.arange(x.shape[-1], device=x.device)
    later = position.unsqueeze(-1) < position
    x = x.unsqueeze(-2).masked_fill(later, -torch.inf)
    peak = x.amax(dim=-1, keepdim=True)
    return ((x - peak).exp().sum(dim=-1, keepdim=True).log() + peak).squeeze(-1)


def cumprod(x: Tensor, dim: int) -> Tensor:
    """Compute cumulative products along an axis of fixed size."""
    return torch.stack(list(accumulate(x.unbind(dim), torch.mul)), dim)


def solve_unit_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """Solve a x = b for unit lower triangular a, by inverting blocks of doubling size.

    Raises:
        NotImplementedError: If the system is of another kind.

    >>> a, b = torch.tensor([[1.0, 0.0], [3.0, 1.0]]), torch.tensor([[2.0], [5.0]])
    >>> solve_unit_triangular(a, b, upper=False, unitriangular=True).flatten().tolist()
    [2.0, -1.0]
    """
    if upper or not left or not unitriangular:
        raise NotImplementedError("only unit lower triangular systems are supported")
    size = a.shape[-1]
    padded_size = 1 << (size - 1).bit_length()
    a = F.pad(a, (0, padded_size - size, 0, padded_size - size))
    # ..., blocks, 1, 1
    inverse = torch.ones_like(a[..., 0]).unsqueeze(-1).unsqueeze(-1)
    while (length := inverse.shape[-1]) < padded_size:
        pairs = a.unflatten(-1, (-1, 2 * length)).unflatten(-3, (-1, 2 * length))
        diagonal = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        below = diagonal[..., length:, :length]
        first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)
        corner = -(second @ below @ first)
        lines = (
            torch.cat([first, torch.zeros_like(first)], dim=-1),
            torch.cat([corner, second], dim=-1),
        )
        inverse = torch.cat(lines, dim=-2)
    return inverse.squeeze(-3)[..., :size, :size] @ b
