"""ListOps of the Long Range Arena: expressions to be worked out, each drawn by itself.

The trees are those of the published generator (arXiv:2011.04006, after arXiv:1804.06028): a node
is an operator with probability 1/4, and otherwise a digit; below the deepest level there is
nothing, so the nodes of that level are digits; an operator has 2 to `max_args` arguments; operators
and digits are uniform; a tree that is too short or too long is drawn anew. The classes are not
balanced: MIN and MAX make 0 and 9 the most frequent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from onescan.data.long_range.chance import SPLITS, below, check_whole, example_chance
from onescan.data.long_range.expressions import DIGITS, END, OPERATORS, apply

LRA_COUNTS = {"train": 96_000, "val": 2_000, "test": 2_000}
"""How many examples the Long Range Arena has of each split."""

OPERATOR_SHARE = 0.25
LEAST_ARGS = 2
TRIES = 100_000
OWNERS = ("train", *SPLITS)  # of each quarter of all expressions


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
    """Expressions and what they are worth, as many as one asks for.

    No expression is in two splits: a hash of its tokens says to which one it belongs. (The
    published generator removes duplicates from a list of all.) Within a split nothing is removed;
    in expressions of the arena's length no duplicate is to be expected.

    Raises:
        ValueError: a size is out of range, or no expression has the sizes asked for.

    >>> tokens, label = ListOps(ListOpsConfig(min_length=5, max_length=20)).example("train", 0)
    """

    def __init__(self, config: ListOpsConfig | None = None) -> None:
        self.config = config or ListOpsConfig()
        _check(self.config)

    def example(self, split: str, index: int) -> tuple[list[int], int]:
        """Draw one example: a function of the config, the split and the index alone.

        Args:
            split: train, val or test.
            index: from 0; there is no last one.

        Returns:
            The tokens, see `expressions`, and what the expression is worth, 0 to 9.

        Raises:
            ValueError: split is unknown, index is no whole number from 0, or expressions of the
                config's sizes are so rare that none was found.
        """
        chance = example_chance("listops", seed=self.config.seed, split=split, index=index)
        for _ in range(TRIES):
            counts = self._draw_counts(chance)
            if counts is None:
                continue
            tokens: list[int] = []
            label = _write(iter(counts), chance, tokens)
            if split_of(tokens) == split:
                return tokens, label
        raise ValueError(
            f"min_length is {self.config.min_length} and max_length {self.config.max_length}: "
            f"of {TRIES} expressions drawn for {split!r} none fitted, expected a wider range"
        )

    def _draw_counts(self, chance: Random) -> list[int] | None:
        """Draw a tree: how many arguments each node has, a digit 0, the root first.

        Returns:
            None if the expression is too short or too long.
        """
        config = self.config
        counts: list[int] = []
        awaited = [1]  # arguments still to come, of each operator that is open
        length = 0
        while awaited:
            if not awaited[-1]:
                awaited.pop()
                continue
            awaited[-1] -= 1
            is_operator = len(awaited) < config.max_depth and chance.random() < OPERATOR_SHARE
            count = LEAST_ARGS + below(chance, config.max_args - 1) if is_operator else 0
            counts.append(count)
            awaited.append(count)
            length += 2 if is_operator else 1  # an operator has an end
            if length > config.max_length:
                return None
        return counts if length >= config.min_length else None


def split_of(tokens: list[int]) -> str:
    """Say to which split an expression belongs: half of all to train, a quarter to val and to test.

    >>> split_of([11, 3, 10, 15])
    'val'
    """
    digest = blake2b(bytes(tokens), digest_size=1).digest()
    return OWNERS[digest[0] % len(OWNERS)]


def _write(counts: Iterator[int], chance: Random, tokens: list[int]) -> int:
    """Append the next node and all below it to the tokens; return what it is worth."""
    count = next(counts)
    if not count:
        tokens.append(DIGITS[below(chance, len(DIGITS))])
        return tokens[-1] - DIGITS[0]
    operator = OPERATORS[below(chance, len(OPERATORS))]
    tokens.append(operator)
    arguments = [_write(counts, chance, tokens) for _ in range(count)]
    tokens.append(END)
    return apply(operator, arguments)


def _check(config: ListOpsConfig) -> None:
    check_whole(1, min_length=config.min_length, max_depth=config.max_depth)
    check_whole(LEAST_ARGS, max_args=config.max_args)
    check_whole(config.min_length, max_length=config.max_length)
    longest = 1
    for _ in range(config.max_depth - 1):
        longest = 2 + config.max_args * longest
    if longest < config.min_length:
        raise ValueError(
            f"min_length is {config.min_length}, but with max_depth {config.max_depth} and "
            f"max_args {config.max_args} no expression has more than {longest} tokens"
        )
