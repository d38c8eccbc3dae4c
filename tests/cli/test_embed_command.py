"""`onescan embed`: the file that it writes, what it reads, and how it fails."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import python_block
from PIL import Image
from tiny_language_models import BOTH, SMALL
from tiny_tokenizers import WORDS, word_tokenizer
from torch.testing import assert_close

import onescan
from onescan.cli import main
from onescan.inference import loading
from onescan.inference.embedding import embed
from onescan.inference.loading import Checkpoint, load, load_language_model
from onescan.inputs import ArrayFormat, ByteTokenizer, PairFormat, TextFormat
from onescan.integrations.transformers import to_transformers
from onescan.layers.position import TokenPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

LM, DIGITS = "zoo/shakespeare_lightnet", "zoo/digits_lightnet"
LINES = ["To be, or not to be", "A horse! A horse!", "", "naïve café", "  ", "the end"]
TEXTS = [line for line in LINES if line.strip()]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    """Embed, and return names and vectors."""
    assert main(["embed", *map(str, arguments), "--out", "vectors.npz"]) == 0
    with np.load("vectors.npz", allow_pickle=False) as file:
        assert sorted(file) == ["names", "vectors"]
        return file["names"].tolist(), torch.from_numpy(file["vectors"])


def fails(capsys, *arguments, out="vectors.npz"):
    """Return the message of a failure that writes nothing."""
    capsys.readouterr()
    assert main(["embed", *map(str, arguments), "--out", out]) == 2
    assert not Path("vectors.npz").exists()
    return capsys.readouterr().err


def classifier(length=16):
    """A text classifier of bytes whose training data had its texts in the column body."""
    config = SequenceClassifierConfig(**{**SMALL, **BOTH["lion"], "vocab_size": 258})
    return Checkpoint(
        folder=Path("nowhere"),
        run={"data": {"text_column": "body"}},
        model=config.build().eval(),
        format=PairFormat(text=TextFormat.of(ByteTokenizer()), length=length),
        class_names=("a", "b"),
        metrics={},
    )


# Texts


def test_lines_of_a_file_are_embedded(capsys):
    Path("a.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    names, vectors = run("a.txt", "--model", LM)
    assert names == [f"a.txt, line {i}" for i in (1, 2, 4, 6)]
    assert (vectors.dtype, vectors.shape[1]) == (torch.float32, 128)
    assert_close(vectors, embed(load(LM), TEXTS))
    shown = capsys.readouterr()
    assert shown.out == "vectors.npz: 4 vectors of width 128\n"
    assert shown.err.splitlines() == [
        "skipped: a.txt, line 3: the text is empty",
        "skipped: a.txt, line 5: the text is empty",
    ]


def test_tables_and_texts_in_quotes_are_embedded(capsys):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("b.csv").write_text("id,body\n1,the cat\n2,\n3,a dog\n")
    names, vectors = run("a.jsonl", "my kingdom", "--model", LM)
    assert names == [*(f"a.jsonl, line {i}" for i in (1, 2, 3, 4)), "my kingdom"]
    assert_close(vectors, embed(load(LM), [*TEXTS, "my kingdom"]), rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    names, _ = run("b.csv", "--model", LM, "--text-column", "body")
    assert names == ["b.csv, line 2", "b.csv, line 4"]
    assert "skipped: b.csv, line 3: the text is empty" in capsys.readouterr().err
    Path("vectors.npz").unlink()
    message = "b.csv has no column 'text'; available: id, body (--text-column selects one)"
    assert message in fails(capsys, "b.csv", "--model", LM)


def test_options_are_those_of_the_function():
    Path("a.txt").write_text("\n".join(TEXTS))
    _, vectors = run("a.txt", "--model", LM, "--pooling", "last", "--normalize")
    assert_close(vectors, embed(load(LM), TEXTS, pooling="last", normalize=True))
    _, single = run("a.txt", "--model", LM, "--pooling", "last", "--normalize", "--batch-size", 1)
    assert_close(single, vectors, rtol=1e-5, atol=1e-5)
    _, plain = run("a.txt", "--model", LM, "--no-normalize", "--device", "cpu")
    assert_close(plain, embed(load(LM), TEXTS))


def test_a_folder_of_transformers_is_embedded(capsys):
    config = {**SMALL, **BOTH["bert"], "vocab_size": len(WORDS)}
    native = MaskedLMConfig(**config | {"position": TokenPositionConfig(max_tokens=8)}).build()
    to_transformers(native.eval()).save_pretrained("folder")
    word_tokenizer(framed=True).save_pretrained("folder")
    Path("a.txt").write_text("the cat sat\n" + "the " * 9 + "\n")
    capsys.readouterr()
    _, vectors = run("a.txt", "--model", "folder")
    texts = ["the cat sat", "the " * 9]
    assert_close(vectors, embed(load_language_model("folder"), texts, truncate=True))
    message = "note: 1 of 2 texts is longer than the 8 tokens that the model reads and is truncated"
    assert message in capsys.readouterr().err


def test_the_column_of_the_training_data_is_read(capsys, monkeypatch):
    source = classifier()
    monkeypatch.setattr(loading, "load", lambda _: source)
    Path("b.csv").write_text(
        "id,body\n1,the cat\n2,a dog on a mat and more\n3,and so on and on on\n"
    )
    names, vectors = run("b.csv", "--model", "runs/texts/seed-0", "--pooling", "head")
    assert names == [f"b.csv, line {i}" for i in (2, 3, 4)]
    texts = ["the cat", "a dog on a mat and more", "and so on and on on"]
    assert_close(vectors, embed(source, texts, pooling="head", truncate=True))
    message = "2 of 3 texts are longer than the 16 tokens that the model reads and are truncated"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "inputs is empty, expected at least one text, file or folder"),
        (("",), "inputs contains an empty text"),
        (("no.txt",), "there is no file no.txt"),
        (("no.csv",), "there is no file no.csv"),
        (("picture.png",), "picture.png is not a file of texts, expected a name ending in .txt"),
        (("latin.txt",), "there is no readable text in latin.txt: latin.txt, line 1: this is not"),
        (("empty.txt",), "there is no readable text in empty.txt"),
        (("images",), "images is a folder, expected a text or a file of texts (.txt, "),
        (("images/",), "to pass the text 'images/' itself, write it to such a file"),
        (("a\udcff",), "inputs[0] is 'a\\udcff', expected Unicode text without lone surrogates"),
        (("a text", "--pooling", "head"), "--pooling is 'head', expected 'mean', 'last' or"),
        (("a text", "--batch-size", 0), "--batch-size is 0, expected a whole number"),
    ],
)
def test_texts_that_cannot_be_read(arguments, message, capsys):
    Path("latin.txt").write_bytes("café".encode("latin1"))
    Path("empty.txt").touch()
    Path("images").mkdir()
    Image.new("L", (8, 8)).save("picture.png")
    assert message in fails(capsys, *arguments, "--model", LM)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("vectors.npy", "--out is 'vectors.npy', expected a name ending in .npz"),
        ("", "--out is '', expected a name ending in .npz"),
        ("folder.npz", "--out is 'folder.npz', which is a folder, expected a file"),
        ("text.txt/new/v.npz", "--out is 'text.txt/new/v.npz', but text.txt is not a folder"),
    ],
)
def test_other_names_of_the_file_are_refused(out, message, capsys, monkeypatch):
    monkeypatch.setattr(loading, "load", None)  # before anything is loaded
    Path("folder.npz").mkdir()
    Path("text.txt").touch()
    assert message in fails(capsys, "a text", "--model", LM, out=out)


def test_a_read_only_folder_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load", None)  # before anything is loaded
    monkeypatch.setattr("os.access", lambda path, mode: False)
    message = fails(capsys, "a text", "--model", LM, out="new/v.npz")
    assert "--out is 'new/v.npz', but nothing can be written to ." in message


def test_the_input_is_not_overwritten(capsys):
    np.savez("x.npz", x=np.zeros((2, 8, 8, 1), np.uint8))
    before = Path("x.npz").read_bytes()
    message = fails(capsys, "x.npz", "--model", DIGITS, out="./x.npz")
    assert "which is also an input; choose another name" in message
    assert Path("x.npz").read_bytes() == before


def test_a_failed_write_keeps_the_last_file(monkeypatch, capsys):
    def fail(file, **_arrays):
        file.write(b"half of it")
        raise OSError("no space left on device")

    run("a text", "--model", LM)
    before = Path("vectors.npz").read_bytes()
    monkeypatch.setattr(np, "savez", fail)
    assert main(["embed", "another", "--model", LM, "--out", "vectors.npz"]) == 1
    assert "no space left on device" in capsys.readouterr().err
    assert Path("vectors.npz").read_bytes() == before
    assert list(Path().iterdir()) == [Path("vectors.npz")]


def test_the_examples_of_the_page_run(capsys, monkeypatch):
    Path("texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    for given, name in (("texts.txt", "texts.npz"), ("A horse! A horse? A", "query.npz")):
        assert main(["embed", given, "--model", LM, "--normalize", "--out", name]) == 0
    capsys.readouterr()
    exec(python_block("embeddings.md", "argsort"), {})  # noqa: S102
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("  texts.txt, line 2")
    source = classifier(length=32)
    monkeypatch.setattr(onescan, "load", lambda _: source)
    names = {"onescan": onescan, "embed": embed}
    exec(python_block("embeddings.md", 'onescan.load("RUN")'), names)  # noqa: S102
    assert names["vectors"].shape == (2, 24)


# Images


def test_images_and_folders_are_embedded(capsys):
    Path("folder/deep").mkdir(parents=True)
    for i, name in enumerate(["a.png", "folder/b.png", "folder/deep/c.png"]):
        Image.new("L", (8 + i, 8), 80 * i).save(name)
    Path("folder/damaged.png").write_text("no image")
    names, vectors = run("a.png", "folder", "a.png", "--model", DIGITS)
    assert [Path(name).as_posix() for name in names] == [
        *("a.png", "folder/b.png", "folder/deep/c.png", "a.png")
    ]
    assert_close(vectors, embed(load(DIGITS), names), rtol=1e-5, atol=1e-5)
    shown = capsys.readouterr()
    assert shown.out == f"vectors.npz: 4 vectors of width {vectors.shape[1]}\n"
    assert shown.err.startswith("skipped: ")
    assert "damaged.png is not an image" in shown.err
    _, single = run("a.png", "folder", "a.png", "--model", DIGITS, "--batch-size", 1)
    assert_close(single, vectors, rtol=1e-5, atol=1e-5)


def test_images_that_cannot_be_read(capsys):
    Path("text.png").write_text("no image")
    Path("empty").mkdir()
    for argument, message in [
        ("no.png", "no.png"),
        ("text.png", "text.png is not an image"),
        ("empty", "there is no"),
        ("text.png --pooling last", "--pooling is 'last', expected 'head', 'mean' or"),
    ]:
        assert message in fails(capsys, *argument.split(), "--model", DIGITS)


def test_options_for_texts_are_refused_for_images(capsys):
    Image.new("L", (8, 8)).save("a.png")
    message = "--text-column is 'body', but the model does not read texts"
    assert message in fails(capsys, "a.png", "--model", DIGITS, "--text-column", "body")
    assert main(["predict", DIGITS, "a.png", "--text-column", "body"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("out", ["folder.csv", "a.png/x.csv"])
def test_predict_checks_the_output_first(out, capsys, monkeypatch):
    Image.new("L", (8, 8)).save("a.png")
    Path("folder.csv").mkdir()
    monkeypatch.setattr("onescan.inputs.read_image", None)
    assert main(["predict", DIGITS, "a.png", "--out", out]) == 2
    assert f"--out is '{out}', " in capsys.readouterr().err


def test_predict_refuses_a_folder_as_a_text(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda _: classifier())
    Path("images").mkdir()
    assert main(["predict", "run", "images"]) == 2
    assert "images is a folder, expected a text or a file of texts" in capsys.readouterr().err


def test_predict_reads_the_lines_of_text_files(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda _: classifier())
    Path("new.txt").write_text("\n".join(LINES), encoding="utf-8")
    assert main(["predict", "run", "new.txt", "see new.txt"]) == 0
    shown = capsys.readouterr()
    assert [line.partition(": ")[0] for line in shown.out.splitlines()] == [*TEXTS, "see new.txt"]
    assert shown.err.startswith("skipped: new.txt, line 3: the text is empty\n")
    assert main(["predict", "run", "no.txt"]) == 2
    assert capsys.readouterr().err == "onescan: error: there is no file no.txt\n"


def test_predictions_of_texts_have_the_row_of_the_table(monkeypatch):
    monkeypatch.setattr(loading, "load", lambda _: classifier())
    Path("a.csv").write_text("id,body\n1,the cat\n\n2,\n3,a dog\n")
    Path("b.jsonl").write_text('{"body": "on"}\n\n{"body": "a\\nmat"}\n')
    Path("c.txt").write_text("\n".join(LINES), encoding="utf-8")
    given = ["a.csv", "b.jsonl", "a text", "c.txt"]
    assert main(["predict", "run", *given, "--top-k", "1", "--out", "out.json"]) == 0
    rows = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert [*rows[0]] == ["path", "row", "text", "class", "confidence"]
    expected = [("a.csv", 0, "the cat"), ("a.csv", 2, "a dog")]
    expected += [("b.jsonl", 0, "on"), ("b.jsonl", 1, "a\nmat"), (None, None, "a text")]
    expected += [("c.txt", row, line) for row, line in enumerate(LINES) if line.strip()]
    assert [tuple(row.values())[:3] for row in rows] == expected
    assert main(["predict", "run", *given[:2], "--out", "out.csv"]) == 0
    with Path("out.csv").open(newline="") as predicted, Path("a.csv").open(newline="") as table:
        bodies = [row["body"] for row in csv.DictReader(table)]
        for row in csv.DictReader(predicted):
            assert row["path"] == "b.jsonl" or bodies[int(row["row"])] == row["text"]


def test_predictions_do_not_depend_on_the_batch_size(monkeypatch):
    source, batches = load(DIGITS), []
    source.model.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    monkeypatch.setattr(loading, "load", lambda _: source)
    np.savez("x.npz", x=np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8))
    Path("folder").mkdir()
    for i in range(3):
        Image.new("L", (8 + i, 8), 80 * i).save(f"folder/{i}.png")
    found = []
    for options in ([], ["--batch-size", "3", "--device", "cpu", "--backend", "torch"]):
        batches.clear()
        argv = ["predict", "run", "folder", "x.npz", *options, "--out", "out.json"]
        assert main(argv) == 0
        found.append(([*batches], json.loads(Path("out.json").read_text())))
    (all_at_once, expected), (in_threes, rows) = found
    assert (all_at_once, in_threes) == ([8], [3, 3, 2])
    assert [row["path"] for row in rows[:5]] == [f"x.npz[{i}]" for i in range(5)]
    for row, same in zip(rows, expected, strict=True):
        assert row.pop("confidence") == pytest.approx(same.pop("confidence"), abs=2e-6)
        assert row["class"] == same["class"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", "0"), "--batch-size is 0, expected a whole number of at least 1"),
        (("--device", "x"), "device is 'x', expected auto, cpu, cuda, ..."),
    ],
)
def test_predict_checks_the_options_first(options, message, capsys, monkeypatch):
    monkeypatch.setattr(loading, "load", None)
    assert main(["predict", DIGITS, "a.png", *options]) == 2
    assert message in capsys.readouterr().err


def test_rows_with_lone_surrogates_are_skipped(capsys):
    Path("a.jsonl").write_text('{"text": "a\\ud800"}\n{"text": "b"}\n')
    names, _ = run("a.jsonl", "--model", LM)
    assert names == ["a.jsonl, line 2"]
    assert "skipped: a.jsonl, line 1" in capsys.readouterr().err


def test_arrays_are_embedded(monkeypatch, capsys):
    rng = np.random.default_rng(0)
    images = rng.random((5, 8, 8, 1), np.float32)
    np.savez("x.npz", x=images)
    names, vectors = run("x.npz", "--model", DIGITS, "--batch-size", 2)
    assert names == [f"x.npz[{i}]" for i in range(5)]
    pixels = torch.from_numpy(images).movedim(-1, 1)
    assert_close(vectors, embed(load(DIGITS), pixels), rtol=1e-5, atol=1e-5)
    model = ImageClassifierConfig(
        image_size=(16,), patch_size=(4,), channels=1, width=24, depth=1, pool="mean"
    ).build()
    format = ArrayFormat(channels=1, shape=(16,), mean=(0.0,), std=(1.0,), is_ragged=True)
    source = Checkpoint(
        folder=Path("run"), run={}, model=model.eval(), format=format, class_names=(), metrics={}
    )
    monkeypatch.setattr(loading, "load", lambda _: source)
    signals = rng.random((3, 16, 1), np.float32)
    np.savez("x.npz", x=signals, lengths=np.array([16, 9, 5]))
    _, vectors = run("x.npz", "--model", DIGITS)
    for row, length in enumerate((16, 9, 5)):
        alone = embed(source, torch.from_numpy(signals[row : row + 1, :length]).movedim(-1, 1))
        assert_close(vectors[row : row + 1], alone, rtol=1e-5, atol=1e-5)
    assert "the model reads arrays (.npz or .npy files), not 'a.png'" in main_error(capsys)


def main_error(capsys):
    Path("vectors.npz").unlink()
    return fails(capsys, "a.png", "--model", DIGITS)


def test_a_model_without_vectors_is_refused(capsys):
    message = fails(capsys, "a.png", "--model", "zoo/digits_denoiser")
    assert "a Denoiser cannot embed inputs, expected a language model or a classifier" in message
