"""Train a byte-level BPE tokenizer on any text."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onescan.experiments.data.text.corpus import character_bar, encode_documents, split_text
from onescan.inputs.tokenizer import PretrainedTokenizer
from onescan.messages import missing_package

END, MASK = "<end>", "[MASK]"
MIN_VOCAB_SIZE = 258  # those two, and 256 bytes
PIECE = 1 << 12  # minimum characters of a piece
HELD_OUT_EVERY = 10  # pieces
MAX_HELD_OUT = 1000  # pieces, which are held in memory


class TrainedTokenizer(NamedTuple):
    """A tokenizer and its compression.

    Attributes:
        tokenizer: The tokenizer.
        bytes_per_token: Measured on held-out text, or on training text if there is too little.
        is_held_out: Whether it was measured on held-out text.
    """

    tokenizer: PretrainedTokenizer
    bytes_per_token: float
    is_held_out: bool


def train_bpe(texts: Iterable[str], vocab_size: int) -> TrainedTokenizer:
    """Train a tokenizer with the special tokens <end>, also used for padding, and [MASK].

    Texts are split into pieces of a few thousand characters, and every tenth is held out. Training
    is deterministic.

    Args:
        texts: Texts to train on.
        vocab_size: Maximum number of tokens, including bytes and special tokens. A small text
            gives fewer.

    Raises:
        ValueError: If vocab_size is too small, or there is no text.
        ImportError: If transformers is not installed.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}, expected at least {MIN_VOCAB_SIZE}: the 256 bytes, {END} "
            f"and {MASK}"
        )
    held_out: list[str] = []
    first: list[str] = []

    def training_pieces() -> Iterator[str]:
        pieces = (piece for text in texts for piece in split_text(text, PIECE))
        with character_bar("reading") as bar:
            for number, piece in enumerate(pieces, start=1):
                bar.update(len(piece))
                if number % HELD_OUT_EVERY == 0:
                    if len(held_out) < MAX_HELD_OUT:
                        held_out.append(piece)
                    continue
                if len(first) < HELD_OUT_EVERY:
                    first.append(piece)
                yield piece

    trained = _train(training_pieces(), vocab_size)
    if not first:
        raise ValueError("there is no text to train a tokenizer on")
    tokenizer = PretrainedTokenizer("trained", trained)
    measured = held_out or first
    tokens = sum(len(ids) - 1 for ids in encode_documents(measured, tokenizer))
    size = sum(len(piece.encode()) for piece in measured)
    return TrainedTokenizer(tokenizer, size / tokens, bool(held_out))


def check_empty(folder: Path) -> None:
    """Raise ValueError if a folder to be created exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: remove it, or choose another folder")


def _train(texts: Iterator[str], vocab_size: int) -> Any:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_package("training a tokenizer", "transformers", "text", error) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The token of a word includes the space before it, so a mask that replaces a word does too.
    mask = AddedToken(MASK, lstrip=True, special=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(END, special=True), mask],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        mask_token=mask,
        clean_up_tokenization_spaces=False,
    )
