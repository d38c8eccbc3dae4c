"""Progress bars on a terminal, and lines in a log file."""

import sys
from typing import Any

from tqdm import tqdm

LOG_INTERVAL_S = 30


def progress_bar(total: int | None, *, leave: bool = True, **options: Any) -> "tqdm[Any]":
    """Return a progress bar on stderr, which is a line every 30 s if stderr is not a terminal.

    Args:
        total: Number of updates at the end; ``None`` if unknown.
        leave: Whether the bar stays when it is closed. In a log file, a bar that does not stay is
            not written before 30 s have passed.
        options: Other arguments of `tqdm.tqdm`, such as ``desc``, ``unit`` and ``disable``.
    """
    if not sys.stderr.isatty():
        options |= {
            "file": _Lines(),
            "mininterval": LOG_INTERVAL_S,
            "miniters": 1,  # check the time at each update
            "delay": 0 if leave else LOG_INTERVAL_S,
            "position": 0,  # do not move the cursor
            "ncols": 0,  # only numbers, without the bar
        }
    return tqdm(total=total, leave=leave, **options)


class _Lines:
    """Writes each state of a bar to stderr as a line, without carriage returns and padding."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()
