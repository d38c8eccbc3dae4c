"""metrics.jsonl: one line per training step and one per evaluation, kept across restarts."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from onescan.training.files import damaged, parse_json, write_atomically, writing

METRICS = "metrics.jsonl"
Split = Literal["train", "test"]
TIMING = frozenset({"seconds"})  # the only numbers in which two equal runs differ


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Read a run's metrics: step, epoch, split ("train" or "test"), and numbers by name.

    A last line that a killed run left unfinished is passed over.

    Raises:
        ValueError: another line is damaged; says which.
    """
    path = Path(folder) / METRICS
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if last and not last.startswith(b"{"):  # not even the beginning of a line
        lines.append(last)
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


class Records:
    """Appends to metrics.jsonl, after dropping what was written past step `upto`."""

    def __init__(self, folder: Path, *, upto: int) -> None:
        self.folder = folder
        kept = [line for line in read_metrics(folder) if line["step"] <= upto]
        self.evaluated = max((line["step"] for line in kept if line["split"] == "test"), default=0)
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(folder / METRICS, lambda path: path.write_text(text, encoding="utf-8"))
        self.file = (folder / METRICS).open("a", encoding="utf-8")

    def add(self, split: Split, *, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Append one line, unless it is of an evaluation that is already there."""
        if split == "test" and step <= self.evaluated:
            return
        line = {"step": step, "epoch": round(epoch, 4), "split": split} | metrics
        with writing(self.folder):
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        if split == "test":
            self.evaluated = step

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        with writing(self.folder):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _parse(text: bytes, place: str) -> dict[str, Any]:
    remedy = "remove the file to go on without its history"
    line: dict[str, Any] = parse_json(text, place, remedy)
    match line:
        case {"step": int(), "epoch": int() | float(), "split": "train" | "test", **numbers}:
            if all(isinstance(number, int | float) for number in numbers.values()):
                return line
    raise damaged(place, line, remedy)
