"""Measure how long the host takes to launch a kernel, without a GPU.

python benchmarks/launch_overhead.py

A stub stands in for Triton's driver: kernels are compiled and launches are prepared as on an H100,
but nothing runs. Prints microseconds per launch for each kernel of some calls, both passes, by
`onescan.ops.backend.launch` and by Triton with the same arguments. On a GPU, the driver and a check
of the current device add a few microseconds to both.
"""

import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from onescan.ops import additive_decay, backend, decay_attention, delta_rule

OPS = ("additive_decay", "decay_attention", "delta_rule")
LAUNCHERS = [import_module(f"onescan.ops.{op}.launch") for op in OPS]
REPEATS, LAUNCHES = 9, 200  # measurements, and launches of each


class Launch(NamedTuple):
    """The arguments of one call of `backend.launch`."""

    kernel: Any
    arguments: tuple[Any, ...]
    flags: dict[str, Any]

    def run(self) -> None:
        """Launch by way of onescan."""
        backend.launch(self.kernel, *self.arguments, **self.flags)

    def run_by_triton(self) -> Callable[[], object]:
        """Return a function that launches by way of Triton."""
        case, grid, *given = self.arguments
        settings = self.kernel.settings(case, tuple(x is not None for x in given), self.flags)
        filled = [given[0] if x is None else x for x in given]
        return lambda: self.kernel.code[grid](*filled, **settings)


class StubDriver(DriverBase):
    """A driver of an H100 that launches nothing; `launched` has the arguments of each launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] | None = None
        self.utils = self

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return object(), 1, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any) -> None:
        if self.launched is not None:
            self.launched.append(arguments)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def recorded_launches() -> list[Launch]:
    """Run calls on tensors of the CPU; return the first launch of each kernel."""
    launches: dict[str, Launch] = {}
    launch = backend.launch

    def record(kernel: Any, *arguments: Any, **flags: Any) -> None:
        launches.setdefault(kernel.name, Launch(kernel, arguments, flags))
        launch(kernel, *arguments, **flags)

    q, k, v = (torch.randn(2, 256, 4, 64).half().requires_grad_() for _ in range(3))
    angles, log_decay, beta = torch.randn(256, 4, 64), -torch.rand(2, 256, 4), torch.rand(2, 256, 4)
    with patch.object(backend, "is_interpreted", return_value=True):  # takes tensors of the CPU
        for module in LAUNCHERS:
            module.launch = record
        try:
            for o, _ in (
                additive_decay(q, k, v, angles=angles, backend="triton"),
                additive_decay(q, k, v, causal=True, form="chunk", backend="triton"),
                decay_attention(q, k, v, log_decay, form="chunk", backend="triton"),
                delta_rule(q, k, v, beta, causal=True, form="chunk", backend="triton"),
            ):
                o.sum().backward()
        finally:
            for module in LAUNCHERS:
                module.launch = launch
    return list(launches.values())


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        times.append((time.perf_counter() - start) / LAUNCHES)
    return 1e6 * median(times)


def main() -> None:
    triton.runtime.driver.set_active(StubDriver())
    rows = []
    for launch in recorded_launches():
        ours, theirs = microseconds(launch.run), microseconds(launch.run_by_triton())
        rows.append((ours, theirs))
        print(f"{launch.kernel.name:<18} {ours:6.1f} us   by Triton {theirs:6.1f} us")
    print(f"{'median':<18} {median(r[0] for r in rows):6.1f} us   by Triton "
          f"{median(r[1] for r in rows):6.1f} us")  # fmt: skip


if __name__ == "__main__":
    main()
