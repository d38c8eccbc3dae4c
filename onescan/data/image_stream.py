"""Images that come one after the other, from files or a hub too large to look rows up in."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onescan.data.base import DataState, Example, LoadedBatch, check_data_state
from onescan.data.image_columns import Classes, ImageTable
from onescan.data.image_parquet import UNREADABLE, first_line
from onescan.data.image_reader import EncodedImage, ImageReader
from onescan.data.images import ImageSet
from onescan.data.order import Block, BlockStart, Mark, derive_seed, read_blocks

FIRST: DataState = {"block": 0, "turn": 0, "row": 0, "state": None}
GROUP = 64  # rows asked for at once: one by one, the datasets library takes much longer


@dataclass(frozen=True, kw_only=True)
class ImageStream(ImageSet):
    """Rows of a stream of the datasets library, shuffled shard by shard and in blocks.

    A DataState describes where the current block begins: `block` is its number, `turn` its shard's
    position in the shuffled order, `row` its first row in that shard, and `state` the position of
    the datasets library before the group of rows that the previous row is in.

    Attributes:
        table: the stream, with images undecoded.
        classes: what its labels mean.
        split: what the rows are called.
        files: one for each shard, where they are known.
        count: how many rows a pass has; in the stored order it goes on to the stream's end all the
            same.
        block: how many neighbours are shuffled with each other.
        reader: what decodes them.
    """

    decodes = True
    table: ImageTable
    classes: Classes
    split: str
    files: Sequence[str]
    count: int
    block: int
    reader: ImageReader

    def __len__(self) -> int:
        return self.count

    def read(self, examples: Sequence[Example]) -> LoadedBatch:
        return self.reader.read(
            [example.source for example in examples], [example.seed for example in examples]
        )

    def examples(
        self,
        *,
        seed: int | None,
        epoch: int = 0,
        start: int = 0,
        repeats: int = 1,
        data_state: DataState | None = None,
    ) -> Iterator[tuple[Example, DataState | None]]:
        first, limit = data_state or FIRST, None if seed is None else self.count
        check_data_state(first, FIRST)
        blocks = read_blocks(
            self._read_shard,
            shards=self.table.rows.num_shards,
            size=self.block,
            start=_start(first),
            seed=seed,
            epoch=epoch,
        )
        begin = first["block"] * self.block * repeats
        for block in blocks:
            end = begin + len(block.items) * repeats
            for index in range(max(begin, start), end if limit is None else min(end, limit)):
                example_seed = None if seed is None else derive_seed(seed, "example", epoch, index)
                image = block.items[(index - begin) // repeats]
                yield Example(image, example_seed), _state(block, is_last=index + 1 == end)
            begin = end
            if limit is not None and end >= limit:
                return
        if limit is not None and begin < limit:
            raise ValueError(
                f"the stream {self.split} ended after {begin // repeats} images, expected "
                f"{math.ceil(limit / repeats)}: is data.train_examples right?"
            )

    def _read_shard(self, index: int, mark: Mark) -> Iterator[tuple[EncodedImage, Mark]]:
        rows = self.table.rows
        name = self.files[index] if self.files else f"shard {index} of {self.split}"
        shard = rows.shard(num_shards=rows.num_shards, index=index)
        for row, example, state in _read(shard, name, mark.get("row", 0), mark.get("state")):
            yield self._encoded(example, f"row {row} of {name}"), {"row": row + 1, "state": state}

    def _encoded(self, example: dict[str, Any], row: str) -> EncodedImage:
        label = self.classes.place(example[self.table.label], row)
        return EncodedImage.of(example[self.table.image], label, row)


def _start(state: DataState) -> BlockStart:
    mark = {"row": state["row"], "state": state["state"]}
    return BlockStart(state["block"], state["turn"], mark)


def _state(block: Block[EncodedImage], *, is_last: bool) -> DataState:
    """The state after an example of a block: the next block's start, or this one's."""
    start = block.end if is_last else block.start
    return {**FIRST, "block": start.block, "turn": start.shard, **start.mark}


def _read(shard: Any, name: str, first: int, state: Any) -> Iterator[tuple[int, Any, Any]]:
    """Yield a shard's rows from `first` on: number, columns, and the state before their group."""
    begin = max(first - 1, 0) // GROUP * GROUP  # of the group that the row before is in
    try:
        if state is not None:
            shard.load_state_dict(state)
        for columns in shard.iter(batch_size=GROUP):
            end = begin + len(next(iter(columns.values())))
            for row in range(max(first, begin), end):
                yield row, {key: column[row - begin] for key, column in columns.items()}, state
            begin, state = end, shard.state_dict()
    except UNREADABLE as error:
        raise ValueError(f"{name} cannot be read: {first_line(error)}") from error
