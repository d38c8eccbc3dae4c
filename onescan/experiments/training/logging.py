"""Logging of a run: metrics.jsonl, pictures, experiment trackers, progress bar and memory.

No tracker shows a step twice when a run is resumed. TensorBoard drops the points that a killed run
logged after its last checkpoint. trackio and wandb keep those points, and ignore the repeated
steps. Without a network, wandb writes one folder per start.
"""

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from uuid import uuid4

import numpy as np
import torch
from PIL.Image import Image
from tqdm import tqdm

from onescan import configs
from onescan.checkpoint.files import (
    check_regular,
    damaged,
    from_json,
    numbers,
    remove_from,
    to_json,
    write_atomically,
    write_text_atomically,
    writing,
)
from onescan.experiments.training.config import RunConfig, TrackerName
from onescan.progress import progress_bar

METRICS, PICTURES = "metrics.jsonl", "pictures"
TENSORBOARD, WANDB, TRACKER_ID = "tensorboard", "wandb", "tracker_id"  # in a run's folder
EVENTS = re.compile(r"events\.out\.tfevents\..*")  # files of TensorBoard
PROJECT = "onescan"  # in trackio and wandb
Split = Literal["transfer", "train", "test"]  # "transfer" is the first phase of training
NO_METRICS = frozenset({"step", "epoch", "split", "unreadable"})
# the only numbers that differ between two equal runs
TIMING = frozenset({"seconds", "waiting_seconds", "memory_mib"})
MIB = 2**20
STATM = Path("/proc/self/statm")

log = logging.getLogger("onescan")


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Read a run's metrics: step, epoch, split and numbers by name.

    The split is "train", "test", or "transfer" for the steps of attention transfer. An unfinished
    last line, left by a killed run, is ignored.

    Raises:
        ValueError: If any other line is damaged (names it), or the path is not a regular file.
    """
    path = Path(folder) / METRICS
    check_regular(path)
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if last and (not last.startswith(b"{") or b"}" in last):  # more than the start of a line
        lines.append(last)
    return [_parse(line + b"\n", f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parse(content: bytes, source: str) -> dict[str, Any]:
    remedy = "remove the file to continue without its history"
    line: dict[str, Any] = from_json(content, source, remedy)
    match line:
        case {"step": int(), "epoch": int() | float(), "split": split, **metrics} if (
            split in get_args(Split)
        ):
            read = numbers({"step": line["step"], "epoch": line["epoch"], **metrics})
            if read is not None:
                return line | read
    raise damaged(source, line, remedy)


def waiting_share(lines: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of the training time that was spent waiting for data.

    >>> waiting_share([{"split": "train", "seconds": 2.0, "waiting_seconds": 0.5}])
    0.25
    """
    trained = [line for line in lines if line["split"] != "test"]
    seconds = sum(line["seconds"] for line in trained)
    return sum(line["waiting_seconds"] for line in trained) / seconds if seconds else 0.0


def read_pictures(folder: Path) -> dict[int, Path]:
    """Return the pictures of a run's evaluations by step, in ascending order."""
    files = (folder / PICTURES).glob("step_*.png")
    numbered = {int(file.stem.removeprefix("step_")): file for file in files}
    return dict(sorted(numbered.items()))


class Records:
    """Append to metrics.jsonl, after removing all lines past step `upto`.

    Attributes:
        metrics: Metrics of the last evaluation up to that step.
    """

    def __init__(self, folder: Path, run: RunConfig, *, upto: int) -> None:
        self.folder = folder
        kept_lines = [line for line in read_metrics(folder) if line["step"] <= upto]
        evaluations = [line for line in kept_lines if line["split"] == "test"]
        self.evaluated = max((line["step"] for line in evaluations), default=0)
        last = evaluations[-1] if evaluations else {}
        self.metrics = {name: x for name, x in last.items() if name not in NO_METRICS}
        text = "".join(map(to_json, kept_lines))
        write_text_atomically(folder / METRICS, text)
        self.file = (folder / METRICS).open("a", encoding="utf-8", newline="\n")
        self.trackers = open_trackers(run.machine.trackers, folder=folder, run=run, step=upto)

    def add(self, split: Split, *, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Append one line, unless it is an evaluation that is already there."""
        if split == "test" and step <= self.evaluated:
            return
        line = {"step": step, "epoch": round(epoch, 4), "split": split} | metrics
        with writing(self.folder):
            self.file.write(to_json(line))
            self.file.flush()
        self.trackers.log(step, {f"{split}/{name}": value for name, value in metrics.items()})
        if split == "test":
            self.evaluated = step

    def add_picture(self, picture: Image, *, step: int) -> None:
        """Write a picture of an evaluation, and pass it on to TensorBoard."""
        path = self.folder / PICTURES / f"step_{step}.png"
        with writing(self.folder):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, lambda part: picture.save(part, format="png"))
        self.trackers.log_picture(step, picture)

    def sync(self) -> None:
        """Flush the lines to disk."""
        with writing(self.folder):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file and the trackers."""
        self.file.close()
        self.trackers.close()


# Experiment trackers


class Trackers:
    """Trackers of accelerate, by name. One that fails is dropped with a warning.

    Attributes:
        open: Each tracker, with the first step that it accepts.
    """

    def __init__(self) -> None:
        self.open: dict[TrackerName, tuple[Any, int]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step: {"train/loss": 0.5, ...}."""
        for name, tracker, first in self._all():
            if step >= first:
                with self._dropping(name):
                    tracker.log(dict(metrics), step=step)

    def log_picture(self, step: int, picture: Image) -> None:
        """Log a picture to TensorBoard."""
        pixels = {"picture": np.asarray(picture.convert("RGB"))[None]}
        for name, tracker, _ in self._all():
            if name == "tensorboard":
                with self._dropping(name):
                    tracker.log_images(pixels, step=step, dataformats="NHWC")

    def close(self) -> None:
        """Finish what is under way. The run may be resumed later."""
        for name, tracker, _ in self._all():
            with self._dropping(name):
                tracker.finish()
        self.open.clear()

    def _all(self) -> list[tuple[TrackerName, Any, int]]:
        return [(name, tracker, first) for name, (tracker, first) in self.open.items()]

    @contextmanager
    def _dropping(self, name: TrackerName) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an error of a tracker must not end the run
            del self.open[name]
            log.warning("%s failed and receives no more metrics of this run: %s", name, error)


def open_trackers(
    names: tuple[TrackerName, ...] | None, *, folder: Path, run: RunConfig, step: int
) -> Trackers:
    """Open trackers for a run that starts, at step 0, or is resumed.

    TensorBoard writes to the run's folder under "tensorboard", wandb under "wandb", and trackio
    where TRACKIO_DIR says.

    Args:
        names: The trackers; None is tensorboard if it is installed.
        folder: The run's folder.
        run: Config to log.
        step: Steps so far. At 0, TensorBoard's files of an earlier run in the folder are removed,
            and the other trackers show a new run.

    Raises:
        ImportError: If a tracker is not installed; says how to install it.
        OSError: If a tracker does not start; says why.
    """
    if names is None and find_spec("tensorboard") and find_spec("accelerate"):
        names = ("tensorboard",)
    check_installed(names)
    with ExitStack() as on_error:
        trackers = Trackers()
        on_error.callback(trackers.close)
        for name in names or ():
            try:
                trackers.open[name] = _open_tracker(name, folder, run, step)
            except ImportError:
                raise
            except Exception as error:  # each tracker has its own types
                raise OSError(f"{name} in machine.trackers does not start: {error}") from error
        on_error.pop_all()
    return trackers


def check_installed(names: tuple[TrackerName, ...] | None) -> None:
    """Raise ImportError for a tracker that is not installed; says how to install it."""
    for name in names or ():
        for module in (name, "accelerate"):
            if find_spec(module) is None:
                raise ImportError(
                    f"machine.trackers contains {name}, but {module} is not installed: "
                    f"{INSTALL.get(module, f'pip install {module}')}"
                )


def _open_tracker(name: TrackerName, folder: Path, run: RunConfig, step: int) -> tuple[Any, int]:
    """Start a tracker, and return it with the first step that it accepts."""
    from accelerate import PartialState, tracking

    PartialState()  # which the logger of accelerate.tracking needs
    config, title = configs.to_dict(run), f"{run.name}/seed-{run.training.seed}"
    is_new = step == 0 or not (folder / TENSORBOARD).exists()
    tracker: Any
    if name == "tensorboard":
        if step == 0:
            remove_from(folder / TENSORBOARD, EVENTS)
        tracker = tracking.TensorBoardTracker(TENSORBOARD, str(folder), purge_step=step + 1)
    elif name == "trackio":
        run_id = f"{title}/{_tracker_id(folder, step)}"  # trackio has no other identifier
        tracker = tracking.TrackioTracker(PROJECT, name=run_id, config=config, resume="allow")
    else:
        run_id = _tracker_id(folder, step)
        settings = {"name": title, "id": run_id, "dir": str(folder), "resume": "allow"}
        tracker = tracking.WandBTracker(PROJECT, config=config, **settings)
    tracker.main_process_only = False  # only rank 0 opens trackers
    tracker.start()
    if name == "tensorboard":
        if is_new:
            tracker.log({"config": f"```\n{json.dumps(config, indent=2)}\n```"}, step=step)
        return tracker, 0
    tracker_run = tracker.tracker  # trackio has no public name for the step
    return tracker, tracker_run._next_step if name == "trackio" else tracker_run.starting_step


def _tracker_id(folder: Path, step: int) -> str:
    """Return the identifier of the run, which moves with its folder; at step 0 a new one."""
    path = folder / TRACKER_ID
    if step == 0 or not path.exists():
        write_text_atomically(path, uuid4().hex[:12])
    content = path.read_bytes()
    if not re.fullmatch(rb"[0-9a-f]{12}", content):
        raise damaged(path, content, "remove it to start a new run in the trackers")
    return content.decode()


INSTALL = {"tensorboard": "pip install 'onescan[log]'", "accelerate": "pip install 'onescan[log]'"}


# Progress


class Progress(NamedTuple):
    """The state of a run after a step."""

    step: int
    """Steps so far."""
    steps: int
    """Steps of the whole run."""
    batch_size: int
    """Examples per step; the largest number, if it grows."""
    unit: str
    """What the examples are, in the plural."""
    metrics: dict[str, float]
    """Metrics of the last batch, and of the last evaluation as "test_..."."""
    waiting: float = 0.0
    """Share of the time so far that was spent waiting for data."""
    examples: int = 0
    """Examples so far."""
    total_examples: int = 0
    """Examples of the whole run."""


Show = Callable[[Progress], object]


def _silent(_: object) -> None:
    """Show nothing."""


class Display(NamedTuple):
    """Shows a run: its progress after every step, and lines of text."""

    show: Show = _silent
    write: Callable[[str], object] = _silent
    has_bar: bool = False


@contextmanager
def display(progress: bool | Show, start: Progress) -> Iterator[Display]:
    """Yield the display of a run: a bar on stderr, the caller's own function, or nothing."""
    if progress is not True:
        yield Display(show=progress) if progress else Display()
        return
    total, unit = start.total_examples, f" {start.unit}"
    with progress_bar(total, initial=start.examples, unit=unit) as bar:

        def show(now: Progress) -> None:
            bar.set_postfix(now.metrics | {"waiting": f"{now.waiting:.1%}"}, refresh=False)
            bar.update(now.examples - bar.n)

        yield Display(show, lambda text: tqdm.write(text, file=sys.stderr), has_bar=True)


def duration(seconds: float) -> str:
    """Format a duration with its two largest units.

    >>> duration(0.4), duration(75.0), duration(7260.0), duration(2e5)
    ('less than 1 s', '1 min 15 s', '2 h 1 min', '2 d 7 h')
    """
    left, parts = round(seconds), []
    for name, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number:
            parts.append(f"{number} {name}")
    return " ".join(parts[:2]) or "less than 1 s"


def memory_mib(device: torch.device) -> float:
    """Return the memory in use, in MiB.

    On a GPU, it is the peak of this process's tensors. Elsewhere it is the memory of this process
    that is resident now, its peak if the system reports only that, or NaN.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    if STATM.exists():
        resident_pages = int(STATM.read_text(encoding="ascii").split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE") / MIB
    try:
        import resource  # missing on Windows
    except ImportError:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
