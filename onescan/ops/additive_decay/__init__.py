"""Additive decay, the attention of LightNet: argument checks and the choice of an implementation.

z_t  = log sum_{s <= t} exp(k_s)                                      normalizer (K,)
KV_t = sum_{s <= t} R_s(exp(k_s - z_t)) v_s^T                         state      (F, V)
o_t  = KV_t^T R_t(q_t)        causal; KV_T if not causal              output     (V,)

with R_t(x) = [x cos(a_t), x sin(a_t)] and F = 2K under LRPE, R_t(x) = x and F = K without.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from onescan.checks import (
    can_look_at_values,
    check_choice,
    check_devices,
    check_floating,
    check_no_nan,
    check_positive,
    check_sequence_options,
    check_shapes,
    check_whole,
    named_state_tensors,
    nan_probe,
)
from onescan.kernels.chips import WIDEST_HEAD, widest_causal_head
from onescan.ops.additive_decay import blockwise, forms
from onescan.ops.additive_decay import causal as causal_chunks
from onescan.ops.additive_decay.ranks import merged_before
from onescan.ops.additive_decay.state import (
    AdditiveDecayState,
    AdditiveInputs,
    canonical,
    check_state_type,
    merge_states,
    merged,
)
from onescan.ops.backend import (
    Backend,
    chip_of,
    data_type,
    is_interpreted,
    name_of,
    resolved_backend,
    wants_gradient,
)
from onescan.ops.blocks import check_causal_block, check_whole_blocks
from onescan.ops.feature_maps import FEATURE_MAPS, KERNEL_MAPS, FeatureMapName
from onescan.ops.lrpe import RotaryPositions, rotary_table
from onescan.ops.numerics import (
    accumulation_dtype,
    disable_autocast,
    product_dtype,
    to_accumulation_dtype,
    zero_masked,
)
from onescan.ops.packing import Packing, PackingShard
from onescan.ops.parallel import (
    Group,
    SequenceGroup,
    is_empty,
    one_token,
    packing_over,
    sequence_group,
)
from onescan.shapes import Angles, Keep, Keys, Queries, Values

__all__ = ["IMPLEMENTATIONS", "AdditiveDecayState", "additive_decay", "choose", "merge_states"]

Form = Literal["auto", "one_scan", "full", "chunk", "recurrent"]
Forward = Callable[[AdditiveInputs], tuple[Values, AdditiveDecayState]]


def _one_scan_kernels(x: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    from onescan.ops.additive_decay import launch  # imports Triton

    return launch.one_scan(*x[:5], keep=x.keep, chunk_size=x.chunk_size, packing=x.packing)


def _chunk_kernels(x: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    from onescan.ops.additive_decay import launch

    return launch.chunk(*x[:5], keep=x.keep, chunk_size=x.chunk_size, packing=x.packing)


def _recurrent_kernels(x: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
    from onescan.ops.additive_decay import launch

    return launch.recurrent(*x[:5], keep=x.keep, positions=x.positions, feature_map=x.feature_map)


# All implementations by (causal, form, backend).
IMPLEMENTATIONS: dict[tuple[bool, str, str], Forward] = {
    (False, "one_scan", "torch"): forms.one_scan,
    (False, "full", "torch"): forms.full,
    (True, "chunk", "torch"): causal_chunks.forward,
    (True, "full", "torch"): forms.causal_full,
    (True, "recurrent", "torch"): forms.recurrent,
    (False, "one_scan", "triton"): _one_scan_kernels,
    (True, "chunk", "triton"): _chunk_kernels,
    (True, "recurrent", "triton"): _recurrent_kernels,
}
# Forms that support packed sequences, and forms that support a process group.
PACKED = {False: ["one_scan"], True: ["chunk"]}
OVER_RANKS = {False: ["one_scan"], True: ["chunk", "full", "recurrent"]}


def additive_decay(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    angles: Angles | RotaryPositions | None = None,
    feature_map: FeatureMapName = "identity",
    causal: bool = False,
    causal_block: int | None = None,
    keep: Keep | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    state: AdditiveDecayState | None = None,
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
        causal_block: Tokens per block of a blockwise causal call: each token reads its own block
            and all earlier blocks, and the softmax is over these tokens. The last block may be
            shorter. Masked tokens count as positions of a block. A call with a state begins a new
            block. None for a single block.
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
        form: Algorithm. All forms give the same result. Not causal: "one_scan" is O(T), "full" is
            O(T^2). Causal: "chunk" is O(T), "full" is O(T^2), "recurrent" visits one token at a
            time. With `causal_block`: "one_scan" computes a state per block, O(T); "chunk" and
            "full" run the causal forms on 2T tokens, without a state per block. "auto" chooses the
            fastest.
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
            with causal=True, cu_seqlens is invalid, the form does not support cu_seqlens or a
            group, a rank ends within a block or, on a CPU, an argument holds NaN or an infinity
            that causes NaN.

    >>> q = k = torch.zeros(1, 3, 1, 1)
    >>> v = torch.tensor([3.0, 5.0, 10.0]).reshape(1, 3, 1, 1)
    >>> additive_decay(q + 1, k, v)[0].flatten().tolist()  # mean, since all keys are equal
    [6.0, 6.0, 6.0]
    >>> additive_decay(q + 1, k, v, causal=True)[0].flatten().round(decimals=3).tolist()
    [3.0, 4.0, 6.0]
    >>> additive_decay(q + 1, k, v, causal_block=2)[0].flatten().round(decimals=3).tolist()
    [4.0, 4.0, 6.0]
    """
    ranks, own = sequence_group(group), q
    if causal_block is not None:
        check_causal_block(causal_block, causal=causal, cu_seqlens=cu_seqlens, ranks=ranks)
    if ranks is not None and causal_block is not None:
        check_whole_blocks(causal_block, ranks.lengths(own))
    if ranks is not None and isinstance(angles, RotaryPositions):
        angles = angles.angles(q.shape[1], ranks)
    if empty := is_empty(ranks, q):
        q, k, v = one_token(q, k, v)
        keep = q.new_zeros(q.shape[:2], dtype=torch.bool)
        if isinstance(angles, Tensor):
            (angles,) = one_token(angles, dim=0)
    _check(q, k, v, angles, causal, keep, state, chunk_size)
    check_choice("feature_map", feature_map, FEATURE_MAPS)
    dtype = v.dtype
    packing = packing_over(ranks, cu_seqlens, own, state=state)
    positions = angles if isinstance(angles, RotaryPositions) else None
    rotary = angles.theta if isinstance(angles, RotaryPositions) else angles
    choice = choose(
        form, backend, q, k, v, rotary, *(state or ()), causal=causal, causal_block=causal_block,
        packed=packing is not None, over_ranks=ranks is not None,
    )  # fmt: skip
    is_fused = choice == (True, "recurrent", "triton")
    in_kernels = choice[2] == "triton"  # which apply `keep` themselves
    maps_here = not (is_fused and feature_map in KERNEL_MAPS)
    if keep is not None and (not in_kernels or (maps_here and feature_map != "identity")):
        (q,) = zero_masked(keep, q)
    if maps_here:
        q, feature_map = FEATURE_MAPS[feature_map](q), "identity"
    if isinstance(angles, RotaryPositions):
        angles, positions = (None, angles) if is_fused else (angles.angles(q.shape[1]), None)
    elif angles is not None and keep is not None:
        angles = angles.masked_fill(~keep.any(dim=0)[:, None, None], 0)
    named = {
        "q": q,
        "k": k,
        "v": v,
        "angles": rotary,
        **named_state_tensors((state, None), causal=True),
    }
    state = state if ranks is None or ranks.is_first else None
    dropped = None
    if not in_kernels:  # which read any dtype and state
        if choice[1] == "one_scan" and packing is None and causal_block is None:
            q, k, v = (x.to(product_dtype(q, k, v)) for x in (q, k, v))
        else:
            q, k, v = to_accumulation_dtype(q, k, v)
        state = None if state is None else canonical(state, accumulation_dtype(v.dtype))
        if keep is not None:
            dropped, keep = ~keep[:, :, None, None], None
            k, v = k.masked_fill(dropped, -torch.inf), v.masked_fill(dropped, 0)
    with disable_autocast(q):
        last = table = None
        if ranks is not None and (causal or causal_block is not None):
            table = rotary_table(angles, accumulation_dtype(k.dtype))
            state, last = _carried(ranks, k, v, table, state, keep, packing)
        inputs = AdditiveInputs(
            q, k, v, angles, state, keep, chunk_size, positions, feature_map, packing, ranks, table
        )
        if causal_block is None:
            o, outgoing = IMPLEMENTATIONS[choice](inputs)
        elif choice[1] == "one_scan":
            o, outgoing = blockwise.one_scan(inputs, causal_block)
        else:
            o, outgoing = blockwise.in_causal_form(IMPLEMENTATIONS[choice], inputs, causal_block)
        outgoing = outgoing if last is None else last
    if dropped is not None:
        o = o.masked_fill(dropped, 0)
    if can_look_at_values(o):
        check_no_nan(nan_probe(o, outgoing.kv), **named)
    o = o[:, :0] if empty else o
    return o.to(dtype), None if packing is not None else outgoing


def choose(
    form: str,
    backend: Backend,
    q: Queries,
    k: Keys,
    v: Values,
    *others: Any,
    causal: bool,
    causal_block: int | None = None,
    packed: bool = False,
    over_ranks: bool = False,
) -> tuple[bool, str, str]:
    """Return the key in IMPLEMENTATIONS of the implementation that a call runs.

    With `causal_block`, all forms except "one_scan" run as causal calls.
    """
    if causal_block is not None:
        if form == "auto":  # on a CPU, "one_scan" is faster unless its states are large
            key_width, value_width = k.shape[-1], v.shape[-1]
            is_small = key_width * value_width <= 2 * causal_block * (key_width + value_width)
            form = "one_scan" if is_small or packed else "chunk"
        check_choice("form (causal_block)", form, ["one_scan", "chunk", "full"])
        if form != "one_scan":
            if packed:
                check_choice("form (causal_block, cu_seqlens)", form, PACKED[False])
            return choose(form, backend, q, k, v, *others, causal=True, over_ranks=over_ranks)
    direction = "causal" if causal else "not causal"
    here = [key for key in IMPLEMENTATIONS if key[0] == causal]
    check_choice(f"form ({direction})", form, ["auto", *dict.fromkeys(f for _, f, _ in here)])
    chosen: str = form
    if form == "auto":
        is_step = q.shape[1] == 1 and not packed
        chosen = ("recurrent" if is_step else "chunk") if causal else "one_scan"
    if packed:
        check_choice(f"form ({direction}, cu_seqlens)", chosen, PACKED[causal])
    if over_ranks:
        check_choice(f"form ({direction}, group)", chosen, OVER_RANKS[causal])
        if packed or not causal:
            here = [(causal, chosen, "torch")]
    if causal_block is not None:
        here = [(causal, chosen, "torch")]
    has_kernel = (causal, chosen, "triton") in here
    widest = WIDEST_HEAD
    if causal and (q.device.type == "cuda" or is_interpreted()):  # kernels only run there
        widest = widest_causal_head(name_of(data_type(q, k, v)), chip_of(q.device))
    op = f"additive_decay.{chosen}"
    runs_on = resolved_backend(backend, has_kernel, q, k, v, op=op, widest=widest)
    is_step = form == "auto" and (chosen, runs_on) == ("recurrent", "triton")
    if is_step and wants_gradient(q, k, v, *others):
        chosen = "chunk"  # the kernel for single tokens has no gradients
    known = [f"{f}/{b}" for _, f, b in here]
    check_choice(f"form/backend ({direction})", f"{chosen}/{runs_on}", known)
    return causal, chosen, runs_on


def _carried(
    ranks: SequenceGroup,
    k: Keys,
    v: Values,
    table: Tensor | None,
    state: AdditiveDecayState | None,
    keep: Keep | None,
    packing: Packing | None,
) -> tuple[AdditiveDecayState, AdditiveDecayState]:
    """Return the state before the tokens of this rank, and the state after those of all ranks."""
    k, v = to_accumulation_dtype(k, v)
    if keep is not None:
        dropped = ~keep[:, :, None, None]
        k, v = k.masked_fill(dropped, -torch.inf), v.masked_fill(dropped, 0)
    shard = packing if isinstance(packing, PackingShard) else None
    if shard is not None:  # only the last sequence continues
        is_last = shard.sequence == shard.sequence[:, -1:]
        k = k.masked_fill(~is_last[:, :, None, None], -torch.inf)
    cos, sin = (None, None) if table is None else table.unbind(-2)
    own = forms.context_of(k, v, (cos, sin), state)
    before, last = merged_before(ranks, own, shard)
    return before if state is None else merged(state, before), last


def _check(
    q: Any, k: Any, v: Any, angles: Any, causal: Any, keep: Any, state: Any, chunk_size: Any
) -> None:  # Any: the arguments are not checked yet
    check_sequence_options(causal=causal, keep=keep, chunk_size=chunk_size)
    if state is not None:
        check_state_type("state", state)
    incoming = named_state_tensors((state, None), causal=True)
    given = {} if angles is None else {"angles": angles}
    if isinstance(angles, RotaryPositions):
        given = {"angles.theta": angles.theta}
        start: Any = angles.start
        if not isinstance(start, Tensor):
            check_whole(0, **{"angles.start": start})
        elif start.ndim or start.is_floating_point():
            raise ValueError(
                f"angles.start has shape {tuple(start.shape)} and dtype {start.dtype}, expected "
                "one integer"
            )
    check_floating(q=q, k=k, v=v, **given, **incoming)
    check_devices(q=q, k=k, v=v, keep=keep, **given, **incoming)
    features = k.shape[-1] * (1 if angles is None else 2)
    patterns = {"log_normalizer": "B H K", "kv": f"B H {features} V"}
    sizes = check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        **{name: (x, "H K" if name == "angles.theta" else "T H K") for name, x in given.items()},
        keep=(keep, "B T"),
        **{name: (x, patterns[name.removeprefix("state.")]) for name, x in incoming.items()},
    )
    check_positive(**{letter: sizes[letter] for letter in "THKV"})
