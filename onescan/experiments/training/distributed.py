"""The processes of a run: started by torchrun or alone, their devices, signals and models."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from onescan.experiments.training.config import MachineConfig
from onescan.layers.block import Block
from onescan.ops.parallel import sequence_parallel

ResultT = TypeVar("ResultT")
CPU = torch.device("cpu")
GLOO_GRACE_S = 0.2
TIMEOUT_S = 1800.0
# parts of the messages of gloo, NCCL and torch's store
LOST_SIGNS = (
    *("by peer", "Broken pipe", "Connection refused", "imed out", "imeout"),
    *("remote process", "aborted", "got 0 bytes"),
)
SAME_SIGNAL_S = 1.0  # launchers forward Ctrl-C, so that one key press arrives twice
RAISED_BY_FIRST = "also raised by the first process"  # a note on errors in the other processes

log = logging.getLogger("onescan")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process and the number of processes. All processes call each method."""

    rank: int = 0
    """Rank of this process; rank 0 writes all files."""
    size: int = 1
    """Number of processes."""
    local: int = 0
    """Rank among the processes on this machine, which selects the GPU."""
    sequence: int = 1
    """Number of processes across which each sequence is sharded. Their ranks are consecutive."""

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this process's group among the groups across which sequences are sharded."""
        return self.rank // self.sequence

    @property
    def sequence_rank(self) -> int:
        """Rank of this process in its group, in the order of the tokens."""
        return self.rank % self.sequence

    @property
    def data_size(self) -> int:
        """Number of groups across which sequences are sharded. Each reads its own examples."""
        return self.size // self.sequence

    def first(self, act: Callable[[], ResultT]) -> ResultT:
        """Call a function in rank 0 only, and return its result in every process.

        An error is raised in every process; in the others it has the note `RAISED_BY_FIRST`.
        """
        if self.size == 1:
            return act()
        outcome: list[Any] = [None, None]
        try:
            outcome[0] = act() if self.is_first else None
        except Exception as error:
            outcome = [None, (_base_type(error), str(error))]
            dist.broadcast_object_list(outcome, device=CPU)
            raise
        dist.broadcast_object_list(outcome, device=CPU)
        result, failure = outcome
        if failure:
            error_type, message = failure
            raised: Exception = error_type(message)
            raised.add_note(RAISED_BY_FIRST)
            raise raised
        return result

    def mean(self, numbers: dict[str, float]) -> dict[str, float]:
        """Average each number over the processes."""
        if self.size == 1:
            return numbers
        total = torch.tensor([*numbers.values()], dtype=torch.float64)
        dist.all_reduce(total)
        return dict(zip(numbers, (total / self.size).tolist(), strict=True))

    def average(self, x: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if self.size == 1:
            return x
        total = x.clone()
        dist.all_reduce(total)
        return total / self.size

    def any(self, value: bool) -> bool:
        """Return whether the value is true in any process."""
        return self.mean({"value": float(value)})["value"] > 0

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values of replicated tensors to all processes, in place."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor, 0)

    def average_gradients(self, model: nn.Module) -> None:
        """Average gradients over processes, after backward passes that bypass DDP."""
        for parameter in model.parameters() if self.size > 1 else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def gather(self, item: ResultT) -> list[ResultT]:
        """Collect one object from each process, ordered by rank, in every process."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items


def _base_type(error: Exception) -> type[Exception]:
    """Return a type that can be raised again with a message alone."""
    types = (ValueError, OSError, ArithmeticError, ImportError)
    return next((kind for kind in types if isinstance(error, kind)), RuntimeError)


@contextmanager
def joined(device: str = "auto", *, timeout: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Set up torch.distributed for processes started by torchrun; otherwise run in one process.

    A process group that the caller has set up is used and kept.

    Args:
        device: Device that the processes compute on.
        timeout: Seconds to wait for the other processes.

    Raises:
        ValueError: If there is no such device for this process, or the caller's process group
            cannot communicate tensors on the CPU.
        ConnectionError: If another process exits or does not respond.
    """
    if dist.is_initialized():
        with _lost_processes_raise():
            yield _existing_group()
        return
    if not dist.is_torchelastic_launched():
        yield Ranks()
        return
    ranks = Ranks(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local=int(os.environ["LOCAL_RANK"]),
    )
    on_gpu = choose_device(device, ranks).type == "cuda"
    store, rank, size = next(rendezvous("env://"))
    # one prefix per restart, so that torch does not find the addresses of killed processes
    store = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    try:
        with _lost_processes_raise():
            yield ranks
    except ConnectionError:
        with _ignored_sigterm():  # from torchrun, so that this process can report the error
            _leave()
        raise
    finally:
        if dist.is_initialized():
            _leave()


def _leave() -> None:
    # A gloo thread may still hold the last tensors that it sent. Releasing them needs Python's
    # lock, so a process that ends at that moment would abort or deadlock.
    time.sleep(GLOO_GRACE_S)
    dist.destroy_process_group()


@contextmanager
def _ignored_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def lost_process(error: BaseException) -> bool:
    """Return whether torch.distributed raised an error because another process is lost.

    >>> lost_process(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    """
    message = f"{error} {error.__cause__ or ''}"
    is_gloo = isinstance(error, RuntimeError) and "gloo/" in message
    return (is_gloo or isinstance(error, dist.DistError)) and any(
        sign in message for sign in LOST_SIGNS
    )


@contextmanager
def _lost_processes_raise() -> Iterator[None]:
    """Raise ConnectionError if another process exits or does not respond."""
    try:
        yield
    except RuntimeError as error:
        if not lost_process(error):
            raise
        raise ConnectionError(
            "another process of the run has exited, or did not respond within machine.timeout: see "
            "its error message. To resume from the last checkpoint, run the same command again"
        ) from error


@contextmanager
def sharing_sequences(ranks: Ranks, machine: MachineConfig) -> Iterator[Ranks]:
    """Shard each sequence across `machine.sequence_parallel` processes in a `with` block.

    The processes of a sequence have consecutive ranks.

    Yields:
        The ranks, with the number of processes per sequence.

    Raises:
        ValueError: If `machine.sequence_parallel` does not divide the number of processes.
    """
    count = machine.sequence_parallel
    if ranks.size % count:
        raise ValueError(
            f"machine.sequence_parallel is {count}, expected a divisor of the number of processes, "
            f"{ranks.size}; start several with torchrun"
        )
    if count == 1:
        yield ranks
        return
    group, _ = dist.new_subgroups(count, timeout=timedelta(seconds=machine.timeout))
    with sequence_parallel(group):
        yield replace(ranks, sequence=count)
    dist.destroy_process_group(group)


def _existing_group() -> Ranks:
    if dist.get_backend() == "nccl":
        raise ValueError(
            "the backend of torch.distributed is nccl, expected backend='cpu:gloo,cuda:nccl'"
        )
    gpus = torch.cuda.device_count() or 1
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank() % gpus))
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), local=local)


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """Return the device that this process trains on, and make it torch's current one.

    Raises:
        ValueError: If the device does not exist, or several processes would share it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"machine.device is {name!r}, expected auto, cpu, cuda, ...") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"machine.device is {name!r}, expected auto, cpu, cuda, cuda:1, ...")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"machine.device is {name!r}, but there is no GPU that torch can use")
    if ranks.size > 1 and device.index is not None:
        raise ValueError(
            f"machine.device is {name!r}, but each process needs its own GPU, expected cuda"
        )
    index, count = device.index or ranks.local, torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"machine.device is {name!r}, but the last GPU has index {count - 1}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def prepare(
    model: nn.Module, machine: MachineConfig, ranks: Ranks, device: torch.device
) -> nn.Module:
    """Set up recomputation, compilation and DDP or FSDP2; return the module to call in training.

    The names of the model's own weights do not change.

    Raises:
        ValueError: If `machine.gradient_checkpointing` is set and the model has no blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if machine.gradient_checkpointing and not blocks:
        raise ValueError(
            "machine.gradient_checkpointing is True, but the model has no blocks to recompute"
        )
    for block in blocks:
        block.recompute = machine.gradient_checkpointing
    parts: list[nn.Module] = [*blocks] or [model]
    for part in parts if machine.compile else ():
        part.compile()
    if ranks.size == 1:
        return model
    if not machine.fsdp:
        device_ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh  # slow: half a second
    from torch.distributed.fsdp import fully_shard

    # over all processes, including those of one sequence
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in [*blocks, model]:
        # the root is resharded as well, so that its state_dict holds shards after an evaluation
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return model


@contextmanager
def gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Let backward passes average gradients over the processes, or only accumulate them."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
        return
    switch = getattr(model, "set_requires_gradient_sync", None)  # of FSDP2
    if switch:
        switch(enabled)
    yield


class Interrupts:
    """A context that records SIGINT and SIGTERM in `requested`; a second Ctrl-C stops at once.

    Outside the main thread, which receives all signals, it does nothing.

    Args:
        message: Logged when the first signal arrives.
    """

    def __init__(self, message: str = "stopping after this step, with a checkpoint") -> None:
        self.message, self.requested = message, False
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        is_second = time.monotonic() - self._since > SAME_SIGNAL_S
        if self.requested and number == signal.SIGINT and is_second:
            raise KeyboardInterrupt
        if not self.requested:
            log.warning("%s; press Ctrl-C again to stop at once", self.message)
        self.requested, self._since = True, self._since or time.monotonic()
