"""Language models trained by recipes: from a text file to a report and generated text."""

import re
from itertools import pairwise

import pytest
import torch
from tiny_run import press_ctrl_c_at
from trained_recipes import TEXT, train
from trained_recipes import text as text  # a fixture

import onescan
from onescan.cli import main
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.recipes.language import RECIPES as LANGUAGE
from onescan.experiments.report import texts
from onescan.experiments.tasks import LanguageModellingConfig, MaskedLanguageModellingConfig
from onescan.experiments.training import evaluate, learning_rate
from onescan.experiments.training import train as train_run
from onescan.experiments.training.folder import read_manifest
from onescan.experiments.training.optim import Plan
from onescan.experiments.training.runs import run_config
from onescan.inference.loading import load_language_model
from onescan.inputs.tokenizer import ByteTokenizer
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig


@pytest.fixture(autouse=True, scope="module")
def _short_texts():
    """Shorten the texts on reports, which take longer than training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "NEW_TOKENS", 9)
        yield


@pytest.fixture(scope="module")
def lightnet(text):
    return train("shakespeare_lightnet", text, "--training.checkpoint-every", "0.01")


SMALL = [name for name in LANGUAGE if name.startswith(("shakespeare", "wikitext2"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if name != "shakespeare_lightnet"])
def test_a_small_recipe_is_trained_and_reported(name, text, capsys):
    run = train(name, text, *(["--task.supervised-blocks", "1"] if name.endswith("ldn") else []))
    assert "test loss" in capsys.readouterr().out
    assert_reported(run)
    if name == "wikitext2_mlm_bert":
        assert main(["fill", str(run), "The c[MASK]t", "--top-k", "2"]) == 0
        assert capsys.readouterr().out.count("%") == 2


def assert_reported(run):
    page = (run.parent / "report.html").read_text()
    assert "Generated text" in page or "Predicted tokens" in page
    assert "<pre" in page
    assert ("Half-life by block" in page) == ("lion" in str(run))
    assert onescan.load(run).metrics["perplexity"] > 1


@pytest.mark.sampled
@pytest.mark.parametrize("limit", [4, 12, 300])
def test_texts_on_a_report_are_within_the_limit_of_the_model(limit, text, monkeypatch):
    data = TextDatasetConfig(path=str(text), length=limit, cache=False)
    task = LanguageModellingConfig().build(data.build())
    position = TokenPositionConfig(max_tokens=limit)
    mixer = SoftmaxMixerConfig(num_heads=2, direction="forward")
    model = CausalLMConfig(vocab_size=258, width=8, depth=1, mixer=mixer, position=position)
    monkeypatch.setattr(texts, "NEW_TOKENS", 1000)
    assert len(texts._continuations(task, model.build().eval())) > 1


@pytest.mark.slow
def test_a_run_generates_text_and_is_found_in_its_parent_folder(lightnet, capsys):
    _, tokenizer = load_language_model(str(lightnet))
    assert isinstance(tokenizer, ByteTokenizer)
    for folder in (lightnet, lightnet.parent):  # which holds only this run
        assert main(["generate", str(folder), "--prompt", "The", "--max-new-tokens", "5"]) == 0
        assert capsys.readouterr().out.startswith("The")
    for command, *more in (["generate"], ["needle"], ["evaluate", "--lengths", "8"]):
        assert main([command, str(lightnet / "no" / "such"), *more]) == 2
        assert str(lightnet / "no" / "such") in capsys.readouterr().err


@pytest.mark.slow
def test_a_language_model_resumes_to_the_same_numbers(lightnet, tmp_path):
    assert_reported(lightnet)
    run = read_manifest(lightnet).run
    with pytest.raises(KeyboardInterrupt):
        train_run(run, tmp_path / "stopped", progress=press_ctrl_c_at(4))
    again = onescan.load(train_run(run, tmp_path / "stopped").folder).model.state_dict()
    for name, weight in onescan.load(lightnet).model.state_dict().items():
        assert torch.equal(again[name], weight), name


@pytest.mark.slow
def test_longer_training_lowers_the_loss(text):
    few = onescan.load(train("shakespeare_gpt2", text, "--training.steps", "2")).metrics
    more = train("shakespeare_gpt2", text, "--training.steps", "60")
    assert onescan.load(more).metrics["loss"] < few["loss"] - 0.5


TOKENIZERS = {  # tokens of each
    "openai-community/gpt2": 50257,
    "google-bert/bert-base-uncased": 30522,
    "JonasGeiping/crammed-bert": 32768,
    "FacebookAI/roberta-base": 50265,
}
PADDED = {
    50257: (50265, 50272),
    30522: (),
    32768: (),
    50265: (),
}  # LightNet's causal language models


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", sorted(set(LANGUAGE) - set(SMALL)))
def test_a_recipe_of_a_paper_has_its_model_size(name):
    run = LANGUAGE[name]()
    assert run.name == name
    tokenizer_size = TOKENIZERS[run.data.tokenizer]
    assert run.model.vocab_size in (tokenizer_size, *PADDED[tokenizer_size])
    with torch.device("meta"):
        model = run.model.build()
    assert sum(p.numel() for p in model.parameters()) > 4e7
    is_masked = isinstance(run.task, MaskedLanguageModellingConfig)
    assert run.data.add_special_tokens is is_masked
    if name.startswith("c4"):
        assert (run.task.mask_rate, run.task.evaluation_mask_rate) == (0.3, 0.15)
        assert run.model.norm_position == "post"
    if "pile" in run.data.path:
        assert "uncopyrighted" in name or "pile-uncopyrighted" in LANGUAGE[name].description
    if run.data.streaming and run.training.steps:
        assert run.data.train_rows == run.training.batch_size * run.training.steps


@pytest.mark.parametrize(
    ("size", "rows", "tokens"),
    [
        ("150m", 26 * 8, 100e9),
        ("379m", 15 * 8, 10e9),
        ("380m", 15 * 8, 100e9),
        ("1b", 10 * 16, 300e9),
        ("3b", 36 * 48, 300e9),
    ],
)
def test_lightnet_reads_the_rows_and_tokens_of_its_tables(size, rows, tokens):
    run = LANGUAGE[f"pile_uncopyrighted_lightnet_{size}"]()
    assert run.training.batch_size == rows
    assert (run.data.length, run.training.learning_rate) == (2048, 3e-4)
    assert run.training.steps * rows * 2048 == pytest.approx(tokens, rel=1e-4)


def test_cramming_has_the_budget_the_triangle_and_the_ramp_of_its_files():
    run = LANGUAGE["cramming_lightnet"]()
    plan = Plan.of(run.training, run.data.train_rows // run.training.micro_batch_size)
    assert run.model.depth == 16
    assert plan.micro_batches == 900_000
    assert plan.micro_batches * 128 == 115_200_000
    sizes = [128 * (after - before) for before, after in pairwise(plan.ends)]
    assert (sizes[0], max(sizes)) == (128, 8192)
    full = sizes.index(8192)
    assert plan.read(full) / plan.micro_batches == pytest.approx(0.6, abs=0.02)
    rates = [learning_rate(plan.read(step), 900_000, run.training) for step in range(plan.steps)]
    assert rates[0] == pytest.approx(0.25e-3, rel=1e-4)
    assert max(rates) == pytest.approx(1e-3, rel=1e-3)
    peak = rates.index(max(rates))
    assert plan.read(peak) / plan.micro_batches == pytest.approx(0.75, abs=1e-3)
    assert rates[-1] < 0.001e-3


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["missing.txt", "empty.txt"])
def test_a_missing_text_is_rejected(name, tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    path, out = str(tmp_path / name), str(tmp_path / "out")
    assert main(["train", "shakespeare_lightnet", "--data.path", path, "--out", out]) == 2
    assert name in capsys.readouterr().err


def test_a_run_is_evaluated_on_its_validation_and_on_its_test_split(tmp_path, capsys):
    for split, content in (("train", TEXT), ("valid", TEXT[:300]), ("test", "A mat!\n" * 40)):
        (tmp_path / f"wiki.{split}.txt").write_text(content)
    folder = train("shakespeare_gpt2", tmp_path, "--training.steps", "2")
    trained = onescan.load(folder).metrics

    def perplexity(*words):
        capsys.readouterr()
        assert main(["evaluate", str(folder), *words]) == 0
        return float(re.search(r"perplexity +(\S+)", capsys.readouterr().out)[1])

    assert perplexity() == pytest.approx(trained["perplexity"], rel=1e-3)
    assert perplexity("--split", "valid") == perplexity()
    checkpoint = onescan.load(folder)
    alone = TextDatasetConfig(
        path=str(tmp_path / "wiki.train.txt"), test_path=str(tmp_path / "wiki.test.txt"), length=32
    )
    task = run_config(folder).task.build(alone.build())
    expected = evaluate(checkpoint.model, task).metrics["perplexity"]
    assert perplexity("--split", "test") == pytest.approx(expected, rel=1e-3)
    assert abs(expected - trained["perplexity"]) > 1
    assert main(["evaluate", str(folder), "--split", "dev"]) == 2
    assert "--split is 'dev', but" in capsys.readouterr().err
    assert main(["evaluate", str(folder), "--split", "test", "--lengths", "16"]) == 2
    assert "split is test, which is not supported with --lengths" in capsys.readouterr().err
