"""Text to hide a needle in: a file of the user's, or what a model was not shown."""

from pathlib import Path
from typing import NamedTuple

from onescan.data.text import Tokenizer
from onescan.data.text.tokenizer import Ids
from onescan.evaluation.held_out import held_out_tokens
from onescan.evaluation.names import short_name
from onescan.training.folder import read_manifest


class Haystack(NamedTuple):
    """A long text.

    Attributes:
        name: where it is from.
        tokens: all of it, by the model's own tokenizer.
    """

    name: str
    tokens: Ids


def read_haystack(file: Path, tokenizer: Tokenizer) -> Haystack:
    """Tokenize a text file.

    Raises:
        ValueError: it is no file, or no text in UTF-8.
        OSError: it cannot be read.
    """
    if not file.is_file():
        raise ValueError(f"haystack is {str(file)!r}, which is no file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"haystack is {str(file)!r}, which is no text in UTF-8") from error
    (tokens,) = tokenizer.encode_many([text])
    return Haystack(file.name, tokens)


def held_out_haystack(checkpoint: str) -> Haystack:
    """Take the text that a run was judged on.

    Raises:
        ValueError: there is no run, it was not trained on text, or its text is no longer there.
    """
    path = Path(checkpoint)
    try:
        data = read_manifest(path if path.is_dir() else path.parent).run.data
        tokens = held_out_tokens(checkpoint, data)
    except ValueError as error:
        raise ValueError(f"haystack is to be given, as there is no other text: {error}") from error
    return Haystack(f"the held-out text of {short_name(checkpoint)}", tokens)
