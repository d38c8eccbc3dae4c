"""Continuous batching: sequences join and leave a batch between any two tokens.

A causal model has a state of the same size for every text, so the states of all sequences form one
batch, however many tokens each has read.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onescan.checks import check_token_ids, check_whole
from onescan.layers.position import TokenPositionConfig
from onescan.messages import expected_model, named_type
from onescan.models.causal_lm import CausalLM, Sampling
from onescan.models.token_network import (
    check_constant_size,
    flatten_state,
    select_rows,
    unflatten_state,
)
from onescan.shapes import Tokens

START = 2**16  # position of the first token to generate, and the maximum length of a prompt


@dataclass(eq=False, kw_only=True)
class GeneratedSequence:
    """A sequence in a batch; compare with ``is``.

    Attributes:
        sampling: How to choose the next token.
        generator: Source of randomness.
        remaining: Number of tokens that may still be generated.
        tokens: The generated tokens, including the end-of-sequence token.
    """

    sampling: Sampling
    generator: torch.Generator | None
    remaining: int
    tokens: list[int]


class ContinuousBatch:
    """Generate one token per step for each sequence of a changing batch.

    Each sequence gets the tokens that `CausalLM.generate` returns for it, up to rounding.

    Args:
        model: Model in evaluation mode, whose state does not grow with the text.
        end: Id of the end-of-sequence token; a sequence leaves the batch after it.
        vocab_size: Generate only ids below this number. ``None`` allows all ids.

    Raises:
        ValueError: If the model is not a `CausalLM`, its state grows with the text, as in softmax
            attention, or `vocab_size` is not positive.

    >>> from onescan.models.causal_lm import CausalLMConfig
    >>> batch = ContinuousBatch(CausalLMConfig(vocab_size=11, width=24, depth=1).build().eval())
    >>> first = batch.add(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    >>> batch.step()[0] is first
    True
    >>> second = batch.add(torch.tensor([[4]]), max_new_tokens=1)
    >>> len(batch.step()), len(batch.step()), len(first.tokens), len(second.tokens)
    (2, 1, 3, 1)
    """

    @torch.no_grad()
    def __init__(
        self, model: CausalLM, *, end: int | None = None, vocab_size: int | None = None
    ) -> None:
        if not isinstance(model, CausalLM):
            raise expected_model(model, "a CausalLM")
        if vocab_size is not None:
            check_whole(1, vocab_size=vocab_size)
        self.model, self.end, self.vocab_size = model, end, vocab_size
        self.active: list[GeneratedSequence] = []
        masked = torch.zeros(1, 2, dtype=torch.long, device=model.network.device)
        # Masked tokens leave the state as it is before the first token.
        self._empty = model(masked[:, :1], keep=masked[:, :1] > 0)[1]
        check_constant_size(self._empty, model(masked, keep=masked > 0)[1])
        self._logits = torch.empty(0)
        self._state = self._empty
        self._position = START  # which all sequences share

    def __len__(self) -> int:
        return len(self.active)

    def check(self, tokens: Tokens, sampling: Sampling, *, max_new_tokens: int) -> None:
        """Raise ValueError if `add` would reject its arguments."""
        sampling.check()
        check_whole(1, max_new_tokens=max_new_tokens)
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens is {named_type(tokens)}, expected a tensor of token ids")
        if len(tokens) != 1 or not 1 <= tokens.shape[1] <= START:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}, expected (1, T) with T from 1 to {START}"
            )
        check_token_ids(tokens, self.model.config.vocab_size)
        position = self.model.config.position
        if not isinstance(position, TokenPositionConfig):
            return
        if (count := tokens.shape[1] + max_new_tokens) > position.max_tokens:
            raise ValueError(
                f"tokens and max_new_tokens add up to {count} tokens, expected at most "
                f"{position.max_tokens}, the number of positions of the model"
            )

    @torch.no_grad()
    def add(
        self,
        tokens: Tokens,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int,
        generator: torch.Generator | None = None,
    ) -> GeneratedSequence:
        """Read a prompt and add its sequence to the batch.

        Args:
            tokens: Prompt of at least one token, of shape ``[1, T]``.
            sampling: How to choose the next token. ``None`` takes the most likely one.
            max_new_tokens: Maximum number of tokens to generate.
            generator: Source of randomness, for this sequence only. ``None`` is torch's global
                generator.

        Raises:
            ValueError: If an argument is out of range, or the tokens exceed the model's positions.
        """
        sampling = Sampling() if sampling is None else sampling
        self.check(tokens, sampling, max_new_tokens=max_new_tokens)
        if not self.active:
            self._position = START
        # Numbers in a state are positions. Logits depend on relative positions only, so the prompt
        # may begin anywhere. Let it end at the current position of the other sequences.
        begin = torch.tensor(self._position - tokens.shape[1])
        empty = flatten_state(self._empty)
        state = {name: x if x.ndim else begin for name, x in empty.items()}
        logits, new_state = self.model(tokens, unflatten_state(self._empty, state), last_only=True)
        if self.active:
            logits, old_tensors = torch.cat([self._logits, logits]), flatten_state(self._state)
            new_tensors = flatten_state(new_state).items()
            joined = {
                name: torch.cat([old_tensors[name], x]) if x.ndim else x for name, x in new_tensors
            }
            new_state = unflatten_state(new_state, joined)
        self._logits, self._state = logits, new_state
        sequence = GeneratedSequence(
            sampling=sampling, generator=generator, remaining=max_new_tokens, tokens=[]
        )
        self.active.append(sequence)
        return sequence

    def remove(self, sequence: GeneratedSequence) -> None:
        """Remove a sequence before its end; does nothing if it has left the batch."""
        self._select([i for i, other in enumerate(self.active) if other is not sequence])

    @torch.no_grad()
    def step(self) -> list[GeneratedSequence]:
        """Append one token to each sequence, and return the sequences.

        Sequences that have ended or reached their maximum number of tokens have left the batch;
        their `remaining` is 0.
        """
        sequences = list(self.active)
        chosen = [
            sequence.sampling.choose(logits[-1:, : self.vocab_size], sequence.generator)
            for sequence, logits in zip(sequences, self._logits.unbind(), strict=True)
        ]
        tokens = torch.cat(chosen).tolist() if chosen else []  # waits for the device once
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
            sequence.remaining -= 1
            if sequence.tokens[-1] == self.end:
                sequence.remaining = 0
        self._select([i for i, sequence in enumerate(sequences) if sequence.remaining])
        if self.active:
            last = [[sequence.tokens[-1]] for sequence in self.active]
            new = torch.tensor(last, device=self._logits.device)
            self._logits, self._state = self.model(new, self._state)
            self._position += 1
        return sequences

    def _select(self, rows: list[int]) -> None:
        if len(rows) < len(self.active):
            self.active = [self.active[i] for i in rows]
            index: Tensor = torch.tensor(rows, dtype=torch.long, device=self._logits.device)
            self._logits = self._logits.index_select(0, index)
            self._state = select_rows(self._state, index)


class BatchWorker(threading.Thread):
    """Run a batch in a thread of its own; other threads add sequences and receive their tokens.

    Args:
        batch: Batch that no other thread uses.

    >>> from onescan.models.causal_lm import CausalLMConfig
    >>> model = CausalLMConfig(vocab_size=11, width=24, depth=1).build().eval()
    >>> worker = BatchWorker(ContinuousBatch(model))
    >>> worker.start()
    >>> len(list(worker.stream(torch.tensor([[1, 2, 3]]), max_new_tokens=5)))
    5
    >>> worker.stop()
    """

    def __init__(self, batch: ContinuousBatch) -> None:
        super().__init__(daemon=True)
        self.batch = batch
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def stream(
        self,
        tokens: Tokens,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int,
        generator: torch.Generator | None = None,
    ) -> Iterator[int]:
        """Return an iterator over the tokens of a new sequence; closing it removes the sequence.

        Args:
            tokens: Prompt of at least one token, of shape ``[1, T]``.
            sampling: How to choose the next token. ``None`` takes the most likely one.
            max_new_tokens: Maximum number of tokens to generate.
            generator: Source of randomness; see `ContinuousBatch.add`.

        Raises:
            ValueError: See `ContinuousBatch.add`.
            RuntimeError: If the thread has not been started or, while iterating, has stopped.
        """
        if self.ident is None:
            raise RuntimeError("the worker has not been started: call start() first")
        sampling = Sampling() if sampling is None else sampling
        self.batch.check(tokens, sampling, max_new_tokens=max_new_tokens)
        return self._receive(tokens, sampling, max_new_tokens, generator)

    def _receive(
        self,
        tokens: Tokens,
        sampling: Sampling,
        max_new_tokens: int,
        generator: torch.Generator | None,
    ) -> Iterator[int]:
        client = _Client()
        self._waiting.put((client, tokens, sampling, max_new_tokens, generator))
        try:
            for _ in range(max_new_tokens):
                while True:
                    try:
                        token = client.tokens.get(timeout=1)
                        break
                    except queue.Empty:
                        if not self.is_alive():
                            raise RuntimeError(
                                "the thread that runs the model has stopped"
                            ) from None
                if token is None:
                    raise RuntimeError("the thread that runs the model has stopped")
                yield token
                if token == self.batch.end:
                    return
        finally:
            client.is_closed = True

    def run(self) -> None:
        """Repeat until `stop`: add the new sequences, take a step, send its tokens."""
        clients: dict[GeneratedSequence, _Client] = {}
        try:
            while True:
                while not self.batch.active or not self._waiting.empty():
                    if (new := self._waiting.get()) is None:
                        return
                    client, tokens, sampling, count, generator = new
                    sequence = self.batch.add(
                        tokens, sampling, max_new_tokens=count, generator=generator
                    )
                    clients[sequence] = client
                for sequence in self.batch.step():
                    clients[sequence].tokens.put(sequence.tokens[-1])
                    if clients[sequence].is_closed:
                        self.batch.remove(sequence)
                    if sequence not in self.batch.active:
                        del clients[sequence]
        finally:
            for client in clients.values():
                client.tokens.put(None)

    def stop(self) -> None:
        """End the thread after its current step, and with it all sequences."""
        self._waiting.put(None)
        if self.is_alive():
            self.join()


class _Client:
    """Receiver of the tokens of a sequence, and of None if the thread has stopped."""

    def __init__(self) -> None:
        self.tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.is_closed = False
