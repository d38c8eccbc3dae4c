"""GLUE, arXiv:1804.07461: eight tasks of single texts or pairs, from its tables or the hub."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from onescan.checks import HUB_NAME, check_choice
from onescan.experiments.data.base import SKIP_ROWS, DataConfig, OnError
from onescan.experiments.data.sequences import LabeledSequence, SequenceSet, SequenceSplits
from onescan.experiments.data.sources import first_line, import_datasets, quiet, report_unreadable
from onescan.experiments.data.text.lines import decode, open_text
from onescan.inputs.pairs import PairEncoder, PairFormat
from onescan.inputs.tokenizer import BYTES, TextFormat, load_tokenizer
from onescan.messages import plural

GlueTask = Literal["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]
Metric = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearman"]

HUB = "nyu-mll/glue"
ENTAILMENT = ("entailment", "not_entailment")
INFERENCES = ("entailment", "neutral", "contradiction")
MAX_SCORE = 5.0  # of STS-B
MEASURED = 10_000  # texts that are encoded to count those that are truncated


class HeldOut(NamedTuple):
    """Examples to evaluate on.

    Attributes:
        file: Name of the table in the published archive, without its extension.
        split: Name of the split on the hub.
        prefix: Prefix of its metrics' names; empty if a task has only one such part.
    """

    file: str = "dev"
    split: str = "validation"
    prefix: str = ""


@dataclass(frozen=True, kw_only=True)
class GlueProblem:
    """One task of GLUE.

    Attributes:
        title: Name of the task, and of its folder in the published archive.
        texts: Columns of the one or two texts in the archive's tables.
        hub_texts: Columns of the texts on the hub; None if they have the same names.
        label: Column of the label in the archive's tables.
        metrics: Metrics; the first one is the most informative.
        class_names: Names of the classes in the order of GLUE's labels; () if labels are numbers.
        table_labels: How the archive's tables write the classes, in the same order.
        columns: Columns of tables without a header line; None if they have one.
        held_out: One part, or several that are evaluated separately.
    """

    title: str
    texts: tuple[str, ...]
    hub_texts: tuple[str, ...] | None = None
    label: str = "label"
    metrics: tuple[Metric, ...] = ("accuracy",)
    class_names: tuple[str, ...] = ()
    table_labels: tuple[str, ...] = ("0", "1")
    columns: tuple[str, ...] | None = None
    held_out: tuple[HeldOut, ...] = (HeldOut(),)


PROBLEMS: Mapping[GlueTask, GlueProblem] = MappingProxyType(
    {
        "mnli": GlueProblem(
            title="MNLI",
            texts=("sentence1", "sentence2"),
            hub_texts=("premise", "hypothesis"),
            label="gold_label",
            class_names=INFERENCES,
            table_labels=INFERENCES,
            held_out=(
                HeldOut("dev_matched", "validation_matched", "matched_"),
                HeldOut("dev_mismatched", "validation_mismatched", "mismatched_"),
            ),
        ),
        "qnli": GlueProblem(
            title="QNLI",
            texts=("question", "sentence"),
            class_names=ENTAILMENT,
            table_labels=ENTAILMENT,
        ),
        "qqp": GlueProblem(
            title="QQP",
            texts=("question1", "question2"),
            label="is_duplicate",
            metrics=("accuracy", "f1"),
            class_names=("not_duplicate", "duplicate"),
        ),
        "rte": GlueProblem(
            title="RTE",
            texts=("sentence1", "sentence2"),
            class_names=ENTAILMENT,
            table_labels=ENTAILMENT,
        ),
        "sst2": GlueProblem(
            title="SST-2", texts=("sentence",), class_names=("negative", "positive")
        ),
        "mrpc": GlueProblem(
            title="MRPC",
            texts=("#1 String", "#2 String"),
            hub_texts=("sentence1", "sentence2"),
            label="Quality",
            metrics=("accuracy", "f1"),
            class_names=("not_equivalent", "equivalent"),
        ),
        "cola": GlueProblem(
            title="CoLA",
            texts=("sentence",),
            metrics=("matthews_correlation",),
            class_names=("unacceptable", "acceptable"),
            columns=("source", "label", "mark", "sentence"),
        ),
        "stsb": GlueProblem(
            title="STS-B",
            texts=("sentence1", "sentence2"),
            label="score",
            metrics=("pearson", "spearman"),
        ),
    }
)


# Rows of tables and of the hub


class GlueRow(NamedTuple):
    """One example before it is tokenized.

    Attributes:
        texts: One or two texts.
        label: Index of its class, or a number.
    """

    texts: tuple[str, ...]
    label: int | float


def _row(
    problem: GlueProblem, texts: Sequence[str], label: Any, labels: Sequence[Any], expected: str
) -> GlueRow:
    if not any(text.strip() for text in texts):
        raise ValueError("the text is empty")
    if problem.class_names:
        if label not in labels:
            raise ValueError(f"the label is {label!r}, expected {expected}")
        return GlueRow(tuple(texts), labels.index(label))
    try:
        score = math.nan if label is None else float(label)
    except ValueError:
        score = math.nan
    if not 0 <= score <= MAX_SCORE:
        raise ValueError(f"the score is {label!r}, expected a number from 0 to {MAX_SCORE:g}")
    return GlueRow(tuple(texts), score)


def _read_table(
    path: Path, problem: GlueProblem, on_error: OnError, notes: list[str]
) -> list[GlueRow]:
    """Read a table of the published archive, in which quotes have no meaning.

    Adds notes with the numbers of empty and of unreadable lines to `notes`.

    Raises:
        ValueError: If the file does not exist, has no rows or lacks a column, or if a line cannot
            be read and `on_error` is "raise"; names the file and the line.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    labels = problem.table_labels
    rows, columns, failures, empty = [], problem.columns, [], 0
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip(b"\r\n"):
                empty += 1
                continue
            try:
                cells = _cells(line)
                if columns is None:
                    columns = tuple(cells)
                    _check_columns((*problem.texts, problem.label), columns)
                    continue
                if len(cells) != len(columns):
                    raise ValueError(
                        f"{plural(len(cells), 'cell')} separated by tabs, expected {len(columns)}: "
                        f"{', '.join(columns)}"
                    )
                values = dict(zip(columns, cells, strict=True))
                texts = [values[name] for name in problem.texts]
                rows.append(
                    _row(problem, texts, values[problem.label], labels, " or ".join(labels))
                )
            except ValueError as error:
                failures.append(f"{path}, line {number}: {error}")
                if number == 1 and not problem.columns:
                    raise ValueError(failures[-1]) from error
                if on_error == "raise":
                    raise ValueError(f"{failures[-1]} ({SKIP_ROWS})") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    report_unreadable(str(path), failures)
    if failures:
        lines = "line" if len(failures) == 1 else "lines"
        notes.append(f"left out {len(failures)} {lines} of {path} that cannot be read")
    if empty:
        notes.append(f"left out {empty} empty {'line' if empty == 1 else 'lines'} of {path}")
    return rows


def _cells(line: bytes) -> list[str]:
    text, fault, _ = decode(line)
    if fault:
        raise ValueError(fault)
    return text.removeprefix("\ufeff").rstrip("\r\n").split("\t")


def _check_columns(names: Sequence[str], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            raise ValueError(f"the column {name!r} is missing; available: {', '.join(columns)}")


def _read_hub(name: str, task: GlueTask, problem: GlueProblem, split: str) -> list[GlueRow]:
    """Read a split of a task on the hub.

    Raises:
        ImportError: If the datasets library is not installed.
        ValueError: If there is no such dataset or split, it lacks a column, or a row cannot be
            read; names the row.
    """
    datasets = import_datasets("text")
    try:
        with quiet():
            table = datasets.load_dataset(name, task, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"data.path is {name!r}, which is not on disk, and the split {split} of {task} cannot "
            f"be read from the hub: {first_line(error.__cause__ or error)}"
        ) from error
    columns = (*(problem.hub_texts or problem.texts), "label")
    location = f"{name}, {task}, {split}"
    rows, labels = [], range(len(problem.class_names))
    try:
        _check_columns(columns, table.column_names)
        cells = zip(*(table[column][:] for column in columns), strict=True)
        for number, (*texts, label) in enumerate(cells):
            location = f"{name}, {task}, row {number} of {split}"
            texts = [text or "" for text in texts]
            rows.append(_row(problem, texts, label, labels, f"0 to {len(labels) - 1}"))
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    return rows


def find_folder(path: Path, task: GlueTask, problem: GlueProblem) -> Path:
    """Find a task's folder in the archive, by its title or name, or at `path` itself."""
    names = (problem.title.lower(), task)
    folders = [folder for folder in sorted(path.iterdir()) if folder.name.lower() in names]
    for folder in [*folders, path]:
        if (folder / "train.tsv").is_file():
            return folder
    raise ValueError(
        f"data.path is {str(path)!r}, which has no tables of {problem.title}: expected "
        f"{problem.title}/train.tsv in it, or train.tsv"
    )


# The dataset


@dataclass(frozen=True, kw_only=True)
class GlueSet(SequenceSet):
    """Texts in memory, tokenized when read, which takes little time."""

    decodes = False
    rows: Sequence[GlueRow]
    encoder: PairEncoder

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> LabeledSequence:
        texts, label = self.rows[index]
        tokens, first = self.encoder.encode(*texts)
        return LabeledSequence(tokens, label, first)


def truncation_notes(texts: GlueSet, name: str) -> Iterator[str]:
    """Describe how many texts are truncated, measured on at most `MEASURED` of them."""
    every = max(1, -(-len(texts) // MEASURED))
    rows = [row.texts for row in texts.rows[::every]]
    if count := sum(texts.encoder.is_truncated(rows)):
        which = f"{count} of {len(rows)} {name} texts"
        which += "" if every == 1 else f" (one in {every} was measured)"
        yield f"{which} are longer than {texts.encoder.length} tokens and are truncated"


@dataclass(frozen=True, kw_only=True)
class GlueSplits(SequenceSplits):
    """Training and held-out examples of one task."""

    train: GlueSet
    test: GlueSet
    problem: GlueProblem
    """The task."""
    counts: tuple[int, ...]
    """Number of examples in each held-out part; `test` is their concatenation."""


@dataclass(frozen=True, kw_only=True)
class GlueDatasetConfig(DataConfig):
    """A GLUE task, evaluated on its dev set because the test labels are not public."""

    task: GlueTask
    """Name of the task."""
    path: str = HUB
    """The unpacked GLUE archive, a folder of one task, or a name on the Hugging Face Hub."""
    tokenizer: str = BYTES
    """bytes, or a tokenizer: a folder, a tokenizer.json, or a name on the Hugging Face Hub."""
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
            ImportError: If the datasets library or transformers is needed and not installed.
            ValueError: If there is no such task, tokenizer or data, or if a table lacks a column
                or has a line that cannot be read; names the file and the line.
        """
        check_choice("data.task", self.task, PROBLEMS)
        check_choice("data.on_error", self.on_error, get_args(OnError))
        tokenizer, problem = load_tokenizer(self.tokenizer), PROBLEMS[self.task]
        encoder = PairEncoder(tokenizer, self.length)
        notes: list[str] = []
        train, *parts = self._read(problem, notes)
        train_set = GlueSet(rows=train, encoder=encoder)
        test_set = GlueSet(rows=list(chain(*parts)), encoder=encoder)
        for name, part in (("training", train_set), ("test", test_set)):
            notes += truncation_notes(part, name)
        return GlueSplits(
            notes=tuple(notes),
            train=train_set,
            test=test_set,
            class_names=problem.class_names,
            format=PairFormat(text=TextFormat.of(tokenizer), length=self.length),
            problem=problem,
            counts=tuple(map(len, parts)),
        )

    def _read(self, problem: GlueProblem, notes: list[str]) -> Iterator[list[GlueRow]]:
        """Read the training rows, then those of each held-out part; add notes on left-out lines."""
        path = Path(self.path).expanduser()
        if path.is_dir():
            folder = find_folder(path, self.task, problem)
            for file in ("train", *(part.file for part in problem.held_out)):
                yield _read_table(folder / f"{file}.tsv", problem, self.on_error, notes)
        elif path.exists() or not re.fullmatch(HUB_NAME, self.path):
            raise ValueError(f"data.path is {self.path!r}: there is no such folder")
        else:
            for split in ("train", *(part.split for part in problem.held_out)):
                yield _read_hub(self.path, self.task, problem, split)
