"""Trackers: who else gets a run's metrics while it trains, beside its own metrics.jsonl.

A run that goes on from a checkpoint shows no point twice. TensorBoard forgets what a killed run
had logged past the checkpoint. A run of trackio's or wandb's takes nothing back: it keeps those
points, and takes new ones from the step after them. Without a network wandb does not know them,
and writes what it gets from every start into a folder of its own.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from PIL.Image import Image

from onescan import configs
from onescan.checkpoint.files import damaged, remove_from, write_atomically
from onescan.training.run import RunConfig, TrackerName

PROJECT = "onescan"
TENSORBOARD, WANDB, IDENTITY = "tensorboard", "wandb", "tracker_id"  # in a run's folder
EVENTS = re.compile(r"events\.out\.tfevents\..*")  # TensorBoard's files

logger = logging.getLogger("onescan")


class Tracker(ABC):
    """Who shows a run's metrics."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on what was measured after `step` updates: {"train/loss": 0.5, ...}."""

    def show(self, step: int, picture: Image) -> None:
        """Pass on what an evaluation shows; who shows no pictures lets it be."""
        del step, picture

    @abstractmethod
    def close(self) -> None:
        """Hand over what is under way; the run is done, or will go on later."""


class Trackers(Tracker):
    """Several at once; one that fails is dropped with a warning, and the run goes on."""

    def __init__(self, trackers: dict[TrackerName, Tracker]) -> None:
        self.trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def show(self, step: int, picture: Image) -> None:
        self._each(lambda tracker: tracker.show(step, picture))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self.trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # whatever it is, it is not worth days of training
                del self.trackers[name]
                logger.warning("%s failed and gets no more of this run: %s", name, error)


def open_trackers(
    names: tuple[TrackerName, ...] | None, *, folder: Path, run: RunConfig, step: int
) -> Trackers:
    """Open trackers for a run that starts, at step 0, or goes on.

    TensorBoard's files lie in the run's folder under "tensorboard", wandb's under "wandb";
    trackio keeps its own, where TRACKIO_DIR says.

    Args:
        names: which; None is tensorboard where it is installed.
        folder: the run's.
        run: goes along for the record.
        step: updates so far. At 0 an earlier run in the folder is forgotten: its TensorBoard files
            go, and the others show a new run.

    Raises:
        ImportError: a tracker is not installed; says how to.
        OSError: a tracker does not start; says why.
    """
    names = _installed() if names is None else names
    check_installed(names)
    with ExitStack() as on_error:
        trackers = Trackers({})
        on_error.callback(trackers.close)
        for name in dict.fromkeys(names):
            trackers.trackers[name] = _open(name, folder, run, step)
        on_error.pop_all()
    return trackers


def check_installed(names: tuple[TrackerName, ...] | None) -> None:
    """Raise ImportError for a tracker that is not installed; says how to."""
    for name in names or ():
        if find_spec(name) is None:
            raise ImportError(f"machine.trackers names {name}, which is missing: {INSTALL[name]}")


def _installed() -> tuple[TrackerName, ...]:
    return ("tensorboard",) if find_spec("tensorboard") else ()


def _open(name: TrackerName, folder: Path, run: RunConfig, step: int) -> Tracker:
    try:
        return OPENERS[name](folder, run, step)
    except ImportError:
        raise
    except Exception as error:  # each has its own kinds
        raise OSError(f"{name}, of machine.trackers, does not start: {error}") from error


class TensorBoard(Tracker):
    """Event files in the run's folder, on the disk after every call."""

    def __init__(self, folder: Path, run: RunConfig, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / TENSORBOARD
        if step == 0:
            remove_from(path, EVENTS)
        is_new = not path.exists()
        self.writer = SummaryWriter(str(path), purge_step=step + 1)
        if is_new:
            text = json.dumps(configs.to_dict(run), indent=2)
            self.writer.add_text("config", f"```\n{text}\n```", step)
            self.writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def show(self, step: int, picture: Image) -> None:
        self.writer.add_image(
            "picture", np.asarray(picture.convert("RGB")), step, dataformats="HWC"
        )
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class RunTracker(Tracker):
    """A run of trackio's or wandb's, which takes steps from `first` on."""

    def __init__(self, run: Any, *, first: int, finish: Callable[[], object]) -> None:
        self.run, self.first, self.finish = run, first, finish

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self.first:
            self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.finish()


def _open_trackio(folder: Path, run: RunConfig, step: int) -> RunTracker:
    import trackio

    name = f"{_title(run)}/{_identity(folder, step)}"  # it knows runs by nothing else
    opened = trackio.init(PROJECT, name=name, config=configs.to_dict(run), resume="allow")
    # no public name tells how far a run has come
    return RunTracker(opened, first=opened._next_step, finish=trackio.finish)


def _open_wandb(folder: Path, run: RunConfig, step: int) -> RunTracker:
    import wandb

    opened = wandb.init(
        project=PROJECT,
        name=_title(run),
        id=_identity(folder, step),
        dir=str(folder),
        config=configs.to_dict(run),
        resume="allow",
    )
    return RunTracker(opened, first=opened.starting_step, finish=opened.finish)


def _title(run: RunConfig) -> str:
    return f"{run.name}/seed-{run.training.seed}"


def _identity(folder: Path, step: int) -> str:
    """What the run in `folder` is known by, wherever the folder is moved; at step 0 a new one."""
    path = folder / IDENTITY
    if step == 0 or not path.exists():
        write_atomically(path, lambda partial: partial.write_text(uuid4().hex[:12], "ascii"))
    identity = path.read_bytes()
    if not re.fullmatch(rb"[0-9a-f]{12}", identity):
        raise damaged(path, identity, "remove it to start a new run in the trackers")
    return identity.decode()


OPENERS: dict[TrackerName, Callable[[Path, RunConfig, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": _open_trackio,
    "wandb": _open_wandb,
}
INSTALL: dict[TrackerName, str] = {
    "tensorboard": "pip install 'onescan[log]'",
    "trackio": "pip install trackio",
    "wandb": "pip install wandb",
}
