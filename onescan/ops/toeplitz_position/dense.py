"""One Toeplitz matrix per channel, y_n = sum_m t_{n-m} x_m: a batched product, O(N^2).

Source: LightNet, arXiv:2405.21022, Eq. 17, along one axis.
"""

from onescan.ops.toeplitz_position.exponentials import kernel
from onescan.ops.toeplitz_position.state import step, with_state
from onescan.shapes import DirectedDecays, Lines, LineStates, Toeplitz


def forward(
    x: Lines, log_decay: DirectedDecays, weight: DirectedDecays, hidden: LineStates | None
) -> tuple[Lines, LineStates | None]:
    if hidden is not None and x.shape[-1] == 1:
        return step(x, log_decay[0], weight[0], hidden)
    y = x @ matrix(log_decay, weight, x.shape[-1])
    return with_state(y, x, log_decay, weight, hidden)


def matrix(log_decay: DirectedDecays, weight: DirectedDecays, length: int) -> Toeplitz:
    """t_{n-m} in row m, column n, to be applied from the right."""
    return kernel(log_decay, weight, length).unfold(-1, length, 1).flip(1)
