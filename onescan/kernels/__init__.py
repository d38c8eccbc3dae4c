"""Device code alone: kernels in Triton, which know neither torch nor a model.

A file imports Triton and `onescan.kernels.common`, so that all compile ahead of time in an
environment without torch and without a GPU (`make check-kernels`). What launches them is in
`onescan.ops`, beside the plain torch forms that say the same.

Layout: q and k are [B, T, H, K], v and o [B, T, H, V], contiguous. One program has one head of one
sample. Names in capitals are known when a kernel is compiled; lengths are not, so that a new length
compiles nothing.
"""

FILES = (
    "causal_scan",
    "one_scan",
    "toeplitz",
    "lrpe",
    "additive_step",
    "decay_scalar",
    "decay_diagonal",
    "decay_step",
)
