"""Needle in a haystack: can a language model recall a fact from anywhere in a long text?

The text is read in chunks with a recurrent state, so memory does not grow with the length for
models whose state does not grow. The text before a needle is read once for all depths.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from onescan import __version__, configs
from onescan.checkpoint.files import damaged, parse_json
from onescan.checks import check_distinct, check_positive
from onescan.experiments.data import derive_seed
from onescan.experiments.data.text.lines import read_text_file
from onescan.experiments.evaluation.config import NeedleConfig, short_name
from onescan.experiments.evaluation.lengths import held_out_tokens
from onescan.experiments.training.folder import write_json
from onescan.experiments.training.runs import run_config
from onescan.inputs.tokenizer import Ids, Tokenizer
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLM
from onescan.models.token_network import NetworkState
from onescan.progress import progress_bar

RESULTS = "needle.json"
REMEDY = "remove it to start again, or choose another folder"
NAME, NUMBER = "{name}", "{number}"
NAMES = (
    *("Amsterdam", "Bogota", "Cairo", "Dublin", "Edinburgh", "Florence", "Geneva", "Havana"),
    *("Istanbul", "Jakarta", "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague"),
)

Cells = Float[np.ndarray, "depths lengths"]


class Haystack(NamedTuple):
    """A long text.

    Attributes:
        name: Where it is from.
        tokens: Ids of the model's tokenizer.
    """

    name: str
    tokens: Ids


class Needle(NamedTuple):
    """A fact and a question about it, in tokens.

    Attributes:
        start: What the tokenizer adds before a text.
        fact: The needle.
        question: At least one token.
        answer: Expected continuation.
    """

    start: list[int]
    fact: list[int]
    question: list[int]
    answer: list[int]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one needle at one depth."""

    length: int
    depth: float
    trial: int
    right: bool
    """Whether greedy decoding returns the number."""
    log_probability: float
    """Log-probability of the number after the question, in nats."""
    without: float
    """The same without the needle in the text."""

    @property
    def gain(self) -> float:
        """Increase of the log-probability due to the needle."""
        return self.log_probability - self.without


@dataclass(frozen=True, kw_only=True)
class NeedleGrid:
    """Content of needle.json: the results of one model on one text."""

    name: str
    """Name of the model."""
    weights: str
    """Hash of the weights."""
    haystack: str
    """Where the text is from."""
    text: str
    """Hash of the text."""
    onescan: str
    """Version."""
    config: NeedleConfig
    """Settings of the last call."""
    outcomes: tuple[Outcome, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Lengths with results, in increasing order."""
        return sorted({outcome.length for outcome in self.outcomes})

    def accuracy(self) -> Cells:
        """Return the fraction of needles that are found."""
        return self._means(lambda outcome: float(outcome.right))

    def gain(self) -> Cells:
        """Return the mean increase of the log-probability due to the needle, in nats."""
        return self._means(lambda outcome: outcome.gain)

    def _means(self, value: Callable[[Outcome], float]) -> Cells:
        cells: dict[tuple[float, int], list[float]] = {}
        for outcome in self.outcomes:
            cells.setdefault((outcome.depth, outcome.length), []).append(value(outcome))
        depths = sorted(self.config.depths)
        return np.array([[np.mean(cells[d, length]) for length in self.lengths] for d in depths])


def read_haystack(file: Path, tokenizer: Tokenizer) -> Haystack:
    """Tokenize a text file.

    Raises:
        ValueError: If it is not a file, or not text in UTF-8.
        OSError: If it cannot be read.
    """
    if not file.is_file():
        raise ValueError(f"haystack is {str(file)!r}, which is not a file")
    try:
        text = read_text_file(file)
    except ValueError as error:
        raise ValueError(f"haystack is {str(file)!r}, which is not UTF-8 text: {error}") from error
    (tokens,) = tokenizer.encode_many([text])
    return Haystack(file.name, tokens)


def held_out_haystack(checkpoint: str) -> Haystack:
    """Return the test text of a run.

    Raises:
        ValueError: If it is not a run, was not trained on text, or the text no longer exists.
    """
    run = run_config(checkpoint)
    if run is None:
        raise ValueError(f"haystack is None, but {checkpoint!r} has no test text, expected a file")
    try:
        tokens = held_out_tokens(checkpoint, run.data)
    except ValueError as error:
        raise ValueError(f"haystack is None, expected a file: {error}") from error
    return Haystack(f"the held-out text of {short_name(checkpoint)}", tokens)


def measure_needles(
    name: str,
    model: CausalLM,
    tokenizer: Tokenizer,
    haystack: Haystack,
    config: NeedleConfig,
    folder: Path,
    *,
    progress: bool = False,
) -> NeedleGrid:
    """Evaluate needles at each length and depth, and save the results in needle.json.

    Results that needle.json already has are kept; lengths and trials may be added to them.

    Args:
        name: Name of the model.
        model: Model in evaluation mode.
        tokenizer: Tokenizer of the model.
        haystack: Text at least as long as the longest context; it is not repeated.
        config: Lengths, depths, needles.
        folder: Folder of needle.json.
        progress: Whether to show a progress bar on stderr.

    Raises:
        ValueError: If a setting is out of range, a length exceeds the haystack or the model's
            limit or is too short for a needle, the tokenizer does not match the model, or the
            folder has results of other settings.
        OSError: If needle.json cannot be written.
    """
    needles = _check(model, tokenizer, haystack, config)
    grid = NeedleGrid(
        name=name,
        weights=_hash(_bytes(weight) for weight in model.state_dict().values()),
        haystack=haystack.name,
        text=_hash([haystack.tokens.tobytes()]),
        onescan=__version__,
        config=config,
    )
    path = folder / RESULTS
    grid = dataclasses.replace(grid, outcomes=_saved_outcomes(path, grid))
    write_json(path, configs.to_dict(grid))  # fail before the first needle if it cannot be written
    scorer = Scorer(model, tokenizer.size, config.prefill_chunk_size)
    done = {(outcome.length, outcome.trial) for outcome in grid.outcomes}
    cases = [(length, trial) for length in sorted(config.lengths) for trial in range(config.trials)]
    with progress_bar(len(cases), unit=" needles", disable=not progress) as bar:
        for length, trial in cases:
            bar.set_description(f"{length} tokens")
            if (length, trial) not in done:
                hay = cut_haystack(haystack, needles[trial], config.seed, length, trial)
                outcomes = _outcomes(
                    scorer, needles[trial], hay, config, length=length, trial=trial
                )
                grid = dataclasses.replace(grid, outcomes=(*grid.outcomes, *outcomes))
                write_json(path, configs.to_dict(grid))
            bar.update()
    return grid


def build_needle(tokenizer: Tokenizer, config: NeedleConfig, trial: int) -> Needle:
    """Draw the needle of a trial, which is the same at all lengths and depths."""
    rng = Random(derive_seed(config.seed, "needle", trial))
    name = NAMES[int(rng.random() * len(NAMES))]
    smallest = 10 ** (config.digits - 1)
    number = str(smallest + int(rng.random() * 9 * smallest))
    fact = f"\n{config.needle}\n".replace(NAME, name).replace(NUMBER, number)
    question = f"\n{config.question}".replace(NAME, name)
    space = "" if question[-1].isspace() else " "
    ids, answered = tokenizer.encode(question), tokenizer.encode(question + space + number)
    # Tokens may span question and answer, so the question ends where the two tokenizations differ.
    pairs = enumerate(zip(ids, answered, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(answered)))
    start = tokenizer.begin(question)
    return Needle(
        start=start[: len(start) - len(ids)],
        fact=tokenizer.encode(fact),
        question=answered[:shared],
        answer=answered[shared:],
    )


def cut_haystack(
    haystack: Haystack, needle: Needle, seed: int, length: int, trial: int
) -> list[int]:
    """Draw a part of the haystack that fills a context of `length` tokens around the needle."""
    size = length - sum(map(len, needle))
    rng = Random(derive_seed(seed, "haystack", length, trial))
    start = int(rng.random() * (len(haystack.tokens) - size + 1))
    return haystack.tokens[start : start + size].tolist()


class Scorer:
    """Reads tokens in chunks and scores answers.

    Args:
        model: Model in evaluation mode.
        size: Vocabulary size of the tokenizer.
        chunk_size: Tokens to read at once.
    """

    def __init__(self, model: CausalLM, size: int, chunk_size: int) -> None:
        self.model, self.size, self.chunk_size = model, size, chunk_size
        self.device = next(model.parameters()).device

    def read(self, ids: list[int], state: NetworkState | None) -> NetworkState | None:
        """Return the state after more tokens."""
        for start in range(0, len(ids), self.chunk_size):
            tokens = self._batch(ids[start : start + self.chunk_size])
            _, state = self.model(tokens, state, last_only=True)
        return state

    def score(self, needle: Needle, state: NetworkState | None) -> tuple[bool, float]:
        """Return whether greedy decoding answers the question, and the answer's log-probability."""
        question, answer = needle.question, needle.answer
        last = question[-1:] + answer[:-1]
        logits, _ = self.model(self._batch(last), self.read(question[:-1], state))
        log_probabilities = logits[0, :, : self.size].float().log_softmax(dim=-1)
        labels = torch.tensor(answer, device=self.device)
        total = log_probabilities.gather(1, labels.unsqueeze(1)).sum().item()
        return bool((log_probabilities.argmax(dim=-1) == labels).all()), total

    def _batch(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)


@torch.no_grad()
def _outcomes(
    scorer: Scorer,
    needle: Needle,
    hay: list[int],
    config: NeedleConfig,
    *,
    length: int,
    trial: int,
) -> list[Outcome]:
    """Evaluate one needle at all depths; the haystack before it is read once."""
    state, position, scores = scorer.read(needle.start, None), 0, {}
    for depth in sorted(config.depths):
        end = round(depth * len(hay))
        state, position = scorer.read(hay[position:end], state), end
        scores[depth] = scorer.score(needle, scorer.read(needle.fact + hay[end:], state))
    _, without = scorer.score(needle, scorer.read(hay[position:], state))
    return [
        Outcome(
            length=length,
            depth=depth,
            trial=trial,
            right=right,
            log_probability=log_probability,
            without=without,
        )
        for depth, (right, log_probability) in scores.items()
    ]


def _saved_outcomes(path: Path, grid: NeedleGrid) -> tuple[Outcome, ...]:
    """Return the outcomes in a file, after checking that only lengths and trials differ."""
    if not path.exists():
        return ()
    data = parse_json(path.read_bytes(), path, REMEDY)
    if not isinstance(data, dict):
        raise damaged(path, data, REMEDY)
    try:
        saved = configs.from_dict(NeedleGrid, data)
    except ValueError as error:
        raise damaged(path, error, REMEDY) from error

    def fixed(grid: NeedleGrid) -> NeedleGrid:
        config = dataclasses.replace(grid.config, lengths=(), trials=1, prefill_chunk_size=1)
        return dataclasses.replace(grid, config=config, outcomes=())

    for field, saved_value, value in configs.differences(fixed(saved), fixed(grid)):
        raise ValueError(
            f"{path} has results for {field} {saved_value!r}, expected {value!r}: choose another "
            "folder"
        )
    return saved.outcomes


def _check(
    model: CausalLM, tokenizer: Tokenizer, haystack: Haystack, config: NeedleConfig
) -> list[Needle]:
    """Return the needles of all trials, or raise ValueError if something does not fit."""
    tokenizer.check_vocabulary(model.config.vocab_size)
    check_positive(
        trials=config.trials, digits=config.digits, prefill_chunk_size=config.prefill_chunk_size
    )
    check_distinct(lengths=config.lengths, depths=config.depths)
    for depth in config.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depths contains {depth}, expected 0 (start) to 1 (end)")
    if NUMBER not in config.needle:
        raise ValueError(f"needle is {config.needle!r}, expected {NUMBER} in it")
    if not config.question.strip() or NUMBER in config.question:
        raise ValueError(f"question is {config.question!r}, expected a text without {NUMBER}")
    for field in ("needle", "question"):
        template = getattr(config, field)
        remainder = template.replace(NAME, "").replace(NUMBER, "")
        if "{" in remainder or "}" in remainder:
            raise ValueError(f"{field} is {template!r}, expected no braces but {NAME} and {NUMBER}")
    needles = [build_needle(tokenizer, config, trial) for trial in range(config.trials)]
    sizes = [sum(map(len, needle)) for needle in needles]
    position = model.config.position
    for length in config.lengths:
        if length <= max(sizes):
            raise ValueError(
                f"lengths contains {length}, expected more than the {max(sizes)} tokens of a "
                "needle, its question and its answer"
            )
        if length - min(sizes) > len(haystack.tokens):
            raise ValueError(
                f"lengths contains {length}, but {haystack.name} has {len(haystack.tokens)} "
                f"tokens, expected at least {length - min(sizes)}"
            )
        if isinstance(position, TokenPositionConfig) and length > position.max_tokens:
            raise ValueError(
                f"lengths contains {length}, but the model is limited to {position.max_tokens} "
                "tokens"
            )
    return needles


def _bytes(weight: Tensor) -> bytes:
    return weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _hash(parts: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
