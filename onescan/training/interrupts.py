"""Ctrl-C and the system's request to end, noted until the run is between two updates."""

import logging
import signal
import threading
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger("onescan")

URGENT_S = 1.0  # a launcher hands the terminal's Ctrl-C on, so that one arrives twice


class Interrupts:
    """While entered, notes SIGINT and SIGTERM in `asked`; a second, later Ctrl-C ends at once.

    Args:
        says: what happens now, for who asked.
    """

    def __init__(self, says: str = "stopping after this update, with a checkpoint") -> None:
        self.says, self.asked = says, False
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # only it gets signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.asked and number == signal.SIGINT and monotonic() - self._since > URGENT_S:
            raise KeyboardInterrupt
        if not self.asked:
            log.warning("%s; Ctrl-C again ends at once", self.says)
        self.asked, self._since = True, self._since or monotonic()
