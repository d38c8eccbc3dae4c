"""What text a model was trained on: its tokenizer, which goes along in the model's folder."""

from dataclasses import dataclass
from pathlib import Path

from onescan.checkpoint.files import (
    check_digests,
    damaged,
    digests,
    from_json,
    is_own_file,
    to_json,
    write_atomically,
)
from onescan.data.base import Format
from onescan.data.text.tokenizer import BYTES, Tokenizer, load_tokenizer

TOKENIZER = "tokenizer"  # the folder of a run in which it lies
CHECKSUMS = "checksums.json"  # of the files in it
REMEDY = "restore the tokenizer from a backup"


@dataclass(frozen=True, kw_only=True)
class TextFormat(Format):
    """The tokens a model was trained on."""

    tokenizer: str
    """What the user called the tokenizer."""
    vocab_size: int
    """All ids are below it."""
    fingerprint: str
    """What another tokenizer has another of."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TextFormat":
        """Describe a tokenizer."""
        return cls(
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.size,
            fingerprint=tokenizer.fingerprint(),
        )

    def save(self, folder: Path) -> None:
        if self.tokenizer == BYTES:
            return
        place = folder / TOKENIZER
        load_tokenizer(self.tokenizer).save(place)
        (place / CHECKSUMS).unlink(missing_ok=True)
        text = to_json(digests(place))
        write_atomically(place / CHECKSUMS, lambda path: path.write_text(text, encoding="utf-8"))

    def open(self, folder: Path) -> Tokenizer:
        """Load the tokenizer that was saved in a run's folder.

        Raises:
            ValueError: it is missing or damaged; names the file.
            ImportError: transformers is needed and not installed.
        """
        if self.tokenizer == BYTES:
            return load_tokenizer(BYTES)
        place = folder / TOKENIZER
        if not is_own_file(place / CHECKSUMS):
            raise damaged(place, ValueError(f"it has no {CHECKSUMS}"), REMEDY)
        files = from_json((place / CHECKSUMS).read_bytes(), place / CHECKSUMS, REMEDY)
        check_digests(place, files, REMEDY, but=CHECKSUMS)
        return load_tokenizer(str(place))
