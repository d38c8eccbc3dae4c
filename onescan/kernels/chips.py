"""Hardware properties that kernels depend on. Does not import Triton, so any module can use it."""

WIDEST_HEAD = 128  # channels of a key or value that fit a program's registers


def reads_operands_from_shared(chip: str) -> bool:
    """Return whether matrix units read operands from shared memory rather than registers.

    >>> reads_operands_from_shared("sm_90"), reads_operands_from_shared("sm_80")
    (True, False)
    """
    return chip.startswith(("sm_9", "sm_10"))


def widest_causal_head(data: str, chip: str) -> int:
    """Return the widest head whose causal gradients fit in registers; fp32 needs the most."""
    few = data == "fp32" and chip.startswith("sm_") and not reads_operands_from_shared(chip)
    return WIDEST_HEAD // 2 if few else WIDEST_HEAD


def shared_memory_kib(chip: str) -> int:
    """Return how much shared memory a program of any kernel may use, in KiB.

    It is the amount that chips of this kind have; `make check-kernels` compiles for one of each.

    >>> shared_memory_kib("sm_90"), shared_memory_kib("sm_89"), shared_memory_kib("gfx942")
    (227, 99, 64)
    """
    if chip.startswith("gfx"):
        return 64
    return 227 if reads_operands_from_shared(chip) else 99
