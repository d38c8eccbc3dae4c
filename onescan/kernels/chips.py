"""What chips differ in, as far as kernels mind: without Triton, so that anyone may ask."""

WIDEST_HEAD = 128  # channels of a key or value that fit a program's registers


def reads_operands_from_shared(chip: str) -> bool:
    """Whether matrix units take operands from shared memory: others hold them in registers.

    >>> reads_operands_from_shared("sm_90"), reads_operands_from_shared("sm_80")
    (True, False)
    """
    return chip.startswith(("sm_9", "sm_10"))


def widest_causal_head(data: str, chip: str) -> int:
    """The widest head whose causal gradients fit: fp32 is multiplied in pieces, all held."""
    few = data == "fp32" and chip.startswith("sm_") and not reads_operands_from_shared(chip)
    return WIDEST_HEAD // 2 if few else WIDEST_HEAD
