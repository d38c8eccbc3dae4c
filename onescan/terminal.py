"""Make untrusted text safe to print on a terminal."""

import unicodedata

CONTROLS = ("Cc", "Cs")  # Unicode categories: control characters and surrogates
BIDIRECTIONAL = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def printable(text: object, keep: str = "") -> str:
    r"""Escape control characters.

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
