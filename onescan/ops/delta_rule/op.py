"""What distinguishes the delta rule from other recurrences; see `onescan.ops.recurrence`."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from onescan.checks import check_log_decay, check_whole
from onescan.ops.delta_rule import forms
from onescan.ops.delta_rule.forms import Form, Inputs
from onescan.ops.delta_rule.ranks import EnteringStates
from onescan.ops.numerics import to_accumulation_dtype, zero_masked
from onescan.ops.recurrence import (
    Call,
    Implementation,
    Key,
    Recurrence,
    States,
    check_tensors,
)
from onescan.shapes import KeyValue, Values


class DeltaState(NamedTuple):
    """The state of one direction: a matrix that maps keys to values.

    Attributes:
        kv: ``[B, H, K, V]``, in float32, or float64 for float64 inputs. Zeros before any token.
    """

    kv: KeyValue


class DeltaStates(NamedTuple):
    """The states of both directions.

    Attributes:
        forward: As an input, the state of the tokens to the left; as an output, the state after
            the last token. None is the empty state.
        backward: As an input, the state of the tokens to the right; as an output, the backward
            state before the first token. None is the empty state.
    """

    forward: DeltaState | None
    backward: DeltaState | None


class Options(NamedTuple):
    """Options of the forms.

    Attributes:
        chunk_size: Updates per chunk.
    """

    chunk_size: int


def _in_torch(form: Form) -> Callable[[Call], tuple[Values, States]]:
    """Return a form as an implementation: for one or both directions, over one or several ranks."""

    def run(call: Call) -> tuple[Values, States]:
        inputs, layout = call.inputs, call.layout
        matrices = _matrices(call)
        options: dict[str, Any] = {"chunk_size": call.options.chunk_size}
        entering = None
        if layout.ranks is not None:
            entering = options["entering"] = EnteringStates(layout.ranks, len(inputs.q))
        of_directions = forms.causal if layout.causal else forms.bidirectional
        o, *states_out = of_directions(form, inputs, *matrices, **options)
        if entering is not None:
            states_out = list(entering.last.split(len(inputs.q)))
        return o, tuple(map(DeltaState, states_out))

    return run


def _in_triton(call: Call) -> tuple[Values, States]:
    from onescan.ops.delta_rule import launch

    o, *states_out = launch.chunk(call.inputs, _matrices(call), keep=call.layout.keep)
    return o, tuple(map(DeltaState, states_out))


def _matrices(call: Call) -> list[KeyValue | None]:
    """Return the incoming state of each direction that is computed."""
    states = call.states_in[: 1 if call.layout.causal else 2]
    return [None if state is None else state.kv for state in states]


def _implementations(direction: str) -> dict[Key, Implementation]:
    return {
        Key(direction, "full", "torch"): Implementation(_in_torch(forms.full), carries=True),
        Key(direction, "chunk", "torch"): Implementation(_in_torch(forms.chunk), carries=True),
        Key(direction, "recurrent", "torch"): Implementation(
            _in_torch(forms.recurrent), over_ranks=False
        ),
        Key(direction, "chunk", "triton"): Implementation(_in_triton, over_ranks=False),
    }


class DeltaRule(Recurrence):
    """S' = (I - beta k k^T) diag(exp(a)) S + beta k v^T, R times per token."""

    state = DeltaState
    states = DeltaStates
    implementations: ClassVar = _implementations("causal") | _implementations("both")

    def check(self, call: Call) -> None:
        q, k, v, beta, log_decay, *_ = call.inputs
        keep, state_tensors = call.layout.keep, call.state_tensors
        check_whole(1, chunk_size=call.options.chunk_size)
        updates = "R " if getattr(k, "ndim", 0) > q.ndim else ""
        check_tensors(
            keep,
            q=(q, "B T H K"),
            k=(k, f"B T {updates}H K"),
            v=(v, f"B T {updates}H V"),
            beta=(beta, f"B T {updates}H"),
            log_decay=(log_decay, ("B T H", "B T H K")),
            **{name: (x, "B H K V") for name, x in state_tensors.items()},
        )

    def form_of(self, call: Call, form: str, backend: str) -> str:
        if form != "auto":
            return form
        is_step = call.inputs.q.shape[1] == 1 and call.layout.ranks is None
        return "recurrent" if is_step and backend == "torch" else "chunk"

    def finite_inputs(self, inputs: Inputs) -> dict[str, Tensor | None]:
        return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "beta": inputs.beta}

    def why_no_kernel(self, call: Call) -> str | None:
        q, k, _, _, log_decay, *_ = call.inputs
        if k.ndim > q.ndim and k.shape[2] > 1:
            return "with several updates per token, expected one"
        if log_decay is not None and log_decay.ndim == q.ndim:
            return "with a decay per key channel, expected one per head"
        return None

    def prepared(self, call: Call, key: Key) -> Inputs:
        """Give k, v and beta an axis of updates; make masked tokens zero, so that they do nothing.

        An update with beta = 0 writes nothing, and a log-decay of 0 keeps the state.
        """
        q, k, v, beta, log_decay, *_ = call.inputs
        keep = call.layout.keep
        if k.ndim == q.ndim:
            k, v, beta = k.unsqueeze(2), v.unsqueeze(2), beta.unsqueeze(2)
        if log_decay is not None:
            log_decay = log_decay if log_decay.ndim == q.ndim else log_decay.unsqueeze(-1)
            if keep is not None:
                (log_decay,) = zero_masked(keep, log_decay)
            check_log_decay(log_decay)
        if key.backend == "triton":
            return Inputs(q, k, v, beta, log_decay, log_decay)
        tensors = [x for x in (q, k, v, beta, log_decay) if x is not None]
        q, k, v, beta, *logs = to_accumulation_dtype(*tensors)
        if keep is not None:
            q, k, v, beta = zero_masked(keep, q, k, v, beta)
        return Inputs(q, k, v, beta, *logs, *logs)

    def written(self, call: Call) -> DeltaState:
        _, (state,) = self.implementations[Key("causal", "chunk", "torch")].run(call)
        return state

    def restarted(self, call: Call) -> Inputs:
        """Empty the states by log-decays of -inf."""
        inputs, layout = call.inputs, call.layout
        none = inputs.q.new_zeros(1, 1, 1, 1)
        forward, backward = (none if x is None else x for x in (inputs.log_decay, inputs.backward))
        if (starts := layout.starts) is not None:
            forward = torch.where(starts[:, :, None, None], -torch.inf, forward)
        if (ends := layout.ends) is not None:
            backward = torch.where(ends[:, :, None, None], -torch.inf, backward)
        return inputs._replace(log_decay=forward, backward=backward)
