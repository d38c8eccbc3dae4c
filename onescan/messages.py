"""Text of error messages: hints about unknown names, and escaping of untrusted text.

This module does not import torch, so that the command line can use it without the delay.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from os import PathLike

CONTROLS = ("Cc", "Cs")  # Unicode categories: control characters and surrogates
BIDIRECTIONAL = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def unknown_choice(
    name: str, value: object, choices: Iterable[object], *, listed_by: str | None = None
) -> ValueError:
    """Return the error for an unknown name.

    Args:
        name: What the value names, such as the argument.
        value: The unknown name.
        choices: The known names.
        listed_by: Command that lists them, to name instead of many choices.

    >>> unknown_choice("form", "chunks", ["full", "chunk"])
    ValueError("form 'chunks' is unknown (perhaps you meant 'chunk'); available: full, chunk")
    """
    if listed_by is None:
        return ValueError(f"{name} {value!r} is unknown{hint(value, choices)}")
    near = closest(value, [str(choice) for choice in choices], count=3)
    return ValueError(f"{name} {value!r} is unknown{near}; `{listed_by}` lists all {name}s")


def unsupported(name: str, value: object, what: str, choices: Iterable[str]) -> ValueError:
    """Return the error for a known name that does not support an option.

    Args:
        name: What the value names, such as the argument.
        value: The name.
        what: What it does not support.
        choices: The names that support it.

    >>> unsupported("form", "chunk", "causal=False", ["auto", "full"])
    ValueError("form is 'chunk', which does not support causal=False; available: auto, full")
    """
    return ValueError(
        f"{name} is {value!r}, which does not support {what}; available: {', '.join(choices)}"
    )


def hint(value: object, choices: Iterable[object]) -> str:
    """Return the end of a message about an unknown name: the closest match and all choices."""
    known = [str(choice) for choice in choices]
    return f"{closest(value, known)}; available: {', '.join(known) or 'none'}"


def closest(value: object, choices: Sequence[str], *, count: int = 1) -> str:
    """Return a hint at the choices that are closest to an unknown name; empty if none is close.

    >>> closest("digit", ["digits", "recall"])
    " (perhaps you meant 'digits')"
    """
    near = get_close_matches(str(value), choices, n=count)
    return f" (perhaps you meant {' or '.join(map(repr, near))})" if near else ""


def missing_package(
    what: str, package: str, extra: str, error: ImportError | None = None
) -> ImportError:
    """Return the error for a package that cannot be imported, and the extra to install.

    Args:
        what: What needs the package.
        package: Its name, as in the extra.
        extra: Extra of onescan.
        error: What importing it raised. The message quotes it unless the package is just missing.

    >>> missing_package("writing ONNX", "onnx", "export")
    ImportError("writing ONNX needs onnx: pip install 'onescan[export]'")
    >>> missing_package("timm's registry", "timm", "timm", ImportError("torchvision is too old"))
    ImportError("timm's registry needs timm: pip install 'onescan[timm]' (torchvision is too old)")
    """
    message = f"{what} needs {package}: pip install 'onescan[{extra}]'"
    is_absent = isinstance(error, ModuleNotFoundError) and error.name == package.replace("-", "_")
    return ImportError(message if error is None or is_absent else f"{message} ({error})")


def named_type(value: object) -> str:
    """Return the name of a value's type with its article.

    >>> named_type(3), named_type("x")
    ('an int', 'a str')
    """
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return the name of a type with its article."""
    return f"an {name}" if name[0] in "AEIOaeio" or name == "ndarray" else f"a {name}"


def expected_model(value: object, expected: str) -> ValueError:
    """Return the error for an argument ``model`` of the wrong type.

    For a path, or the result of `onescan.load`, it says how to get the model.

    >>> expected_model("runs/digits/seed-0", "a Denoiser")
    ValueError('model is a str, expected a Denoiser; pass onescan.load(path).model')
    """
    advice = ""
    if type(value).__name__ == "Checkpoint":
        advice = "; pass checkpoint.model"
    elif isinstance(value, str | PathLike):
        advice = "; pass onescan.load(path).model"
    return ValueError(f"model is {named_type(value)}, expected {expected}{advice}")


def plural(count: int, noun: str) -> str:
    """Format a count together with its noun.

    >>> plural(1, "seed"), plural(1437, "image"), plural(2, "class"), plural(2, "axis")
    ('1 seed', '1,437 images', '2 classes', '2 axes')
    """
    if count == 1:
        return f"{count:,} {noun}"
    if noun.endswith("is"):
        return f"{count:,} {noun[:-2]}es"
    return f"{count:,} {noun}es" if noun.endswith(("s", "ch")) else f"{count:,} {noun}s"


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
