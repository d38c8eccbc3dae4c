"""Device code: kernels in Triton, which import neither torch nor models.

Files import Triton and each other only, so that kernels compile ahead of time in an environment
without torch and without a GPU (`make check-kernels`). `onescan.kernels.common` says how kernels
are declared; `onescan.ops.backend.launch` runs them.

Layout: q and k are [B, T, H, K], v and o [B, T, H, V], contiguous. One program has one head of one
sample. Names in capitals are constants at compile time; lengths are not, so that a new length
compiles nothing.
"""

FILES = (
    "causal_scan",
    "one_scan",
    "toeplitz",
    "lrpe",
    "additive_step",
    "decay_states",
    "decay_scalar",
    "decay_diagonal",
)
