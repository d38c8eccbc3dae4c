"""The delta rule, causal or bidirectional: arguments, states and choice of form.

S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T   state    (K, V)
o_t = S_t^T q_t                                              output, causal               (V,)
o_t = (S_t + S'_t - beta_t k_t v_t^T)^T q_t                  output, bidirectional        (V,)

where S' is the state of the backward direction. DeltaNet has no decay, Gated DeltaNet one decay per
head, KDA one per key channel, and DeltaProduct several updates (I - beta k k^T) S + beta k v^T per
token.
"""

from typing import Literal

import torch
from torch import Tensor

from onescan.checks import check_no_nan
from onescan.ops import recurrence
from onescan.ops.backend import Backend
from onescan.ops.blocks import Blocks
from onescan.ops.delta_rule.forms import Inputs
from onescan.ops.delta_rule.op import DeltaRule, DeltaState, DeltaStates, Options
from onescan.ops.layout import layout_of
from onescan.ops.numerics import disable_autocast, to_accumulation_dtype
from onescan.ops.packing import Packing
from onescan.ops.parallel import Group
from onescan.shapes import Keep, Queries, UpdateBetas, UpdateKeys, UpdateValues, Values

__all__ = ["DELTA_RULE", "DeltaState", "DeltaStates", "delta_rule", "read", "write"]

Form = Literal["auto", "full", "chunk", "recurrent"]
StatePair = tuple[DeltaState | None, DeltaState | None]  # DeltaStates, or a plain pair

DELTA_RULE = DeltaRule()
UPDATES_NDIM = 5  # of k with an axis of updates


def delta_rule(
    q: Queries,
    k: UpdateKeys,
    v: UpdateValues,
    beta: UpdateBetas,
    log_decay: Tensor | None = None,
    *,
    causal: bool = False,
    causal_block: Blocks | None = None,
    keep: Keep | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    state: DeltaState | StatePair | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int = 64,
    group: Group | None = None,
) -> tuple[Values, DeltaState | DeltaStates | None]:
    """Compute linear attention in which each token overwrites the value stored under its key.

    Without `log_decay`, this is DeltaNet. With one decay per head, it is Gated DeltaNet; with one
    per key channel, Kimi Delta Attention (KDA). With an axis R in k, v and beta, each token applies
    R updates, as in DeltaProduct.

        S_{t,0} = diag(exp(log_decay_t)) S_{t-1}
        S_{t,r} = (I - beta_tr k_tr k_tr^T) S_{t,r-1} + beta_tr k_tr v_tr^T     r = 1, ..., R
        o_t     = S_t^T q_t, with S_t = S_{t,R}

    Bidirectional calls add the same recurrence from the last token to the first, and count the
    updates of each token once in its own output. Both directions apply the updates of a token in
    the order of the axis R. Reversing all inputs along T and swapping the states reverses the
    outputs.

    Inputs have the layout ``[B, T, H, K]``, unlike torch's ``scaled_dot_product_attention``, which
    takes ``[B, H, T, K]``.

    Sources: DeltaNet, arXiv:2406.06484; Gated DeltaNet, arXiv:2412.06464; KDA, arXiv:2510.26692;
    DeltaProduct, arXiv:2502.10297; both directions as in LION, arXiv:2502.16249, Table 1 and
    App. B.7. Each direction subtracts half of the token's own output; the half printed in LION,
    q k v / 2, lacks beta.

    Args:
        q: Queries ``[B, T, H, K]``, after their feature map.
        k: Keys ``[B, T, H, K]``, or ``[B, T, R, H, K]`` for R updates per token, after their
            feature map. Normalize them to length 1 so that beta is the fraction of the stored
            value that is replaced.
        v: Values ``[B, T, H, V]``, or ``[B, T, R, H, V]``.
        beta: Write strength ``[B, T, H]``, or ``[B, T, R, H]``, any finite number: 0 writes
            nothing, 1 replaces the stored value, 2 reflects it.
        log_decay: Log of the decay factor, at most 0; -inf empties the state. ``[B, T, H]`` for one
            decay per head, ``[B, T, H, K]`` for one per key channel. Applied once per token,
            before its first update. None for no decay.
        causal: Whether a token attends only to itself and to those before it.
        causal_block: Tokens per block of a blockwise causal call, or the offsets of blocks of
            several sizes, int32, ``[N + 1]``, from 0 to T: each token attends to its own block in
            both directions, and to all earlier blocks. The backward recurrence starts from an empty
            state at the end of each block. The last block may be shorter. Masked tokens count as
            positions of a block. As in causal calls, there is only a forward state. A call with a
            state begins a new block. Offsets do not support cu_seqlens. None for a single block.
        keep: ``[B, T]``, True for real tokens, the opposite of ``key_padding_mask`` in PyTorch and
            `onescan.nn`. Other tokens have zero output and neither update nor decay the state.
            None keeps all.
        cu_seqlens: Offsets of several sequences packed in one row, as in flash-attention: int32,
            ``[S + 1]``, from 0 to T, on the CPU or the device of q. With several rows, offsets
            count the tokens of all rows, up to B * T, and every row begins with a new sequence.
            Not with `state`.
        state: State returned by a previous call: a `DeltaState` if causal or with `causal_block`,
            otherwise `DeltaStates` or a pair, either of which may be None.
        form: Algorithm. "chunk" uses matrix products, O(T); "full" computes attention between all
            pairs of tokens, O(T^2); "recurrent" visits one token at a time, O(T). "auto" is
            "recurrent" for a single token in torch, otherwise "chunk".
        backend: "torch" runs on any device. "triton" requires a GPU and dtypes of at most 32 bits.
            It implements "chunk" with its own chunk size, for one update per token and at most one
            decay per head, without `group`, and has first derivatives only. "auto" chooses; see
            `use_backend`.
        chunk_size: Updates per chunk of the chunk form in torch: R per token. Rounded up to a power
            of two tokens for decays per key channel. Precision decreases if it is many times the
            key width.
        group: Process group across which the T axis is sharded in rank order; see
            `onescan.ops.parallel`. None uses that of `sequence_parallel`, if any. Supported by the
            forms "chunk" and "full" in torch. A block of `causal_block` may extend over several
            ranks. Does not support `causal_block` together with `cu_seqlens`.

    Returns:
        The outputs ``[B, T, H, V]`` in the dtype of v, and the state: a `DeltaState` if causal or
        with `causal_block`, otherwise `DeltaStates`; None with cu_seqlens.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the form or backend is
            unknown, the backend cannot run the call, the state does not match `causal`,
            chunk_size or causal_block is below 1, causal_block is given with causal=True,
            cu_seqlens is invalid or, on a CPU, log_decay is positive, or an argument contains NaN
            or an infinity that causes NaN.

    >>> import torch
    >>> q = k = torch.ones(1, 3, 1, 1)
    >>> v = torch.tensor([8.0, 4.0, 2.0]).reshape(1, 3, 1, 1)
    >>> half = torch.full((1, 3, 1), 0.5)
    >>> delta_rule(q, k, v, half, causal=True)[0].flatten().tolist()  # half of the way to v
    [4.0, 4.0, 3.0]
    >>> delta_rule(q, k, v, half)[0].flatten().tolist()
    [5.25, 4.5, 3.0]
    >>> delta_rule(q, k, v, half, causal_block=2)[0].flatten().tolist()
    [5.0, 4.0, 3.0]
    >>> delta_rule(q, k, v, half, half.log(), causal=True)[0].flatten().tolist()
    [4.0, 3.0, 1.75]
    """
    layout = layout_of(
        q, causal=causal, causal_block=causal_block, keep=keep, cu_seqlens=cu_seqlens,
        state=state, group=group,
    )  # fmt: skip
    inputs = Inputs(*layout.pad_if_empty(q, k, v, beta, log_decay))
    return recurrence.run(
        DELTA_RULE, inputs, layout, state, Options(chunk_size), form=form, backend=backend
    )


def write(
    k: UpdateKeys,
    v: UpdateValues,
    beta: UpdateBetas,
    log_decay: Tensor | None = None,
    *,
    keep: Keep | None = None,
    state: DeltaState | None = None,
    chunk_size: int = 64,
) -> DeltaState:
    """Return the state of tokens without queries, such as the context of cross-attention.

    Runs in plain torch. `read` reads the state. Arguments and errors are those of a causal
    `delta_rule`.

    >>> import torch
    >>> k, v = torch.ones(1, 2, 1, 1), torch.tensor([8.0, 4.0]).reshape(1, 2, 1, 1)
    >>> read(torch.ones(1, 1, 1, 1), write(k, v, torch.ones(1, 2, 1))).item()
    4.0
    """
    has_updates = isinstance(k, Tensor) and k.ndim == UPDATES_NDIM
    q = k[:, :, :1].sum(2) if has_updates else k  # outputs are dropped
    layout = layout_of(q, name="k", causal=True, keep=keep)
    inputs = Inputs(*layout.pad_if_empty(q, k, v, beta, log_decay))
    options = Options(chunk_size)
    return recurrence.write(DELTA_RULE, inputs, layout, state, options, form="chunk")


def read(q: Queries, state: DeltaState) -> Values:
    """Return what queries read from a state, S^T q, [B, T, H, V] in the dtype of q.

    Args:
        q: Queries ``[B, T, H, K]``, after their feature map.
        state: State of all tokens that the queries read, from `write` or `delta_rule`.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong or, on a CPU, an argument
            contains NaN.
    """
    recurrence.check_read(q, state, DeltaState, {"kv": "B H K V"})
    with disable_autocast(q):
        wide_q, kv = to_accumulation_dtype(q, state.kv)
        o = torch.einsum("bthk,bhkv->bthv", wide_q, kv)
    check_no_nan(o, q=q, **{"state.kv": state.kv})
    return o.to(q.dtype)
