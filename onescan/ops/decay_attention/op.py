"""What distinguishes linear attention with decay from other recurrences (`ops.recurrence`)."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from onescan.checks import check_choice, check_log_decay, check_whole, is_known
from onescan.ops.decay_attention import forms, tiled
from onescan.ops.decay_attention.forms import (
    Directions,
    directed,
    separated,
    total,
    updates_of,
)
from onescan.ops.decay_attention.ranks import carried_states
from onescan.ops.decay_factors import padded
from onescan.ops.feature_maps import FEATURE_MAPS, KERNEL_MAPS, FeatureMapName
from onescan.ops.numerics import (
    accumulation_dtype,
    product_dtype,
    to_accumulation_dtype,
    zero_masked,
)
from onescan.ops.recurrence import (
    Call,
    Implementation,
    Key,
    Recurrence,
    States,
    check_tensors,
)
from onescan.shapes import DecayedKeys, DecayedKeyValue, Keys, LogDecays, Queries, Values

PATTERNS = {1: "H", 3: "B T H", 4: "B T H K"}  # of log_decay, by rank

DecayAt = Literal["auto", "source", "target", "symmetric"]
Normalize = Literal["none", "sum", "max_one"]


class DecayState(NamedTuple):
    """Decayed sums over all keys and values on one side of a token.

    Attributes:
        kv: Sum of decay * k v^T, [B, H, K, V]; float32, or float64 for float64 inputs.
        k_sum: Sum of decay * k, [B, H, K], used to compute the row sums for `normalize`.
    """

    kv: DecayedKeyValue
    k_sum: DecayedKeys


class DecayStates(NamedTuple):
    """The states of a bidirectional call, one per direction.

    Attributes:
        forward: As an input, the state of the tokens to the left. As an output, the state after
            the last token.
        backward: As an input, the state of the tokens to the right. As an output, the state before
            the first token.
    """

    forward: DecayState | None
    backward: DecayState | None


class Inputs(NamedTuple):
    """The tensors of a call.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        log_decay: The argument of the caller.
        decays: Log-decays as each direction applies them; None before `DecayAttention.prepared`.
        ends: Log-decay of each direction after the last token visited; None if there is none.
    """

    q: Queries
    k: Keys
    v: Values
    log_decay: Tensor | None
    decays: Directions | None = None
    ends: tuple[Tensor | None, Tensor | None] = (None, None)


class Options(NamedTuple):
    """Options of a call, as in `decay_attention`."""

    feature_map: FeatureMapName
    decay_at: DecayAt
    normalize: Normalize
    chunk_size: int


def _in_torch(form: Callable[..., Any]) -> Callable[[Call], tuple[Values, States]]:
    """Return a form as an implementation."""

    def run(call: Call) -> tuple[Values, States]:
        q, k, v, _, decays, ends = call.inputs
        dtype = accumulation_dtype(v.dtype)
        options = forms.Options(call.options.normalize, call.options.chunk_size, call.returns_state)
        o, states_out = form(
            q, k, v, decays, tuple(_joined(x, dtype) for x in call.states_in), options
        )
        return o, tuple(map(_split, states_out, ends))

    return run


def _in_triton(kernel: str) -> Callable[[Call], tuple[Values, States]]:
    """Return a function of `launch` as an implementation."""

    def run(call: Call) -> tuple[Values, States]:
        from onescan.ops.decay_attention import launch

        q, k, v, _, decays, ends = call.inputs
        absolute = call.options.normalize == "max_one" and call.layout.causal
        options = {"normalizer": "absolute_max_one" if absolute else call.options.normalize}
        if _maps_itself(call.options, kernel):
            options["feature_map"] = call.options.feature_map
        o, states_out = getattr(launch, kernel)(
            q, k, v, decays, call.states_in, keep=call.layout.keep, **options
        )
        if not call.returns_state:
            return o, states_out
        if (
            states_out[0] is states_out[1] and states_out[1] is not None
        ):  # a caller may change one in place
            states_out = states_out[0], DecayState(*(x.clone() for x in states_out[1]))
        return o, tuple(map(_after, states_out, ends))

    return run


def _maps_itself(options: Options, kernel: str) -> bool:
    """Return whether a kernel applies the feature map."""
    return kernel == "recurrent" and options.feature_map in KERNEL_MAPS


def _joined(state: DecayState | None, dtype: torch.dtype) -> Tensor | None:
    """Concatenate both parts of a state into one matrix, [B, H, K, V + 1]."""
    if state is None:
        return None
    return torch.cat([state.kv.to(dtype), state.k_sum.to(dtype).unsqueeze(-1)], dim=-1)


def _split(matrix: Tensor | None, log_decay: Tensor | None) -> DecayState | None:
    """Split a matrix from `_joined` into a state, and apply a final decay if given."""
    if matrix is None:
        return None
    return _after(DecayState(matrix[..., :-1], matrix[..., -1]), log_decay)


def _after(state: DecayState | None, log_decay: Tensor | None) -> DecayState | None:
    """Apply one more decay, [., H or 1, K or 1], to a state, if given."""
    if state is None or log_decay is None:
        return state
    decay = log_decay.exp()
    return DecayState(state.kv * decay.unsqueeze(-1), state.k_sum * decay)


def _implementations(direction: str) -> dict[Key, Implementation]:
    return {
        Key(direction, "full", "torch"): Implementation(_in_torch(tiled.full)),
        Key(direction, "chunk", "torch"): Implementation(_in_torch(tiled.chunk)),
        Key(direction, "recurrent", "torch"): Implementation(_in_torch(forms.recurrent)),
        Key(direction, "chunk", "triton"): Implementation(_in_triton("chunk")),
    }


class DecayAttention(Recurrence):
    """S' = diag(exp(a)) S + k v^T in each direction."""

    state = DecayState
    states = DecayStates
    implementations: ClassVar = {
        **_implementations("causal"),
        Key("causal", "recurrent", "triton"): Implementation(
            _in_triton("recurrent"), has_gradients=False
        ),
        **_implementations("both"),
        Key("both", "one_scan", "torch"): Implementation(_in_torch(forms.one_scan)),
        Key("both", "one_scan", "triton"): Implementation(_in_triton("one_scan")),
    }

    def check(self, call: Call) -> None:
        (q, k, v, log_decay, *_), options = call.inputs, call.options
        keep, state_tensors = call.layout.keep, call.state_tensors
        check_whole(1, chunk_size=options.chunk_size)
        check_tensors(
            keep,
            q=(q, "B T H K"),
            k=(k, "B T H K"),
            v=(v, "B T H V"),
            log_decay=(log_decay, tuple(PATTERNS.values())),
            **{
                name: (x, "B H K V" if name.endswith("kv") else "B H K")
                for name, x in state_tensors.items()
            },
        )
        check_choice("decay_at", options.decay_at, get_args(DecayAt))
        if call.layout.causal and options.decay_at == "symmetric":
            raise ValueError(
                "decay_at is 'symmetric' with causal=True, expected 'auto', 'source' or 'target'"
            )
        check_choice("normalize", options.normalize, get_args(Normalize))
        check_choice("feature_map", options.feature_map, FEATURE_MAPS)

    def form_of(self, call: Call, form: str, backend: str) -> str:
        """Return the form that runs; without decay, one sum serves the tokens of both directions.

        Kernels have no full form.
        """
        if not call.layout.causal and not _decays(call):
            return "one_scan" if form in ("auto", "chunk") else form
        if form == "one_scan" and not call.layout.causal:
            raise ValueError(
                "form is 'one_scan', which does not support decay, cu_seqlens or causal_block"
            )
        if form != "auto":
            return form
        (q, _, v, log_decay, *_), directions = call.inputs, 1 if call.layout.causal else 2
        if backend == "torch":
            return cheapest(
                q.shape[1], q.shape[3], v.shape[3], directions=directions,
                chunk_size=call.options.chunk_size, is_diagonal=_is_diagonal(log_decay),
            )  # fmt: skip
        is_step = is_known(q.shape[1]) and q.shape[1] == 1 and directions == 1
        return "recurrent" if is_step and not call.is_learning else "chunk"

    def prepared(self, call: Call, key: Key) -> Inputs:
        """Apply the feature map, and shift the decays to where each direction applies them.

        Keys of zeros write nothing, and a log-decay of 0 keeps the state.
        """
        (q, k, v, log_decay, *_), keep, options = call.inputs, call.layout.keep, call.options
        in_torch = key.backend == "torch"
        if options.feature_map != "identity" and (in_torch or not _maps_itself(options, key.form)):
            if keep is not None:
                q, k = zero_masked(keep, q, k)
            q, k = FEATURE_MAPS[options.feature_map](q), FEATURE_MAPS[options.feature_map](k)
        if in_torch and key.form == "recurrent":
            q, k, v = to_accumulation_dtype(q, k, v)
        elif in_torch:
            q, k, v = (x.to(product_dtype(q, k, v)) for x in (q, k, v))
        if in_torch and keep is not None:
            q, k, v = zero_masked(keep, q, k, v)
        wide = _broadcast(log_decay, accumulation_dtype(k.dtype), k)
        if keep is not None:
            (wide,) = zero_masked(keep, wide)
        if log_decay is not None:
            check_log_decay(log_decay if log_decay.ndim == 1 else wide)
        decay_at = options.decay_at
        if decay_at == "auto":
            decay_at = "target" if call.layout.causal or _is_diagonal(log_decay) else "source"
        if not _decays(call):
            decay_at = "target"  # which shifts nothing
        return Inputs(q, k, v, log_decay, *directed(wide, decay_at, causal=call.layout.causal))

    def restarted(self, call: Call) -> Inputs:
        """Empty the states by log-decays of -inf."""
        inputs, layout = call.inputs, call.layout
        assert inputs.decays is not None
        return inputs._replace(decays=separated(inputs.decays, layout.starts, layout.ends))

    def written(self, call: Call) -> DecayState:
        inputs, (state_in, _) = call.inputs, call.states_in
        if call.layout.ranks is not None:
            return self.carried(call)[1][0]
        before = _joined(state_in, inputs.v.dtype)
        if _decays(call):
            ((added, transition),) = updates_of(inputs.k, inputs.v, inputs.decays, inputs.ends)
            before = None if before is None else transition * before
        else:
            added = total(inputs.k, inputs.v)
        state = _split(added if before is None else added + before, None)
        assert state is not None
        return state

    def carried(self, call: Call) -> tuple[States, States]:
        inputs, keep = call.inputs, call.layout.keep
        assert inputs.decays is not None
        assert call.layout.ranks is not None
        k, v = to_accumulation_dtype(inputs.k, inputs.v)
        if keep is not None:  # as kernels ignore masked tokens only later
            k, v = zero_masked(keep, k, v)
        forward, backward = (_joined(state, k.dtype) for state in call.states_in)
        entering, final = carried_states(
            call.layout.ranks, k, v, inputs.decays, inputs.ends, (forward, backward)
        )
        return tuple(_split(x, None) for x in entering), tuple(_split(x, None) for x in final)


def _decays(call: Call) -> bool:
    """Return whether states decay, including where they restart."""
    return call.inputs.log_decay is not None or call.layout.restarts


def _is_diagonal(log_decay: Tensor | None) -> bool:
    return log_decay is not None and PATTERNS[log_decay.ndim] == "B T H K"


def _broadcast(log_decay: Tensor | None, dtype: torch.dtype, k: Keys) -> LogDecays:
    """Reshape log-decays to [1 or B, T, 1 or H, 1 or K]."""
    tokens = k.shape[1]
    if log_decay is None:
        return k.new_zeros(1, tokens, 1, 1, dtype=dtype)
    wide = log_decay.to(dtype)
    if PATTERNS[wide.ndim] == "H":
        return wide[:, None].expand(1, tokens, -1, 1)
    return wide if PATTERNS[wide.ndim] == "B T H K" else wide.unsqueeze(-1)


def cheapest(
    tokens: int,
    key_width: int,
    value_width: int,
    *,
    directions: int = 2,
    chunk_size: int = 64,
    is_diagonal: bool = False,
) -> str:
    """Return the form with the fewest multiplications per token and head in plain torch.

        full:   T (K + V)                  attention to all tokens
        chunk:  C (K + V) + (3 + D) K V    attention within the chunk, and D states

    where T and C are padded if the decay is diagonal. Two of the K V terms are products with a
    state. The others account for the remaining cost of states. They were fitted to the lengths at
    which the forward pass of both forms took equal time on a CPU, for selective decay,
    K = V = 32, 64 and 128, and C = 64.

    Args:
        tokens: Number of tokens T.
        key_width: Key channels per head, K.
        value_width: Value channels per head, V.
        directions: Number of directions D.
        chunk_size: Tokens per chunk, C.
        is_diagonal: Whether each key channel has its own decay.

    >>> cheapest(197, 64, 64), cheapest(512, 64, 64)
    ('full', 'chunk')
    """
    if not is_known(tokens):
        return "chunk"  # which fits any length
    if tokens == 1:
        return "recurrent"
    all_tokens, chunk_tokens = (
        padded(n) if is_diagonal else n for n in (tokens, min(chunk_size, tokens))
    )
    states = (3 + directions) * key_width * value_width
    full = all_tokens * (key_width + value_width)
    return "full" if full <= chunk_tokens * (key_width + value_width) + states else "chunk"
