"""A needle in tokens, drawn by chance, and the haystack that it is to lie in."""

from random import Random
from typing import NamedTuple

from onescan.data import derive_seed
from onescan.data.text import Tokenizer
from onescan.evaluation.asked import NeedleConfig
from onescan.evaluation.haystack import Haystack

NAME, NUMBER = "{name}", "{number}"
NAMES = (
    *("Amsterdam", "Bogota", "Cairo", "Dublin", "Edinburgh", "Florence", "Geneva", "Havana"),
    *("Istanbul", "Jakarta", "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague"),
)


class Hidden(NamedTuple):
    """One needle, in tokens.

    Attributes:
        opening: what a tokenizer puts before a text.
        needle: the fact.
        question: it has a token at least.
        answer: what is to follow.
    """

    opening: list[int]
    needle: list[int]
    question: list[int]
    answer: list[int]

    @property
    def tokens(self) -> int:
        """All together."""
        return sum(map(len, self))


def hide(
    tokenizer: Tokenizer, haystack: Haystack, asked: NeedleConfig, *, length: int, trial: int
) -> tuple[Hidden, list[int]]:
    """One needle, and the tokens that are to surround it."""
    hidden = draw(tokenizer, asked, trial)
    room = length - hidden.tokens
    chance = Random(derive_seed(asked.seed, "haystack", length, trial))
    start = int(chance.random() * (len(haystack.tokens) - room + 1))
    return hidden, haystack.tokens[start : start + room].tolist()


def draw(tokenizer: Tokenizer, asked: NeedleConfig, trial: int) -> Hidden:
    """One needle, the same for all lengths."""
    chance = Random(derive_seed(asked.seed, "needle", trial))
    name = NAMES[int(chance.random() * len(NAMES))]
    least = 10 ** (asked.digits - 1)
    number = str(least + int(chance.random() * 9 * least))
    needle = f"\n{asked.needle}\n".replace(NAME, name).replace(NUMBER, number)
    question = f"\n{asked.question}".replace(NAME, name)
    space = "" if question[-1].isspace() else " "
    ids, whole = tokenizer.encode(question), tokenizer.encode(question + space + number)
    shared = _shared(ids, whole)  # less than the question where a token is of both
    opening = tokenizer.begin(question)
    return Hidden(
        opening=opening[: len(opening) - len(ids)],
        needle=tokenizer.encode(needle),
        question=whole[:shared],
        answer=whole[shared:],
    )


def _shared(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with.

    >>> _shared([1, 2, 3], [1, 2, 4, 5]), _shared([1], [1, 2])
    (2, 1)
    """
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))
