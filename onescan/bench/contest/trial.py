"""What is called of a contestant, and what is known of it without measuring."""

from collections.abc import Callable
from typing import Any, NamedTuple

FORWARD, BOTH_WAYS = "forward", "forward + backward"  # of an op
INFERENCE, TRAINING = "inference", "training"  # of a model


class RefusalError(ValueError):
    """Why a contestant cannot run on this machine with these options, however often it is tried."""


class Trial(NamedTuple):
    """One contestant at one size, ready to be called.

    Attributes:
        call: does the work once; on a GPU it need not wait for the end.
        floor_bytes: what any implementation must read and write of the call's inputs and outputs;
            0 where nobody has counted.
        macs: multiply-accumulates in the matrix products of a call; 0 where nobody has counted.
        items: tokens or images of a call.
        parameters: of a model.
        state_mib: carried from call to call.
    """

    call: Callable[[], object]
    floor_bytes: int = 0
    macs: int = 0
    items: int = 0
    parameters: int = 0
    state_mib: float = 0.0


# From a contestant's name, what it does, the size and the options; picklable by name.
Prepare = Callable[[str, str, int, Any], Trial]


class Field(NamedTuple):
    """Who takes part.

    Attributes:
        names: the first is what the others are compared to.
        works: what each does, one after the other, as in "forward".
        prepare: makes a trial, in the contestant's own process.
    """

    names: tuple[str, ...]
    works: tuple[str, ...]
    prepare: Prepare
