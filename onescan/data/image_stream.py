"""Images that come one after the other, from files or a hub too large to look rows up in."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onescan.data.base import Bookmark, Example, Loaded, check_bookmark
from onescan.data.image_columns import Classes, ImageTable
from onescan.data.image_parquet import UNREADABLE, first_line
from onescan.data.image_reader import EncodedImage, ImageReader
from onescan.data.images import ImageSet
from onescan.data.order import derive_seed, epoch_order

BEGINNING: Bookmark = {"block": 0, "turn": 0, "row": 0, "state": None}
GROUP = 64  # rows asked for at once: one by one, the datasets library takes much longer


@dataclass(frozen=True, kw_only=True)
class ImageStream(ImageSet):
    """Rows of a stream of the datasets library, shuffled shard by shard and in blocks.

    A bookmark tells where the current block begins: which block of the pass it is, which turn of
    the shards, how many of its rows came before, and what the datasets library knows of the place
    where their last group began.

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

    def read(self, examples: Sequence[Example]) -> Loaded:
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
        bookmark: Bookmark | None = None,
    ) -> Iterator[tuple[Example, Bookmark | None]]:
        here, count = bookmark or BEGINNING, None if seed is None else self.count
        check_bookmark(here, BEGINNING)
        turn = here["block"] * self.block * repeats
        for block, after in self._blocks(here, seed, epoch):
            order = _order(len(block), seed, "block", here["block"], epoch=epoch)
            end = turn + len(block) * repeats
            stop = end if count is None else min(end, count)
            for now in range(max(turn, start), stop):
                chance = None if seed is None else derive_seed(seed, "example", epoch, now)
                image = block[order[(now - turn) // repeats]]
                yield Example(image, chance), after if now + 1 == end else here
            here, turn = after, end
            if turn == count or stop < end:
                return
        if count is not None and turn < count:
            raise ValueError(
                f"the stream {self.split} ended after {turn // repeats} images, expected "
                f"{math.ceil(count / repeats)}: is data.train_examples right?"
            )

    def _blocks(
        self, here: Bookmark, seed: int | None, epoch: int
    ) -> Iterator[tuple[list[EncodedImage], Bookmark]]:
        """Yield blocks in the order that they are read in, each with the place after it."""
        rows, number, block = self.table.rows, here["block"], []
        first, state = here["row"], here["state"]
        order = _order(rows.num_shards, seed, "shards", epoch=epoch)
        for turn in range(here["turn"], len(order)):
            shard = rows.shard(num_shards=len(order), index=order[turn])
            name = self._shard_name(order[turn])
            for row, example, before in _read(shard, name, first, state):
                block.append(self._encoded(example, f"row {row} of {name}"))
                if len(block) == self.block:
                    number += 1
                    yield block, {"block": number, "turn": turn, "row": row + 1, "state": before}
                    block = []
            first, state = 0, None
        if block:
            yield block, {"block": number + 1, "turn": len(order), "row": 0, "state": None}

    def _encoded(self, example: dict[str, Any], row: str) -> EncodedImage:
        label = self.classes.place(example[self.table.label], row)
        return EncodedImage.of(example[self.table.image], label, row)

    def _shard_name(self, index: int) -> str:
        return self.files[index] if self.files else f"shard {index} of {self.split}"


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


def _order(count: int, seed: int | None, *purpose: int | str, epoch: int) -> list[int]:
    if seed is None:
        return list(range(count))
    return epoch_order(count, seed=derive_seed(seed, *purpose), epoch=epoch).tolist()
