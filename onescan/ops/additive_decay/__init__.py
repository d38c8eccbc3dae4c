"""Additive decay, the attention of LightNet: argument checks and the choice of an implementation.

z_t  = log sum_{s <= t} exp(k_s)                                      normalizer (K,)
KV_t = sum_{s <= t} R_s(exp(k_s - z_t)) v_s^T                         state      (F, V)
o_t  = KV_t^T R_t(q_t)        causal; KV_T if not causal              output     (V,)

with R_t(x) = [x cos(a_t), x sin(a_t)] and F = 2K under LRPE, R_t(x) = x and F = K without.
With a leak, k_s - leak (t - s) replaces k_s.
"""

from typing import Literal

from torch import Tensor

from onescan.checks import check_choice, check_no_nan
from onescan.ops import recurrence
from onescan.ops.additive_decay import tiled
from onescan.ops.additive_decay.op import AdditiveDecay, Inputs, Options
from onescan.ops.additive_decay.state import AdditiveDecayState, merge_states
from onescan.ops.backend import Backend
from onescan.ops.blocks import Blocks, check_whole_blocks
from onescan.ops.feature_maps import FEATURE_MAPS, FeatureMapName
from onescan.ops.layout import layout_of
from onescan.ops.lrpe import RotaryPositions, rotary_tables
from onescan.ops.numerics import disable_autocast, to_accumulation_dtype
from onescan.ops.packing import Packing
from onescan.ops.parallel import Group
from onescan.shapes import Angles, Keep, Keys, Leak, Queries, Values

__all__ = [
    "ADDITIVE_DECAY",
    "AdditiveDecayState",
    "Form",
    "additive_decay",
    "merge_states",
    "read",
    "write",
]

Form = Literal["auto", "one_scan", "full", "chunk", "recurrent"]

ADDITIVE_DECAY = AdditiveDecay()


def additive_decay(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    angles: Angles | RotaryPositions | None = None,
    feature_map: FeatureMapName = "identity",
    causal: bool = False,
    causal_block: Blocks | None = None,
    keep: Keep | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    state: AdditiveDecayState | None = None,
    leak: Leak | None = None,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int = 64,
    group: Group | None = None,
) -> tuple[Values, AdditiveDecayState | None]:
    """Compute linear attention with additive decay: per key channel, a softmax over the tokens.

    Inputs have the layout ``[B, T, H, K]``, unlike torch's ``scaled_dot_product_attention``, which
    takes ``[B, H, T, K]``.

    Logits may have any size up to about 1e4.

    Source: LightNet, arXiv:2405.21022, Eq. 13 (causal) and Eq. 14 (not causal). LRPE is applied as
    in App. A.2: the decay is computed from the keys before rotation and shared by both halves.

    Args:
        q: Queries, [B, T, H, K].
        k: Key logits, [B, T, H, K]. A token with logit -inf has no weight.
        v: Values, [B, T, H, V].
        angles: LRPE angles from `lrpe_angles`, [T, H, K], or for one axis `RotaryPositions`. None
            disables position encoding.
        feature_map: Feature map to apply to the queries, SiLU in the paper; "identity" if it has
            already been applied.
        causal: Whether each token reads only itself and earlier tokens.
        causal_block: Tokens per block of a blockwise causal call, or the offsets of blocks of
            several sizes, int32, [N + 1], from 0 to T: each token reads its own block and all
            earlier blocks, and the softmax is over these tokens. The last block may be shorter.
            Masked tokens count as positions of a block. A call with a state begins a new block.
            Offsets do not support cu_seqlens. None for a single block.
        keep: True for real tokens, [B, T], the opposite of ``key_padding_mask`` in PyTorch and
            `onescan.nn`. Other tokens have zero output and do not change the output of real ones.
            None keeps all tokens.
        cu_seqlens: Offsets of several sequences packed in one row, as in flash-attention: int32,
            [S + 1], from 0 to T, on the CPU or the device of q. With several rows, offsets count
            the tokens of all rows, up to B * T, and every row begins with a new sequence. Angles
            remain those of the positions in a row. Not with `state`; only with the form "chunk" if
            causal, otherwise with "one_scan".
        state: State of earlier tokens (causal or with `causal_block`), or of additional tokens (not
            causal), such as another device's part of the sequence or the context of
            cross-attention.
        leak: Rate at which weights decay with distance, finite and at least 0, [H] or [H, K]. The
            query at token t weights token s by exp(k_s - leak (t - s)), normalized over s <= t, so
            weights halve every ln(2) / leak tokens. Masked tokens do not count. Rates above 1e5
            act like 1e5, where each token reads only itself. Requires causal=True, computes in
            float64 and runs only on the backend "torch". States of calls with a leak cannot be
            merged. None disables the leak, as in the paper.
        form: Algorithm. All forms give the same result. Not causal: "one_scan" is O(T), "full" is
            O(T^2). Causal: "chunk" is O(T), "full" is O(T^2), "recurrent" visits one token at a
            time. With `causal_block`: "one_scan" computes a state per block, O(T); "chunk" and
            "full" run the causal forms on 2T tokens, without a state per block, and are the only
            ones for offsets. "auto" chooses the fastest.
        backend: "torch" runs on any device. "triton" runs kernels on a GPU. It implements
            "one_scan", "chunk" and, without gradients, "recurrent", for heads of up to 128 channels
            and dtypes of up to 32 bits, with first derivatives only. "recurrent" is one launch,
            which also applies the feature map and computes angles from `RotaryPositions`. "auto"
            chooses; see `use_backend`.
        chunk_size: Maximum number of tokens per chunk, for the form "chunk" only. Rounded down to a
            multiple of 8 between 8 and 64, or, in kernels, to a power of two between 16 and 64.
        group: Process group across which the T axis is sharded in rank order; see
            `onescan.ops.parallel`. None uses that of `sequence_parallel`, if any. Bidirectional
            calls require the form "one_scan"; only causal calls without cu_seqlens have kernels.
            With `causal_block`, each rank's tokens must begin with a new block, and cu_seqlens is
            not supported.

    Returns:
        The outputs in the dtype of v, and the state of all tokens including the incoming state;
        None with cu_seqlens.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the form, backend or
            feature map does not exist, chunk_size or causal_block is below 1, causal_block is given
            with causal=True, leak is given without causal=True, cu_seqlens is invalid, the form
            does not support cu_seqlens or a group, a rank ends within a block or, on a CPU, leak is
            negative or not finite, or an argument contains NaN or an infinity that causes NaN.

    >>> import torch
    >>> q = k = torch.zeros(1, 3, 1, 1)
    >>> v = torch.tensor([3.0, 5.0, 10.0]).reshape(1, 3, 1, 1)
    >>> additive_decay(q + 1, k, v)[0].flatten().tolist()  # mean, since all keys are equal
    [6.0, 6.0, 6.0]
    >>> additive_decay(q + 1, k, v, causal=True)[0].flatten().round(decimals=3).tolist()
    [3.0, 4.0, 6.0]
    >>> additive_decay(q + 1, k, v, causal_block=2)[0].flatten().round(decimals=3).tolist()
    [4.0, 4.0, 6.0]
    >>> leak = torch.tensor([2.0]).log()  # a half-life of one token
    >>> o, _ = additive_decay(q + 1, k, v, causal=True, leak=leak)
    >>> [round(x, 2) for x in o.flatten().tolist()]
    [3.0, 4.33, 7.57]
    """
    layout = layout_of(
        q, causal=causal, causal_block=causal_block, keep=keep, cu_seqlens=cu_seqlens, state=state,
        group=group,
    )  # fmt: skip
    if causal_block is not None and layout.lengths is not None:
        check_whole_blocks(causal_block, layout.lengths)
    if layout.ranks is not None:
        if isinstance(angles, RotaryPositions):
            angles = angles.angles(q.shape[1], layout.ranks)
        (angles,) = layout.pad_if_empty(angles, dim=0)
    q, k, v = layout.pad_if_empty(q, k, v)
    inputs = Inputs(q, k, v, angles, leak=leak)
    options = Options(feature_map, chunk_size)
    return recurrence.run(
        ADDITIVE_DECAY, inputs, layout, state, options, form=form, backend=backend
    )


def write(
    k: Keys,
    v: Values,
    *,
    angles: Angles | RotaryPositions | None = None,
    keep: Keep | None = None,
    state: AdditiveDecayState | None = None,
) -> AdditiveDecayState:
    """Return the state of tokens without queries, such as the context of cross-attention.

    Runs in plain torch. `read` reads the state.

    Args:
        k: As in `additive_decay`.
        v: As in `additive_decay`.
        angles: As in `additive_decay`.
        keep: As in `additive_decay`.
        state: State of other tokens to include; None if there are none.

    Raises:
        ValueError: As `additive_decay`.

    >>> import torch
    >>> k, v = torch.zeros(1, 3, 1, 1), torch.tensor([3.0, 5.0, 10.0]).reshape(1, 3, 1, 1)
    >>> read(torch.ones(1, 2, 1, 1), write(k, v)).flatten().tolist()
    [6.0, 6.0]
    """
    layout = layout_of(k, name="k", causal=True, keep=keep)
    if layout.ranks is not None:
        if isinstance(angles, RotaryPositions):
            angles = angles.angles(k.shape[1], layout.ranks)
        (angles,) = layout.pad_if_empty(angles, dim=0)
    k, v = layout.pad_if_empty(k, v)
    inputs, options = Inputs(k, k, v, angles), Options("identity", chunk_size=64)
    return recurrence.write(ADDITIVE_DECAY, inputs, layout, state, options, form="recurrent")


def read(
    q: Queries,
    state: AdditiveDecayState,
    *,
    angles: Angles | None = None,
    feature_map: FeatureMapName = "identity",
) -> Values:
    """Read a state with queries; return outputs, [B, T, H, V] in the dtype of q, in plain torch.

    Args:
        q: Queries, [B, T, H, K].
        state: State of all tokens that the queries read, from `write` or `additive_decay`.
        angles: LRPE angles of the queries, [T, H, K], if the state was written with angles.
        feature_map: Feature map to apply to the queries.

    Raises:
        ValueError: If shapes or devices do not match, a dtype is wrong, the feature map does not
            exist or, on a CPU, an argument contains NaN.
    """
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    patterns = {"log_normalizer": "B H K", "kv": "B H F V"}
    recurrence.check_read(q, state, AdditiveDecayState, patterns, angles=(angles, "T H K"))
    width = q.shape[-1] * (1 if angles is None else 2)
    if state.kv.shape[2] != width:
        raise ValueError(
            f"state.kv has {state.kv.shape[2]} features, expected {width} "
            f"{'without' if angles is None else 'with'} angles"
        )
    with disable_autocast(q):
        wide_q, kv = to_accumulation_dtype(FEATURE_MAPS[feature_map](q), state.kv)
        o = tiled.read(wide_q, kv, *rotary_tables(angles, wide_q.dtype))
    check_no_nan(o, q=q, angles=angles, **{"state.kv": state.kv})
    return o.to(q.dtype)
