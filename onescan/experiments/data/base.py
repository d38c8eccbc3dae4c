"""The interface of datasets: ordered examples, which are read when a batch needs them."""

import math
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

import torch
from jaxtyping import Int
from torch import Tensor

from onescan.experiments.data.order import derive_seed, epoch_order
from onescan.experiments.data.share import Share
from onescan.shapes import Labels

DataState = dict[str, Any]  # position of a stream, in JSON types
MAX_COUNT = 1 << 62  # of anything that a DataState counts
HELD_OUT = ("validation", "valid", "val", "test")  # a hub's test split may have no labels
SPLITS = ("train", *HELD_OUT)
NUMBER = re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{0,15})?")  # exact enough to compare as a float

OnError = Literal["raise", "skip"]
"""What to do with an example that cannot be read."""
SKIP_ROWS = "on_error='skip' skips such rows"  # end of errors; the command line names the flag


def check_data_state(state: DataState, first: DataState) -> None:
    """Check a DataState that was read from a file.

    Args:
        state: The one to check.
        first: The state at the beginning of the same stream. An int in it stands for any count,
            None for any dict or None.

    Raises:
        ValueError: If it has fields other than those of `first`, or a value of another type.

    >>> check_data_state({"row": -1}, {"row": 0})
    Traceback (most recent call last):
    ValueError: data_state is {'row': -1}, but row must be a count: remove the saved training state
    """
    problem = None if state.keys() == first.keys() else f"its fields must be {', '.join(first)}"
    for name, default in first.items() if not problem else ():
        value = state[name]
        if type(default) is int and not (type(value) is int and 0 <= value < MAX_COUNT):
            problem = f"{name} must be a count"
        elif not isinstance(default, int) and not isinstance(value, (dict, type(default))):
            problem = f"{name} must be an object"
    if problem:
        raise ValueError(
            f"data_state is {reprlib.repr(state)}, but {problem}: remove the saved training state"
        )


class DataConfig(ABC):
    """Where a run's data comes from. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self) -> Any:
        """Open the data: training and held-out examples, in the form the task reads."""

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens per sequence; None if there is no limit, or the data is not tokens."""
        return None


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Training and held-out examples. Subclasses add what their tasks read."""

    notes: tuple[str, ...] = ()
    """What was left out, converted or inferred when the data was opened: one phrase each, with
    counts. Shown before training, saved with the run and listed in its report."""


def listed(names: Sequence[str], limit: int = 10) -> str:
    """Join at most `limit` names by commas.

    >>> listed(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def class_range(count: int, *, has_names: bool) -> str:
    """Describe the valid class indices, and the names that limit them.

    >>> class_range(3, has_names=True)
    '0 to 2, because data.class_names has 3 names, starting with class 0'
    """
    reason = f", because data.class_names has {count} names, starting with class 0"
    return f"0 to {count - 1}{reason if has_names else ''}"


def held_out_note(held_out: int, count: int) -> str:
    """Say how many examples are held out because the data has no test split."""
    return f"{held_out:,} of {count:,} examples are held out, because there is no test split"


def missing_classes_note(
    labels: Labels, names: Sequence[str], *, part: str = "training"
) -> list[str]:
    """Return a note on the classes without examples in a part, if there are any."""
    counts = labels.bincount(minlength=len(names)).tolist()
    missing = [name for name, count in zip(names, counts, strict=True) if not count]
    return [f"classes without {part} examples: {listed(missing)}"] if missing else []


def similar_names_note(names: Sequence[str]) -> list[str]:
    """Return a note on class names that differ only in case, spaces, Unicode form or zeros.

    >>> similar_names_note(["Cat", "cat ", "dog", "1", "01", "1.0"])
    ["separate classes have similar names: 'Cat' and 'cat ', '1' and '01' and '1.0'"]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        plain = " ".join(normalize("NFKC", name).casefold().split())
        if NUMBER.fullmatch(plain):
            plain = str(float(plain))
        groups.setdefault(plain, []).append(repr(name))
    similar = [" and ".join(group) for group in groups.values() if len(group) > 1]
    return [f"separate classes have similar names: {listed(similar)}"] if similar else []


class Example(NamedTuple):
    """One example of a batch, before it is read.

    Attributes:
        source: Its index in the dataset, or the undecoded item of a stream.
        seed: Random seed of this example, such as of its random crop. None for no randomness, as
            in evaluation.
    """

    source: Any
    seed: int | None = None


class LoadedBatch(NamedTuple):
    """A batch that was read, and the errors while reading it.

    Attributes:
        batch: The tensors.
        failures: A message for each example that could not be read and was replaced or skipped.
    """

    batch: tuple[Tensor, ...]
    failures: tuple[str, ...] = ()


class DataSet(ABC):
    """Examples whose order is known without reading them, and which any process can read."""

    decodes: bool = False
    """Whether reading is slow enough to need worker processes."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the examples of one epoch."""

    @abstractmethod
    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        """Read a batch. The result depends on the argument alone, in any process."""

    def shared(self, share: Share) -> "DataSet":
        """Return a data set of the same examples that reads only a shard of each sequence.

        Raises:
            ValueError: If there are several shards, but the data set can only read whole sequences.
        """
        if share.size > 1:
            raise ValueError(
                f"machine.sequence_parallel is {share.size}, but {type(self).__name__} can "
                "only read whole sequences, expected 1"
            )
        return self

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        """Yield the examples of one epoch, each with the state from which to resume after it.

        The same arguments give the same examples, so a run resumed within an epoch need not read
        earlier examples. Datasets with random access need no state.

        Args:
            seed: Random seed of the order and of each example. None for the stored order without
                randomness.
            epoch: Index of the epoch.
            start: Number of examples of the epoch to skip.
            repeats: Number of consecutive copies of each example, each with its own seed. The
                epoch keeps its length, so it contains fewer distinct examples.
            data_state: The state yielded with example `start - 1`, for streams.
        """
        if seed is None:
            yield from ((Example(index), None) for index in range(start, len(self)))
            return
        order = epoch_order(len(self), seed=seed, epoch=epoch).numpy()  # faster to index
        for index in range(start, len(self)):
            example_seed = derive_seed(seed, "example", epoch, index)
            yield Example(int(order[index // repeats]), example_seed), None


@dataclass(frozen=True, kw_only=True)
class Subset(DataSet):
    """At most `max_examples` of a dataset, spread evenly over its stored order, for evaluation.

    >>> from onescan.experiments.data.images import ImageTensors
    >>> five = ImageTensors(images=torch.zeros(5, 1, 2, 2), labels=torch.arange(5))
    >>> subset = Subset(whole=five, max_examples=3)
    >>> [example.source for example, _ in subset.examples(seed=None)]
    [0, 1, 3]
    """

    whole: DataSet
    max_examples: int

    @property
    def decodes(self) -> bool:  # type: ignore[override]
        """Whether the whole dataset decodes."""
        return self.whole.decodes

    def __len__(self) -> int:
        return min(self.max_examples, len(self.whole))

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        return self.whole.read(examples)

    def examples(
        self, *, seed: int | None, **options: Any
    ) -> Iterator[tuple[Example, DataState | None]]:
        """Yield the chosen examples; a stream is read to its end."""
        if seed is not None or options:
            raise ValueError(
                f"seed is {seed} and options are {options}, but a subset is only read in stored "
                "order"
            )
        selected = {i * len(self.whole) // len(self) for i in range(len(self))}
        for index, example in enumerate(self.whole.examples(seed=None)):
            if index in selected:
                yield example


class HeldOutError(ValueError):
    """A fraction to hold out that is too small or too large.

    Attributes:
        fraction: The nearest valid fraction.
    """

    def __init__(self, message: str, fraction: float) -> None:
        super().__init__(message)
        self.fraction = fraction


def stratified_split(
    labels: Labels, *, fraction: float, seed: int, names: Sequence[str] | None = None
) -> tuple[Int[Tensor, " train"], Int[Tensor, " test"]]:
    """Split the indices of labels into a training and a test part of every class.

    Args:
        labels: Class index of each example.
        fraction: Fraction of the examples in the test part.
        seed: Random seed.
        names: Names of the classes, for errors. By default their indices.

    Raises:
        ValueError: If `fraction` is not between 0 and 1, or a class has a single example.
        HeldOutError: If either part has fewer examples than classes.
    """
    from sklearn.model_selection import train_test_split  # imported on use: half a second

    if not 0 < fraction < 1:
        raise ValueError(f"data.test_fraction is {fraction}, expected between 0 and 1")
    sizes = labels.bincount()
    count, classes = len(labels), int((sizes > 0).sum())
    held_out = math.ceil(fraction * count)
    if (sizes == 1).any():
        index = sizes.tolist().index(1)
        name = index if names is None else repr(names[index])
        raise ValueError(
            f"class {name} has one example, expected at least 2, so that one can be held out"
        )
    if not classes <= held_out <= count - classes:
        target = classes if held_out < classes else count - classes
        nearest = round(target / count, 4)
        nearest = nearest if math.ceil(nearest * count) == target else (target - 0.5) / count
        largest = count - classes
        allowed = f"{classes} to {largest}" if classes < largest else f"{classes}"
        raise HeldOutError(
            f"data.test_fraction is {fraction}, which holds out {held_out} of {count} examples, "
            f"expected {allowed}, so that both parts have an example of each class, for example "
            f"with {nearest:.4g}",
            fraction=nearest,
        )
    train, test = train_test_split(
        range(count), test_size=fraction, random_state=seed, stratify=labels.numpy()
    )
    return torch.tensor(train), torch.tensor(test)


def random_split(
    count: int, *, fraction: float, seed: int
) -> tuple[Int[Tensor, " train"], Int[Tensor, " test"]]:
    """Split the indices of examples into a training and a test part at random.

    Raises:
        ValueError: If `fraction` is not between 0 and 1, or there are fewer than two examples.
        HeldOutError: If either part would be empty.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"data.test_fraction is {fraction}, expected between 0 and 1")
    if count < 2:  # noqa: PLR2004
        raise ValueError(f"expected at least 2 examples, so that one can be held out, got {count}")
    held_out = math.ceil(fraction * count)
    if held_out == count:
        raise HeldOutError(
            f"data.test_fraction is {fraction}, which holds out all {count} examples, expected at "
            f"most {(count - 1) / count:.4g}",
            fraction=(count - 1.5) / count,
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[held_out:].sort().values, order[:held_out].sort().values
