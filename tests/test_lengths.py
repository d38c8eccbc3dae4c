"""Language models over lengths: what is measured, the command, and its page."""

import dataclasses
import json
import math

import pytest
import torch
from test_language_runs import train
from tiny_language_models import BOTH, CAUSAL, SMALL, causal, ids, over_causal
from tiny_tokenizers import WORDS, word_tokenizer

from onescan.cli import main
from onescan.evaluation import lengths
from onescan.evaluation.config import LengthsConfig
from onescan.evaluation.lengths import measure_lengths, open_long_text
from onescan.integrations.transformers import to_transformers
from onescan.models.causal_lm import IGNORE_INDEX, CausalLMConfig, score_logits, token_losses
from onescan.models.masked_lm import MaskedLMConfig

TEXT = "The cat sat on the mat.\nA dog looked at it, and at the door.\n" * 60


@over_causal
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_a_text_in_pieces_is_told_as_in_one_call(change, at_once):
    model, tokens = causal(change), ids(3, 31)
    logits, _ = model(tokens)
    whole = score_logits(logits[:, :-1], tokens[:, 1:])
    told = token_losses(model, tokens[:, :-1], tokens[:, 1:], chunk_tokens=at_once)
    torch.testing.assert_close(told.losses, whole.losses)
    assert torch.equal(told.correct, whole.correct)


def test_what_is_not_to_be_told_counts_nothing():
    model, tokens = causal(CAUSAL["lion"]), ids(1, 6)
    labels = tokens.clone()
    labels[:, ::2] = IGNORE_INDEX
    told = token_losses(model, tokens, labels)
    assert (told.losses[:, ::2] == 0).all()
    assert (told.losses[:, 1::2] > 0).all()
    assert not told.correct[:, ::2].any()
    assert token_losses(model, tokens[:, :0], labels[:, :0]).losses.shape == (1, 0)


def saved(folder, model):
    """A folder of transformers', with its tokenizer."""
    to_transformers(model).save_pretrained(folder / "model")
    word_tokenizer(framed=not model.config.mixer.is_causal).save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.fixture
def text(tmp_path):
    """Five documents of words, 61 tokens with their ends."""
    g = torch.Generator().manual_seed(5)
    sizes = (17, 1, 20, 8, 10)
    lines = [torch.randint(5, 12, (size,), generator=g).tolist() for size in sizes]
    spoken = [json.dumps({"text": " ".join(WORDS[i] for i in line)}) for line in lines]
    (tmp_path / "text.jsonl").write_text("\n".join(spoken))
    return str(tmp_path / "text.jsonl"), [token for line in lines for token in [*line, 3]]


def writer(name, **more):
    torch.manual_seed(3)
    return CausalLMConfig(**{**SMALL, "vocab_size": 12, **CAUSAL[name], **more}).build().eval()


def filler(name):
    torch.manual_seed(3)
    return MaskedLMConfig(**{**SMALL, "vocab_size": 12, **BOTH[name]}).build().eval()


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("at_once", [8, 2048])
def test_a_row_of_any_length_is_told_as_directly(tmp_path, text, name, at_once, monkeypatch):
    file, tokens = text
    monkeypatch.setattr(lengths, "CHUNK_TOKENS", at_once)
    model = writer(name)
    asked = LengthsConfig(lengths=(40, 4, 9), text=file)
    found = measure_lengths(saved(tmp_path, model), asked)
    assert (found.tokens, found.told, found.is_causal) == (61, 60, True)
    assert [score.length for score in found.scores] == [4, 9, 40]
    for score in found.scores:
        losses, right = [], 0
        for begin in range(0, 60, score.length):
            row = torch.tensor([tokens[begin : begin + score.length + 1]])
            logits, _ = model(row[:, :-1])
            losses.append(-logits[0].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0])
            right += (logits[0].argmax(-1) == row[0, 1:]).sum().item()
        loss = torch.cat(losses).mean().item()
        assert score.loss == pytest.approx(loss, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        assert score.accuracy == pytest.approx(right / 60)
        ends = [(place.begin, place.end) for place in score.places]
        assert ends[:3] == [(0, 1), (1, 2), (2, 4)]
        assert ends[-1][1] == score.length
        for place in score.places:
            part = torch.cat([row[place.begin : place.end] for row in losses]).mean().item()
            assert place.loss == pytest.approx(part, rel=1e-5)


@pytest.mark.parametrize("name", BOTH)
def test_masks_are_the_same_at_every_length(tmp_path, text, name):
    model = filler(name)
    opened = open_long_text(saved(tmp_path, model), text[0])
    shown, labels = opened.masked()
    chosen = labels != IGNORE_INDEX
    assert opened.ids.tolist() == [text[1]]
    assert torch.equal(labels[chosen], opened.ids[chosen])
    assert torch.equal(shown[~chosen], opened.ids[~chosen])
    assert (shown == 4).any()
    assert not (labels == 3).any()
    found = measure_lengths(opened_at(tmp_path), LengthsConfig(lengths=(7, 40), text=text[0]))
    assert (found.told, found.is_causal) == (chosen.sum(), False)
    for score in found.scores:
        losses, right = [], 0
        for begin in range(0, 61, score.length):
            row = slice(begin, begin + score.length)
            scores = model(shown[:, row])[0].log_softmax(-1)[chosen[0, row]]
            wanted = labels[0, row][chosen[0, row]]
            losses.append(-scores.gather(1, wanted[:, None])[:, 0])
            right += (scores.argmax(-1) == wanted).sum().item()
        assert score.loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
        assert score.accuracy == pytest.approx(right / found.told)
        assert score.places == ()


def opened_at(folder):
    return str(folder / "model")


def test_a_number_of_tokens_is_of_the_first_ones(tmp_path, text):
    opened = open_long_text(saved(tmp_path, writer("lion")), text[0], most=25)
    assert opened.ids.tolist() == [text[1][:25]]
    found = measure_lengths(
        opened_at(tmp_path), LengthsConfig(lengths=(5,), text=text[0], max_tokens=25)
    )
    assert (found.tokens, found.told) == (25, 24)


def test_what_is_too_long_is_left_out_by_name(tmp_path, text):
    asked = LengthsConfig(lengths=(8, 41, 64), text=text[0])
    found = measure_lengths(saved(tmp_path, writer("gpt2")), asked)
    assert [score.length for score in found.scores] == [8]
    assert [(left.length, left.why) for left in found.left_out] == [
        (41, "the model has 40 places"),
        (64, "the model has 40 places"),
    ]
    found = measure_lengths(saved(tmp_path, writer("lion")), asked)
    assert [score.length for score in found.scores] == [8, 41]
    assert [left.why for left in found.left_out] == ["there are 60 tokens of text to read"]
    with pytest.raises(ValueError, match="not 64, as there are 60 tokens of text to read"):
        measure_lengths(
            opened_at(tmp_path), dataclasses.replace(asked, lengths=(64,)), device="cpu"
        )


def test_a_runs_own_text_is_its_held_out_part(tmp_path, capsys, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    run = train("shakespeare_lion_s", file)
    opened = open_long_text(str(run), None)
    assert bytes(opened.ids[0].tolist()[:-1]).decode() in TEXT
    assert opened.ids.shape[1] < len(TEXT) / 5
    assert opened.trained_length == 32
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--lengths", "32", "128", "9999"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["length", "loss", "perplexity", "accuracy"]
    assert shown[1].startswith("      32")
    assert shown[1].endswith("as in training")
    assert shown[3].startswith("skipped length 9999: there are ")
    folder = tmp_path / "bench" / "lengths" / "run" / "seed-0"
    held = json.loads((folder / "lengths.json").read_text())
    assert [score["length"] for score in held["scores"]] == [32, 128]
    assert (folder / "report.html").exists()


def test_a_masked_run_draws_masks_as_in_training(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    run = train("wikitext2_mlm_lion_s", file, "--task.mask-rate", "0.4")
    opened = open_long_text(str(run), str(file))
    assert opened.masks.mask_rate == 0.4
    told = (opened.masked()[1] != IGNORE_INDEX).float().mean().item()
    assert told == pytest.approx(0.4, abs=0.05)


def test_mistakes_are_told_in_a_sentence(tmp_path, text, capsys):
    model = saved(tmp_path, writer("lion"))

    def told(*words):
        assert main(["evaluate", model, *words]) == 2
        return capsys.readouterr().err

    assert "tells no held-out text, expected text to be given" in told("--lengths", "8")
    assert "lengths is 0, expected a number above 0" in told("--lengths", "0", "--text", text[0])
    assert "expected at least one, and each once" in told("--lengths", "8", "8", "--text", text[0])
    assert "max_tokens is 0" in told("--lengths", "8", "--text", text[0], "--max-tokens", "0")
    assert "text is 'no/such/text': there is no such" in told(
        "--lengths", "8", "--text", "no/such/text"
    )
    assert "lengths and tasks exclude each other" in told("--lengths", "8", "--tasks", "piqa")
    assert f"text is {text[0]!r}, but requires --lengths" in told("--text", text[0])
    assert "out is 'x', but requires --lengths, --tasks or --samples" in told("--out", "x")
    (tmp_path / "report.html").write_text("mine")
    words = ["--lengths", "8", "--text", text[0], "--out", str(tmp_path)]
    assert "was not written by onescan" in told(*words)
    assert f"{text[0]} is a file, expected a folder" in told(*words[:-1], f"{text[0]}/deeper")
