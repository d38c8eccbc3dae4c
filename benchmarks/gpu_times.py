"""Stages of benchmarks/gpu.py that measure time and memory: ops, models, decoding, peers.

Ops and training steps are timed by replays of a CUDA graph, which excludes the host, and eagerly.
"""

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import causal
import torch
import torch.nn.functional as F
from gpu_calls import DIFFUSION_RADIUS
from gpu_session import Row, Session, failure, is_fatal, run_tasks
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

import onescan
from onescan.ops import (
    additive_decay,
    decay_attention,
    delta_rule,
    linear_diffusion,
    lrpe_angles,
    toeplitz_position,
)
from onescan.ops.backend import use_backend
from onescan.ops.cross_entropy import cross_entropy
from onescan.ops.feature_maps import shifted_silu
from onescan.ops.gating import gated
from onescan.ops.lrpe import lrpe_frequencies

Work = tuple[Callable[[], object], int]  # a call, and the bytes that it has to move; 0 if unknown
OpSize = tuple[int, int, int, int]  # batch, tokens, heads, width

SIZES: tuple[OpSize, ...] = ((8, 8192, 16, 64), (8, 4096, 16, 128), (1, 65536, 8, 64))
MAX_SOFTMAX_TOKENS = 8192
TOEPLITZ_STATES = 16
VOCABULARY, LABELS = 50265, 32768
IMAGES = ((224, 256), (448, 64), (896, 16))  # side in pixels, batch size
TEXT = (8, 4096)  # rows, tokens
DECODE_MODELS = ("lightnet_lm_45m", "lion_s_lm_124m")
NEW_TOKENS, BATCHES = 128, (1, 64)
GRAPH_MS, MAX_GRAPH_CALLS, REPLAYS = 60, 20, 7  # of a measurement; calls of a graph; measurements
COMPILE_PROCESSES = 12
DRY_CANDIDATES = 4  # of each stage of a dry run
MIB = 2**20


class Candidate(NamedTuple):
    """Something to time.

    Attributes:
        stage: The stage that times it.
        name: Name of the op or model.
        peer: Name of the candidate that it is compared with, or its own name.
        mode: "forward" for the forward pass, or "both" for the forward and backward pass.
        size: Its size, as text for the report.
        make: Returns the work. If its second argument is True, the work is small, and compiles the
            same kernels as the full size.
    """

    stage: str
    name: str
    peer: str
    mode: str
    size: str
    make: Callable[[Session, bool], Work]


def candidates(session: Session) -> list[Candidate]:
    """Return all candidates, in the order in which they are timed."""
    our_candidates = [*ops(), *losses(), *models()]
    return [*our_candidates, *peers()] if find_spec("fla") and not session.dry else our_candidates


# Ops


def op_inputs(session: Session, size: OpSize) -> dict[str, Tensor]:
    """Draw the inputs of all ops."""
    batch, tokens, heads, _ = size

    def draw(*shape: int, wide: bool = False) -> Tensor:
        dtype = torch.float32 if wide else session.dtype
        return torch.randn(*shape, device=session.device, dtype=dtype)

    q, k, v = (draw(*size) for _ in range(3))
    per_token = batch, tokens, heads
    return {
        "q": q, "k": k, "v": v, "unit_k": normalize(k, dim=-1),
        "positive_q": q.sigmoid(), "positive_k": k.sigmoid(),
        "scalar": logsigmoid(draw(*per_token, wide=True) + 2),
        "diagonal": logsigmoid(draw(*size, wide=True) + 2),
        "beta": draw(*per_token, wide=True).sigmoid(),
    }  # fmt: skip


def angles_of(session: Session, size: OpSize) -> Tensor:
    theta = lrpe_frequencies(size[3], axes=1).repeat(size[2], 1).to(session.device)
    return lrpe_angles((size[1],), theta)


def softmax(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=is_causal).transpose(1, 2)


def _op(session: Session, size: OpSize, name: str, backend: Any) -> Callable[..., Tensor]:
    """Return an op as a function of its inputs in INPUTS."""
    options: dict[str, Any] = {"backend": backend}
    chunk = {**options, "form": "chunk"}
    _, tokens, heads, width = size
    channels = heads * width
    match name:
        case "one scan":
            return lambda q, k, v: additive_decay(q, k, v, **options)[0]
        case "one scan, LRPE":
            angles = angles_of(session, size)
            return lambda q, k, v: additive_decay(q, k, v, angles=angles, **options)[0]
        case "causal additive decay, LRPE":
            angles = angles_of(session, size)
            return lambda q, k, v: additive_decay(
                q, k, v, angles=angles, causal=True, **chunk
            )[0]  # fmt: skip
        case "decay both ways, normalized":
            return lambda *x: decay_attention(*x, normalize="sum", return_state=False, **chunk)[0]
        case "decay both ways" | "diagonal decay both ways":
            return lambda *x: decay_attention(*x, return_state=False, **chunk)[0]
        case "causal decay":
            return lambda *x: decay_attention(*x, causal=True, return_state=False, **chunk)[0]
        case "no decay, normalized":
            return lambda *x: decay_attention(*x, normalize="sum", return_state=False, **chunk)[0]
        case "causal delta rule":
            return lambda *x: delta_rule(*x, causal=True, **chunk)[0]
        case "MD-TPE, 16 states":
            tables = (
                torch.randn(1, channels, TOEPLITZ_STATES, device=session.device) for _ in "ab"
            )
            log_rate, weight = tables
            log_decay = -log_rate.exp()
            return lambda x: toeplitz_position(
                x.flatten(2), log_decay, weight, (tokens,), form="scan", **options
            )[0].view(x.shape)  # fmt: skip
        case "diffusion":
            weights = torch.rand(heads, 2 * DIFFUSION_RADIUS + 1, device=session.device)
            dt = 0.9 / weights.sum(1)
            return lambda x: linear_diffusion(x, weights, dt, form="banded", **options)
        case "gate, SiLU":
            return lambda x, gate: gated(x, gate, "silu", **options)
        case "shifted SiLU":
            return lambda x: shifted_silu(x, **options)
    raise ValueError(f"op is {name!r}, expected one of {', '.join(INPUTS)}")


DECAYED = ("positive_q", "positive_k", "v")
INPUTS: dict[str, tuple[str, ...]] = {
    "one scan": ("q", "k", "v"),
    "one scan, LRPE": ("q", "k", "v"),
    "decay both ways, normalized": (*DECAYED, "scalar"),
    "decay both ways": (*DECAYED, "scalar"),
    "causal additive decay, LRPE": ("q", "k", "v"),
    "causal decay": (*DECAYED, "scalar"),
    "diagonal decay both ways": (*DECAYED, "diagonal"),
    "no decay, normalized": DECAYED,
    "causal delta rule": ("q", "unit_k", "v", "beta"),
    "MD-TPE, 16 states": ("v",),
    "diffusion": ("v",),
    "gate, SiLU": ("v", "q"),
    "shifted SiLU": ("q",),
}
ALSO_IN_TORCH = ("one scan, LRPE", "decay both ways, normalized", "causal additive decay, LRPE")
SMALL_OPS = ("MD-TPE, 16 states", "diffusion", "gate, SiLU", "shifted SiLU")  # first size only


def ops() -> Iterator[Candidate]:
    """Yield onescan's ops and softmax attention at each size."""
    for size in SIZES:
        is_first = size == SIZES[0]
        for is_causal in (False, True) if size[1] <= MAX_SOFTMAX_TOKENS else ():
            name = "causal softmax" if is_causal else "softmax"

            def make_softmax(_session: Session, _size: OpSize, causal: bool = is_causal) -> Any:
                return lambda *x: softmax(*x, is_causal=causal)

            yield from _both_modes("ops", name, name, size, ("q", "k", "v"), make_softmax)
        for name, inputs in INPUTS.items():
            if name in SMALL_OPS and not is_first:
                continue
            peer = "causal softmax" if name.startswith("causal") else "softmax"
            for backend in (
                ("triton", "torch") if is_first and name in ALSO_IN_TORCH else ("triton",)
            ):

                def make(
                    session: Session, size: OpSize, name: str = name, by: str = backend
                ) -> Any:
                    return _op(session, size, name, by)

                label = name if backend == "triton" else f"{name}, plain torch"
                peer = label if name in SMALL_OPS else peer
                yield from _both_modes("ops", label, peer, size, inputs, make)


def _both_modes(
    stage: str,
    name: str,
    peer: str,
    size: OpSize,
    inputs: tuple[str, ...],
    make_op: Callable[[Session, OpSize], Callable[..., Tensor]],
) -> Iterator[Candidate]:
    """Yield a candidate for the forward pass of an op, and one for both passes."""

    def prepared(session: Session, small: bool) -> tuple[Callable[..., Tensor], list[Tensor]]:
        used_size = (1, 32, 2, 16) if session.dry else (1, 1024, *size[2:]) if small else size
        drawn = op_inputs(session, used_size)
        return make_op(session, used_size), [drawn[x] for x in inputs]

    def forward(session: Session, small: bool) -> Work:
        op, arguments = prepared(session, small)

        def call() -> None:
            with torch.no_grad():
                op(*arguments)

        return call, sum(x.nbytes for x in arguments) + arguments[0].nbytes

    def both(session: Session, small: bool) -> Work:
        op, arguments = prepared(session, small)
        leaves = [x.detach().requires_grad_() for x in arguments]
        output_gradient = torch.randn_like(arguments[0])
        bytes_moved = 3 * sum(x.nbytes for x in arguments) + 2 * arguments[0].nbytes
        return lambda: torch.autograd.grad(op(*leaves), leaves, output_gradient), bytes_moved

    text = " x ".join(map(str, size))
    yield Candidate(stage, name, peer, "forward", text, forward)
    yield Candidate(stage, name, peer, "both", text, both)


def losses() -> Iterator[Candidate]:
    """Yield the loss of a language model, in kernels and in torch."""
    for name in ("cross-entropy", "F.cross_entropy in float32"):

        def make(session: Session, small: bool, is_ours: bool = name == "cross-entropy") -> Work:
            rows = 4 if small or session.dry else LABELS
            logits = torch.randn(rows, VOCABULARY, device=session.device, dtype=session.dtype)
            labels = torch.randint(VOCABULARY, (rows,), device=session.device)
            leaf = logits.requires_grad_()

            def call() -> object:
                if is_ours:
                    loss = cross_entropy(leaf, labels, backend="triton")
                else:
                    loss = F.cross_entropy(leaf.float(), labels)
                return torch.autograd.grad(loss, leaf)

            return call, 3 * logits.nbytes

        size = f"{LABELS} x {VOCABULARY}"
        yield Candidate("ops", name, "F.cross_entropy in float32", "both", size, make)


# Models


def train_step(
    session: Session, model: nn.Module, loss: Callable[[nn.Module], Tensor], backend: Any
) -> Callable[[], object]:
    """Return a function that computes the gradients of a loss under autocast."""
    weights = [x for x in model.parameters() if x.requires_grad]

    def step() -> object:
        with use_backend(backend):
            with torch.autocast(session.device.type, dtype=torch.bfloat16, cache_enabled=False):
                value = loss(model)
            return torch.autograd.grad(value, weights, allow_unused=True)

    return step


def _vision(name: str, side: int, batch: int, backend: str, peer: str) -> Candidate:
    def make(session: Session, small: bool) -> Work:
        changes = {"depth": 1, "image_size": 32} if session.dry else {"image_size": side}
        images_per_batch = 2 if session.dry else min(batch, 4) if small else batch
        with session.device:
            model = onescan.build(name, **changes).train()
            images = torch.randn(images_per_batch, 3, *model.config.image_size)
            labels = torch.randint(1000, (images_per_batch,))
        loss = lambda model: F.cross_entropy(model(images).float(), labels)  # noqa: E731
        return train_step(session, model, loss, backend), 0

    label = name if backend == "triton" or "deit" in name else f"{name}, plain torch"
    return Candidate("models", label, peer, "both", f"{side} pixels, batch {batch}", make)


def _language(name: str, backend: str, peer: str) -> Candidate:
    rows, tokens = TEXT

    def make(session: Session, small: bool) -> Work:
        shape, length = ("small", 32) if session.dry else ("45m", tokens)
        config = causal.our_config(name, shape, max_tokens=length)
        with session.device:
            model = config.build().train()
            ids = torch.randint(8192, (1 if small or session.dry else rows, length))

        def loss(model: nn.Module) -> Tensor:
            logits = model(ids)[0]
            return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        return train_step(session, model, loss, backend), 0

    label = f"{name} language model" + (", plain torch" if backend == "torch" else "")
    return Candidate("models", label, peer, "both", f"{rows} x {tokens} tokens", make)


def models() -> Iterator[Candidate]:
    """Yield training steps of whole models."""
    for side, batch in IMAGES:
        yield _vision("deit_tiny", side, batch, "torch", "deit_tiny")
        yield _vision("lightnet_tiny", side, batch, "triton", "deit_tiny")
    side, batch = IMAGES[0]
    yield _vision("lightnet_tiny", side, batch, "torch", "deit_tiny")
    for name in ("lion_s_tiny", "lion_lit_tiny", "ldn_base"):
        yield _vision(name, side, batch // 2, "triton", name)
    for name in ("softmax", "lightnet", "lion_s"):
        yield _language(name, "triton", "softmax language model")
    yield _language("lightnet", "torch", "softmax language model")


# flash-linear-attention


def _fla(module: str, name: str) -> Any:
    return getattr(import_module(f"fla.ops.{module}"), name)


def _simple_gla(*x: Tensor) -> Tensor:
    return _fla("simple_gla", "chunk_simple_gla")(*x, scale=1.0)[0]


def _simple_gla_twice(*x: Tensor) -> Tensor:
    return _simple_gla(*x) + _simple_gla(*(y.flip(1) for y in x)).flip(1)


def _lightnet(*x: Tensor) -> Tensor:
    return _fla("lightnet", "chunk_lightnet")(*x, scale=1.0)[0]


def _gla(*x: Tensor) -> Tensor:
    return _fla("gla", "chunk_gla")(*x, scale=1.0)[0]


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return _fla("delta_rule", "chunk_delta_rule")(q, k, v, beta.to(q), scale=1.0)[0]


# name -> (op of onescan for the same task, function, inputs)
FLA_OPS: dict[str, tuple[str, Callable[..., Tensor], tuple[str, ...]]] = {
    "chunk_simple_gla twice": ("decay both ways", _simple_gla_twice, (*DECAYED, "scalar")),
    "chunk_simple_gla": ("causal decay", _simple_gla, (*DECAYED, "scalar")),
    "chunk_lightnet": ("causal additive decay, LRPE", _lightnet, ("q", "k", "v")),
    "chunk_gla": ("causal decay", _gla, (*DECAYED, "diagonal")),
    "chunk_delta_rule": ("causal delta rule", _delta_rule, ("q", "unit_k", "v", "beta")),
}


def peers() -> Iterator[Candidate]:
    """Yield ops and a model of flash-linear-attention, compared with those of onescan."""
    for name, (ours, op, inputs) in FLA_OPS.items():

        def make_op(_session: Session, _size: OpSize, op: Callable[..., Tensor] = op) -> Any:
            return op

        yield from _both_modes("fla", name, ours, SIZES[0], inputs, make_op)
    rows, tokens = TEXT

    def make(session: Session, small: bool) -> Work:
        options: Any = type("Options", (), {"device": "cuda"})()
        with session.device:
            model = causal.fla_model("fla_gla", "45m", options).train()
            ids = torch.randint(8192, (1 if small else rows, tokens))
        loss = lambda model: model(input_ids=ids, labels=ids).loss  # noqa: E731
        return train_step(session, model, loss, "auto"), 0

    peer = "lightnet language model"
    yield Candidate("fla", "GLA language model", peer, "both", f"{rows} x {tokens} tokens", make)


def limit_autotuning(max_configs: int = 16) -> None:
    """Limit the configs that Triton tries per kernel; flash-linear-attention has up to 48."""
    from triton.runtime.autotuner import Autotuner

    init = Autotuner.__init__

    def thinned(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        chosen = configs[:: -(-len(configs) // max_configs)] if configs else configs
        init(self, fn, names, chosen, *args, **kwargs)

    Autotuner.__init__ = thinned


# Stages


def compile_kernels(session: Session) -> None:
    """Run each candidate once at a small size, in several processes, to fill Triton's cache."""
    if session.dry:
        return
    tasks = list(range(len(candidates(session))))
    for index, row in run_tasks(compile_candidate, tasks, session, COMPILE_PROCESSES):
        if "error" in row:
            session.add("compile", name=candidates(session)[index].name, **row)


def compile_candidate(session: Session, index: int) -> Row:
    """Run a candidate once at a small size."""
    limit_autotuning()
    call, _ = candidates(session)[index].make(session, True)
    call()
    torch.cuda.synchronize()
    return {}


def time_stage(session: Session, stage: str) -> None:
    """Time the candidates of a stage."""
    limit_autotuning()
    chosen = [candidate for candidate in candidates(session) if candidate.stage == stage]
    for candidate in chosen[:DRY_CANDIDATES] if session.dry else chosen:
        labels = {
            "name": candidate.name,
            "peer": candidate.peer,
            "mode": candidate.mode,
            "size": candidate.size,
        }
        try:
            session.add(stage, **labels, **measure(session, candidate))
        except Exception as error:
            session.add(stage, **labels, error=failure(error))
            if is_fatal(error):
                return
        if not session.dry:
            torch.cuda.empty_cache()


def measure(session: Session, candidate: Candidate) -> Row:
    """Return a candidate's milliseconds, peak memory and bandwidth, if its bytes are known."""
    call, bytes_moved = candidate.make(session, False)
    if session.dry:
        begin = time.perf_counter()
        call()
        return {"ms": 1000 * (time.perf_counter() - begin)}
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated_before = torch.cuda.memory_allocated()
    call()
    peak = torch.cuda.max_memory_allocated() - allocated_before
    row = graph_time(call)
    row["peak_mib"] = round(peak / MIB)
    if bytes_moved:
        row["gb_s"] = round(bytes_moved / row["ms"] / 1e6)
    return row


def graph_time(call: Callable[[], object]) -> Row:
    """Return the median milliseconds of a call in a CUDA graph, quartiles, and when run eagerly."""
    warm_up_stream = torch.cuda.Stream()
    warm_up_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up_stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(warm_up_stream)
    torch.cuda.synchronize()

    def timed(run: Callable[[], object], count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    eager = sorted(timed(call, 3) for _ in range(3))[1]
    row: Row = {"ms": round(eager, 4), "eager_ms": round(eager, 4)}
    try:
        calls_per_graph = max(1, min(MAX_GRAPH_CALLS, int(GRAPH_MS / max(eager, 0.05) / 4)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls_per_graph):
                call()
        graph.replay()
        torch.cuda.synchronize()
        times = sorted(timed(graph.replay, 1) / calls_per_graph for _ in range(REPLAYS))
        low, median, high = (round(times[i], 4) for i in (1, REPLAYS // 2, REPLAYS - 2))
        row |= {"ms": median, "low_ms": low, "high_ms": high}
    except Exception as error:  # what cannot be captured keeps its eager time
        torch.cuda.synchronize()
        row["graph_error"] = failure(error)
    return row


def decode(session: Session) -> None:
    """Measure the time per generated token, with and without a CUDA graph."""
    new_tokens, batches = (4, (1,)) if session.dry else (NEW_TOKENS, BATCHES)
    for name in DECODE_MODELS:
        with session.device:
            model = onescan.build(
                name, **({"depth": 1, "vocab_size": 1000} if session.dry else {})
            ).eval()
        model = model.to(session.dtype)
        for batch in batches:
            prompt = torch.randint(1000, (batch, 16), device=session.device)
            texts = []
            for graph in (False,) if session.dry else (False, True):
                labels = {"name": name, "batch": batch, "cuda_graph": graph}
                try:
                    with use_backend("torch" if session.dry else "triton"):
                        model.generate(prompt, max_new_tokens=4, cuda_graph=graph)
                        begin = time.perf_counter()
                        text = model.generate(prompt, max_new_tokens=new_tokens, cuda_graph=graph)
                        texts.append(text.cpu())
                    seconds = time.perf_counter() - begin
                    row = {
                        "ms": round(1000 * seconds / new_tokens, 3),
                        "tokens_s": round(batch * new_tokens / seconds),
                    }
                    same = torch.equal(texts[0], texts[-1])
                    session.add("decode", **labels, **row, same_text=same)
                except Exception as error:
                    session.add("decode", **labels, error=failure(error))
                    if is_fatal(error):
                        return


def measure_machine(session: Session) -> Row:
    """Return the bandwidth of a copy and the speed of matrix products in bfloat16."""
    if session.dry:
        return {}
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / graph_time(lambda: target.copy_(source))["ms"] / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    products = 2 * 8192**3 / graph_time(lambda: a @ b)["ms"] / 1e9
    return {"copy_gb_s": round(copied), "matmul_tflops": round(products, 1)}
