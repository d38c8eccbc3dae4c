"""GLUE's tables and its data set on the hub: what is read, framed and cut, and what is refused."""

from itertools import product

import numpy as np
import pytest
from tiny_glue import HEADS, row, ruled, write_ruled, write_table
from tiny_tokenizers import word_tokenizer

from onescan import configs
from onescan.data import Example
from onescan.data.glue import PROBLEMS, GlueDatasetConfig, PairEncoder, PairFormat
from onescan.data.glue.pairs import shortened
from onescan.data.text import ByteTokenizer, PretrainedTokenizer, TextFormat

TITLES = {problem.title: task for task, problem in PROBLEMS.items()}


def built(folder, task="cola", **fields):
    return GlueDatasetConfig(task=task, path=str(folder), **{"length": 32} | fields).build()


# Tables


@pytest.mark.parametrize("title", HEADS)
def test_every_tasks_columns_are_read(title, tmp_path):
    write_ruled(tmp_path, title, train=9, dev=7)
    problem = PROBLEMS[TITLES[title]]
    data = built(tmp_path, TITLES[title])
    rows = ruled(title, 9, seed=0)
    classes = len(problem.class_names) or 6
    labels = [data.train.rows[place].label for place in range(9)]
    assert {type(label) for label in labels} == {int if problem.class_names else float}
    for place, label in enumerate(labels):
        *other, text = data.train.rows[place].texts
        assert rows[place] == row(title, text, int(label))
        assert text[-4:] == "abcdef"[int(label)] * 4
        assert other == ["of it"] * (len(problem.texts) - 1)
    assert set(map(int, labels)) <= set(range(classes))
    assert len(set(labels)) > 1


def test_matched_and_mismatched_lie_one_after_the_other(tmp_path):
    write_ruled(tmp_path, "MNLI")
    write_table(tmp_path / "MNLI/dev_mismatched.tsv", "MNLI", [row("MNLI", "last", 2)])
    data = built(tmp_path, "mnli")
    assert data.counts == (24, 1)
    assert len(data.test) == 25
    assert data.test.rows[24] == (("of it", "last"), 2)


@pytest.mark.parametrize("name", ["STS-B", "sts-b", "stsb", ""])
def test_a_tasks_folder_goes_by_several_names(name, tmp_path):
    for split in ("train", "dev"):
        write_table(tmp_path / name / f"{split}.tsv", "STS-B", ruled("STS-B", 3, seed=0))
    assert len(built(tmp_path, "stsb").train) == 3


def test_quotes_marks_and_line_ends_are_no_markup(tmp_path):
    folder = write_ruled(tmp_path, "SST-2") / "SST-2"
    lines = ["\ufeffsentence\tlabel\r\n", '"An open quote\t1\r\n', 'it\'s ""a\u2028line\t0']
    (folder / "train.tsv").write_bytes("".join(lines).encode())
    texts = [row.texts for row in built(tmp_path, "sst2").train.rows]
    assert texts == [('"An open quote',), ('it\'s ""a\u2028line',)]


@pytest.mark.parametrize(
    ("title", "line", "says"),
    [
        ("CoLA", "gj04\t1\tno mark", "3 cells between tabs, expected 4: source, label, mark"),
        ("CoLA", "gj04\tyes\t\ttext", "the label is 'yes', expected 0 or 1"),
        ("CoLA", "gj04\t1\t\t ", "no text is written in it"),
        ("CoLA", "", "1 cells between tabs, expected 4"),
        ("SST-2", "a\tb\t1", "3 cells between tabs, expected 2: sentence, label"),
        ("RTE", "0\ta\tb\tneutral", "the label is 'neutral', expected entailment or not_"),
        ("STS-B", "0\tg\tf\t1\t1\ta\tb\tx\ty\t5.5", "the score is '5.5', expected a number from 0"),
        ("STS-B", "0\tg\tf\t1\t1\ta\tb\tx\ty\tnan", "the score is 'nan', expected a number from 0"),
        ("STS-B", "0\tg\tf\t1\t1\ta\tb\tx\ty\tmuch", "the score is 'much', expected a number"),
    ],
)
def test_a_line_that_cannot_be_read_is_told_with_its_place(title, line, says, tmp_path, caplog):
    path = write_ruled(tmp_path, title, train=2) / title / "train.tsv"
    with path.open("a") as file:
        file.write(f"{line}\n")
        file.write("\t".join(row(title, "after", 0)) + "\n")
    number = 3 if title == "CoLA" else 4
    with pytest.raises(ValueError, match=rf"{title}/train\.tsv, line {number}: {says}"):
        built(tmp_path, TITLES[title])
    data = built(tmp_path, TITLES[title], on_error="skip")
    assert [row.texts[-1] for row in data.train.rows][2:] == ["after"]
    assert f"train.tsv, line {number}: {says}" in caplog.text
    assert "1 lines could not be read and are left out" in caplog.text


def test_bytes_that_are_no_text_are_told_with_their_place(tmp_path):
    path = write_ruled(tmp_path, "CoLA", train=1) / "CoLA/train.tsv"
    path.write_bytes(path.read_bytes() + b"gj04\t1\t\t\xff\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: is not text in UTF-8"):
        built(tmp_path)


def test_a_missing_column_is_told(tmp_path):
    path = write_ruled(tmp_path, "MRPC") / "MRPC/dev.tsv"
    path.write_text(path.read_text().replace("#2 String", "second"))
    with pytest.raises(ValueError, match=r"dev\.tsv, line 1: the column '#2 String' is missing; "):
        built(tmp_path, "mrpc")


def test_an_empty_or_missing_table_is_told(tmp_path):
    path = write_ruled(tmp_path, "RTE", "CoLA") / "RTE/dev.tsv"
    path.write_text("")
    with pytest.raises(ValueError, match=r"RTE/dev\.tsv is empty"):
        built(tmp_path, "rte")
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no file .*RTE/dev\.tsv"):
        built(tmp_path, "rte")
    (tmp_path / "CoLA/dev.tsv").write_text("")
    with pytest.raises(ValueError, match=r"CoLA/dev\.tsv holds no rows"):
        built(tmp_path)


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no tables of QQP: expected QQP/train\.tsv in it"):
        built(tmp_path, "qqp")
    with pytest.raises(ValueError, match="there is no such folder"):
        built(tmp_path / "no")


# The hub


def serve(monkeypatch, **columns):
    import datasets

    asked = []

    def load(name, task, split):
        asked.append((name, task, split))
        return datasets.Dataset.from_dict(columns)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_the_hubs_columns_are_read(monkeypatch):
    texts = {"premise": ["a", "b"], "hypothesis": ["c", "d"]}
    asked = serve(monkeypatch, **texts, label=[2, 0], idx=[0, 1])
    data = GlueDatasetConfig(task="mnli").build()
    assert asked == [
        ("nyu-mll/glue", "mnli", split)
        for split in ("train", "validation_matched", "validation_mismatched")
    ]
    assert data.train.rows == [(("a", "c"), 2), (("b", "d"), 0)]
    assert data.counts == (2, 2)


def test_what_is_wrong_with_the_hubs_rows_is_told(monkeypatch):
    serve(monkeypatch, sentence=["a", "b"], label=[1, -1])
    with pytest.raises(ValueError, match="cola, row 1 of train: the label is -1, expected 0 to 1"):
        GlueDatasetConfig(task="cola").build()
    serve(monkeypatch, text=["a"], label=[1])
    with pytest.raises(ValueError, match="cola, train: the column 'sentence' is missing"):
        GlueDatasetConfig(task="cola").build()


# Framing


def words(*, framed):
    return PretrainedTokenizer("words", word_tokenizer(framed=framed))


def test_a_pair_is_framed_as_the_tokenizer_frames_a_text():
    encoder = PairEncoder(words(framed=True), length=20)
    tokens, first = encoder.encode("the cat", "a mat sat")
    assert words(framed=True).tokenizer.convert_ids_to_tokens(tokens.tolist()) == (
        ["[CLS]", "the", "cat", "[SEP]", "a", "mat", "sat", "[SEP]"]
    )
    assert first == 4
    pair = word_tokenizer(framed=True)("the cat", "a mat sat")
    assert tokens.tolist() == pair["input_ids"]
    assert pair["token_type_ids"].count(0) == first


def test_one_text_has_no_second_segment():
    tokens, first = PairEncoder(words(framed=True), length=20).encode("the cat")
    assert tokens.tolist() == [2, 5, 6, 3]
    assert first is None


def test_bytes_have_a_separator_and_no_frame():
    encoder = PairEncoder(ByteTokenizer(), length=20)
    tokens, first = encoder.encode("né", "[MASK]")
    assert tokens.tolist() == [*"né".encode(), 256, *b"[MASK]"]
    assert first == 4
    assert encoder.encode("né")[0].tolist() == list("né".encode())


class Ringed(ByteTokenizer):
    """Bytes with the same token before and after a text."""

    def encode(self, text, *, framed=False):
        ids = super().encode(text)
        return [self.end, *ids, self.end] if framed else ids


def test_one_token_may_begin_and_end_a_text():
    tokens, first = PairEncoder(Ringed(), length=20).encode("ab", "c")
    assert tokens.tolist() == [256, *b"ab", 256, *b"c", 256]
    assert first == 4


def test_a_tokenizer_without_a_separator_reads_single_texts_alone():
    tokenizer = words(framed=False)
    tokenizer.end = None
    encoder = PairEncoder(tokenizer, length=20)
    assert encoder.encode("the cat")[0].tolist() == [5, 6]
    with pytest.raises(ValueError, match="'words' has no token to put between two texts"):
        encoder.encode("the", "cat")


@pytest.mark.parametrize("most", [2, 5, 8])
def test_tokens_come_off_the_longer_text(most):
    for first, second in product(range(9), range(9)):
        ours, theirs = first, second
        while ours + theirs > most:
            ours, theirs = (ours - 1, theirs) if ours > theirs else (ours, theirs - 1)
        cut = shortened(np.arange(first), np.arange(second), most)
        assert [part.tolist() for part in cut] == [list(range(ours)), list(range(theirs))]


def test_sequences_are_cut_to_their_length():
    encoder = PairEncoder(words(framed=True), length=7)
    tokens, first = encoder.encode("the cat sat on", "a mat the dog")
    assert tokens.tolist() == [2, 5, 6, 3, 9, 10, 3]
    assert first == 4
    assert encoder.encode("the cat sat on a mat the dog")[0].tolist() == [2, 5, 6, 7, 8, 9, 3]
    with pytest.raises(ValueError, match=r"data\.length is 4, expected 5 or more"):
        PairEncoder(words(framed=True), length=4)


def test_a_batch_of_pairs_has_segments(tmp_path):
    write_ruled(tmp_path, "RTE", "CoLA")
    _, keep, labels, segments = built(tmp_path, "rte").train.read([Example(0)]).batch
    assert segments[0].tolist() == [0] * 6 + [1] * 8
    assert keep.all()
    assert not labels.is_floating_point()
    assert len(built(tmp_path, "cola").train.read([Example(0)]).batch) == 3


def test_the_format_outlives_json_and_opens_its_own_tokenizer(tmp_path):
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
