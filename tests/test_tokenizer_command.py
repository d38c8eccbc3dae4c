"""`onescan tokenizer`: a byte-level BPE trained on any text."""

import json
import random
import re

import pytest
from transformers import AutoTokenizer

from onescan.cli import main
from onescan.data.text import load_tokenizer
from onescan.data.text.bpe import MIN_VOCAB_SIZE, train_bpe

ODD = "na\u00efve \u6f22\u5b57 \U0001f600\n\n\tend <end> [MASK] \x00"


def sentences(count=2000):
    chance = random.Random(0)
    words = [
        "the",
        "cat",
        "sat",
        "upon",
        "a",
        "mat",
        "caf\u00e9",
        "and",
        "slept",
        "under",
        "moonlight",
    ]
    return [" ".join(chance.choices(words, k=8)) for _ in range(count)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("\n".join(sentences()))
    return path


def made(path, out, *words):
    return main(["tokenizer", str(path), "--out", str(out), "--vocab-size", "300", *words])


def test_a_tokenizer_is_trained_saved_and_measured(text, tmp_path, capsys):
    assert made(text, tmp_path / "out") == 0
    said = capsys.readouterr().out
    size, measured = re.fullmatch(
        r".*out: (\d+) tokens, ([\d.]+) bytes per token of held-out text\n", said
    ).groups()
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert int(size) == tokenizer.size == 300
    whole = text.read_text()
    assert float(measured) == pytest.approx(
        len(whole.encode()) / len(tokenizer.encode(whole)), rel=0.02
    )
    assert float(measured) > 3


def test_every_text_comes_back(text, tmp_path):
    made(text, tmp_path / "out")
    ours = load_tokenizer(str(tmp_path / "out"))
    many = ours.encode_many([ODD, "a"])  # first, as each call leaves its settings behind
    assert many[0].tolist() == ours.encode(ODD)
    assert ours.decode(ours.encode(ODD)) == ODD
    assert (ours.end, ours.mask, ours.mask_text) == (0, 1, "[MASK]")
    assert not {ours.end, ours.mask} & set(ours.encode(ODD))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode("the cat") == ours.encode("the cat")
    assert (theirs.eos_token, theirs.pad_token, theirs.mask_token) == ("<end>", "<end>", "[MASK]")
    # a mask takes the space before it, which is a part of the word that it stands for
    assert ours.encode("the [MASK] sat", framed=True) == [
        *ours.encode("the"),
        ours.mask,
        *ours.encode(" sat"),
    ]


def test_the_same_text_gives_the_same_tokenizer(text, tmp_path):
    for name in ("one", "two"):
        made(text, tmp_path / name)
    one, two = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert one == two


def test_any_kind_of_text_will_do(text, tmp_path, capsys):
    lines = text.read_text().splitlines()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": x}) + "\n" for x in lines))
    made(tmp_path / "a.jsonl", tmp_path / "objects", "--text-column", "body")
    made(text, tmp_path / "lines", "--sample-by", "line")
    made(text, tmp_path / "whole")
    objects, of_lines, whole = (
        (tmp_path / name / "tokenizer.json").read_bytes() for name in ("objects", "lines", "whole")
    )
    assert objects == of_lines
    assert whole != of_lines  # which knows line breaks
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_tenth_is_held_out():
    pieces = ["cat " * 1000] * 9 + ["dog " * 1000]
    trained = train_bpe(pieces, 270)
    known = trained.tokenizer
    assert trained.is_held_out
    assert trained.bytes_per_token == 4000 / len(known.encode(pieces[9]))
    assert len(known.encode(" cat")) == 1
    assert len(known.encode(" dog")) == 4
    little = train_bpe(pieces[:9], 270)
    assert not little.is_held_out
    assert little.bytes_per_token == 4000 / len(known.encode(pieces[0]))


def test_mistakes_are_told_in_a_sentence(text, tmp_path, capsys):
    def told(path, out, *words):
        assert made(path, out, *words) == 2
        return capsys.readouterr().err

    assert f"vocab_size is 257, expected at least {MIN_VOCAB_SIZE}" in told(
        text, tmp_path / "a", "--vocab-size", "257"
    )
    (tmp_path / "empty.txt").write_text(" \n")
    assert "there is no text to train a tokenizer on" in told(
        tmp_path / "empty.txt", tmp_path / "b"
    )
    assert "path is './nowhere': there is no such file" in told("./nowhere", tmp_path / "c")
    assert "split is 'learn', but" in told(text, tmp_path / "d", "--split", "learn")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    assert "a.jsonl, line 2: the column 'text' holds int" in told(
        tmp_path / "a.jsonl", tmp_path / "e"
    )
    assert not [name for name in "abcde" if (tmp_path / name).exists()]
    assert made(text, tmp_path / "full") == 0
    assert "full is there already" in told(text, tmp_path / "full")


def test_the_smallest_is_bytes(text, tmp_path):
    assert made(text, tmp_path / "out", "--vocab-size", str(MIN_VOCAB_SIZE)) == 0
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer.size == MIN_VOCAB_SIZE
    assert len(tokenizer.encode(ODD)) == len(ODD.encode())
