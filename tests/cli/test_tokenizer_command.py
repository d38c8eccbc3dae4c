"""`onescan tokenizer`: training a byte-level BPE tokenizer on any text."""

import json
import random
import re

import pytest
from transformers import AutoTokenizer

from onescan.cli import main
from onescan.experiments.data.text.bpe import MIN_VOCAB_SIZE, train_bpe
from onescan.inputs.tokenizer import load_tokenizer

ODD = "na\u00efve \u6f22\u5b57 \U0001f600\n\n\tend <end> [MASK] \x00"
WORDS = ["the", "cat", "sat", "upon", "a", "mat", "café", "and", "slept", "under", "moonlight"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("text") / "a.txt", random.Random(0)
    path.write_text("\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(2000)))
    return path


def run(path, out, *options):
    return main(["tokenizer", str(path), "--out", str(out), "--vocab-size", "300", *options])


def test_a_tokenizer_is_trained_saved_and_measured(text, tmp_path, capsys):
    assert run(text, tmp_path / "out") == 0
    size, measured = re.fullmatch(
        r".*out: (\d+) tokens, ([\d.]+) bytes per token of held-out text\n",
        capsys.readouterr().out,
    ).groups()
    tokenizer, whole = load_tokenizer(str(tmp_path / "out")), text.read_text()
    assert int(size) == tokenizer.size == 300
    expected = len(whole.encode()) / len(tokenizer.encode(whole))
    assert float(measured) == pytest.approx(expected, rel=0.02)
    assert expected > 3
    assert run(text, tmp_path / "again") == 0  # deterministic
    one, two = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("out", "again"))
    assert one == two


def test_encoding_is_lossless(text, tmp_path):
    run(text, tmp_path / "out")
    run(text, tmp_path / "bytes", "--vocab-size", str(MIN_VOCAB_SIZE))
    smallest, ours = (load_tokenizer(str(tmp_path / name)) for name in ("bytes", "out"))
    assert smallest.size == MIN_VOCAB_SIZE
    assert len(smallest.encode(ODD)) == len(ODD.encode())
    many = ours.encode_many([ODD, "a"])  # before encode, which changes settings of the backend
    assert many[0].tolist() == ours.encode(ODD)
    assert ours.decode(ours.encode(ODD)) == ODD
    assert (ours.end, ours.mask, ours.mask_text) == (0, 1, "[MASK]")
    assert not {ours.end, ours.mask} & set(ours.encode(ODD))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode("the cat") == ours.encode("the cat")
    assert (theirs.eos_token, theirs.pad_token, theirs.mask_token) == ("<end>", "<end>", "[MASK]")
    # A mask includes the space before it, which is part of the word that it replaces.
    before, after = ours.encode("the"), ours.encode(" sat")
    assert ours.encode("the [MASK] sat", framed=True) == [*before, ours.mask, *after]


def test_any_type_of_file(text, tmp_path):
    lines = text.read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": x}) + "\n" for x in lines))
    run(tmp_path / "a.jsonl", tmp_path / "objects", "--text-column", "body")
    run(text, tmp_path / "lines", "--sample-by", "line")
    run(text, tmp_path / "whole")
    objects, of_lines, whole = (
        (tmp_path / name / "tokenizer.json").read_bytes() for name in ("objects", "lines", "whole")
    )
    assert objects == of_lines
    assert whole != of_lines  # lines do not include line breaks


def test_a_tenth_is_held_out():
    pieces = ["cat " * 1000] * 9 + ["dog " * 1000]
    trained = train_bpe(pieces, 270)
    encode = trained.tokenizer.encode
    assert trained.is_held_out
    assert trained.bytes_per_token == 4000 / len(encode(pieces[9]))
    assert (len(encode(" cat")), len(encode(" dog"))) == (1, 4)
    few = train_bpe(pieces[:9], 270)
    assert not few.is_held_out
    assert few.bytes_per_token == 4000 / len(encode(pieces[0]))


@pytest.mark.parametrize(
    ("path", "options", "found"),
    [
        ("text.txt", ("--vocab-size", "257"), f"is 257, expected at least {MIN_VOCAB_SIZE}"),
        ("empty.txt", (), "no text"),
        ("./nowhere", (), "path is './nowhere'"),
        ("text.txt", ("--split", "learn"), "split is 'learn'"),
        ("a.jsonl", (), "a.jsonl, line 2: the column 'text' holds int"),
        ("text.txt", ("--out", "full"), "full already exists"),
    ],
)
def test_mistakes_write_nothing(text, tmp_path, capsys, monkeypatch, path, options, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(text.read_text())
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["tokenizer", path, "--out", "new", *options]) == 2
    assert found in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
