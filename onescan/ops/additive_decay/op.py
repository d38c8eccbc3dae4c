"""What distinguishes additive decay from other recurrences; see `onescan.ops.recurrence`."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_choice, check_whole
from onescan.kernels.chips import WIDEST_HEAD, widest_causal_head
from onescan.ops.additive_decay import blockwise, forms, tiled_causal
from onescan.ops.additive_decay.leak import add_leak, check_leak
from onescan.ops.additive_decay.ranks import merged_before
from onescan.ops.additive_decay.state import (
    AdditiveDecayState,
    AdditiveInputs,
    canonical,
    check_state_type,
    merged,
)
from onescan.ops.backend import chip_of, data_type, is_interpreted, name_of
from onescan.ops.feature_maps import FEATURE_MAPS, KERNEL_MAPS, FeatureMapName
from onescan.ops.layout import Layout
from onescan.ops.lrpe import RotaryPositions, rotary_table, rotary_tables
from onescan.ops.numerics import (
    accumulation_dtype,
    product_dtype,
    to_accumulation_dtype,
    zero_masked,
)
from onescan.ops.packing import PackingShard
from onescan.ops.recurrence import (
    Call,
    Implementation,
    Key,
    Recurrence,
    States,
    check_tensors,
)
from onescan.shapes import Angles, Keys, Leak, Queries, Values


class Inputs(NamedTuple):
    """The tensors of a call.

    Attributes:
        q: Queries.
        k: Key logits.
        v: Values.
        angles: Angles of LRPE, or the positions from which they are computed; None without LRPE.
        table: Cosines and sines of the angles, [T, H, 2, K], if `AdditiveDecay.prepared` needed
            them.
        leak: Rate at which weights decay with distance; None for 0.
        leaked: What has to be undone in the last state; None before `AdditiveDecay.prepared` and
            without a leak.
    """

    q: Queries
    k: Keys
    v: Values
    angles: Angles | RotaryPositions | None
    table: Tensor | None = None
    leak: Leak | None = None
    leaked: "Leaked | None" = None


class Leaked(NamedTuple):
    """How the state of a call with a leak differs from the one to return.

    Attributes:
        shift: What `add_leak` added to the log-normalizer.
        dtype: Type of kv in the state to return.
    """

    shift: Tensor
    dtype: torch.dtype


class Options(NamedTuple):
    """Options of a call, as in `additive_decay`."""

    feature_map: FeatureMapName
    chunk_size: int


Form = Callable[[AdditiveInputs], tuple[Values, AdditiveDecayState]]


def _in_torch(form: Form) -> Callable[[Call], tuple[Values, States]]:
    """Return a form in torch as an implementation."""

    def run(call: Call) -> tuple[Values, States]:
        inputs = _form_inputs(call)
        if inputs.state is not None:
            state = canonical(inputs.state, accumulation_dtype(inputs.v.dtype))
            inputs = inputs._replace(state=state)
        o, state = form(inputs._replace(keep=None))  # masked tokens have no weight already
        state = _without_leak(state, call.inputs.leaked)
        if inputs.keep is not None:
            (o,) = zero_masked(inputs.keep, o)
        return o, (state,)

    return run


def _without_leak(state: AdditiveDecayState, leaked: Leaked | None) -> AdditiveDecayState:
    """Undo in a state what a leak changed."""
    if leaked is None:
        return state
    return AdditiveDecayState(state.log_normalizer - leaked.shift, state.kv.to(leaked.dtype))


def _in_triton(form: Form) -> Callable[[Call], tuple[Values, States]]:
    """Return a form of kernels as an implementation."""

    def run(call: Call) -> tuple[Values, States]:
        o, state = form(_form_inputs(call))
        return o, (state,)

    return run


def _form_inputs(call: Call) -> AdditiveInputs:
    q, k, v, angles, table, *_ = call.inputs
    (state,), layout = call.states_in, call.layout
    return AdditiveInputs(
        q, k, v, angles, state, layout.keep, call.options.chunk_size,
        causal_block=layout.block_size, bounds=layout.bounds, packing=layout.packing,
        ranks=layout.ranks, table=table,
    )  # fmt: skip


def _kernels(name: str) -> Form:
    """Return a function of `launch` as a form."""

    def run(x: AdditiveInputs) -> tuple[Values, AdditiveDecayState]:
        from onescan.ops.additive_decay import launch  # imports Triton

        return getattr(launch, name)(
            x.q, x.k, x.v, x.angles, x.state, keep=x.keep, chunk_size=x.chunk_size,
            packing=x.packing,
        )  # fmt: skip

    return run


def _steps_in_triton(call: Call) -> tuple[Values, States]:
    from onescan.ops.additive_decay import launch

    q, k, v, angles, *_ = call.inputs
    positions = angles if isinstance(angles, RotaryPositions) else None
    feature_map = call.options.feature_map
    o, state = launch.recurrent(
        q, k, v, None if positions else angles, call.states_in[0], keep=call.layout.keep,
        positions=positions, feature_map=feature_map if feature_map in KERNEL_MAPS else "identity",
    )  # fmt: skip
    return o, (state,)


def _in_causal_forms(direction: str) -> dict[Key, Implementation]:
    """Return the implementations that compute blocks in a causal form on 2T tokens."""
    functions = {
        ("chunk", "torch"): _in_torch(blockwise.in_causal_form(tiled_causal.forward)),
        ("chunk", "triton"): _in_triton(blockwise.in_causal_form(_kernels("chunk"))),
        ("full", "torch"): _in_torch(blockwise.in_causal_form(forms.causal_full)),
    }
    return {
        Key(direction, *key): Implementation(run, packed=False) for key, run in functions.items()
    }


class AdditiveDecay(Recurrence):
    """S' = diag(f) S + R(exp(k) / s) v^T, with s' = s + exp(k) and f = s / s'."""

    state = AdditiveDecayState
    implementations: ClassVar = {
        Key("both", "one_scan", "torch"): Implementation(_in_torch(forms.one_scan), carries=True),
        Key("both", "one_scan", "triton"): Implementation(
            _in_triton(_kernels("one_scan")), over_ranks=False
        ),
        Key("both", "full", "torch"): Implementation(
            _in_torch(forms.full), over_ranks=False, packed=False
        ),
        Key("blocks", "one_scan", "torch"): Implementation(_in_torch(blockwise.one_scan)),
        **_in_causal_forms("blocks"),
        **_in_causal_forms("uneven"),
        Key("causal", "chunk", "torch"): Implementation(_in_torch(tiled_causal.forward)),
        Key("causal", "chunk", "triton"): Implementation(
            _in_triton(_kernels("chunk")), packed_over_ranks=False
        ),
        Key("causal", "full", "torch"): Implementation(_in_torch(forms.causal_full), packed=False),
        Key("causal", "recurrent", "torch"): Implementation(
            _in_torch(forms.recurrent), packed=False
        ),
        Key("causal", "recurrent", "triton"): Implementation(
            _steps_in_triton, packed=False, has_gradients=False
        ),
    }

    def direction(self, layout: Layout) -> str:
        """Return "blocks" or "uneven", for offsets, if there are blocks, with their own forms."""
        if layout.causal_block is None:
            return super().direction(layout)
        return "uneven" if layout.block_size is None else "blocks"

    def incoming(self, state: Any, layout: Layout) -> States:
        if state is not None:
            check_state_type("state", state)
        return (state,)

    def check(self, call: Call) -> None:
        q, k, v, angles, *_ = call.inputs
        keep, state_tensors = call.layout.keep, call.state_tensors
        check_whole(1, chunk_size=call.options.chunk_size)
        given = {} if angles is None else {"angles": angles}
        if isinstance(angles, RotaryPositions):
            given = {"angles.theta": angles.theta}
            start: Any = angles.start
            if not isinstance(start, Tensor):
                check_whole(0, **{"angles.start": start})
            elif start.ndim or start.is_floating_point():
                raise ValueError(
                    f"angles.start has shape {tuple(start.shape)} and dtype {start.dtype}, "
                    "expected a single integer"
                )
        features = q.shape[-1] * (1 if angles is None else 2)
        patterns = {"angles.theta": "H K", "angles": "T H K", "state.log_normalizer": "B H K"}
        patterns["state.kv"] = f"B H {features} V"
        check_tensors(
            keep,
            q=(q, "B T H K"),
            k=(k, "B T H K"),
            v=(v, "B T H V"),
            **{name: (x, patterns[name]) for name, x in (given | state_tensors).items()},
        )
        if call.inputs.leak is not None:
            check_leak(call.inputs.leak, k, call.layout)
        check_choice("feature_map", call.options.feature_map, FEATURE_MAPS)

    def form_of(self, call: Call, form: str, backend: str) -> str:
        """Return the form that runs. Kernels for single tokens have no gradients."""
        if form != "auto":
            return form
        layout, (q, k, v, *_) = call.layout, call.inputs
        if layout.causal:
            is_step = q.shape[1] == 1 and layout.packing is None
            takes_steps = is_step and (backend == "torch" or not call.is_learning)
            return "recurrent" if takes_steps else "chunk"
        if layout.causal_block is None or layout.packing is not None:
            return "one_scan"
        if layout.block_size is None:
            return "chunk"
        # on a CPU, a state per block is faster unless states are large
        widths = k.shape[-1], v.shape[-1]
        is_small = widths[0] * widths[1] <= 2 * layout.block_size * sum(widths)
        return "one_scan" if is_small else "chunk"

    def widest_head(self, call: Call) -> int:
        q, k, v = call.inputs[:3]
        has_kernels = q.device.type == "cuda" or is_interpreted()
        if has_kernels and self.direction(call.layout) != "both":
            return widest_causal_head(name_of(data_type(q, k, v)), chip_of(q.device))
        return WIDEST_HEAD

    def finite_inputs(self, inputs: Inputs) -> dict[str, Tensor | None]:
        q, k, v, angles, *_ = inputs
        rotary = angles.theta if isinstance(angles, RotaryPositions) else angles
        return {"q": q, "k": k, "v": v, "angles": rotary}

    def why_no_kernel(self, call: Call) -> str | None:
        return None if call.inputs.leak is None else "with leak, expected backend 'torch'"

    def prepared(self, call: Call, key: Key) -> Inputs:
        """Apply the feature map to the queries, and compute the angles of positions.

        A masked token has the logit -inf, so that it has no weight.
        """
        (q, k, v, angles, _, leak, _), layout, options = call.inputs, call.layout, call.options
        keep, in_torch = layout.keep, key.backend == "torch"
        is_fused = (key.form, key.backend) == ("recurrent", "triton")
        maps_here = options.feature_map != "identity" and not (
            is_fused and options.feature_map in KERNEL_MAPS
        )
        if keep is not None and (in_torch or maps_here):
            (q,) = zero_masked(keep, q)
        if maps_here:
            q = FEATURE_MAPS[options.feature_map](q)
        if isinstance(angles, RotaryPositions):
            angles = angles if is_fused else angles.angles(q.shape[1])
        elif angles is not None and keep is not None:
            angles = angles.masked_fill(~keep.any(dim=0)[:, None, None], 0)
        if in_torch:
            if key[:2] == ("both", "one_scan") and layout.packing is None:
                q, k, v = (x.to(product_dtype(q, k, v)) for x in (q, k, v))
            else:
                q, k, v = to_accumulation_dtype(q, k, v)
            if keep is not None:
                k = k.masked_fill(~keep[:, :, None, None], -torch.inf)
                (v,) = zero_masked(keep, v)
        table = leaked = None
        if leak is not None:
            k, shift = add_leak(k, leak, layout)
            leaked = Leaked(shift, v.dtype)
            q, v = q.double(), v.double()
        if layout.ranks is not None and key.direction != "both":
            table = rotary_table(angles, accumulation_dtype(k.dtype))
        return Inputs(q, k, v, angles, table, leak, leaked)

    def written(self, call: Call) -> AdditiveDecayState:
        (_, k, v, angles, *_), (state,) = call.inputs, call.states_in
        if call.layout.ranks is not None:
            return self.carried(call)[1][0]
        state = None if state is None else canonical(state, accumulation_dtype(v.dtype))
        return forms.context_of(k, v, rotary_tables(angles, k.dtype), state)

    def carried(self, call: Call) -> tuple[States, States]:
        (_, k, v, _, table, _, leaked), layout, (state,) = call.inputs, call.layout, call.states_in
        assert layout.ranks is not None
        k, v = to_accumulation_dtype(k, v)
        if layout.keep is not None:  # as kernels ignore masked tokens only later
            k = k.masked_fill(~layout.keep[:, :, None, None], -torch.inf)
            (v,) = zero_masked(layout.keep, v)
        if state is not None:
            state = canonical(state, v.dtype) if layout.ranks.is_first else None
        shard = layout.packing if isinstance(layout.packing, PackingShard) else None
        if shard is not None:  # only the last sequence continues
            is_last = shard.sequence == shard.sequence[:, -1:]
            k = k.masked_fill(~is_last[:, :, None, None], -torch.inf)
        cos, sin = (None, None) if table is None else table.unbind(-2)
        rank_state = forms.context_of(k, v, (cos, sin), state, low_memory=True)
        before, last = merged_before(layout.ranks, rank_state, shard)
        last = _without_leak(last, leaked)
        return (before if state is None else merged(state, before),), (last,)
