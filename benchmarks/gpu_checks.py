"""Stages of benchmarks/gpu.py that check results: every call of every op, and edge cases."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_calls import (
    CALLS,
    DTYPES,
    ODD_SIZES,
    SIZES,
    TOLERANCES,
    WIDE_SIZES,
    Size,
    draw_inputs,
    largest_error,
    results,
)
from gpu_session import Row, Session, failure, is_fatal, run_tasks
from torch import Tensor, nn

import onescan
from onescan.ops import additive_decay, decay_attention
from onescan.ops.backend import use_backend
from onescan.ops.gating import gated

CHECK_PROCESSES = 12
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}
BFLOAT16_TOLERANCE = 2e-2  # relative error of sums in another order, in bfloat16
DRY_RUN_SIZES = (Size(1, 3, 1, 4),)

Task = tuple[str, str, str]  # op, call, dtype


# check


def check(session: Session) -> None:
    """Compare every call of every op with float64, in each dtype, and repeat it bit by bit."""
    ops = ("lrpe", "gated", "additive_decay.one_scan") if session.dry else tuple(CALLS)
    # bfloat16 first: no interpreter runs it
    names = ("float32",) if session.dry else tuple(NAMES)
    tasks = [(op, call, name) for name in names for op in ops for call in CALLS[op]]
    for (op, call, name), row in run_tasks(
        check_call, tasks, session, 1 if session.dry else CHECK_PROCESSES
    ):
        session.add("check", op=op, call=call, dtype=name, ok=row.pop("ok", False), **row)


def sizes_of(session: Session, dtype: torch.dtype) -> tuple[Size, ...]:
    """Return the sizes to check; without `everything`, wide heads in bfloat16 only.

    There are then 574 programs to compile.
    """
    if session.everything:
        return (*SIZES, *WIDE_SIZES, *ODD_SIZES)
    return (*SIZES, *WIDE_SIZES) if dtype is torch.bfloat16 else SIZES


def check_call(session: Session, task: Task) -> Row:
    """Return the largest error of a call at each size, in kernels and in torch."""
    op, name, dtype_name = task
    call, dtype = CALLS[op][name], NAMES[dtype_name]
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    errors, torch_errors, is_repeatable = [], [], True
    for size in DRY_RUN_SIZES if session.dry else sizes_of(session, dtype):
        exact_inputs = draw_inputs(call, size)
        exact = results(call, exact_inputs, None)
        inputs = {
            name: x.to(session.device, DTYPES.get(name, dtype)) for name, x in exact_inputs.items()
        }
        outputs, repeated = (results(call, inputs, "triton") for _ in range(2))
        errors.append(largest_error(outputs, exact))
        torch_errors.append(largest_error(results(call, inputs, "torch"), exact))
        is_repeatable &= all(torch.equal(x, y) for x, y in zip(outputs, repeated, strict=True))
    return {
        "ok": max(errors) <= TOLERANCES[dtype] and is_repeatable,
        "errors": [float(f"{error:.3g}") for error in errors],
        "torch_error": float(f"{max(torch_errors):.3g}"),
        "repeats": is_repeatable,
    }


# edges


def edges(session: Session) -> None:
    """Run what tests on a CPU cannot; stop if CUDA fails, since all that follows would fail."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic products
    for name, (case, needs_gpu) in EDGES.items():
        if session.dry and needs_gpu:
            continue
        try:
            problem = case(session)
            session.add("edges", name=name, ok=not problem, problem=problem)
        except Exception as error:
            session.add("edges", name=name, ok=False, problem=failure(error))
            if is_fatal(error):
                return


def noise(session: Session, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Draw normal numbers in the dtype of what is timed, or another."""
    return torch.randn(*shape, device=session.device, dtype=dtype or session.dtype)


def nan_survives(session: Session) -> str:
    """A NaN that a GPU computes, 0x7fffffff, must reach the outputs in every dtype."""
    lost = []
    for dtype in (torch.float32, torch.float16, *([] if session.dry else [torch.bfloat16])):
        q, k, v = (noise(session, 1, 40, 2, 64, dtype=dtype) for _ in range(3))
        v[0, 3, 0, 5] = torch.inf
        v = v * 0 + v  # inf * 0, on the device
        decay = -torch.rand(1, 40, 2, device=session.device)
        calls = {
            "one scan": additive_decay(q, k, v, backend="triton"),
            "causal": additive_decay(q, k, v, causal=True, form="chunk", backend="triton"),
            "decay": decay_attention(
                q.sigmoid(), k.sigmoid(), v, decay, form="chunk", backend="triton"
            ),
        }
        lost += [
            f"{name} in {dtype}"
            for name, (o, _) in calls.items()
            if o[0, -1, 0, 5] == o[0, -1, 0, 5]
        ]
    return f"NaN is lost by {', '.join(lost)}" if lost else ""


def large_offsets(session: Session) -> str:
    """With more than 2^31 elements, the second sample must equal a call of its own."""
    shape = (2, 40, 2, 16) if session.dry else (2, 1_100_000, 16, 64)
    q, k, v = (noise(session, *shape) for _ in range(3))
    decay = torch.full((shape[2],), -0.05, device=session.device)
    options: dict[str, Any] = {"form": "chunk", "return_state": False, "backend": "triton"}
    calls: dict[str, Callable[..., Tensor]] = {
        "one scan": lambda q, k, v: additive_decay(q, k, v, backend="triton")[0],
        "decay": lambda q, k, v: decay_attention(q, k, v, decay, causal=True, **options)[0],
        "gated": lambda q, k, v: gated(q, v, "silu", backend="triton"),
    }
    wrong = []
    with torch.no_grad():
        for name, op in calls.items():
            whole = op(q, k, v)[1, -1000:].float()
            alone = op(q[1:], k[1:], v[1:])[0, -1000:].float()
            error = float((whole - alone).abs().max() / alone.abs().max())
            if not error < BFLOAT16_TOLERANCE:
                wrong.append(f"{name}: error {error:.2g}")
    return ", ".join(wrong)


def unaligned_views(session: Session) -> str:
    """Parts of one projection, with pointers that are not aligned to 16 bytes."""
    u = noise(session, 2, 65, 3 * 2 * 64 + 1)[..., 1:]
    q, k, v = (x.unflatten(-1, (2, 64)) for x in u.split(128, -1))
    decay = torch.full((2,), -0.1, device=session.device)
    step: dict[str, Any] = {"causal": True, "form": "recurrent", "backend": "triton"}
    calls: dict[str, Callable[..., Tensor]] = {
        "one scan": lambda *x: additive_decay(*x, backend="triton")[0],
        "step": lambda *x: additive_decay(*(y[:, :1] for y in x), **step)[0],
        "decay step": lambda *x: decay_attention(*(y[:, :1] for y in x), decay, **step)[0],
    }
    with torch.no_grad():
        wrong = [
            name
            for name, op in calls.items()
            if not torch.equal(op(q, k, v), op(*(x.contiguous() for x in (q, k, v))))
        ]
    return f"differs from contiguous inputs: {', '.join(wrong)}" if wrong else ""


def other_stream(session: Session) -> str:
    """Kernels must be ordered with the current stream, here behind slow products."""
    q, k, v = (noise(session, 2, 3000, 4, 64) for _ in range(3))
    expected = additive_decay(q, k, v, backend="triton")[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(3):
            busy = busy @ busy * 1e-4
        delayed_q = q + 0 * busy[0, 0].nan_to_num(0).to(q)
        actual = additive_decay(delayed_q, k, v, backend="triton")[0]
    torch.cuda.current_stream().wait_stream(stream)
    return "" if torch.equal(actual, expected) else "differs from the default stream"


def graph_of_backward(session: Session) -> str:
    """A CUDA graph of a forward and backward pass must repeat it bit by bit."""
    leaves = [noise(session, 2, 1000, 4, 64).requires_grad_() for _ in range(3)]
    output_gradient = noise(session, 2, 1000, 4, 64)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            additive_decay(*leaves, backend="triton")[0], leaves, output_gradient
        )

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run()
    for x in actual:
        x.zero_()
    graph.replay()
    same = all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    return "" if same else "the graph's gradients differ"


def small_model(session: Session) -> nn.Module:
    with session.device:
        return onescan.build("lightnet_tiny", depth=2, image_size=64, num_classes=10).train()


def loss_of(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Tensor:
    labels = torch.arange(len(images), device=images.device) % 10
    with torch.autocast(images.device.type, dtype=dtype):
        return F.cross_entropy(model(images).float(), labels)


def grad_scaler(session: Session) -> str:
    """In float16, a scale of the loss that overflows must be lowered, and training must go on."""
    model, images = small_model(session), torch.randn(64, 3, 64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler, losses = torch.amp.GradScaler("cuda", init_scale=2.0**24), []
    with use_backend("triton"):
        for _ in range(30):
            optimizer.zero_grad()
            loss = loss_of(model, images, torch.float16)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    finite = all(x.isfinite().all() for x in model.parameters())
    if finite and losses[-1] < losses[0] and scaler.get_scale() < 2.0**24:
        return ""
    return f"losses {losses[::6]}, scale {scaler.get_scale()}, finite weights: {finite}"


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    all_gradients = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [x for x in all_gradients if x is not None]


def deterministic(session: Session) -> str:
    """Two equal steps must give equal gradients, and no operator may be nondeterministic."""
    model, images = small_model(session), torch.randn(16, 3, 64, 64, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        with use_backend("triton"):
            first, second = (
                gradients(model, loss_of(model, images, torch.bfloat16)) for _ in range(2)
            )
    finally:
        torch.use_deterministic_algorithms(False)
    same = all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    return "" if same else "two equal steps differ"


def inductor(session: Session) -> str:
    """torch.compile with its default backend must give the same loss and gradients."""
    model, images = small_model(session), torch.randn(16, 3, 64, 64, device="cuda")
    with use_backend("triton"):
        expected_loss = loss_of(model, images, torch.bfloat16)
        expected_gradients = torch.cat(
            [x.flatten().float() for x in gradients(model, expected_loss)]
        )
        compiled: Any = torch.compile(model, fullgraph=True)
        compiled_loss = loss_of(compiled, images, torch.bfloat16)
        compiled_gradients = torch.cat(
            [x.flatten().float() for x in gradients(model, compiled_loss)]
        )
    gradient_error = float(
        (compiled_gradients - expected_gradients).norm() / expected_gradients.norm()
    )
    loss_error = abs(float(compiled_loss - expected_loss))
    return (
        ""
        if loss_error < BFLOAT16_TOLERANCE and gradient_error < 2 * BFLOAT16_TOLERANCE
        else f"loss off by {loss_error:.2g}, gradients by {gradient_error:.2g}"
    )


def channels_last(session: Session) -> str:
    """Images in the channels_last format, and weights in bfloat16."""
    model = small_model(session).to(torch.bfloat16).eval()
    images = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    with use_backend("triton"), torch.no_grad():
        expected, actual = model(images), model(images.to(memory_format=torch.channels_last))
    error = float((actual - expected).abs().max() / expected.abs().max())
    return "" if error < BFLOAT16_TOLERANCE else f"outputs differ by {error:.2g}"


def ddp_nccl(session: Session) -> str:
    """A step of DDP with one process."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    try:
        model = nn.parallel.DistributedDataParallel(small_model(session), device_ids=[0])
        with use_backend("triton"):
            loss = loss_of(model, torch.randn(8, 3, 64, 64, device="cuda"), torch.bfloat16)
        loss.backward()
        torch.cuda.synchronize()
        return "" if loss.isfinite() else "the loss is not finite"
    finally:
        dist.destroy_process_group()


# name -> (case, whether it needs a GPU); a case returns what is wrong
EDGES: dict[str, tuple[Callable[[Session], str], bool]] = {
    "NaN reaches the outputs": (nan_survives, True),
    "more than 2^31 elements": (large_offsets, False),
    "unaligned views": (unaligned_views, False),
    "float16 with GradScaler": (grad_scaler, True),
    "CUDA graph of a backward pass": (graph_of_backward, True),
    "deterministic mode": (deterministic, True),
    "another stream": (other_stream, True),
    "channels_last, bfloat16 weights": (channels_last, True),
    "torch.compile with inductor": (inductor, True),
    "DDP over NCCL": (ddp_nccl, True),
}


# memcheck


def memcheck(session: Session) -> None:
    """Run one small call of each op under compute-sanitizer, which finds invalid addresses."""
    if session.dry:
        return
    installed = Path("/usr/local/cuda/bin/compute-sanitizer")
    tool = str(installed) if installed.exists() else "compute-sanitizer"
    command = [tool, "--tool", "memcheck", "--print-limit", "20", "--error-exitcode", "9"]
    log = session.out / "memcheck.log"
    with log.open(
        "w", encoding="utf-8"
    ) as file:  # without torch's memory cache, in which one block hides others
        code = subprocess.run(
            [*command, sys.executable, __file__],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    invalid = log.read_text(encoding="utf-8", errors="replace").count("Invalid __global__")
    session.add("memcheck", ok=code == 0, code=code, invalid=invalid)


def run_each_call() -> None:
    """Run one call of each op of odd size, both passes."""
    for calls in CALLS.values():
        for call in calls.values():
            drawn = draw_inputs(call, Size(2, 77, 2, 64))
            inputs = {n: x.to("cuda", DTYPES.get(n, torch.bfloat16)) for n, x in drawn.items()}
            results(call, inputs, "triton")
            torch.cuda.synchronize()


if __name__ == "__main__":
    run_each_call()
