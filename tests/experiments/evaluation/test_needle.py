"""Needle in a haystack: known models find known needles, and scores are those of the whole text."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_language_models import BOTH, CAUSAL, SMALL, built
from tiny_tokenizers import WORDS, word_tokenizer
from torch import nn
from trained_recipes import text as text  # a fixture
from trained_recipes import train

from onescan.cli import main
from onescan.experiments.evaluation import needle
from onescan.experiments.evaluation.config import NeedleConfig
from onescan.experiments.evaluation.needle import (
    Haystack,
    build_needle,
    cut_haystack,
    measure_needles,
    read_haystack,
)
from onescan.inputs.tokenizer import ByteTokenizer, PretrainedTokenizer
from onescan.integrations.transformers import to_transformers
from onescan.models.causal_lm import CausalLM, CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.token_network import NetworkState

TOKENIZER = ByteTokenizer()
LINES = "".join(f"Line {i}: all the hay that there is, and more of it.\n" for i in range(80))
HAY = Haystack("lines", TOKENIZER.encode_many([LINES])[0])
CONFIG = NeedleConfig(lengths=(200, 400), depths=(1.0, 0.0, 0.5), trials=3, prefill_chunk_size=64)
BYTES = {**SMALL, "vocab_size": TOKENIZER.size}


class Copier(CausalLM):
    """Predicts what followed the last tokens where they occurred before, within `context`."""

    def __init__(self, context=10_000, suffix=9):
        nn.Module.__init__(self)
        self.config = CausalLMConfig(**BYTES, **CAUSAL["lion"])
        self.context, self.suffix, self.longest = context, suffix, 0
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens, state=None, *, last_only=False):
        read = tokens if state is None else torch.cat([state.position, tokens], dim=1)
        self.longest = max(self.longest, tokens.shape[1])
        ends = range(read.shape[1] - (1 if last_only else tokens.shape[1]) + 1, read.shape[1] + 1)
        logits = torch.zeros(1, len(ends), TOKENIZER.size)
        for row, end in zip(logits[0], ends, strict=True):
            start = max(0, end - self.context)
            seen = bytes(token % 256 for token in read[0, start:end].tolist())
            before = seen.rfind(seen[-self.suffix :], 0, len(seen) - 1)
            if before >= 0:
                row[seen[before + self.suffix]] = 30.0
        return logits, NetworkState(read[:, -self.context :], ())


def measure(folder, model=None, **changes):
    model = Copier() if model is None else model
    return measure_needles("mine", model, TOKENIZER, HAY, replace(CONFIG, **changes), folder)


def prompt(built, hay, depth):
    """Return all tokens before the answer; without the fact if depth is None."""
    end = round((depth or 0) * len(hay))
    fact = built.fact if depth is not None else []
    return [*built.start, *hay[:end], *fact, *hay[end:], *built.question]


def test_a_copying_model_finds_every_needle(tmp_path):
    model = Copier()
    grid = measure(tmp_path, model)
    assert grid.lengths == [200, 400]
    assert grid.accuracy().tolist() == [[1, 1]] * 3
    assert grid.gain() == pytest.approx(np.full((3, 2), 5 * np.log(TOKENIZER.size)))  # " 1234"
    assert model.longest == 64
    saved = json.loads((tmp_path / "needle.json").read_text())
    assert len(saved["outcomes"]) == 2 * 3 * 3
    assert all(each["right"] for each in saved["outcomes"])
    assert all(each["log_probability"] > each["without"] for each in saved["outcomes"])


@pytest.mark.parametrize(
    ("context", "accuracy"),
    [(100, [[0, 0], [0, 0], [1, 1]]), (250, [[1, 0], [1, 1], [1, 1]]), (20, [[0, 0]] * 3)],
)
def test_a_copying_model_finds_needles_within_its_context(tmp_path, context, accuracy):
    grid = measure(tmp_path, Copier(context=context))
    assert grid.accuracy().tolist() == accuracy  # depths 0, 0.5 and 1 by lengths 200 and 400
    assert (grid.gain() > 1).tolist() == grid.accuracy().astype(bool).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUSAL)
def test_chunks_and_shared_states_score_as_the_whole_text(kind, tmp_path):
    position = CAUSAL[kind]["position"]
    if hasattr(position, "max_tokens"):
        position = replace(position, max_tokens=200)
    model = built(CausalLMConfig(**{**BYTES, **CAUSAL[kind], "position": position}))
    grid = measure(tmp_path, model, lengths=(150,), trials=2, prefill_chunk_size=17)
    for outcome in grid.outcomes:
        found = build_needle(TOKENIZER, CONFIG, outcome.trial)
        hay = cut_haystack(HAY, found, CONFIG.seed, 150, outcome.trial)
        for depth, value in ((outcome.depth, outcome.log_probability), (None, outcome.without)):
            before = prompt(found, hay, depth)
            with torch.no_grad():
                logits, _ = model(torch.tensor([before + found.answer]))
            scores = logits[0, len(before) - 1 : -1].log_softmax(-1)
            total = sum(row[token] for row, token in zip(scores, found.answer, strict=True))
            assert value == pytest.approx(total.item(), rel=1e-5)
            if depth is not None:
                assert outcome.right == (scores.argmax(-1).tolist() == found.answer)


def test_needles_follow_their_templates():
    config = replace(CONFIG, needle="{name} has {number} hens.", question="{name} has", digits=3)
    seen = set()
    for trial in range(8):
        found = build_needle(TOKENIZER, config, trial)
        hay = cut_haystack(HAY, found, config.seed, 300, trial)
        fact, question, answer = (TOKENIZER.decode(part) for part in found[1:])
        name = question.strip().removesuffix(" has")
        assert fact == f"\n{name} has{answer} hens.\n"
        assert 100 <= int(answer) <= 999
        assert len(prompt(found, hay, 0.0)) + len(found.answer) == 300
        assert TOKENIZER.decode(hay) in LINES
        seen.add((fact, bytes(hay)))
    assert len(seen) == 8


def test_special_tokens_of_the_tokenizer_come_first():
    digits = [str(number) for number in range(10)]
    framed = PretrainedTokenizer("words", word_tokenizer(framed=True, words=[*WORDS, *digits]))
    config = replace(CONFIG, needle="the cat {number}", question="the cat", digits=1)
    found = build_needle(framed, config, 0)
    assert found.start == [framed.encode("[CLS]", framed=True)[0]] == [2]
    assert (found.question, found.fact) == ([5, 6], [5, 6, *found.answer])


def test_known_results_are_not_measured_again(tmp_path, monkeypatch):
    first, lengths = measure(tmp_path), []
    outcomes = needle._outcomes

    def watched(*arguments, length, trial):
        lengths.append(length)
        return outcomes(*arguments, length=length, trial=trial)

    monkeypatch.setattr(needle, "_outcomes", watched)
    assert measure(tmp_path) == first
    assert not lengths
    more = measure(tmp_path, lengths=(400, 300), trials=4)
    assert lengths == [300] * 4 + [400]
    assert more.lengths == [200, 300, 400]
    with pytest.raises(ValueError, match=r"needle\.json has results for weights '"):
        measure(tmp_path, Copier().requires_grad_(False).double())
    with pytest.raises(ValueError, match=r"results for config\.digits 4, expected 5"):
        measure(tmp_path, digits=5)
    (tmp_path / "needle.json").write_text('{"outcomes": [1]}')
    with pytest.raises(ValueError, match=r"needle\.json is damaged"):
        measure(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lengths", (), "empty"),
        ("depths", (0.5, 0.5), "0.5 more than once"),
        ("depths", (0.5, 1.5), "1.5"),
        ("lengths", (20,), "20, expected more than the"),
        ("lengths", (9999,), "9999, but lines has"),
        ("needle", "no number", "'no number'"),
        ("question", "is it {number}", "'is it {number}'"),
        ("question", " ", "' '"),
        ("needle", "{nmae} {number}", "'{nmae} {number}'"),
        ("question", "{name", "'{name'"),
        ("trials", 0, "0"),
    ],
)
def test_settings_out_of_range_are_rejected(tmp_path, field, value, message):
    with pytest.raises(ValueError, match=rf"{field} (is|has|contains) {re.escape(message)}"):
        measure(tmp_path, **{field: value})
    assert not list(tmp_path.iterdir())


def test_lengths_beyond_the_limit_of_the_model_are_rejected(tmp_path):
    model = built(CausalLMConfig(**{**BYTES, **CAUSAL["gpt2"]}))
    with pytest.raises(ValueError, match="lengths contains 200, but the model is limited to 40"):
        measure(tmp_path, model)


@pytest.mark.slow
def test_the_command_evaluates_a_run(text, tmp_path, capsys):
    run = train("shakespeare_lion_s", text)
    argv = ["needle", str(run), "--lengths", "150", "200", "--trials", "2"]
    out = tmp_path / "found"
    capsys.readouterr()
    assert main([*argv, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["depth", "150", "200"]
    assert f"report: {out / 'report.html'}" in printed
    saved = json.loads((out / "needle.json").read_text())
    name = "shakespeare_lion_s/seed-0"
    assert (saved["name"], saved["haystack"]) == (name, f"the held-out text of {name}")
    weights = str(run / "best.safetensors")  # of the same model
    assert main(["needle", weights, *argv[2:], "--out", str(out)]) == 0
    (tmp_path / "hay.txt").write_text(LINES)
    own = ["--out", str(tmp_path / "own"), "--haystack", str(tmp_path / "hay.txt")]
    assert main([*argv, *own]) == 0
    assert main([*argv, "--out", str(out), "--lengths", "90000"]) == 2
    assert "lengths contains 90000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "mixers", "message"),
    [
        (MaskedLMConfig, BOTH["bert"], "is a MaskedLM, expected a CausalLM"),
        (CausalLMConfig, CAUSAL["lion"], "haystack is None"),
    ],
)
def test_the_command_rejects_models_without_a_text(tmp_path, capsys, config, mixers, message):
    model = config(**{**SMALL, "vocab_size": len(WORDS), **mixers}).build()
    to_transformers(model).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    assert main(["needle", str(tmp_path / "model")]) == 2
    assert message in capsys.readouterr().err


def test_a_haystack_is_a_text_file(tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    for name in ("bytes.txt", "nowhere.txt"):
        with pytest.raises(ValueError, match=f"haystack is '.*{name}'"):
            read_haystack(tmp_path / name, TOKENIZER)
