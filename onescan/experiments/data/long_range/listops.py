"""ListOps of the Long Range Arena: nested expressions to evaluate, generated or read from tables.

An expression is a digit, or an operator, expressions and an end symbol (arXiv:1804.06028):
`[MAX 2 9 [MIN 4 7 ] 0 ]` evaluates to 9. MED is the median, rounded down; SM is the sum modulo 10.
So the value of every expression is a digit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from random import Random
from typing import Literal, get_args

import numpy as np

from onescan.checks import check_choice, check_positive, check_whole
from onescan.experiments.data.base import DataConfig
from onescan.experiments.data.long_range.rng import SPLITS, example_rng, random_below
from onescan.experiments.data.sequences import (
    GeneratedSequences,
    LabeledSequence,
    SequenceList,
    SequenceSet,
    SequenceSplits,
)
from onescan.inputs.listops import (
    DIGITS,
    END,
    MAX,
    MIN,
    OPERATORS,
    PADDING,
    SM,
    VOCABULARY,
    ListOpsFormat,
    decode,
    encode,
)
from onescan.messages import plural

HeldOut = Literal["val", "test"]


CLASS_NAMES = tuple("0123456789")
HEADER = "Source\tTarget"

LRA_COUNTS = {"train": 96_000, "val": 2_000, "test": 2_000}
"""Number of examples per split in the Long Range Arena."""

OPERATOR_PROBABILITY = 0.25
MIN_ARGS = 2
MAX_ATTEMPTS = 100_000
QUARTERS = ("train", *SPLITS)  # the split of each quarter of all expressions


# Expressions


def evaluate(tokens: Sequence[int]) -> int:
    """Return the value of an expression, a digit, in one pass with a stack.

    Raises:
        ValueError: If tokens are not an expression. The message names the position of the error.

    >>> from onescan.inputs.listops import encode
    >>> evaluate(encode("[SM 8 [MED 1 4 6 7 ] 2 ]"))
    5
    """
    open_operators: list[tuple[int, int]] = []  # operators and their positions
    arguments: list[list[int]] = [[]]  # the value of the whole, then arguments of each operator
    for index, token in enumerate(tokens):
        if not open_operators and arguments[0]:
            raise _misplaced(tokens, index, "the expression ended before it")
        if token in OPERATORS:
            open_operators.append((token, index))
            arguments.append([])
        elif token in DIGITS:
            arguments[-1].append(token - DIGITS[0])
        elif token != END:
            raise ValueError(f"tokens[{index}] is {token}, expected {DIGITS[0]} to {END}")
        elif not open_operators:
            raise _misplaced(tokens, index, "no operator is open")
        else:
            operator, start = open_operators.pop()
            values = arguments.pop()
            if not values:
                name = VOCABULARY[operator]
                raise _misplaced(tokens, index, f"{name} at tokens[{start}] has no arguments")
            arguments[-1].append(apply(operator, values))
    if open_operators:
        operator, index = open_operators[-1]
        raise ValueError(
            f"tokens ends after {len(tokens)} tokens, but {VOCABULARY[operator]} at "
            f"tokens[{index}] is not closed"
        )
    if not arguments[0]:
        raise ValueError("tokens is empty, expected an expression")
    return arguments[0][0]


def apply(operator: int, arguments: Sequence[int]) -> int:
    """Apply an operator to at least one digit.

    >>> from onescan.inputs.listops import MED, SM
    >>> apply(MED, [1, 4, 6, 7]), apply(SM, [8, 5, 2])
    (5, 5)
    """
    if operator == MAX:
        return max(arguments)
    if operator == MIN:
        return min(arguments)
    if operator == SM:
        return sum(arguments) % 10
    ordered, last = sorted(arguments), len(arguments) - 1
    return (ordered[last // 2] + ordered[(last + 1) // 2]) // 2


def _misplaced(tokens: Sequence[int], index: int, why: str) -> ValueError:
    token = tokens[index]
    symbol = VOCABULARY[token] if PADDING <= token <= END else token
    return ValueError(f"tokens[{index}] is {symbol!r}, but {why}")


# Tables


def read_listops(path: str | Path) -> Iterator[tuple[list[int], int]]:
    """Read a table as published by the Long Range Arena, such as basic_train.tsv.

    Yields:
        Tokens of an expression and its value.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the header is missing, or a line is malformed or has the wrong value. The
            message names the file and the line.
    """
    with Path(path).open("rb") as file:  # as bytes, so that decoding errors have a line number too
        for number, line in enumerate(chain([file.readline()], file), start=1):
            try:
                text = line.decode().rstrip("\r\n")
                if number > 1:
                    yield _parse_line(text)
                elif text != HEADER:
                    raise ValueError(f"the first line is {text!r}, expected {HEADER!r}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def write_listops(path: str | Path, examples: Iterable[tuple[Sequence[int], int]]) -> None:
    """Write a table that `read_listops` reads, without parentheses.

    Args:
        path: File to write; an existing one is replaced.
        examples: Tokens of expressions and their values.

    Raises:
        ValueError: If tokens are not an expression or have another value. The message names the
            example.
    """
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.write(HEADER + "\n")
        for index, (tokens, label) in enumerate(examples):
            try:
                _check_label(tokens, label)
            except ValueError as error:
                raise ValueError(f"example {index}: {error}") from error
            file.write(f"{decode(tokens)}\t{label}\n")


def _parse_line(line: str) -> tuple[list[int], int]:
    cells = line.split("\t")
    if len(cells) != HEADER.count("\t") + 1:
        raise ValueError(
            f"{plural(len(cells), 'cell')} separated by tabs, expected an expression and a digit"
        )
    source, target = cells
    if target not in CLASS_NAMES:
        raise ValueError(f"Target is {target!r}, expected 0 to 9")
    tokens = encode(source)
    _check_label(tokens, int(target))
    return tokens, int(target)


def _check_label(tokens: Sequence[int], label: int) -> None:
    value = evaluate(tokens)
    if label != value:
        raise ValueError(f"the label is {label}, but the expression evaluates to {value}")


# Generator


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig:
    """Size of ListOps expressions, by default as in the Long Range Arena."""

    min_length: int = 501
    """Minimum tokens of an expression. The arena's are longer than 500."""
    max_length: int = 1999
    """Maximum tokens of an expression. The arena's are shorter than 2000."""
    max_depth: int = 10
    """Maximum depth of the tree, including the root and the digits."""
    max_args: int = 10
    """Maximum arguments of an operator."""
    seed: int = 0
    """Random seed of all examples."""


class ListOps:
    """Generator of random expressions and their values.

    Trees follow the published generator (arXiv:2011.04006, after arXiv:1804.06028): a node is an
    operator with probability 1/4 and otherwise a digit; nodes at the maximum depth are digits; an
    operator has 2 to `max_args` arguments; operators and digits are uniform; trees that are too
    short or too long are rejected. Classes are not balanced: MIN and MAX make 0 and 9 the most
    frequent.

    Splits are disjoint: a hash of an expression's tokens determines its split. (The published
    generator removes duplicates from a list of all expressions.) Duplicates within a split are not
    removed; at the arena's lengths none are expected.

    Raises:
        ValueError: If a size is out of range, or no expression has the requested sizes.

    >>> tokens, label = ListOps(ListOpsConfig(min_length=5, max_length=20)).example("train", 0)
    """

    def __init__(self, config: ListOpsConfig | None = None) -> None:
        self.config = config or ListOpsConfig()
        _check_sizes(self.config)

    def example(self, split: str, index: int) -> tuple[list[int], int]:
        """Generate one example, which depends only on the config, the split and the index.

        Args:
            split: train, val or test.
            index: Any whole number of at least 0.

        Returns:
            Tokens, and the value of the expression, 0 to 9.

        Raises:
            ValueError: If split is unknown, index is not a whole number of at least 0, or
                expressions of these sizes are too rare to find one.
        """
        rng = example_rng("listops", seed=self.config.seed, split=split, index=index)
        for _ in range(MAX_ATTEMPTS):
            counts = self._draw_tree(rng)
            if counts is None:
                continue
            tokens: list[int] = []
            label = _fill_in(iter(counts), rng, tokens)
            if split_of(tokens) == split:
                return tokens, label
        raise ValueError(
            f"min_length is {self.config.min_length} and max_length is {self.config.max_length}, "
            f"but none of {MAX_ATTEMPTS} random expressions is of such a length and in the split "
            f"{split!r}: choose a wider range"
        )

    def _draw_tree(self, rng: Random) -> list[int] | None:
        """Draw the number of arguments of each node in prefix order; 0 is a digit.

        Returns:
            None if the expression is too short or too long.
        """
        config = self.config
        counts: list[int] = []
        remaining = [1]  # arguments still to come, for each open operator
        length = 0
        while remaining:
            if not remaining[-1]:
                remaining.pop()
                continue
            remaining[-1] -= 1
            is_operator = len(remaining) < config.max_depth and rng.random() < OPERATOR_PROBABILITY
            count = MIN_ARGS + random_below(rng, config.max_args - 1) if is_operator else 0
            counts.append(count)
            remaining.append(count)
            length += 2 if is_operator else 1  # an operator also has an end
            if length > config.max_length:
                return None
        return counts if length >= config.min_length else None


def split_of(tokens: list[int]) -> str:
    """Return the split of an expression: half of all are in train, a quarter each in val and test.

    >>> split_of([11, 3, 10, 15])
    'val'
    """
    digest = blake2b(bytes(tokens), digest_size=1).digest()
    return QUARTERS[digest[0] % len(QUARTERS)]


def _fill_in(counts: Iterator[int], rng: Random, tokens: list[int]) -> int:
    """Append the next node and its descendants to tokens, and return its value."""
    count = next(counts)
    if not count:
        tokens.append(DIGITS[random_below(rng, len(DIGITS))])
        return tokens[-1] - DIGITS[0]
    operator = OPERATORS[random_below(rng, len(OPERATORS))]
    tokens.append(operator)
    arguments = [_fill_in(counts, rng, tokens) for _ in range(count)]
    tokens.append(END)
    return apply(operator, arguments)


def _check_sizes(config: ListOpsConfig) -> None:
    check_whole(1, min_length=config.min_length, max_depth=config.max_depth)
    check_whole(MIN_ARGS, max_args=config.max_args)
    check_whole(config.min_length, max_length=config.max_length)
    longest = 1
    for _ in range(config.max_depth - 1):
        longest = 2 + config.max_args * longest
    if longest < config.min_length:
        raise ValueError(
            f"min_length is {config.min_length}, but with max_depth {config.max_depth} and "
            f"max_args {config.max_args} no expression has more than {longest} tokens"
        )


# Dataset


@dataclass(frozen=True, kw_only=True)
class ListOpsDataConfig(DataConfig):
    """ListOps of the Long Range Arena or of other sizes: expressions and their values.

    Expressions are never truncated, because truncation would change their value.
    """

    path: str | None = None
    """Folder with the published basic_train.tsv and basic_test.tsv; None generates expressions."""
    expressions: ListOpsConfig = field(default_factory=ListOpsConfig)
    """Size of generated expressions."""
    train_examples: int = LRA_COUNTS["train"]
    """Number of generated training examples."""
    test_examples: int = LRA_COUNTS["test"]
    """Number of generated test examples."""
    test_split: HeldOut = "test"
    """Split to evaluate on: test, or val for model selection."""

    @property
    def max_tokens(self) -> int:
        return self.expressions.max_length

    def build(self) -> SequenceSplits:
        """Set up the generator, or read the tables.

        Raises:
            ValueError: If a number is out of range, path is combined with settings of generated
                expressions, a table is missing, or one of its lines is wrong. The message names the
                file and the line.
        """
        check_choice("data.test_split", self.test_split, get_args(HeldOut))
        for name in ("train_examples", "test_examples"):
            check_positive(**{f"data.{name}": getattr(self, name)})
        train, test = self._generated() if self.path is None else self._read(Path(self.path))
        return SequenceSplits(
            train=train, test=test, class_names=CLASS_NAMES, format=ListOpsFormat()
        )

    def _generated(self) -> tuple[SequenceSet, SequenceSet]:
        generator = ListOps(self.expressions)
        return (
            GeneratedSequences(generator=generator, split="train", count=self.train_examples),
            GeneratedSequences(
                generator=generator, split=self.test_split, count=self.test_examples
            ),
        )

    def _read(self, folder: Path) -> tuple[SequenceSet, SequenceSet]:
        if self != ListOpsDataConfig(path=self.path, test_split=self.test_split):
            raise ValueError(
                f"data.path is {self.path!r}, but data.expressions, data.train_examples or "
                "data.test_examples is set too; they are only for generated expressions"
            )
        return _read_split(folder, "train"), _read_split(folder, self.test_split)


def _read_split(folder: Path, split: str) -> SequenceList:
    path = folder / f"basic_{split}.tsv"
    if not path.is_file():
        raise ValueError(f"data.path is {str(folder)!r}, where there is no {path.name}")
    rows = [
        LabeledSequence(np.array(tokens, dtype=np.uint8), label)
        for tokens, label in read_listops(path)
    ]
    if not rows:
        raise ValueError(f"{path} holds no expressions")
    return SequenceList(sequences=rows)
