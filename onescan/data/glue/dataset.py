"""A task of GLUE as labelled sequences, from the published tables or the hub."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from onescan.checks import check_choice
from onescan.data.base import DataConfig, OnError
from onescan.data.glue.hub import read_hub
from onescan.data.glue.pairs import PairEncoder, PairFormat
from onescan.data.glue.problems import PROBLEMS, GlueProblem, GlueTask
from onescan.data.glue.rows import GlueRow
from onescan.data.glue.tables import ENDING, TRAIN, find_folder, read_table
from onescan.data.sequences import LabelledSequence, SequenceSet, SequenceSplits
from onescan.data.sources import HUB_NAME
from onescan.data.text import TextFormat, load_tokenizer
from onescan.data.text.tokenizer import BYTES

HUB = "nyu-mll/glue"


@dataclass(frozen=True, kw_only=True)
class GlueSet(SequenceSet):
    """Texts that are in memory, tokenized as they are read, which takes little time."""

    decodes = False
    rows: Sequence[GlueRow]
    encoder: PairEncoder

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, place: int) -> LabelledSequence:
        texts, label = self.rows[place]
        tokens, first = self.encoder.encode(*texts)
        return LabelledSequence(tokens, label, first)


@dataclass(frozen=True, kw_only=True)
class GlueSplits(SequenceSplits):
    """Of one task."""

    train: GlueSet
    test: GlueSet
    problem: GlueProblem
    """What it asks, and how it is judged."""
    counts: tuple[int, ...]
    """Examples of each held-out part, of which `test` is made, one after the other."""


@dataclass(frozen=True, kw_only=True)
class GlueDatasetConfig(DataConfig):
    """A GLUE task, evaluated on its dev set because the test labels are not public."""

    task: GlueTask
    """Name of the task."""
    path: str = HUB
    """The unpacked GLUE archive, a folder of one task, or a name on the Hugging Face hub."""
    tokenizer: str = BYTES
    """bytes, or a tokenizer: a folder, a tokenizer.json, or a name on the Hugging Face hub."""
    length: int = 128
    """Maximum tokens per sequence. Longer inputs are truncated at the end, the longer text of a
    pair first."""
    on_error: OnError = "raise"
    """On an unreadable line of a table, end the run (raise), or skip and report it (skip)."""

    @property
    def max_tokens(self) -> int:
        return self.length

    def build(self) -> GlueSplits:
        """Read the texts.

        Raises:
            ImportError: the datasets library or transformers is needed and not installed.
            ValueError: there is no such task, tokenizer or data; or it lacks a column, or holds a
                line that cannot be read: says the file and the line.
        """
        check_choice("data.task", self.task, PROBLEMS)
        check_choice("data.on_error", self.on_error, get_args(OnError))
        tokenizer, problem = load_tokenizer(self.tokenizer), PROBLEMS[self.task]
        encoder = PairEncoder(tokenizer, self.length)
        train, *parts = self._read(problem)
        return GlueSplits(
            train=GlueSet(rows=train, encoder=encoder),
            test=GlueSet(rows=[row for part in parts for row in part], encoder=encoder),
            class_names=problem.class_names,
            format=PairFormat(text=TextFormat.of(tokenizer), length=self.length),
            problem=problem,
            counts=tuple(map(len, parts)),
        )

    def _read(self, problem: GlueProblem) -> list[list[GlueRow]]:
        """What to learn from, and then each held-out part."""
        path = Path(self.path).expanduser()
        if not path.is_dir():
            if path.exists() or not re.fullmatch(HUB_NAME, self.path):
                raise ValueError(f"data.path is {self.path!r}: there is no such folder")
            splits = (TRAIN, *(part.split for part in problem.held_out))
            return [read_hub(self.path, self.task, problem, split) for split in splits]
        folder = find_folder(path, self.task, problem)
        files = (TRAIN, *(part.file for part in problem.held_out))
        return [read_table(folder / f"{file}{ENDING}", problem, self.on_error) for file in files]
