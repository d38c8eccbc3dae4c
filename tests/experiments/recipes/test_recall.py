"""Associative recall: sequences, scores, and recipes from their data to their report."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from html_page import Page
from markupsafe import Markup
from tiny_run import KilledError, assert_same, raise_at
from torch import nn
from torch.nn.functional import one_hot

from onescan import configs
from onescan.cli import main
from onescan.configs import differences
from onescan.experiments.data import Example, RecallConfig
from onescan.experiments.recipes.recall import RECIPES as RECALL
from onescan.experiments.report.runs import read_run_group
from onescan.experiments.report.texts import recall
from onescan.experiments.tasks import RecallTaskConfig
from onescan.experiments.training import evaluate, train
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

DATA = RecallConfig(
    keys=9, values=5, length=30, pairs=(2, 5), test_pairs=(3, 7, 9), test_examples=30
)
TINY = {
    "model.width": 8,
    "model.depth": 1,
    "data.length": 20,
    "data.pairs": (1, 2),
    "data.test_pairs": (2, 4),
    "data.train_examples": 40,
    "data.test_examples": 24,
    "training.steps": 12,
    "training.batch_size": 8,
    "training.evaluate_every": 1.0,
    "training.checkpoint_every": 0.5,
    "machine.trackers": (),
}


def solved(tokens):
    """Answers and distances, from a dictionary of the pairs read so far."""
    known, answers, distances = {}, [], []
    for place, token in enumerate(tokens):
        is_query = token in known
        if 1 <= token <= DATA.keys and not is_query:
            known[token] = place
        answers.append(tokens[known[token] + 1] if is_query else 0)
        distances.append(place - known[token] if is_query else 0)
    return answers, distances


def sequences(split="train", count=60, config=DATA):
    data = getattr(config.build(), split)
    return [data.sequence(place) for place in range(count)]


class Dictionary(nn.Module):
    """Predicts every answer except for the keys `unknown`, and 0 elsewhere."""

    def __init__(self, unknown=(), size=15):
        super().__init__()
        self.unknown, self.size = unknown, size
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        answers = torch.tensor([solved(row)[0] for row in tokens.tolist()])
        for key in self.unknown:
            answers = answers.where(tokens != key, 0)
        return 20.0 * one_hot(answers, self.size) + self.weight, None


class Scores(nn.Module):
    """Predicts the same scores for all batches."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, tokens):
        return self.logits, None


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_dictionary_solves_every_sequence(split):
    for sequence in sequences(split):
        assert solved(sequence.tokens) == (sequence.answers, sequence.distances)
    data = getattr(DATA.build(), split)  # a batch has one row per example
    batch = data.read([Example(4), Example(0)]).batch
    assert batch[0].dtype == torch.int64
    for row, place in enumerate((4, 0)):
        assert tuple(part[row].tolist() for part in batch) == sequences(split)[place]


def test_every_key_is_queried_once_after_all_pairs():
    for place, (tokens, answers, distances) in enumerate(sequences()):
        pairs = DATA.pairs[place % 2]
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs
        assert set(keys) <= set(range(1, 10))
        assert set(values) <= set(range(10, 15))
        assert sorted(filter(None, tokens[2 * pairs :])) == sorted(keys)
        assert len(tokens) == len(answers) == len(distances) == DATA.length
        assert np.flatnonzero(answers).tolist() == np.flatnonzero(distances).tolist()
        assert np.flatnonzero(answers).min() >= 2 * pairs


def test_keys_values_and_places_are_uniform():
    config = replace(DATA, pairs=(3,), train_examples=3000)
    keys, values, places = [], [], []
    for tokens, answers, _ in sequences(count=3000, config=config):
        keys += tokens[:6:2]
        values += tokens[1:6:2]
        places += np.flatnonzero(answers).tolist()
    for drawn, possible in ((keys, range(1, 10)), (values, range(10, 15)), (places, range(6, 30))):
        counts = np.array([drawn.count(one) for one in possible])
        assert counts.sum() == len(drawn)
        assert counts == pytest.approx(counts.mean(), abs=4 * np.sqrt(counts.mean()))


def test_sequences_depend_only_on_seed_split_and_index():
    forwards = sequences()
    data = DATA.build().train
    assert [data.sequence(place) for place in reversed(range(60))] == forwards[::-1]
    other = replace(DATA, test_pairs=DATA.pairs)
    others = sequences("test", config=other)
    assert all(a.tokens != b.tokens for a, b in zip(others, forwards, strict=True))
    assert sequences(config=replace(DATA, seed=1)) != forwards


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"keys": 4}, r"data\.pairs contains 5, .* data\.keys 4"),
        ({"length": 26}, r"data\.test_pairs contains 9, .* data\.length 26"),
        ({"pairs": ()}, r"data\.pairs is empty"),
        ({"test_pairs": (3, 0)}, r"data\.test_pairs\[1\] is 0"),
        ({"values": 0}, r"data\.values is 0"),
    ],
)
def test_impossible_sizes_are_rejected(changes, found):
    with pytest.raises(ValueError, match=found):
        replace(DATA, **changes).build()


def recall_task(config=DATA):
    return RecallTaskConfig(evaluation_batch_size=8).build(config.build())


def test_the_loss_is_over_queries_only():
    task = recall_task()
    batch = tokens, answers, _ = task.train.read([Example(i) for i in range(6)]).batch
    model = Scores(torch.randn(*tokens.shape, 15))
    loss, metrics = task.loss(model, batch)
    logits = model.logits
    shares = logits.log_softmax(-1)
    queried = [shares[b, t, a] for b, row in enumerate(answers) for t, a in enumerate(row) if a]
    assert loss.item() == pytest.approx(-torch.stack(queried).mean().item())
    loss.backward()
    assert torch.equal(logits.grad.abs().sum(-1) > 0, answers > 0)
    right = (logits.argmax(-1) == answers)[answers > 0].float().mean()
    assert metrics["accuracy"] == right
    with pytest.raises(ValueError, match=r"scores 12 tokens, but the data has 15"):
        task.loss(Scores(logits[..., :12].detach()), batch)


def test_metrics_of_a_perfect_and_a_forgetful_model():
    perfect = evaluate(Dictionary(), recall_task()).metrics
    names = ["3_pairs_accuracy", "7_pairs_accuracy", "9_pairs_accuracy"]
    assert [perfect[name] for name in names] == [1, 1, 1]
    assert perfect["accuracy"] == 1
    assert perfect["loss"] < 1e-6
    forgetful = evaluate(Dictionary(unknown=(2, 5, 7)), recall_task())
    assert forgetful.metrics["9_pairs_accuracy"] == pytest.approx(6 / 9)  # which has all keys
    rows = forgetful.arrays
    assert rows["right"].shape == rows["distances"].shape == (30, DATA.length)
    assert (rows["distances"] > 0).sum(1).tolist() == [3, 7, 9] * 10
    is_query = rows["distances"] > 0
    assert forgetful.metrics["accuracy"] == pytest.approx(rows["right"][is_query].float().mean())
    assert forgetful.metrics["loss"] == pytest.approx(rows["losses"].sum().item() / is_query.sum())


@pytest.mark.parametrize("kind", [CausalLMConfig, MaskedLMConfig], ids=["causal", "bidirectional"])
def test_the_recipes_differ_only_in_their_mixers_and_widths_of_mlps(kind):
    recipes = [recipe() for recipe in RECALL.values()]
    first, *others = runs = [run for run in recipes if isinstance(run.model, kind)]
    assert len(runs) == len(RECALL) / 2
    for other in others:
        paths = {path for path, *_ in differences(first, other)}
        assert {"name", "model.mixer.type"} <= paths
        assert paths <= {"name", "model.mixer.type", "model.mlp.ratio"}
    models = [run.model.build() for run in runs]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert max(sizes) < 1.05 * min(sizes)
    data = first.data.build()
    assert first.model.vocab_size == data.format.vocab_size
    task = first.task.build(data)
    for model in models:
        task.loss(model, data.train.read([Example(0)]).batch)[0].backward()


def tiny(**changes):
    return configs.replace(RECALL["recall_lion_s"](), TINY | changes)


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_resumes_exactly(tmp_path):
    whole = train(tiny(), tmp_path / "whole")
    with pytest.raises(KilledError):
        train(tiny(), tmp_path / "run", progress=raise_at(8, KilledError()))
    assert_same(train(tiny(), tmp_path / "run"), whole)


@pytest.mark.slow
def test_a_recipe_is_trained_and_reported(tmp_path, capsys):
    argv = ["train", "recall_lightnet", "--out", str(tmp_path)]
    for field, value in (TINY | {"training.steps": 3}).items():
        values = [str(part) for part in (value if isinstance(value, tuple) else (value,))]
        argv += ["--" + field.replace("_", "-"), *values]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "test 4 pairs accuracy" in shown
    page = Page((tmp_path / "report.html").read_text())
    assert "Recall" in page.text
    assert "reads pairs of a key and a value" in page.text
    assert main(["evaluate", str(tmp_path / "seed-0"), "--workers", "0"]) == 0
    assert "2 pairs accuracy" in capsys.readouterr().out


def test_the_grid_has_the_share_of_each_number_of_pairs_and_distance(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        "onescan.experiments.report.texts.heat_map",
        lambda cells, **words: drawn.update(words, cells=cells) or Markup("<table>"),
    )
    results = [train(tiny(**{"training.seed": seed}), tmp_path / str(seed)) for seed in (0, 1)]
    queries = {"2": [], "4": []}  # by pairs: how far each query is, and whether it is right
    for seed, result in enumerate(results):
        arrays = result.evaluation.arrays
        arrays["right"] = arrays["distances"] % (2 + seed) == 1
        for row in arrays["distances"].tolist():
            there = [(distance, distance % (2 + seed) == 1) for distance in row if distance]
            queries[str(len(there))] += there
    assert "2 seeds" in recall(read_run_group(results)).figures[0].caption
    assert drawn["rows"].names == ["2", "4"]
    assert drawn["columns"].names == ["1-3", "4-6", "7-9", "10-12", "13-15", "16-18", "19-21"]
    for cells, number in zip(drawn["cells"], drawn["rows"].names, strict=True):
        for cell, columns in zip(cells, drawn["columns"].names, strict=True):
            first, last = map(int, columns.split("-"))
            near = [right for distance, right in queries[number] if first <= distance <= last]
            assert cell == pytest.approx(np.mean(near) if near else np.nan, nan_ok=True)


@pytest.mark.slow
def test_attention_learns_to_recall(tmp_path):
    mixer = SoftmaxMixerConfig(num_heads=1, direction="forward")
    base = RECALL["recall_softmax"]()
    data = replace(
        DATA, length=12, keys=4, values=4, pairs=(2,), test_pairs=(2,), test_examples=200
    )
    assert isinstance(base.model, CausalLMConfig)
    model = replace(base.model, vocab_size=9, width=32, depth=2, mixer=mixer)
    training = replace(base.training, steps=150, learning_rate=1e-2)
    machine = replace(base.machine, trackers=())
    run = replace(base, model=model, data=data, training=training, machine=machine)
    assert train(run, tmp_path / "run").metrics["accuracy"] > 0.9  # 0.5 by a guess among the two
