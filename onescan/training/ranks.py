"""The processes of a run: this one alone, or those that torchrun started, joined."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

ResultT = TypeVar("ResultT")
CPU = torch.device("cpu")
SETTLING_S = 0.2  # for what takes microseconds on a machine that is not overloaded
TOLD = "raised by the first process, and told by it"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which process this is, of how many. Every method is called by all of them."""

    rank: int = 0
    """This process among all, from 0; the first one writes what is written."""
    size: int = 1
    """How many there are."""
    local: int = 0
    """This process among those on its machine, from 0: which of its GPUs is its own."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def first(self, act: Callable[[], ResultT]) -> ResultT:
        """Let the first process act; all return what it returned, or raise what it raised.

        What others raise is of the same kind and says the same, and has the note `TOLD`.
        """
        if self.size == 1:
            return act()
        outcome: list[Any] = [None, None]
        try:
            outcome[0] = act() if self.is_first else None
        except Exception as error:
            outcome = [None, (_kind(error), str(error))]
            dist.broadcast_object_list(outcome, device=CPU)
            raise
        dist.broadcast_object_list(outcome, device=CPU)
        result, failure = outcome
        if failure:
            told: Exception = failure[0](failure[1])
            told.add_note(TOLD)
            raise told
        return result

    def mean(self, numbers: dict[str, float]) -> dict[str, float]:
        """Average each number over the processes."""
        if self.size == 1:
            return numbers
        total = torch.tensor([*numbers.values()], dtype=torch.float64)
        dist.all_reduce(total)
        return dict(zip(numbers, (total / self.size).tolist(), strict=True))

    def any(self, answer: bool) -> bool:
        """Tell whether any of the processes says yes."""
        return self.mean({"yes": float(answer)})["yes"] > 0

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the first one's values of tensors that each has a copy of."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor, 0)

    def gather(self, item: ResultT) -> list[ResultT]:
        """Collect one thing of each process, in their order, on all of them."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items


def _kind(error: Exception) -> type[Exception]:
    """The plainest kind of an error, which can be made again from what it says."""
    plain = (ValueError, OSError, ArithmeticError, ImportError)
    return next((kind for kind in plain if isinstance(error, kind)), RuntimeError)


@contextmanager
def joined(device: str = "auto") -> Iterator[Ranks]:
    """Join the processes that torchrun started, and part at the end; without it, be alone.

    Processes that are joined already, by whoever calls, stay so.

    Raises:
        ValueError: there is no such device for this process, or the processes that are joined
            already cannot exchange what lies on their CPUs.
    """
    if dist.is_initialized():
        yield _already_joined()
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
    # a prefix for each start, or after a restart torch finds the addresses of dead processes
    again = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=again, rank=rank, world_size=size)
    try:
        yield ranks
    finally:
        # A thread of gloo's may still hold the last tensors it sent, and letting go of them takes
        # Python's lock: ended meanwhile, a process would abort or wait for itself for ever.
        time.sleep(SETTLING_S)
        dist.destroy_process_group()


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """Find the device that this process trains on, and make it torch's current one.

    Raises:
        ValueError: there is no such device here, or several processes would share it.
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
        raise ValueError(f"machine.device is {name!r}, but each process has its own: expected cuda")
    index, there = device.index or ranks.local, torch.cuda.device_count()
    if index >= there:
        raise ValueError(f"machine.device is {name!r}, but of {there} GPUs none is number {index}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _already_joined() -> Ranks:
    if dist.get_backend() == "nccl":
        raise ValueError(
            "torch.distributed was set up with nccl alone, expected backend='cpu:gloo,cuda:nccl'"
        )
    here = torch.cuda.device_count() or 1
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank() % here))
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), local=local)
