"""Names to choose from, and what to say about one that is not among them."""

from collections.abc import Iterable
from difflib import get_close_matches


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ValueError naming what exists, and the nearest of it, where value is none of it.

    >>> check_choice("form", "chunks", ["full", "chunk"])
    Traceback (most recent call last):
    ValueError: form 'chunks' is unknown (perhaps you meant 'chunk'); there are: full, chunk
    """
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown{hint(value, known)}")


def hint(value: object, choices: Iterable[object]) -> str:
    """The end of a message about an unknown name: the nearest there is, and all there are."""
    known = [str(choice) for choice in choices]
    near = get_close_matches(str(value), known, n=1)
    nearest = f" (perhaps you meant {near[0]!r})" if near else ""
    return f"{nearest}; there are: {', '.join(known) or 'none'}"
