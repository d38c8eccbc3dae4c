"""Sequences that join and leave a batch get the tokens that they get alone."""

from concurrent.futures import ThreadPoolExecutor

import jaxtyping
import pytest
import torch
from tiny_language_models import CAUSAL, OPTIONS, causal, ids

from onescan.models.causal_lm import Sampling
from onescan.models.continuous_batch import BatchWorker, ContinuousBatch

CONSTANT = {name: change for name, change in (CAUSAL | OPTIONS).items() if name != "gpt2"}
SAMPLINGS = (None, Sampling(temperature=0.9, top_k=5, top_p=0.9), Sampling(temperature=1.5))
PROMPTS, NEW, STARTS = (3, 11, 1), (6, 4, 9), (0, 2, 3)  # tokens, tokens, step of joining


def rng(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CONSTANT.values(), ids=CONSTANT)
def test_sequences_get_the_tokens_of_generate(change):
    model = causal(change)
    batch, sequences = ContinuousBatch(model), []
    for step in range(20):
        for i in (i for i, start in enumerate(STARTS) if start == step):
            options = {"max_new_tokens": NEW[i], "generator": rng(i)}
            sequences.append(batch.add(ids(1, PROMPTS[i], seed=i), SAMPLINGS[i], **options))
        batch.step()
    for i, sequence in enumerate(sequences):
        options = {"max_new_tokens": NEW[i], "generator": rng(i)}
        alone = model.generate(ids(1, PROMPTS[i], seed=i), SAMPLINGS[i], **options)
        assert sequence.tokens == alone[0].tolist()
    assert len(batch) == 0


def test_a_sequence_leaves_at_its_end_and_when_removed():
    model = causal(CAUSAL["lion"])
    prompt = ids(1, 4)
    expected = model.generate(prompt, max_new_tokens=8)[0].tolist()
    end = expected[2]
    batch = ContinuousBatch(model, end=end)
    removed = batch.add(ids(1, 5), Sampling(temperature=1.0), max_new_tokens=9, generator=rng(0))
    sequence = batch.add(prompt, max_new_tokens=8)
    batch.remove(removed)
    batch.remove(removed)
    while batch.active:
        assert batch.step() == [sequence]
    assert sequence.tokens == expected[: expected.index(end) + 1]
    assert removed.tokens == []
    assert batch.step() == []


def test_invalid_arguments_are_rejected(monkeypatch):
    with pytest.raises(ValueError, match=r"state grows with the text: blocks\.0\.k"):
        ContinuousBatch(causal(CAUSAL["gpt2"]))
    with pytest.raises(ValueError, match="vocab_size is 0, expected a whole number of at least 1"):
        ContinuousBatch(causal(CAUSAL["lion"]), vocab_size=0)
    batch = ContinuousBatch(causal(CAUSAL["lion"]))
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 3\), expected \(1, T\)"):
        batch.add(ids(2, 3), max_new_tokens=1)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        batch.add(ids(1, 3), max_new_tokens=0)
    short = ContinuousBatch(causal(CAUSAL["ldn"]))
    with pytest.raises(ValueError, match=r"add up to 41 tokens, expected at most 40"):
        short.add(ids(1, 3), max_new_tokens=38)
    with pytest.raises(ValueError, match=r"temperature is 1e-40, expected 0 or at least 1e-30"):
        batch.add(ids(1, 3), Sampling(temperature=1e-40), max_new_tokens=1)
    with pytest.raises(ValueError, match="temperature is -1"):
        batch.add(ids(1, 3), Sampling(temperature=-1.0), max_new_tokens=1)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="tokens is a str, expected a tensor of token ids"):
        batch.add("ROMEO:", max_new_tokens=1)


def test_threads_share_a_worker():
    model = causal(CAUSAL["lightnet"])
    worker = BatchWorker(ContinuousBatch(model))
    worker.start()
    streams = [worker.stream(ids(1, 3, seed=i), Sampling(), max_new_tokens=9) for i in range(3)]
    assert len([next(streams[0]), next(streams[0])]) == 2
    streams[0].close()
    with ThreadPoolExecutor() as threads:
        tokens = list(threads.map(list, streams[1:]))
    for i, got in enumerate(tokens, start=1):
        assert got == model.generate(ids(1, 3, seed=i), max_new_tokens=9)[0].tolist()
    endless = worker.stream(ids(1, 3), Sampling(), max_new_tokens=10**9)
    next(endless)
    worker.stop()
    assert len(worker.batch) == 1
    with pytest.raises(RuntimeError, match="the thread that runs the model has stopped"):
        list(endless)
    with pytest.raises(RuntimeError, match="the thread that runs the model has stopped"):
        next(worker.stream(ids(1, 3), max_new_tokens=1))


def test_a_worker_that_was_not_started_says_so():
    worker = BatchWorker(ContinuousBatch(causal(CAUSAL["lion"])))
    with pytest.raises(RuntimeError, match=r"not been started: call start\(\) first"):
        worker.stream(ids(1, 3), max_new_tokens=1)
    worker.stop()
