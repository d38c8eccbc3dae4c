"""metrics.jsonl: one line per training step and one per evaluation, kept across restarts."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from PIL.Image import Image

from onescan.checkpoint.files import (
    check_regular,
    damaged,
    from_json,
    is_number,
    to_json,
    write_atomically,
    writing,
)
from onescan.training.run import RunConfig
from onescan.training.trackers import open_trackers

METRICS, PICTURES = "metrics.jsonl", "pictures"
Split = Literal["train", "test"]
NO_METRICS = frozenset({"step", "epoch", "split", "unreadable"})
# the only numbers in which two equal runs differ
TIMING = frozenset({"seconds", "waiting_seconds", "memory_mib"})


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Read a run's metrics: step, epoch, split ("train" or "test"), and numbers by name.

    An unfinished last line, left by a killed run, is ignored.

    Raises:
        ValueError: If any other line is damaged (names it), or the path is not a regular file.
    """
    path = Path(folder) / METRICS
    check_regular(path)
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if last and (not last.startswith(b"{") or b"}" in last):  # more than the start of a line
        lines.append(last)
    return [_parse(line + b"\n", f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def picture_path(folder: Path, step: int) -> Path:
    """Where the picture of the evaluation after so many steps lies."""
    return folder / PICTURES / f"step_{step}.png"


def read_pictures(folder: Path) -> dict[int, Path]:
    """The pictures of a run's evaluations by their steps, the first one first."""
    files = (folder / PICTURES).glob("step_*.png")
    numbered = {int(file.stem.removeprefix("step_")): file for file in files}
    return dict(sorted(numbered.items()))


def waiting_share(lines: Iterable[Mapping[str, Any]]) -> float:
    """The share of the training time that was spent waiting for data.

    >>> waiting_share([{"split": "train", "seconds": 2.0, "waiting_seconds": 0.5}])
    0.25
    """
    trained = [line for line in lines if line["split"] == "train"]
    seconds = sum(line["seconds"] for line in trained)
    return sum(line["waiting_seconds"] for line in trained) / seconds if seconds else 0.0


class Records:
    """Appends to metrics.jsonl, after dropping what was written past step `upto`.

    Attributes:
        metrics: of the last evaluation that was kept.
    """

    def __init__(self, folder: Path, run: RunConfig, *, upto: int) -> None:
        self.folder = folder
        kept = [line for line in read_metrics(folder) if line["step"] <= upto]
        self.evaluated = max((line["step"] for line in kept if line["split"] == "test"), default=0)
        self.metrics: dict[str, float] = {}
        for line in kept:
            if line["split"] == "test":
                self.metrics = {k: v for k, v in line.items() if k not in NO_METRICS}
        spelt = [{k: _spell(v) for k, v in line.items()} for line in kept]
        text = "".join(map(to_json, spelt))
        write_atomically(folder / METRICS, lambda path: path.write_text(text, encoding="utf-8"))
        self.file = (folder / METRICS).open("a", encoding="utf-8")
        self.trackers = open_trackers(run.machine.trackers, folder=folder, run=run, step=upto)

    def add(self, split: Split, *, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Append one line, unless it is of an evaluation that is already there."""
        if split == "test" and step <= self.evaluated:
            return
        line = {"step": step, "epoch": round(epoch, 4), "split": split} | metrics
        with writing(self.folder):
            self.file.write(to_json({k: _spell(v) for k, v in line.items()}))
            self.file.flush()
        self.trackers.log(step, {f"{split}/{name}": value for name, value in metrics.items()})
        if split == "test":
            self.evaluated = step

    def add_picture(self, picture: Image, *, step: int) -> None:
        """Write a picture of an evaluation, and pass it on to the trackers."""
        path = picture_path(self.folder, step)
        with writing(self.folder):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, lambda part: picture.save(part, format="png"))
        self.trackers.show(step, picture)

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        with writing(self.folder):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file, and let the trackers finish."""
        self.file.close()
        self.trackers.close()


def _spell(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(text: bytes, place: str) -> dict[str, Any]:
    remedy = "remove the file to continue without its history"
    line: dict[str, Any] = from_json(text, place, remedy)
    match line:
        case {"step": int(), "epoch": int() | float(), "split": "train" | "test", **metrics}:
            numbers = (line["step"], line["epoch"], *metrics.values())
            if all(number is None or is_number(number) for number in numbers):
                return {name: math.nan if it is None else it for name, it in line.items()}
    raise damaged(place, line, remedy)
