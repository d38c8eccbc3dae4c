"""The text that a run was judged on."""

from onescan.data import DataConfig
from onescan.data.text import PackedText, TextSplits
from onescan.data.text.tokenizer import Ids


def held_out_tokens(checkpoint: str, data: DataConfig) -> Ids:
    """All of its documents, end to end.

    Args:
        checkpoint: what the user calls the run.
        data: what the run was trained on.

    Raises:
        ValueError: it was not trained on text, or its text is no longer there.
    """
    splits = data.build()
    if not (isinstance(splits, TextSplits) and isinstance(splits.test, PackedText)):
        raise ValueError(f"{checkpoint!r} was trained on {type(data).__name__}, which has no text")
    return splits.test.corpus.tokens
