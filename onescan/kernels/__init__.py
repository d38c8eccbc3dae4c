"""Device code: kernels in Triton, which import neither torch nor models.

Files import only Triton and each other, so that kernels can be compiled ahead of time without torch
and without a GPU (`make check-kernels`). `onescan.kernels.common` describes how kernels are
declared; `onescan.ops.backend.launch` runs them.

Layout: q and k are [B, T, H, K], v and o [B, T, H, V], contiguous. Each program processes one head
of one sample. Names in upper case are compile-time constants. Lengths are not, so that a new length
does not trigger compilation.
"""

FILES = (
    "causal_scan",
    "one_scan",
    "toeplitz",
    "lrpe",
    "feature_maps",
    "gating",
    "cross_entropy",
    "diffusion",
    "additive_step",
    "decay_states",
    "decay_scalar",
    "decay_diagonal",
    "linear_attention",
    "delta_rule",
)
