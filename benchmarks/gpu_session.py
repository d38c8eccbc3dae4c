"""One session on a GPU: where results go, and processes that run tasks side by side."""

import json
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onescan.checks import in_a_line

RESULTS = "results.jsonl"
TASK_S = 60.0  # limit of one task of a worker
Row = dict[str, Any]


class Session(NamedTuple):
    """Where the results go, and how thorough the checks are.

    Attributes:
        out: Folder of the results.
        dry: Only try the script out, on a CPU.
        everything: Also check what takes long to compile.
    """

    out: Path
    dry: bool = False
    everything: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what is timed."""
        return torch.float32 if self.dry else torch.bfloat16

    def add(self, stage: str, **row: Any) -> None:
        """Append a row to the results; a single short write, so processes can share the file."""
        line = json.dumps({"stage": stage, **row}, default=str)
        with (self.out / RESULTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self, stage: str) -> list[Row]:
        """Return the rows of a stage so far."""
        path = self.out / RESULTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row["stage"] == stage]


def failure(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {in_a_line(error)[:300]}"


def is_fatal(error: BaseException) -> bool:
    """Return whether CUDA cannot be used by this process any more."""
    return "CUDA error" in str(error)


def run_tasks(
    run: Callable[[Session, Any], Row], tasks: Sequence[Any], session: Session, processes: int
) -> Iterator[tuple[Any, Row]]:
    """Run tasks in several processes, and yield each with its row, in the order they end.

    A process that dies, loses its GPU or exceeds the limit of a task is replaced, and the row of
    the task has an "error".

    Args:
        run: Runs a task; importable by name.
        tasks: The tasks, picklable.
        session: The session, for `run`.
        processes: Maximum number of processes.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Any, Row]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def manage() -> None:
        worker = None
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or _Worker(run, session)
            row = worker.run(task)
            if "error" in row and not worker.is_alive():
                worker = None
            done.put((task, row))
        if worker:
            worker.close()

    threads = [threading.Thread(target=manage) for _ in range(min(processes, len(tasks)))]
    for thread in threads:
        thread.start()
    for _ in tasks:
        yield done.get()
    for thread in threads:
        thread.join()


class _Worker:
    """A process that runs tasks one after another."""

    def __init__(self, run: Callable[[Session, Any], Row], session: Session) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=_serve, args=(remote, run, session), daemon=True)
        self.process.start()
        remote.close()

    def run(self, task: Any) -> Row:
        begin = time.perf_counter()
        try:
            self.connection.send(task)
            if self.connection.poll(TASK_S):
                row: Row = self.connection.recv()
                if row.pop("fatal", False):
                    self.close()
                return row | {"seconds": round(time.perf_counter() - begin, 1)}
            reason = f"no result after {TASK_S:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            reason = f"the process ended with code {self.process.exitcode}"
        self.close()
        return {"error": reason}

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, run: Callable[[Session, Any], Row], session: Session) -> None:
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            row = run(session, task)
        except Exception as error:  # a task of any kind may fail
            row = {"error": failure(error), "fatal": is_fatal(error)}
        connection.send(row)
