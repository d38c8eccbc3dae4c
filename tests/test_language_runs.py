"""Language models trained by recipes: from a text file to a report, and on to writing."""

import pytest
import torch
from test_writing import byte_level_bpe
from tiny_run import press_ctrl_c_at

import onescan
from onescan.cli import main
from onescan.data.text import ByteTokenizer
from onescan.recipes.language import RECIPES as LANGUAGE
from onescan.report import texts
from onescan.tasks import MaskedLanguageModellingConfig
from onescan.training import train as train_run
from onescan.training.folder import read_manifest
from onescan.training.loading import load_language_model

TEXT = "The cat sat on the mat.\nA dog looked at it, and at the door.\n" * 60
TINY = [
    *("--model.width", "24", "--model.depth", "1", "--model.mixer.num-heads", "2"),
    *("--data.length", "32", "--training.batch-size", "4", "--training.steps", "6"),
]


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    """Shorten the texts on reports, which take longer than training."""
    monkeypatch.setattr(texts, "NEW_TOKENS", 9)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def train(name, text, *words):
    """What a run left, and where."""
    out = text.parent / "run"
    arguments = ["train", name, "--data.path", str(text), "--out", str(out), *TINY, *words]
    assert main(arguments) == 0
    return out / "seed-0"


SMALL = [name for name in LANGUAGE if name.startswith(("shakespeare", "wikitext2"))]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_twin_trains_and_is_told_of(name, text, capsys):
    run = train(name, text, *(["--task.supervised-blocks", "1"] if name.endswith("ldn") else []))
    assert "test loss" in capsys.readouterr().out
    page = (run.parent / "report.html").read_text()
    assert "Generated text" in page or "Predicted tokens" in page
    assert "<pre" in page
    checkpoint = onescan.load(run)
    assert checkpoint.metrics["perplexity"] > 1


def test_a_run_writes_on_and_fills_in(text, capsys):
    run = train("shakespeare_lightnet", text)
    _, tokenizer = load_language_model(str(run))
    assert isinstance(tokenizer, ByteTokenizer)
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "The", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("The")
    run = train("wikitext2_mlm_bert", text, "--overwrite")
    capsys.readouterr()
    assert main(["fill", str(run), "The c[MASK]t", "--top-k", "2"]) == 0
    assert capsys.readouterr().out.count("%") == 2


def test_a_run_keeps_its_tokenizer(text, tmp_path, capsys):
    byte_level_bpe().save_pretrained(tmp_path / "pairs")
    run = train(
        "shakespeare_lion_s",
        text,
        *("--data.tokenizer", str(tmp_path / "pairs"), "--model.vocab-size", "300"),
    )
    for file in (tmp_path / "pairs").iterdir():
        file.unlink()
    _, tokenizer = load_language_model(str(run))
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_a_language_model_resumes_to_the_same_numbers(text, tmp_path):
    words = ["--data.path", str(text), *TINY, "--training.checkpoint-every", "0.01"]
    whole = train("shakespeare_lightnet", text, *words)
    run = read_manifest(whole).run
    with pytest.raises(KeyboardInterrupt):
        train_run(run, tmp_path / "stopped", progress=press_ctrl_c_at(4))
    again = train_run(run, tmp_path / "stopped")
    for name, weight in onescan.load(whole).model.state_dict().items():
        assert torch.equal(onescan.load(again.folder).model.state_dict()[name], weight), name


def test_a_text_that_goes_on_lowers_the_loss(text):
    few = onescan.load(train("shakespeare_gpt2", text, "--training.steps", "2")).metrics
    more = train("shakespeare_gpt2", text, "--training.steps", "60", "--overwrite")
    assert onescan.load(more).metrics["loss"] < few["loss"] - 0.5


@pytest.mark.parametrize("name", sorted(set(LANGUAGE) - set(SMALL)))
def test_a_papers_recipe_is_of_its_models_size(name):
    run = LANGUAGE[name]()
    assert run.name == name
    assert run.data.tokenizer in ("openai-community/gpt2", "google-bert/bert-base-uncased")
    with torch.device("meta"):
        model = run.model.build()
    assert sum(p.numel() for p in model.parameters()) > 4e7
    is_masked = isinstance(run.task, MaskedLanguageModellingConfig)
    assert run.data.add_special_tokens is is_masked
    if name.startswith("c4"):
        assert (run.task.mask_rate, run.task.evaluation_mask_rate) == (0.3, 0.15)
        assert run.model.norm_position == "post"
    if run.data.streaming:
        assert run.data.train_rows == run.training.batch_size * run.training.steps


def test_a_missing_text_is_told_in_a_sentence(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["train", "shakespeare_lightnet", "--data.path", str(tmp_path / "no"), *out]) == 2
    assert "no" in capsys.readouterr().err
    (tmp_path / "empty.txt").write_text("")
    path = str(tmp_path / "empty.txt")
    assert main(["train", "shakespeare_lightnet", "--data.path", path, *out]) == 2
    assert "empty" in capsys.readouterr().err


def test_what_is_no_run_is_told_as_such(text, capsys):
    run = train("shakespeare_lion_s", text)
    capsys.readouterr()
    for command, *more in (["generate"], ["needle"], ["evaluate", "--lengths", "8"]):
        assert main([command, str(run.parent), *more]) == 2
        assert "holds no run: it has no config.json; name one of the runs in it: seed-0" in (
            capsys.readouterr().err
        )
        assert main([command, str(run / "no" / "such"), *more]) == 2
        assert "there is no run at" in capsys.readouterr().err
