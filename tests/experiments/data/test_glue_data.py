"""GLUE's tables and its hub dataset: reading, framing, truncation and errors."""

from itertools import product

import numpy as np
import pytest
from tiny_glue import HEADS, row, ruled, write_ruled, write_table
from tiny_tokenizers import word_tokenizer

from onescan import configs
from onescan.experiments.data import Example
from onescan.experiments.data.glue import PROBLEMS, GlueDatasetConfig
from onescan.inputs.pairs import PairEncoder, PairFormat, truncate_pair
from onescan.inputs.tokenizer import ByteTokenizer, PretrainedTokenizer, TextFormat

TITLES = {problem.title: task for task, problem in PROBLEMS.items()}


def built(folder, task="cola", **fields):
    return GlueDatasetConfig(task=task, path=str(folder), **{"length": 32} | fields).build()


@pytest.mark.parametrize("title", HEADS)
def test_columns_of_every_task(title, tmp_path):
    write_ruled(tmp_path, title, train=9, dev=7)
    problem = PROBLEMS[TITLES[title]]
    data = built(tmp_path, TITLES[title])
    rows = ruled(title, 9, seed=0)
    labels = [data.train.rows[place].label for place in range(9)]
    assert {type(label) for label in labels} == {int if problem.class_names else float}
    assert len(set(labels)) > 1
    for place, label in enumerate(labels):
        *other, text = data.train.rows[place].texts
        assert rows[place] == row(title, text, int(label))
        assert text[-4:] == "abcdef"[int(label)] * 4
        assert other == ["of it"] * (len(problem.texts) - 1)


def test_mismatched_follows_matched(tmp_path):
    write_ruled(tmp_path, "MNLI")
    write_table(tmp_path / "MNLI/dev_mismatched.tsv", "MNLI", [row("MNLI", "last", 2)])
    data = built(tmp_path, "mnli")
    assert data.counts == (24, 1)
    assert len(data.test) == 25
    assert data.test.rows[24] == (("of it", "last"), 2)


@pytest.mark.parametrize("name", ["STS-B", "stsb", ""])
def test_names_of_a_tasks_folder(name, tmp_path):
    for split in ("train", "dev"):
        write_table(tmp_path / name / f"{split}.tsv", "STS-B", ruled("STS-B", 3, seed=0))
    assert len(built(tmp_path, "stsb").train) == 3


def test_quotes_byte_order_marks_and_line_ends(tmp_path):
    folder = write_ruled(tmp_path, "SST-2") / "SST-2"
    lines = ["\ufeffsentence\tlabel\r\n", '"An open quote\t1\r\n', 'it\'s ""a\u2028line\t0']
    (folder / "train.tsv").write_bytes("".join(lines).encode())
    texts = [row.texts for row in built(tmp_path, "sst2").train.rows]
    assert texts == [('"An open quote',), ('it\'s ""a\u2028line',)]


@pytest.mark.parametrize(
    ("title", "line", "message"),
    [
        ("CoLA", b"gj04\t1\tno mark", "3 cells.* expected 4: source, label, mark"),
        ("CoLA", b"gj04\tyes\t\ttext", "label is 'yes', expected 0 or 1"),
        ("CoLA", b"gj04\t1\t\t ", "text is empty"),
        ("CoLA", b"gj04\t1\t\t\xff", "UTF-8"),
        ("RTE", b"0\ta\tb\tneutral", "label is 'neutral', expected entailment or not_"),
        ("STS-B", b"0\tg\tf\t1\t1\ta\tb\tx\ty\t5.5", "score is '5.5', expected .* 0 to 5"),
        ("STS-B", b"0\tg\tf\t1\t1\ta\tb\tx\ty\tnan", "score is 'nan'"),
        ("STS-B", b"0\tg\tf\t1\t1\ta\tb\tx\ty\tmuch", "score is 'much'"),
    ],
)
def test_unreadable_lines_are_named_or_skipped(title, line, message, tmp_path, caplog):
    path = write_ruled(tmp_path, title, train=2) / title / "train.tsv"
    with path.open("ab") as file:
        file.write(line + b"\n" + "\t".join(row(title, "after", 0)).encode() + b"\n")
    place = rf"{title}/train\.tsv, line {3 if title == 'CoLA' else 4}: .*{message}"
    with pytest.raises(ValueError, match=place):
        built(tmp_path, TITLES[title])
    data = built(tmp_path, TITLES[title], on_error="skip")
    assert [row.texts[-1] for row in data.train.rows][2:] == ["after"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert f"train.tsv, line {3 if title == 'CoLA' else 4}: " in caplog.text
    assert "1 row could not be read" in caplog.text


@pytest.mark.parametrize(
    ("title", "content", "message"),
    [
        ("RTE", "index\tsentence1\tlabel\n", r"dev\.tsv, line 1: .*'sentence2'"),
        ("RTE", "", r"RTE/dev\.tsv holds no rows"),
        ("CoLA", "", r"CoLA/dev\.tsv holds no rows"),
        ("RTE", None, r"no file .*RTE/dev\.tsv"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_unusable_tables(title, content, message, on_error, tmp_path):
    path = write_ruled(tmp_path, title) / title / "dev.tsv"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=message):
        built(tmp_path, TITLES[title], on_error=on_error)


@pytest.mark.parametrize(("name", "message"), [(".", "QQP/train.tsv"), ("no", "no such folder")])
def test_missing_data(name, message, tmp_path):
    with pytest.raises(ValueError, match=rf"data\.path is .*{message}"):
        built(tmp_path / name, "qqp")


def serve(monkeypatch, **columns):
    import datasets

    calls = []
    data = datasets.Dataset.from_dict(columns)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names, split: calls.append((*names, split)) or data
    )
    return calls


def test_hub_rows(monkeypatch):
    texts = {"premise": ["a", "b"], "hypothesis": ["c", "d"]}
    calls = serve(monkeypatch, **texts, label=[2, 0], idx=[0, 1])
    data = GlueDatasetConfig(task="mnli").build()
    assert calls == [
        ("nyu-mll/glue", "mnli", split)
        for split in ("train", "validation_matched", "validation_mismatched")
    ]
    assert data.train.rows == [(("a", "c"), 2), (("b", "d"), 0)]
    assert data.counts == (2, 2)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sentence": ["a", "b"], "label": [1, -1]}, "cola, row 1 of train: .* -1, expected 0 to"),
        ({"sentence": ["a", None], "label": [1, 0]}, "cola, row 1 of train: .*empty"),
        ({"text": ["a"], "label": [1]}, "cola, train: .*'sentence'"),
    ],
)
def test_unusable_hub_rows(columns, message, monkeypatch):
    serve(monkeypatch, **columns)
    with pytest.raises(ValueError, match=message):
        GlueDatasetConfig(task="cola").build()


def words(*, framed):
    return PretrainedTokenizer("words", word_tokenizer(framed=framed))


def test_pairs_are_framed_like_berts():
    encoder = PairEncoder(words(framed=True), length=20)
    tokens, first = encoder.encode("the cat", "a mat sat")
    pair = word_tokenizer(framed=True)("the cat", "a mat sat")
    assert tokens.tolist() == pair["input_ids"]
    assert first == pair["token_type_ids"].count(0) == 4
    tokens, first = encoder.encode("the cat")
    assert (tokens.tolist(), first) == ([2, 5, 6, 3], None)


class Ringed(ByteTokenizer):
    """Bytes with the same token before and after a text."""

    def encode(self, text, *, framed=False):
        ids = super().encode(text)
        return [self.end, *ids, self.end] if framed else ids


def test_bytes_have_a_separator_and_no_frame_unless_the_tokenizer_adds_one():
    encoder = PairEncoder(ByteTokenizer(), length=20)
    tokens, first = encoder.encode("né", "[MASK]")
    assert (tokens.tolist(), first) == ([*"né".encode(), 256, *b"[MASK]"], 4)
    assert encoder.encode("né")[0].tolist() == list("né".encode())
    tokens, first = PairEncoder(Ringed(), length=20).encode("ab", "c")
    assert (tokens.tolist(), first) == ([256, *b"ab", 256, *b"c", 256], 4)


def test_tokenizer_without_a_separator():
    tokenizer = words(framed=False)
    tokenizer.end = None
    encoder = PairEncoder(tokenizer, length=20)
    assert encoder.encode("the cat")[0].tolist() == [5, 6]
    with pytest.raises(ValueError, match="'words'"):
        encoder.encode("the", "cat")


@pytest.mark.parametrize("length", [2, 5, 8])
def test_tokens_are_removed_from_the_longer_text(length):
    for first, second in product(range(9), range(9)):
        ours, theirs = first, second
        while ours + theirs > length:
            ours, theirs = (ours - 1, theirs) if ours > theirs else (ours, theirs - 1)
        cut = truncate_pair(np.arange(first), np.arange(second), length)
        assert [part.tolist() for part in cut] == [list(range(ours)), list(range(theirs))]


def test_sequences_are_truncated():
    encoder = PairEncoder(words(framed=True), length=7)
    tokens, first = encoder.encode("the cat sat on", "a mat the dog")
    assert tokens.tolist() == [2, 5, 6, 3, 9, 10, 3]
    assert first == 4
    assert encoder.encode("the cat sat on a mat the dog")[0].tolist() == [2, 5, 6, 7, 8, 9, 3]
    with pytest.raises(ValueError, match=r"data\.length is 4, expected 5"):
        PairEncoder(words(framed=True), length=4)


def test_a_batch_of_pairs_has_segments(tmp_path):
    write_ruled(tmp_path, "RTE", "CoLA")
    _, keep, labels, segments = built(tmp_path, "rte").train.read([Example(0)]).batch
    assert segments[0].tolist() == [0] * 6 + [1] * 8
    assert keep.all()
    assert not labels.is_floating_point()
    assert len(built(tmp_path, "cola").train.read([Example(0)]).batch) == 3


def test_the_format_survives_json_and_opens_its_saved_tokenizer(tmp_path):
    word_tokenizer(framed=True).save_pretrained(tmp_path / "words")
    tokenizer = PretrainedTokenizer(str(tmp_path / "words"), word_tokenizer(framed=True))
    format = PairFormat(text=TextFormat.of(tokenizer), length=6)
    format.save(tmp_path / "run")
    assert format.encode(("the cat", "a")).tolist() == [2, 5, 6, 3, 9, 3]
    again = configs.from_dict(PairFormat, configs.to_dict(format))
    assert again == format
    for file in (tmp_path / "words").iterdir():
        file.unlink()
    tokens, first = again.open(tmp_path / "run").encode("the cat", "a")
    assert (tokens.tolist(), first) == ([2, 5, 6, 3, 9, 3], 4)
    assert again.vocab_size == tokenizer.size
