"""Cases of a benchmark that fail in the way that their name says; imported by their processes."""

import os
import signal

import torch
from harness import Case

MIB = 2**20


def prepare(name, mode, size, options):
    held = torch.ones(16, MIB // 4)  # neither this nor what is freed counts as memory of a call
    torch.ones(100, MIB // 4)

    def call():
        if name == "raises":
            raise ValueError("no\n more")
        if name == "out of memory":
            torch.empty(2**60, dtype=torch.uint8)
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return held.repeat(3, 1)

    return Case(call, items=4)
