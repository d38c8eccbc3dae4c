"""The needle in a haystack: does a language model recall a fact from anywhere in a long text?

A text is read in pieces and its state carried on, so the memory does not grow with the length where
a state does not. What lies before a needle is read once for all depths.
"""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from onescan import __version__, configs
from onescan.checks import check_positive
from onescan.data.text import Tokenizer
from onescan.evaluation.asked import NeedleConfig
from onescan.evaluation.haystack import Haystack
from onescan.evaluation.hidden import NAME, NUMBER, Hidden, draw, hide
from onescan.evaluation.needle_grid import NeedleGrid, Outcome, going_on
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLM
from onescan.models.token_network import NetworkState
from onescan.training.folder import write_json

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
