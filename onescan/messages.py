"""Text of error messages: hints about unknown names, and escaping of untrusted text.

This module does not import torch, so that the command line can use it without the delay.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

CONTROLS = ("Cc", "Cs")  # Unicode categories: control characters and surrogates
BIDIRECTIONAL = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def unknown_choice(name: str, value: object, choices: Iterable[object]) -> ValueError:
    """Return the error for an unknown name.

    >>> unknown_choice("form", "chunks", ["full", "chunk"])
    ValueError("form 'chunks' is unknown (perhaps you meant 'chunk'); there are: full, chunk")
    """
    return ValueError(f"{name} {value!r} is unknown{hint(value, choices)}")


def hint(value: object, choices: Iterable[object]) -> str:
    """Return the end of a message about an unknown name: the closest match and all choices."""
    known = [str(choice) for choice in choices]
    return f"{closest(value, known)}; there are: {', '.join(known) or 'none'}"


def closest(value: object, choices: Sequence[str]) -> str:
    """Return a hint at the choice that is closest to an unknown name; empty if none is close."""
    near = get_close_matches(str(value), choices, n=1)
    return f" (perhaps you meant {near[0]!r})" if near else ""


def printable(text: object, keep: str = "") -> str:
    r"""Escape control characters, so that text is safe to print on a terminal.

    Args:
        text: Text to print; converted with ``str``.
        keep: Control characters to leave unchanged.

    >>> printable("cat\x1b[31m\n")
    'cat\\x1b[31m\\n'
    >>> printable("one\ntwo\x07", keep="\n\t")
    'one\ntwo\\x07'
    """
    return "".join(
        character.encode("unicode_escape").decode() if _is_control(character, keep) else character
        for character in str(text)
    )


def _is_control(character: str, keep: str) -> bool:
    if character in keep:
        return False
    return unicodedata.category(character) in CONTROLS or character in BIDIRECTIONAL
