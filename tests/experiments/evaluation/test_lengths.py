"""Evaluation of language models over context lengths, and its command."""

import json
import math

import pytest
import torch
from html_page import Page
from tiny_language_models import BOTH, CAUSAL, SMALL, causal, ids, over_causal
from tiny_tokenizers import WORDS, word_tokenizer
from trained_recipes import train

from onescan.cli import main
from onescan.experiments.evaluation import lengths
from onescan.experiments.evaluation.config import LengthsConfig
from onescan.experiments.evaluation.lengths import inputs_and_labels, measure_lengths, read_tokens
from onescan.experiments.training.runs import run_config
from onescan.inference.loading import load_language_model
from onescan.integrations.transformers import to_transformers
from onescan.models.causal_lm import IGNORE_INDEX, CausalLMConfig, score_logits, token_losses
from onescan.models.masked_lm import MaskedLMConfig

TEXT = "The cat sat on the mat.\nA dog looked at it, and at the door.\n" * 60


@pytest.mark.sampled(3)
@over_causal
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_token_losses_do_not_depend_on_chunks(change, chunk_tokens):
    model, tokens = causal(change), ids(3, 31)
    logits, _ = model(tokens)
    expected = score_logits(logits[:, :-1], tokens[:, 1:])
    found = token_losses(model, tokens[:, :-1], tokens[:, 1:], chunk_tokens=chunk_tokens)
    torch.testing.assert_close(found.losses, expected.losses)
    assert torch.equal(found.correct, expected.correct)


def test_ignored_labels_have_no_loss():
    model, tokens = causal(CAUSAL["lion"]), ids(1, 6)
    labels = tokens.clone()
    labels[:, ::2] = IGNORE_INDEX
    found = token_losses(model, tokens, labels)
    assert (found.losses[:, ::2] == 0).all()
    assert (found.losses[:, 1::2] > 0).all()
    assert not found.correct[:, ::2].any()
    assert token_losses(model, tokens[:, :0], labels[:, :0]).losses.shape == (1, 0)


@pytest.fixture
def text(tmp_path):
    """Write five documents of words, of 61 tokens with their ends; return path and tokens."""
    g = torch.Generator().manual_seed(5)
    sizes = (17, 1, 20, 8, 10)
    documents = [torch.randint(5, 12, (size,), generator=g).tolist() for size in sizes]
    lines = [json.dumps({"text": " ".join(WORDS[i] for i in each)}) for each in documents]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "text.jsonl"), [token for each in documents for token in [*each, 3]]


def save(folder, name, *, is_causal=True):
    """Save a model and its tokenizer as transformers does; return the model and its path."""
    torch.manual_seed(3)
    config, mixers = (CausalLMConfig, CAUSAL) if is_causal else (MaskedLMConfig, BOTH)
    model = config(**{**SMALL, "vocab_size": 12, **mixers[name]}).build().eval()
    to_transformers(model).save_pretrained(folder / "model")
    word_tokenizer(framed=not is_causal).save_pretrained(folder / "model")
    return model, str(folder / "model")


def opened(path, **changes):
    """Return ids, inputs and labels as `measure_lengths` reads them."""
    model, tokenizer = load_language_model(path)
    run = run_config(path)
    tokens = read_tokens(path, run, tokenizer, LengthsConfig(**changes))
    return tokens, *inputs_and_labels(model, tokenizer, tokens, run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("chunk_tokens", [8, 2048])
def test_scores_equal_those_of_each_row(tmp_path, text, name, chunk_tokens, monkeypatch):
    file, tokens = text
    monkeypatch.setattr(lengths, "CHUNK_TOKENS", chunk_tokens)
    model, path = save(tmp_path, name)
    found = measure_lengths(path, LengthsConfig(lengths=(40, 4, 9), text=file))
    assert (found.tokens, found.predicted_tokens, found.is_causal) == (61, 60, True)
    assert [score.length for score in found.scores] == [4, 9, 40]
    for score in found.scores:
        losses, correct = [], 0
        for begin in range(0, 60, score.length):
            row = torch.tensor([tokens[begin : begin + score.length + 1]])
            logits, _ = model(row[:, :-1])
            losses.append(-logits[0].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0])
            correct += (logits[0].argmax(-1) == row[0, 1:]).sum().item()
        loss = torch.cat(losses).mean().item()
        assert score.loss == pytest.approx(loss, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        assert score.accuracy == pytest.approx(correct / 60)
        ends = [(place.begin, place.end) for place in score.places]
        assert ends[:3] == [(0, 1), (1, 2), (2, 4)]
        assert ends[-1][1] == score.length
        for place in score.places:
            part = torch.cat([row[place.begin : place.end] for row in losses]).mean().item()
            assert place.loss == pytest.approx(part, rel=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("name", BOTH)
def test_masked_models_predict_the_same_tokens_at_every_length(tmp_path, text, name):
    model, path = save(tmp_path, name, is_causal=False)
    tokens, inputs, labels = opened(path, text=text[0])
    chosen = labels != IGNORE_INDEX
    assert tokens.tolist() == text[1]
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    assert (inputs == 4).any()
    assert not (labels == 3).any()
    found = measure_lengths(path, LengthsConfig(lengths=(7, 40), text=text[0]))
    assert (found.predicted_tokens, found.is_causal) == (chosen.sum(), False)
    for score in found.scores:
        losses, correct = [], 0
        for begin in range(0, 61, score.length):
            row = slice(begin, begin + score.length)
            scores = model(inputs[None, row])[0].log_softmax(-1)[chosen[row]]
            expected = labels[row][chosen[row]]
            losses.append(-scores.gather(1, expected[:, None])[:, 0])
            correct += (scores.argmax(-1) == expected).sum().item()
        assert score.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
        assert score.accuracy == pytest.approx(correct / found.predicted_tokens)
        assert score.places == ()


def test_max_tokens_uses_the_start_of_the_text(tmp_path, text):
    _, path = save(tmp_path, "lion")
    assert opened(path, text=text[0], max_tokens=25)[0].tolist() == text[1][:25]
    found = measure_lengths(path, LengthsConfig(lengths=(5,), text=text[0], max_tokens=25))
    assert (found.tokens, found.predicted_tokens) == (25, 24)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        (
            "gpt2",
            {41: "the model is limited to 40 tokens", 64: "the model is limited to 40 tokens"},
        ),
        ("lion", {64: "the text has 60 tokens"}),
    ],
)
def test_lengths_that_are_too_long_are_left_out(tmp_path, text, name, left_out):
    _, path = save(tmp_path, name)
    found = measure_lengths(path, LengthsConfig(lengths=(8, 41, 64), text=text[0]))
    assert {each.length: each.why for each in found.left_out} == left_out
    assert {score.length for score in found.scores} == {8, 41, 64} - left_out.keys()
    with pytest.raises(ValueError, match=rf"lengths is \(64,\), but 64: {left_out[64]}"):
        measure_lengths(path, LengthsConfig(lengths=(64,), text=text[0]), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["shakespeare_lion_s", "wikitext2_mlm_lion_s"])
def test_the_command_evaluates_the_test_text_of_a_run(tmp_path, capsys, monkeypatch, recipe):
    (tmp_path / "text.txt").write_text(TEXT)
    run = train(recipe, tmp_path / "text.txt")
    tokens, _, _ = opened(str(run))
    assert bytes(tokens.tolist()[:-1]).decode() in TEXT
    assert len(tokens) < len(TEXT) / 5
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--lengths", "32", "128", "9999"]) == 0
    header, first, _, skipped, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["length", "loss", "perplexity", "accuracy"]
    assert first.split()[0] == "32"
    assert skipped.startswith("skipped length 9999: ")
    folder = tmp_path / "evaluation" / "lengths" / recipe / "seed-0"
    saved = json.loads((folder / "lengths.json").read_text())
    assert [score["length"] for score in saved["scores"]] == [32, 128]
    assert saved["trained_length"] == 32
    main_metric = "perplexity" if recipe == "shakespeare_lion_s" else "accuracy"
    page = Page((folder / "report.html").read_text())
    assert f"{main_metric} as in training: rows of 32 tokens" in page.text


@pytest.mark.slow
def test_tokens_are_masked_as_in_the_run(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    run = train("wikitext2_mlm_lion_s", file, "--task.mask-rate", "0.4")
    _, _, labels = opened(str(run), text=str(file))
    assert (labels != IGNORE_INDEX).float().mean().item() == pytest.approx(0.4, abs=0.05)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lengths", "8"], "text is None"),
        (["--lengths", "0", "--text", "TEXT"], "lengths is 0"),
        (["--lengths", "8", "8", "--text", "TEXT"], "--lengths contains 8 more than once"),
        (["--lengths", "8", "--text", "TEXT", "--max-tokens", "0"], "--max-tokens is 0"),
        (["--lengths", "8", "--text", "no/such/text"], "text is 'no/such/text'"),
        (["--lengths", "8", "--tasks", "piqa"], "--lengths and --tasks"),
        (["--text", "TEXT"], "--lengths"),
        (["--out", "x"], "--lengths"),
    ],
)
def test_the_command_rejects_wrong_options(tmp_path, text, capsys, argv, message):
    _, path = save(tmp_path, "lion")
    argv = [text[0] if each == "TEXT" else each for each in argv]
    assert main(["evaluate", path, *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_command_does_not_replace_other_files(tmp_path, text, capsys):
    _, path = save(tmp_path, "lion")
    (tmp_path / "report.html").write_text("mine")
    argv = ["evaluate", path, "--lengths", "8", "--text", text[0], "--out"]
    for out in (str(tmp_path), f"{text[0]}/deeper"):
        assert main([*argv, out]) == 2
    assert "report.html" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "mine"
