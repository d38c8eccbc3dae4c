"""The needle in a haystack."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from onescan import __version__, configs
from onescan.checkpoint.files import damaged, parse_json
from onescan.checks import check_positive
from onescan.data import derive_seed
from onescan.data.text import Tokenizer
from onescan.data.text.tokenizer import Ids
from onescan.evaluation.config import NeedleConfig, short_name
from onescan.evaluation.lengths import held_out_tokens
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLM
from onescan.models.token_network import NetworkState
from onescan.training.folder import read_manifest, write_json


class Haystack(NamedTuple):
    """A long text.

    Attributes:
        name: where it is from.
        tokens: all of it, by the model's own tokenizer.
    """

    name: str
    tokens: Ids


def read_haystack(file: Path, tokenizer: Tokenizer) -> Haystack:
    """Tokenize a text file.

    Raises:
        ValueError: it is no file, or no text in UTF-8.
        OSError: it cannot be read.
    """
    if not file.is_file():
        raise ValueError(f"haystack is {str(file)!r}, which is no file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"haystack is {str(file)!r}, which is no text in UTF-8") from error
    (tokens,) = tokenizer.encode_many([text])
    return Haystack(file.name, tokens)


def held_out_haystack(checkpoint: str) -> Haystack:
    """Take the text that a run was judged on.

    Raises:
        ValueError: there is no run, it was not trained on text, or its text is no longer there.
    """
    path = Path(checkpoint)
    try:
        data = read_manifest(path if path.is_dir() else path.parent).run.data
        tokens = held_out_tokens(checkpoint, data)
    except ValueError as error:
        raise ValueError(f"haystack is to be given, as there is no other text: {error}") from error
    return Haystack(f"the held-out text of {short_name(checkpoint)}", tokens)


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


ANEW = "remove it to measure anew, or choose another folder"

Cells = Float[np.ndarray, "depths lengths"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one needle at one depth."""

    length: int
    depth: float
    trial: int
    right: bool
    """Whether greedy decoding gives the number."""
    log_probability: float
    """Of the number after the question, in nats."""
    without: float
    """The same where the needle is taken out."""

    @property
    def gain(self) -> float:
        """What the needle adds to the log-probability."""
        return self.log_probability - self.without


@dataclass(frozen=True, kw_only=True)
class NeedleGrid:
    """All outcomes of one model in one text."""

    name: str
    """Of the model."""
    weights: str
    """What other weights have another of."""
    haystack: str
    """Where the text is from."""
    text: str
    """What another text has another of."""
    onescan: str
    asked: NeedleConfig
    """By the last call."""
    outcomes: tuple[Outcome, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Those of which something is known, from the shortest."""
        return sorted({outcome.length for outcome in self.outcomes})

    def holds(self, length: int, trial: int) -> bool:
        """Whether a needle is measured."""
        return any(each.length == length and each.trial == trial for each in self.outcomes)

    def accuracy(self) -> Cells:
        """The share of needles that are found."""
        return self._means(lambda outcome: float(outcome.right))

    def gain(self) -> Cells:
        """What a needle adds to its number's log-probability, in nats."""
        return self._means(lambda outcome: outcome.gain)

    def _means(self, number: Callable[[Outcome], float]) -> Cells:
        cells: dict[tuple[float, int], list[float]] = {}
        for outcome in self.outcomes:
            cells.setdefault((outcome.depth, outcome.length), []).append(number(outcome))
        depths = sorted(self.asked.depths)
        return np.array([[np.mean(cells[d, length]) for length in self.lengths] for d in depths])


def going_on(path: Path, fresh: NeedleGrid) -> NeedleGrid:
    """What is known before the first needle: `fresh`, with the outcomes that the file holds.

    Lengths and trials may be added.

    Raises:
        ValueError: the file is damaged, or holds outcomes of something else.
    """
    if not path.exists():
        return fresh
    there = _read(path)
    for where, x, y in configs.differences(_fixed(there), _fixed(fresh)):
        raise ValueError(
            f"{path} holds what was measured with {where} {x!r}, and not {y!r}: choose another "
            "folder"
        )
    return dataclasses.replace(fresh, outcomes=there.outcomes)


def _fixed(grid: NeedleGrid) -> NeedleGrid:
    """What may not change from call to call."""
    asked = dataclasses.replace(grid.asked, lengths=(), trials=1, prefill_chunk_size=1)
    return dataclasses.replace(grid, asked=asked, outcomes=())


def _read(path: Path) -> NeedleGrid:
    data = parse_json(path.read_bytes(), path, ANEW)
    if not isinstance(data, dict):
        raise damaged(path, data, ANEW)
    try:
        return configs.from_dict(NeedleGrid, data)
    except ValueError as error:
        raise damaged(path, error, ANEW) from error


NEEDLE = "needle.json"


class Reply(NamedTuple):
    """What a model says after a question: see `Outcome`."""

    right: bool
    log_probability: float


def measure_needles(
    name: str,
    model: CausalLM,
    tokenizer: Tokenizer,
    haystack: Haystack,
    asked: NeedleConfig,
    folder: Path,
    *,
    progress: bool = False,
) -> NeedleGrid:
    """Ask for needles at each length and depth, and keep what comes in needle.json.

    What the folder's needle.json already holds is not measured again.

    Args:
        name: of the model.
        model: in evaluation mode.
        tokenizer: the one that it was trained with.
        haystack: as long as the longest text at least; nothing is repeated.
        asked: what to measure.
        folder: where needle.json is, or will be.
        progress: whether to draw a bar on stderr.

    Raises:
        ValueError: a number or a template is out of range; a text is longer than the haystack or
            than the model has places for, or too short for a needle; the tokenizer is of another
            model; or the folder holds outcomes of something else.
        OSError: needle.json cannot be written.
    """
    _check(model, tokenizer, haystack, asked)
    fresh = NeedleGrid(
        name=name,
        weights=_fingerprint(_bytes(weight) for weight in model.state_dict().values()),
        haystack=haystack.name,
        text=_fingerprint([haystack.tokens.tobytes()]),
        onescan=__version__,
        asked=asked,
    )
    known = going_on(folder / NEEDLE, fresh)
    write_json(folder / NEEDLE, configs.to_dict(known))  # or it fails before the first needle
    reader = Reader(model, tokenizer.size, asked.prefill_chunk_size)
    plan = [(length, trial) for length in sorted(asked.lengths) for trial in range(asked.trials)]
    with tqdm(total=len(plan), unit=" needles", disable=not progress) as bar:
        for length, trial in plan:
            bar.set_description(f"{length} tokens")
            if not known.holds(length, trial):
                hidden, hay = hide(tokenizer, haystack, asked, length=length, trial=trial)
                found = _outcomes(reader, hidden, hay, asked, length=length, trial=trial)
                known = replace(known, outcomes=(*known.outcomes, *found))
                write_json(folder / NEEDLE, configs.to_dict(known))
            bar.update()
    return known


class Reader:
    """A model that reads on from a state, piece by piece."""

    def __init__(self, model: CausalLM, size: int, piece: int) -> None:
        self.model, self.size, self.piece = model, size, piece
        self.device = next(model.parameters()).device

    def read(self, ids: list[int], state: NetworkState | None) -> NetworkState | None:
        """The state after these tokens."""
        for start in range(0, len(ids), self.piece):
            tokens = self._batch(ids[start : start + self.piece])
            _, state = self.model(tokens, state, last_only=True)
        return state

    def ask(self, question: list[int], answer: list[int], state: NetworkState | None) -> Reply:
        """What follows a question.

        Greedy decoding gives the answer if each of its tokens is the likeliest after those before.
        """
        last = question[-1:] + answer[:-1]
        logits, _ = self.model(self._batch(last), self.read(question[:-1], state))
        log_shares = logits[0, :, : self.size].float().log_softmax(dim=-1)
        wanted = torch.tensor(answer, device=self.device)
        told = log_shares.gather(1, wanted.unsqueeze(1)).sum().item()
        return Reply(bool((log_shares.argmax(dim=-1) == wanted).all()), told)

    def _batch(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)


@torch.no_grad()
def _outcomes(
    reader: Reader, hidden: Hidden, hay: list[int], asked: NeedleConfig, *, length: int, trial: int
) -> list[Outcome]:
    """Of one needle at all depths; the haystack before it is read once."""
    opening, needle, question, answer = hidden
    state, read = reader.read(opening, None), 0
    told = {}
    for depth in sorted(asked.depths):
        place = round(depth * len(hay))
        state, read = reader.read(hay[read:place], state), place
        after = reader.read(needle + hay[place:], state)
        told[depth] = reader.ask(question, answer, after)
    without = reader.ask(question, answer, reader.read(hay[read:], state)).log_probability
    return [
        Outcome(length=length, depth=depth, trial=trial, without=without, **each._asdict())
        for depth, each in told.items()
    ]


def _check(model: CausalLM, tokenizer: Tokenizer, haystack: Haystack, asked: NeedleConfig) -> None:
    tokenizer.check_vocabulary(model.config.vocab_size)
    check_positive(
        trials=asked.trials, digits=asked.digits, prefill_chunk_size=asked.prefill_chunk_size
    )
    for argument in ("lengths", "depths"):
        values = getattr(asked, argument)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{argument} is {values}, expected at least one, and each once")
    for depth in asked.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depths has {depth}, expected 0, before the haystack, to 1, after it")
    if NUMBER not in asked.needle:
        raise ValueError(f"needle is {asked.needle!r}, expected {NUMBER} in it")
    if not asked.question.strip() or NUMBER in asked.question:
        raise ValueError(f"question is {asked.question!r}, expected a text without {NUMBER}")
    for argument in ("needle", "question"):
        template = getattr(asked, argument)
        rest = template.replace(NAME, "").replace(NUMBER, "")
        if "{" in rest or "}" in rest:
            raise ValueError(
                f"{argument} is {template!r}, expected no braces but those of {NAME} and {NUMBER}"
            )
    needles = [draw(tokenizer, asked, trial) for trial in range(asked.trials)]
    for length in asked.lengths:
        _check_length(length, model, haystack, needles)


def _check_length(length: int, model: CausalLM, haystack: Haystack, needles: list[Hidden]) -> None:
    shortest, longest = (f(hidden.tokens for hidden in needles) for f in (min, max))
    if length <= longest:
        raise ValueError(
            f"lengths has {length}, expected more than the {longest} tokens of a needle, its "
            "question and its answer"
        )
    room = length - shortest
    if room > len(haystack.tokens):
        raise ValueError(
            f"lengths has {length}, but {haystack.name} has {len(haystack.tokens)} tokens, "
            f"expected {room} at least: nothing is repeated"
        )
    position = model.config.position
    if isinstance(position, TokenPositionConfig) and length > position.max_tokens:
        raise ValueError(
            f"lengths has {length}, but the model has places for {position.max_tokens} tokens"
        )


def _bytes(weight: Tensor) -> bytes:
    return weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _fingerprint(parts: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
