"""Run the ops whose state obeys a linear recurrence, S' = P S + U.

Because the recurrence is linear, every option that these ops share is a change of their inputs.
`run` applies these changes in the same order for all ops:

    a masked token                        a neutral update, P = 1 and U = 0
    a packed sequence, a block            a restart, P = 0
    an earlier call, another rank         an incoming state

A `Recurrence` describes an op: its shapes and types, how to mask and restart it, and its
implementations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from onescan.checks import (
    check_devices,
    check_floating,
    check_no_nan,
    check_positive,
    check_shapes,
    check_supported,
    holds_nan,
    named_state_tensors,
    unpack_states,
)
from onescan.kernels.chips import WIDEST_HEAD
from onescan.messages import named_type, unsupported
from onescan.ops.backend import is_transformed, resolved_backend, wants_gradient
from onescan.ops.layout import Layout
from onescan.ops.numerics import disable_autocast, zero_masked
from onescan.shapes import Values

States = tuple[Any, ...]  # of each direction, forward first; None is the empty state


class Call(NamedTuple):
    """A call of an op.

    Attributes:
        inputs: The op's tensors, a NamedTuple with q, k and v; not checked before
            `Recurrence.check`.
        layout: Layout of the tokens.
        states_in: The incoming state of each direction.
        options: The op's other arguments.
        returns_state: Whether the outgoing states are needed.
        state_tensors: The tensors of the incoming states, by the names used in errors.
    """

    inputs: Any
    layout: Layout
    states_in: States
    options: Any
    returns_state: bool
    state_tensors: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the inputs and the incoming states."""
        nested = (x if isinstance(x, tuple) else (x,) for x in self.inputs)
        given = (x for x in chain.from_iterable(nested) if isinstance(x, Tensor))
        return [*given, *self.state_tensors.values()]

    @property
    def is_learning(self) -> bool:
        """Whether gradients are needed."""
        return wants_gradient(*self.tensors)


class Key(NamedTuple):
    """The name of an implementation.

    Attributes:
        direction: "causal", "both", or another kind of call; see `Recurrence.direction`.
        form: The algorithm, never "auto".
        backend: "torch" or "triton".
    """

    direction: str
    form: str
    backend: str


class Implementation(NamedTuple):
    """A form on one backend.

    Attributes:
        run: Function of a call with prepared inputs that returns the outputs and the outgoing
            states.
        carries: Whether it exchanges states with other ranks itself.
        over_ranks: Whether it supports tokens on several ranks.
        packed: Whether it supports packed sequences.
        packed_over_ranks: Whether it supports packed sequences on several ranks.
        has_gradients: Whether it has gradients.
    """

    run: Callable[[Call], tuple[Values, States]]
    carries: bool = False
    over_ranks: bool = True
    packed: bool = True
    packed_over_ranks: bool = True
    has_gradients: bool = True

    def fits(self, layout: Layout) -> bool:
        """Return whether it supports packed sequences and several ranks, if there are any."""
        is_packed, has_ranks = layout.packing is not None, layout.ranks is not None
        both_fit = self.packed_over_ranks or not (is_packed and has_ranks)
        return (self.packed or not is_packed) and (self.over_ranks or not has_ranks) and both_fit


class Recurrence(ABC):
    """Description of an op whose state obeys a linear recurrence.

    Attributes:
        state: The class of the state of one direction.
        states: The class of the states of both directions; None if they share one state.
        implementations: All implementations. Requesting a missing one is an error.
    """

    state: ClassVar[Any]
    states: ClassVar[Any] = None
    implementations: ClassVar[Mapping[Key, Implementation]]

    def direction(self, layout: Layout) -> str:
        """Return the direction of the implementations that a call may run."""
        return "causal" if layout.causal else "both"

    def incoming(self, state: Any, layout: Layout) -> States:
        """Return the incoming state of each direction, from the argument of the caller.

        Raises:
            ValueError: If it has the wrong type.
        """
        return unpack_states(state, self.state, causal=layout.continues)

    @abstractmethod
    def check(self, call: Call) -> None:
        """Raise ValueError if types, devices, shapes or options are wrong."""

    @abstractmethod
    def form_of(self, call: Call, form: str, backend: str) -> str:
        """Return the form that runs if a form, or "auto", is requested on a backend."""

    def widest_head(self, call: Call) -> int:
        """Return the largest head width that kernels support."""
        return WIDEST_HEAD

    def finite_inputs(self, inputs: Any) -> dict[str, Tensor | None]:
        """Return the inputs that must contain neither NaN nor an infinity, by name."""
        return {"q": inputs.q, "k": inputs.k, "v": inputs.v}

    def why_no_kernel(self, call: Call) -> str | None:
        """Return why kernels do not support a call, as "with ..., expected ...", or None."""
        return None

    @abstractmethod
    def prepared(self, call: Call, key: Key) -> Any:
        """Return the inputs in the dtypes in which an implementation computes, with masks applied.

        A masked token neither updates nor decays the state, and its output is zero. Kernels ignore
        masked tokens themselves, except for their decays.
        """

    def restarted(self, call: Call) -> Any:
        """Return prepared inputs that empty the states before `layout.starts` and `layout.ends`.

        By default, forms do this themselves.
        """
        return call.inputs

    @abstractmethod
    def written(self, call: Call) -> Any:
        """Return the state after all tokens of a causal call, in plain torch."""

    def carried(self, call: Call) -> tuple[States, States]:
        """Return the states that enter this rank, and those after the tokens of all ranks."""
        raise NotImplementedError  # all implementations carry states themselves


def run(
    op: Recurrence,
    inputs: Any,
    layout: Layout,
    state: Any,
    options: Any,
    *,
    form: str,
    backend: str,
    return_state: bool = True,
) -> tuple[Values, Any]:
    """Check a call, run a suitable implementation, and return the outputs and the state.

    Args:
        op: The op.
        inputs: Its tensors, not checked yet.
        layout: Layout of the tokens.
        state: The state that the caller passed.
        options: The op's other arguments.
        form: The form, or "auto".
        backend: The backend, or "auto".
        return_state: Whether to return the state. Packed sequences have none.
    """
    states_in, has_one_state = op.incoming(state, layout), op.states is None or layout.continues
    state_tensors = named_state_tensors(states_in, causal=has_one_state)
    returns_state = return_state and layout.packing is None
    call = Call(inputs, layout, states_in, options, returns_state, state_tensors)
    op.check(call)
    key = choose(op, call, form=form, backend=backend)
    implementation = op.implementations[key]
    with disable_autocast(inputs.q):
        call = call._replace(inputs=op.prepared(call, key))
        if layout.restarts:
            call = call._replace(inputs=op.restarted(call))
        final_states = None
        if layout.ranks is not None and not implementation.carries:
            states_in, final_states = op.carried(call)
            call = call._replace(states_in=states_in, returns_state=False)
        o, states_out = implementation.run(call)
    if holds_nan(o, *state_tensors.values()):
        finite = op.finite_inputs(inputs)
        if (keep := layout.keep) is not None:  # masked tokens may contain anything
            for name, x in finite.items():
                if x is not None and x.shape[:2] == keep.shape:
                    (finite[name],) = zero_masked(keep, x)
        check_no_nan(o, *state_tensors.values(), **finite, **state_tensors)
    o = layout.unpad_if_empty(o).to(inputs.v.dtype)
    if not returns_state:
        return o, None
    states_out = states_out if final_states is None else final_states
    return o, states_out[0] if has_one_state else op.states(*states_out)


def write(
    op: Recurrence, inputs: Any, layout: Layout, state: Any, options: Any, *, form: str
) -> Any:
    """Return the state after tokens without queries, as a causal call of a form returns it.

    Because there are no queries, `inputs.q` is another tensor of the same shape.
    """
    given = {name: x for name, x in inputs._asdict().items() if name != "q"}
    check_devices(**{name: x for name, x in given.items() if isinstance(x, Tensor)})
    states_in = op.incoming(state, layout)
    state_tensors = named_state_tensors(states_in, causal=True)
    call = Call(inputs, layout, states_in, options, returns_state=True, state_tensors=state_tensors)
    op.check(call)
    with disable_autocast(inputs.q):
        call = call._replace(inputs=op.prepared(call, Key("causal", form, "torch")))
        new_state = op.written(call)
    finite = {name: x for name, x in op.finite_inputs(inputs).items() if name != "q"}
    check_no_nan(*new_state, **finite, **state_tensors)
    return new_state


def check_tensors(keep: Any = None, **arguments: tuple[Any, str | tuple[str, ...]]) -> None:
    """Raise ValueError unless tensors are floating-point, on one device, and of these shapes.

    Args:
        keep: The mask, [B, T], if any.
        arguments: Tensors, each with its shape, or with several shapes of different ranks; None is
            skipped.
    """
    given = {name: pair for name, pair in arguments.items() if pair[0] is not None}
    tensors = {name: x for name, (x, _) in given.items()}
    check_floating(**tensors)
    check_devices(**tensors, keep=keep)
    patterns: dict[str, tuple[Any, str]] = {}
    for name, (x, pattern) in given.items():
        choices = (pattern,) if isinstance(pattern, str) else pattern
        by_rank = {len(choice.split()): choice for choice in choices}
        if len(choices) > 1 and x.ndim not in by_rank:
            *first, last = map(repr, choices)
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected {', '.join(first)} or {last}"
            )
        patterns[name] = x, by_rank.get(x.ndim, choices[0])
    sizes = check_shapes(**patterns, keep=(keep, "B T"))
    check_positive(**{letter: size for letter, size in sizes.items() if letter != "B"})


def check_read(
    q: Any, state: Any, kind: Any, patterns: Mapping[str, str], **others: tuple[Any, str]
) -> None:
    """Raise ValueError unless queries, [B, T, H, K], can read a state.

    Args:
        q: The queries.
        state: The state.
        kind: The class of the state.
        patterns: The shape of each tensor of the state.
        others: Other tensors, with their shapes; None is skipped.
    """
    if not isinstance(state, kind):
        raise ValueError(
            f"state is {named_type(state)}, expected the state of a direction, a {kind.__name__}"
        )
    parts = {f"state.{name}": (getattr(state, name), shape) for name, shape in patterns.items()}
    check_tensors(q=(q, "B T H K"), **others, **parts)


def choose(op: Recurrence, call: Call, *, form: str, backend: str) -> Key:
    """Return the implementation that a call runs."""
    layout, direction = call.layout, op.direction(call.layout)
    supported = [
        key
        for key, implementation in op.implementations.items()
        if key.direction == direction and implementation.fits(layout)
    ]
    form_on = partial(op.form_of, call, form)
    kernel, obstacle = Key(direction, form_on("triton"), "triton"), op.why_no_kernel(call)
    if kernel in supported and not op.implementations[kernel].has_gradients and call.is_learning:
        obstacle = f"with form {kernel.form!r}, which has no gradients, expected form 'chunk'"
    if is_transformed(call.tensors):
        obstacle = "under torch.func or forward-mode derivatives, expected backend 'torch'"
    tensors = call.inputs.q, call.inputs.k, call.inputs.v
    has_kernel = kernel in supported and obstacle is None
    chosen_backend = resolved_backend(backend, has_kernel, *tensors, widest=op.widest_head(call))
    chosen_form = form_on(chosen_backend)
    forms = ["auto", *dict.fromkeys(key.form for key in supported)]
    known = {key.form for key in op.implementations}
    check_supported("form", chosen_form, forms, known=known, what=layout.limits)
    chosen = Key(direction, chosen_form, chosen_backend)
    if chosen not in supported:
        what = f"form {chosen_form!r} with {layout.limits}"
        pairs = [f"{key.form}/{key.backend}" for key in supported]
        raise unsupported("backend", chosen_backend, what, pairs)
    if chosen_backend == "triton" and obstacle is not None:
        raise ValueError(f"backend is 'triton' {obstacle}")
    return chosen
