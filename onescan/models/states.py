"""States as trees: tuples of tensors, numbers and None, to reorder, to flatten, to fill again."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The same tree, with each tensor through a function.

    >>> map_tensors(lambda x: 2 * x, (torch.ones(1), None, 3))
    (tensor([2.]), None, 3)
    """
    return _mapped(lambda part, _: function(part) if isinstance(part, Tensor) else part, state, "")


def select_rows(state: Any, rows: Tensor) -> Any:
    """The states of some sequences of a batch, in a new order, as a beam search wants them.

    Args:
        state: what a model returned.
        rows: places in the batch; one may come more than once.
    """
    return map_tensors(lambda x: x.index_select(0, rows), state)


def flatten(state: Any) -> dict[str, Tensor]:
    """Its tensors and numbers by where they are, as in "blocks.0.attention.kv".

    >>> flatten((torch.ones(1), None, (3,)))
    {'0': tensor([1.]), '2.0': tensor(3)}
    """
    return {path: torch.as_tensor(leaf) for path, leaf in _leaves(state, "")}


def unflatten(like: Any, flat: Mapping[str, Tensor]) -> Any:
    """A tree of the same kind as `like`, with what `flatten` gave of another in it.

    Raises:
        ValueError: the other had other parts; says which.
    """
    wanted = {path for path, _ in _leaves(like, "")}
    for path in sorted(wanted ^ set(flat)):
        there = "missing" if path in wanted else "there"
        raise ValueError(f"{path} is {there}, and not so in this model's state")

    def fill(part: Any, path: str) -> Any:
        return part if part is None else _as(part, flat[path])

    return _mapped(fill, like, "")


def _as(like: Any, stored: Tensor) -> Any:
    return stored if isinstance(like, Tensor) else type(like)(stored.item())


def _mapped(function: Callable[[Any, str], Any], state: Any, path: str) -> Any:
    if not isinstance(state, tuple):
        return function(state, path)
    parts = [_mapped(function, part, at) for at, part in _parts(state, path)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def _leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, tuple):
        for at, part in _parts(state, path):
            yield from _leaves(part, at)
    elif state is not None:
        yield path, state


def _parts(state: tuple[Any, ...], path: str) -> Iterator[tuple[str, Any]]:
    names = getattr(state, "_fields", range(len(state)))
    for name, part in zip(names, state, strict=True):
        yield f"{path}.{name}" if path else str(name), part
