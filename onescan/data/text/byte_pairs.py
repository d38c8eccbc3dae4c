"""Byte-level BPE, trained on any text: the tokens are the bytes, and pairs that often meet."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from onescan.data.text.corpus_reader import PATIENCE_S
from onescan.data.text.encode import encode_documents, pieces
from onescan.data.text.tokenizer import PretrainedTokenizer

END, MASK = "<end>", "[MASK]"
SMALLEST = 258  # those two, and 256 bytes
PIECE = 1 << 12  # characters at least
EVERY = 10  # pieces, of which the last is held out
MOST_HELD = 1000  # pieces, so that they fit in memory


@dataclass(frozen=True, kw_only=True)
class BytePairs:
    """A tokenizer, and how well it did.

    Attributes:
        tokenizer: what was trained.
        bytes_per_token: of text that it was not trained on, or of all of it, if that is little.
        is_held_out: which of the two.
    """

    tokenizer: PretrainedTokenizer
    bytes_per_token: float
    is_held_out: bool


def train_byte_pairs(texts: Iterable[str], vocab_size: int) -> BytePairs:
    """Train a tokenizer with the specials <end>, also for padding, and [MASK].

    Every tenth piece of some thousand characters is held out. The same texts give the same again.

    Args:
        texts: to learn from.
        vocab_size: tokens at most, specials and bytes among them; little text gives fewer.

    Raises:
        ValueError: vocab_size is too small, or nothing is written in the texts.
        ImportError: transformers is not installed.
    """
    if vocab_size < SMALLEST:
        raise ValueError(
            f"vocab_size is {vocab_size}, expected at least {SMALLEST}: the 256 bytes, {END} and "
            f"{MASK}"
        )
    split = _HeldOut(piece for text in texts for piece in pieces(text, PIECE))
    trained = _train(split, vocab_size)
    if not split.count:
        raise ValueError("there is no text to train a tokenizer on")
    tokenizer = PretrainedTokenizer("trained", trained)
    judged = split.held or split.first
    tokens = sum(len(ids) - 1 for ids in encode_documents(judged, tokenizer))
    return BytePairs(
        tokenizer=tokenizer,
        bytes_per_token=sum(len(piece.encode()) for piece in judged) / tokens,
        is_held_out=bool(split.held),
    )


def check_empty(folder: Path) -> None:
    """Raise ValueError where something is in the way of a new folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: remove it, or choose another folder")


class _HeldOut:
    """Pieces to learn from, once; those between them are put aside."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = texts
        self.count = 0
        self.held: list[str] = []
        self.first: list[str] = []

    def __iter__(self) -> Iterator[str]:
        with tqdm(
            desc="reading", unit=" characters", unit_scale=True, delay=PATIENCE_S, leave=False
        ) as bar:
            for piece in self.texts:
                self.count += 1
                bar.update(len(piece))
                if self.count % EVERY == 0:
                    self.held += [piece] if len(self.held) < MOST_HELD else []
                    continue
                self.first += [piece] if len(self.first) < EVERY else []
                yield piece


def _train(texts: Iterable[str], vocab_size: int) -> Any:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError(
            "training a tokenizer needs transformers, which is missing: pip install 'onescan[text]'"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # a word's token has the space before it, so a mask that stands for a word takes it too
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
