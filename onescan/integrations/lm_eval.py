"""Wrap a causal language model as a model of lm-eval, to evaluate it on lm-eval's tasks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Int

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    from onescan.messages import missing_package

    raise missing_package("onescan.integrations.lm_eval", "lm-eval", "eval", error) from error
from torch import Tensor, nn

from onescan.checks import check_positive
from onescan.layers.position import TokenPositionConfig
from onescan.messages import named_type
from onescan.models.causal_lm import IGNORE_INDEX, CausalLM, Sampling, score_logits, token_losses
from onescan.models.token_network import select_rows
from onescan.progress import progress_bar

NAME = "onescan"  # in lm-eval's registry
DEFAULT_NEW_TOKENS = 256  # if a task sets no limit
LENGTHS = ("max_gen_toks", "max_new_tokens")  # names of the limit in tasks

RequestT = TypeVar("RequestT")
Ids = list[int]
Score = tuple[float, bool]  # log-likelihood, and whether greedy decoding generates the text
Padded = tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]


@runtime_checkable
class TextTokens(Protocol):
    """Interface of a tokenizer."""

    size: int
    end: int | None

    def encode(self, text: str) -> Ids:
        """Return the ids of a text."""

    def begin(self, prompt: str) -> Ids:
        """Return the ids of a prompt; for an empty prompt, the beginning-of-text token."""

    def pieces(self, ids: Iterable[int], context: Sequence[int]) -> Iterator[str]:
        """Yield the text of each id after a context, "" if it may change, and finally the rest."""


class OnescanLM(TemplateLM):
    """Compute log-likelihoods and generate texts, in time linear in their length.

    Requests with the same context share the state after it. Contexts are not truncated, except for
    models with learned position embeddings, which read only the end of long contexts.

    Args:
        model: A `CausalLM` in evaluation mode, on the device to use.
        tokenizer: The tokenizer with which it was trained.
        batch_size: Number of requests per batch. It affects memory use, and sampled texts but no
            other results.

    Raises:
        ValueError: If the model is not a `CausalLM`, or batch_size is not positive.
    """

    def __init__(self, model: nn.Module, tokenizer: TextTokens, *, batch_size: int = 32) -> None:
        super().__init__()
        if not isinstance(model, CausalLM):
            raise ValueError(
                f"the model is {named_type(model)}, expected a CausalLM: lm-eval needs the "
                "likelihood of continuations"
            )
        check_positive(batch_size=batch_size)
        self.model, self.texts, self.batch_size = model, tokenizer, batch_size
        self._device = model.network.device
        indices = model.config.position
        self.most_tokens = indices.max_tokens if isinstance(indices, TokenPositionConfig) else None

    @property
    def eot_token_id(self) -> int:
        """Return the id of the beginning-of-text token.

        Raises:
            ValueError: If the tokenizer has none, nor an end-of-text token.
        """
        try:
            return self.texts.begin("")[-1]
        except ValueError as error:
            raise ValueError(
                "a task requests the likelihood of a text without context, but the tokenizer has "
                "no beginning-of-text token"
            ) from error

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Ids:
        """Return the ids of a text, by default with the special tokens at its beginning."""
        plain = add_special_tokens is False or not string
        return self.texts.encode(string) if plain else self.texts.begin(string)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[Score]:
        """Compute the log-likelihood of each continuation of a context.

        Both are encoded together, as by lm-eval's own models: white space at the end of the context
        belongs to the continuation, whose tokens are those after as many tokens as the context has
        on its own. If there are none, because one token spans the boundary, the continuation
        is encoded on its own.

        Raises:
            ValueError: If a continuation has no tokens, or too many for the model.
        """
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in requests]
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        start = context.rstrip()
        continuation = context[len(start) :] + continuation
        if not start:
            return [], self.tok_encode(continuation, add_special_tokens=False)
        ids = self.tok_encode(start)
        rest = self.tok_encode(start + continuation)[len(ids) :]
        return ids, rest or self.tok_encode(continuation, add_special_tokens=False)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Compute the log-likelihood of each text after the beginning-of-text token."""
        windows = [self._windows(request.args[0]) for request in requests]
        flat = [(("", ""), context, text) for row in windows for context, text in row]
        scores = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        return [sum((next(scores)[0] for _ in row), 0.0) for row in windows]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Generate a text after each context, up to one of the task's stop strings.

        The text begins with the space after the context, if there is one. Stop strings are searched
        for in the generated text alone.
        """

        def kind(index: int) -> tuple[str, int]:
            context, options = requests[index].args
            return repr(sorted(options.items())), len(context)

        written: dict[int, str] = {}
        order = sorted(range(len(requests)), key=kind)
        with progress_bar(len(order), desc="generating", disable=disable_tqdm) as bar:
            for _, same_options in groupby(order, key=lambda index: kind(index)[0]):
                for indices in _batches(list(same_options), self.batch_size):
                    contexts = [requests[index].args[0] for index in indices]
                    texts = self._write(contexts, dict(requests[indices[0]].args[1]))
                    written |= dict(zip(indices, texts, strict=True))
                    bar.update(len(indices))
        return [written[index] for index in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, **_: Any
    ) -> list[Score]:
        """Score continuations, grouped by context, from the longest contexts to the shortest."""
        pairs = [self._fitted(*request) for request in requests]
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i][0]))
        scores: dict[int, Score] = {}
        with progress_bar(len(order), desc="scoring", disable=disable_tqdm) as bar:
            for indices in _batches(order, self.batch_size):
                batch = self._score([pairs[index] for index in indices])
                scores |= dict(zip(indices, batch, strict=True))
                bar.update(len(indices))
        return [scores[index] for index in range(len(pairs))]

    @torch.no_grad()
    def _score(self, pairs: list[tuple[Ids, Ids]]) -> list[Score]:
        """Score a batch: read each context once, and its continuations from the state after it."""
        contexts = sorted({tuple(context) for context, _ in pairs})
        context_index = torch.tensor([contexts.index(tuple(context)) for context, _ in pairs])
        tokens, keep = self._padded([list(context) for context in contexts], left=True)
        logits, state = self.model(tokens, keep=keep, last_only=True)
        texts, real = self._padded([text for _, text in pairs])
        labels, context_index = texts.where(real, IGNORE_INDEX), context_index.to(texts.device)
        first = score_logits(logits[context_index], labels[:, :1])
        others = token_losses(
            self.model,
            texts[:, :-1],
            labels[:, 1:],
            select_rows(state, context_index),
            keep=real[:, 1:],
        )
        losses = torch.cat([first.losses, others.losses], dim=1).sum(dim=1)
        right = torch.cat([first.correct, others.correct], dim=1) | ~real
        return list(zip((-losses).tolist(), right.all(dim=1).tolist(), strict=True))

    def _write(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        """Generate a batch of texts, each up to a stop string."""
        until, max_new_tokens, sampling = _parse_options(options)
        prompts = [self.tok_encode(context) or [self.eot_token_id] for context in contexts]
        if self.most_tokens is not None:
            if max_new_tokens >= self.most_tokens:
                raise ValueError(
                    f"{max_new_tokens} tokens were requested, but the model is limited to "
                    f"{self.most_tokens} tokens"
                )
            prompts = [prompt[max_new_tokens - self.most_tokens :] for prompt in prompts]
        tokens, keep = self._padded(prompts, left=True)
        end, size = self.texts.end, self.texts.size
        written: list[Ids] = [[] for _ in prompts]
        pairs = zip(written, prompts, strict=True)
        pieces = [self.texts.pieces(iter(ids), prompt) for ids, prompt in pairs]
        texts = [""] * len(prompts)
        unfinished = set(range(len(prompts)))

        steps = self.model.stream(
            tokens, sampling, max_new_tokens=max_new_tokens, keep=keep, vocab_size=size
        )
        for step, _ in steps:
            for row in sorted(unfinished):
                written[row].append(int(step[row]))
                texts[row] += next(pieces[row])
                is_finished = written[row][-1] == end or _cut(texts[row], until)[1]
                unfinished -= {row} if is_finished else set()
            if not unfinished:
                break
        # All ids are read, so the next pieces are the rest.
        return [_cut(text + next(rest), until)[0] for text, rest in zip(texts, pieces, strict=True)]

    def _windows(self, text: str) -> list[tuple[Ids, Ids]]:
        """Split a text into pairs of context and text; one pair unless positions are limited."""
        ids = self.tok_encode(text, add_special_tokens=False)
        max_tokens = self.most_tokens or max(1, len(ids))
        windows = get_rolling_token_windows(ids, self.prefix_token_id, max_tokens, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def _fitted(self, request: tuple[str, str], context: Ids, text: Ids) -> tuple[Ids, Ids]:
        """Truncate a context on the left to the model's number of positions, if that is limited.

        Raises:
            ValueError: If the text is empty, or longer than the number of positions.
        """
        if not text:
            raise ValueError(
                f"a task requests the likelihood of {request[1]!r}, which has no tokens"
            )
        context = context or [self.eot_token_id]
        if self.most_tokens is None:
            return context, text
        if len(text) > self.most_tokens:
            raise ValueError(
                f"a task requests the likelihood of {len(text)} tokens, but the model is limited "
                f"to {self.most_tokens} tokens"
            )
        return context[-(self.most_tokens - len(text) + 1) :], text

    def _padded(self, rows: list[Ids], *, left: bool = False) -> Padded:
        """Pad rows to the same length; return them and a mask of their real tokens."""
        longest = max(map(len, rows))
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        keep = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            real = slice(longest - len(row), None) if left else slice(len(row))
            tokens[i, real], keep[i, real] = torch.tensor(row), True
        return tokens.to(self._device), keep.to(self._device)


def register(load: Callable[[str], tuple[nn.Module, TextTokens]]) -> None:
    """Register the model "onescan" with lm-eval; its model_args are `checkpoint` and `device`.

    Args:
        load: Function that returns the model and the tokenizer of a checkpoint.
    """

    class Loaded(OnescanLM):
        def __init__(
            self,
            checkpoint: str,
            device: str = "cpu",
            batch_size: int | str = 32,
            max_batch_size: int | None = None,
        ) -> None:
            del max_batch_size  # lm-eval passes it to all models
            model, tokenizer = load(checkpoint)
            if not str(batch_size).isdecimal():
                raise ValueError(f"batch_size is {batch_size!r}, expected a whole number")
            super().__init__(model.to(device), tokenizer, batch_size=int(batch_size))

    if NAME not in model_registry:
        model_registry.register(NAME, target=Loaded)


def _parse_options(options: dict[str, Any]) -> tuple[list[str], int, Sampling]:
    """Return the stop strings, the maximum number of new tokens, and the sampling config.

    Raises:
        ValueError: If a task sets an unknown option, or a number out of range.
    """
    options = {name: value for name, value in options.items() if value is not None}
    until = options.pop("until", [])
    limits = [options.pop(name) for name in LENGTHS if name in options]
    do_sample = options.pop("do_sample", options.get("temperature", 0) > 0)
    sampling_options = {
        name: options.pop(name) for name in ("temperature", "top_k", "top_p") if name in options
    }
    if options.pop("num_beams", 1) != 1 or options:
        unknown = sorted(options) or ["num_beams"]
        raise ValueError(f"a task's generation_kwargs set {unknown}, which is not supported")
    sampling = Sampling(**{"temperature": 1.0, **sampling_options} if do_sample else {})
    sampling.check()
    ends = [until] if isinstance(until, str) else list(until)
    return [end for end in ends if end], int(limits[0]) if limits else DEFAULT_NEW_TOKENS, sampling


def _cut(text: str, until: list[str]) -> tuple[str, bool]:
    """Truncate a text at its first stop string; return it and whether there was one.

    >>> _cut("a b. c", [".", "c"]), _cut("a b", ["."])
    (('a b', True), ('a b', False))
    """
    positions = [position for end in until if (position := text.find(end)) >= 0]
    return (text[: min(positions)], True) if positions else (text, False)


def _batches(items: list[RequestT], size: int) -> Iterator[list[RequestT]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
