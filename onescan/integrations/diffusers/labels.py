"""Classes that are asked for by number or by name."""

import operator
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from onescan.messages import hint

MOST_NAMES = 20  # in a message


def find_labels(
    asked: Sequence[int | str], names: Mapping[int, str], *, num_classes: int
) -> list[int]:
    """Return the numbers of classes.

    Args:
        asked: numbers, or names.
        names: of classes, by their numbers; they need not all have one.
        num_classes: how many there are, for numbers; the number itself stands for none.

    Raises:
        ValueError: there is no such class, or several have the name.

    >>> find_labels([1, "cat"], {0: "cat", 1: "dog"}, num_classes=2)
    [1, 0]
    """
    if isinstance(asked, str) or not isinstance(asked, Sequence):
        raise ValueError(f"class_labels is {asked!r}, expected a list, as [{asked!r}]")
    if not asked:
        raise ValueError("class_labels is empty, expected a class for each image, or None")
    if num_classes == 0:
        raise ValueError(f"labels {list(asked)} are asked for, but the model has no classes")
    return [_find(each, names, num_classes) for each in asked]


def spelt_label(word: str, names: Mapping[int, str]) -> int | str:
    """What a word on a command line asks for: a class's name, else a number.

    >>> spelt_label("7", {0: "7"}), spelt_label("1", {0: "7"})
    ('7', 1)
    """
    return int(word) if word.isdecimal() and word not in names.values() else word


def _find(asked: Any, names: Mapping[int, str], num_classes: int) -> int:
    if not isinstance(asked, str):
        try:
            number = operator.index(asked)
        except TypeError as error:
            raise ValueError(f"label {asked!r} is neither a number nor a name") from error
        if isinstance(asked, bool):
            raise ValueError(f"label {asked!r} is neither a number nor a name")
        if not 0 <= number <= num_classes:
            raise ValueError(
                f"label {number} is no class, expected 0 to {num_classes - 1}, or {num_classes} "
                "for none"
            )
        return number
    found = [number for number, name in names.items() if name == asked]
    if len(found) > 1:
        raise ValueError(f"label {asked!r} is the name of {found}, expected one of these numbers")
    if not found:
        known = list(dict.fromkeys(names.values()))
        if len(known) > MOST_NAMES:
            near = get_close_matches(asked, known, n=3)
            said = f"; near are: {', '.join(near)}" if near else f"; there are {len(known)} others"
        else:
            said = hint(asked, known)
        raise ValueError(f"label {asked!r} is unknown{said}")
    return found[0]
