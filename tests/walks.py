"""Count the files of the package that a call enters.

Print the files that one call of a preset enters, with the lines it executes in each:

    python tests/walks.py lightnet_tiny lightnet_lm_45m
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from onescan.models.presets import preset

PACKAGE = f"{Path(__file__).parents[1] / 'onescan'}/"
SMALLER = {"depth": 2}  # every block runs the same files


class Walk(NamedTuple):
    """What a call executed.

    Attributes:
        lines: Number of distinct lines executed in each file, in the order of entry.
        switches: How often execution moved from one file to another.
    """

    lines: dict[str, int]
    switches: int


def walk(call: Callable[[], object]) -> Walk:
    """Trace the lines of the package that a call executes on the current thread.

    >>> from onescan.ops import lrpe_frequencies
    >>> next(iter(walk(lambda: lrpe_frequencies(4, axes=2)).lines))
    'ops/lrpe.py'
    """
    executed: dict[str, set[int]] = {}
    switches, current = -1, ""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal switches, current
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return None
        if event == "line":
            executed.setdefault(name, set()).add(frame.f_lineno)
            switches += name != current
            current = name
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    lines = {name.removeprefix(PACKAGE): len(seen) for name, seen in executed.items()}
    return Walk(lines, max(switches, 0))


def preset_walk(name: str, **changes: Any) -> Walk:
    """Trace the second call of a preset in eval mode on the CPU.

    A classifier computes the logits of one image; a language model generates three tokens.
    """
    model = preset(name, **{**SMALLER, **changes}).build().eval()

    @torch.no_grad()
    def call() -> None:
        if hasattr(model, "generate"):
            model.generate(torch.arange(8).unsqueeze(0), max_new_tokens=3)
        else:
            model(torch.zeros(1, 3, *model.config.image_size))

    call()  # the first call imports modules and fills caches
    return walk(call)


if __name__ == "__main__":
    for preset_name in sys.argv[1:]:
        traced = preset_walk(preset_name)
        for file, count in traced.lines.items():
            print(f"{count:5}  {file}")
        print(
            f"{preset_name}: {len(traced.lines)} files, {sum(traced.lines.values())} lines, "
            f"{traced.switches} switches\n"
        )
