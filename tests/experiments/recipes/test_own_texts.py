"""Text classification on the user's own tables, and predictions for new texts."""

import csv
import gzip
import json
import logging
import random
import re

import pytest
import torch
from pages import python_block
from tiny_tokenizers import WORDS, word_tokenizer

from onescan.cli import main
from onescan.configs import replace
from onescan.experiments.data import TextTableConfig
from onescan.experiments.data.text.files import read_rows
from onescan.experiments.data.text_table import LabeledText, _class_names
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import for_path, infer, infer_vocabulary
from onescan.inference.classification import classify_texts
from onescan.inputs import PairFormat, TextFormat, load_tokenizer

WEATHER = ("rain", "wind", "cloud", "storm")
FOOD = ("bread", "soup", "rice", "salad")
FILLER = ("the", "was", "very", "good", "today", "and")


def sentence(words, rng):
    """Return a sentence with one or two words of a class among others."""
    chosen = [rng.choice(FILLER) for _ in range(rng.randint(3, 6))]
    for _ in range(rng.randint(1, 2)):
        chosen.insert(rng.randint(0, len(chosen)), rng.choice(words))
    return " ".join(chosen)


def rows(count=240, seed=0):
    """Return texts with their classes."""
    rng = random.Random(seed)
    classes = {"weather": WEATHER, "food": FOOD}
    return [
        {"text": sentence(classes[label], rng), "label": label}
        for label in (tuple(classes)[i % 2] for i in range(count))
    ]


def write_csv(path, table, delimiter=","):
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(table[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(table)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("texts") / "texts.csv", rows())


def build(path, **changes):
    return TextTableConfig(path=str(path), **changes).build()


def inferred(path, given=()):
    run = replace(for_path(find_recipe("text_classifier")(), str(path)), dict(given))
    return infer(infer_vocabulary(run, dict(given)), dict(given))


def test_settings_are_inferred(texts):
    run, lines = inferred(texts)
    assert lines == [
        "data: 204 training and 36 test texts in 2 classes (food, weather), up to 64 bytes",
        "model: LightNet, 4 blocks of width 64, vocabulary of 258",
        f"training: {run.training.epochs} epochs, batch size {run.training.batch_size}",
    ]
    assert (run.model.num_classes, run.model.vocab_size, run.data.length) == (2, 258, 64)
    assert run.training.batch_size <= 204 / 4
    run, lines = inferred(texts, {"data.length": 16, "model.width": 32})
    assert (run.data.length, run.model.width) == (16, 32)
    assert "up to 16 bytes (99.0% of the texts are longer and truncated)" in lines[0]


def test_a_tokenizer_sets_vocabulary_and_length(texts, tmp_path):
    word_tokenizer(framed=True).save_pretrained(tmp_path)
    run, lines = inferred(texts, {"data.tokenizer": str(tmp_path)})
    assert (run.model.vocab_size, run.data.length) == (len(WORDS), 16)
    assert "up to 16 tokens" in lines[0]


def test_all_kinds_of_files_hold_the_same_texts(tmp_path):
    table = [*rows(20), {"text": 'a "quoted", word\nand café\tin two lines', "label": "food"}]
    write_csv(tmp_path / "a.csv", table)
    write_csv(tmp_path / "a.tsv", table, delimiter="\t")
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, table)))
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(table))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "a.NDJSON").write_bytes((tmp_path / "a.jsonl").read_bytes())
    kinds = ("csv", "tsv", "jsonl", "parquet", "json", "csv.gz", "NDJSON")
    first, *others = (build(tmp_path / f"a.{kind}") for kind in kinds)
    assert first.class_names == ("food", "weather")
    assert {*first.train.rows, *first.test.rows} == {
        ((row["text"],), first.class_names.index(row["label"])) for row in table
    }
    for other in others:
        assert (other.train.rows, other.test.rows) == (first.train.rows, first.test.rows)


def test_columns_and_integer_labels(tmp_path):
    table = [{"id": i, "body": row["text"], "stars": i % 11} for i, row in enumerate(rows(44))]
    path = write_csv(tmp_path / "a.csv", table)
    data = build(path, text_column="body", label_column="stars", test_fraction=0.25)
    assert data.class_names == tuple(map(str, range(11)))
    with pytest.raises(ValueError, match=r"data.text_column is 'text', but .*a.csv, line 2, has"):
        build(path)
    with pytest.raises(ValueError, match=r"data.label_column is .* available: id, body, stars"):
        build(path, text_column="body")
    with pytest.raises(ValueError, match=r"data.split_column is 'part', but"):
        build(path, text_column="body", label_column="stars", split_column="part")


@pytest.mark.slow
def test_missing_columns_name_their_flags(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", [{"body": row["text"], "stars": 1} for row in rows(8)])
    for argv, flag in [
        (("train", "text_classifier", "--data.path", path), "--data.text-column"),
        (("train", "language_model", "--data.path", path), "--data.text-column"),
        (
            ("train", "text_classifier", "--data.path", path, "--data.text-column", "body"),
            "--data.label-column",
        ),
        (("tokenizer", path, "--out", tmp_path / "words"), "--text-column"),
    ]:
        assert onescan(*argv) == 2
        assert f"body, stars ({flag} selects one); the first line" in capsys.readouterr().err


def test_named_parts(tmp_path):
    parts = ["train", "train", "Validation", "test"] * 10
    table = [row | {"split": part} for row, part in zip(rows(40), parts, strict=True)]
    for row, other in zip(table[2::4], rows(10), strict=True):
        row["label"] = other["label"]
    data = build(write_csv(tmp_path / "a.csv", table))
    assert (len(data.train), len(data.test)) == (20, 10)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_csv(folder / "train.csv", rows(20))
    write_csv(folder / "test.tsv", rows(6, seed=1), delimiter="\t")
    (folder / "info.json").write_text("{}")
    data = build(folder)
    assert (len(data.train), len(data.test)) == (20, 6)
    table[0]["split"] = "holdout"
    with pytest.raises(ValueError, match=r"a.csv, line 2: split is 'holdout', expected one of"):
        build(write_csv(tmp_path / "a.csv", table))


BAD_CSV = [
    ("food", "line 4: the row has 1 cell, expected 2"),
    (",food", "line 4: the text is empty"),
    ("soup, ", "line 4: the label is empty"),
    ('"soup"x,food', "line 4: invalid table row: ',' expected after"),
    ("caf\udce9,food", "line 4: this is not UTF-8: .*; convert the file"),
    ('"caf\udce9\nwas good",food', "line 4: this is not UTF-8: .*; convert the file"),
]


@pytest.mark.parametrize(("line", "message"), BAD_CSV)
def test_bad_rows_are_named_or_skipped(tmp_path, caplog, line, message):
    good = write_csv(tmp_path / "a.csv", rows(20)).read_text().splitlines()
    text = "\n".join([*good[:3], line, *good[3:]])
    (tmp_path / "a.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"a.csv, {message}"):
        build(tmp_path / "a.csv")
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "a.csv", on_error="skip")
        data = build(tmp_path / "a.csv", on_error="skip")
    assert len(data.train) + len(data.test) == 20
    assert len(caplog.messages) == 2
    assert "line 4" in caplog.text
    assert "1 row could not be read" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 21: this is not JSON"),
        ('{"text": "a", "text": "b", "label": "c"}', "line 21: .*'text' occurs more than once"),
        ("[1]", "line 21: this is a list, expected an object"),
        ('{"text": 3, "label": 1}', "line 21: the column 'text' holds int, expected text"),
        ('{"text": "a", "label": 0.5}', "line 21: the label is 0.5"),
        ('{"text": "a", "label": null}', "line 21: the label is empty"),
        ('{"text": "a"}', "line 21, has no such column; available: text"),
        ('{"text": "a", "label": "other"}', "line 21: no other text has the label 'other'"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text("\n".join([*map(json.dumps, rows(20)), line]))
    with pytest.raises(ValueError, match=f"a.jsonl.*{message}"):
        build(tmp_path / "a.jsonl")


def test_errors_of_rows_say_how_to_skip_them(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", [*rows(8), {"text": "", "label": "food"}])
    assert onescan("train", "text_classifier", "--data.path", path) == 2
    message = "a.csv, line 10: the text is empty (--data.on-error skip skips such rows)\n"
    assert capsys.readouterr().err.endswith(message)


def test_missing_and_useless_data(tmp_path):
    (tmp_path / "damaged.parquet").write_text("no parquet")
    (tmp_path / "damaged.csv.gz").write_bytes(gzip.compress(b"text", mtime=0)[:10] + b"\xff" * 20)
    (tmp_path / "utf16.csv").write_bytes("text,label".encode("utf-16"))
    (tmp_path / "empty.csv").write_text("text,label\n")
    (tmp_path / "semicolons.csv").write_text("text;label\nthe rain;weather\n")
    write_csv(tmp_path / "one.csv", rows(20)[::2])
    (tmp_path / "folder").mkdir()
    for name, message in [
        ("missing.csv", "there is no file"),
        ("data.xlsx", "expected a name ending in .parquet, .jsonl, .ndjson, .json, .csv"),
        ("damaged.parquet", "damaged.parquet cannot be read"),
        ("damaged.csv.gz", "damaged.csv.gz is damaged"),
        ("utf16.csv", "utf16.csv is text in UTF-16, expected text in UTF-8"),
        ("semicolons.csv", "line 1: .* separated by semicolons, expected commas"),
        ("empty.csv", "has no texts to train on"),
        ("one.csv", "all labels are 'weather'"),
        ("folder", "a folder without"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(tmp_path / name)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1", "01"], ("01", "1")),
        (["10", "9", "09", "-0", "+0"], ("+0", "-0", "09", "9", "10")),
        (["1_0", "2"], ("1_0", "2")),  # int("1_0") is 10
        (["１", "2"], ("2", "１")),  # noqa: RUF001, a digit of full width
        (["3", "b", "20"], ("20", "3", "b")),
        (["9" * 5000, "1"], ("1", "9" * 5000)),
    ],
)
def test_classes_have_one_order(labels, names):
    for order in (labels, labels[::-1]):
        assert _class_names([LabeledText("", label, "") for label in order]) == names


def test_labels_written_in_several_ways_are_noted(tmp_path):
    labels = [1, 1.0, "1", " 1", True, "True", 2, 2] * 3
    lines = [json.dumps({"text": f"text {i}", "label": x}) for i, x in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = build(tmp_path / "a.jsonl", test_fraction=0.3)
    assert data.class_names == ("1", "2", "True")
    assert data.notes == (
        "labels read as the class '1': 3 ' 1', 3 '1', 3 1, 3 1.0",
        "labels read as the class 'True': 3 'True', 3 True",
        "8 of 24 examples are held out, because there is no test split",
    )


def test_classes_that_may_be_the_same_are_noted(tmp_path):
    labels = ["Cat", "cat", "dog", "1", "01", "1.0", "+1", "-1"] * 3
    write_csv(tmp_path / "a.csv", [{"text": f"text {i}", "label": x} for i, x in enumerate(labels)])
    assert build(tmp_path / "a.csv", test_fraction=0.5).notes[0] == (
        "separate classes have similar names: '+1' and '01' and '1' and '1.0', 'Cat' and 'cat'"
    )


def test_splits_that_are_not_used_are_noted(tmp_path):
    (tmp_path / "files").mkdir()
    for name, count in (("train", 8), ("val", 4), ("test", 6)):
        write_csv(tmp_path / "files" / f"{name}.csv", rows(count))
    assert build(tmp_path / "files").notes == ("splits not used: test (6 rows)",)
    parts = ["train"] * 8 + ["valid"] * 3 + ["validation"] * 2
    table = [row | {"split": part} for row, part in zip(rows(13), parts, strict=True)]
    write_csv(tmp_path / "a.csv", table)
    data = build(tmp_path / "a.csv")
    assert (len(data.test), data.notes) == (2, ("splits not used: valid (3 rows)",))


def texts_of(data):
    return [row.texts[0] for part in (data.train, data.test) for row in part.rows]


PARTED = ["plain", 'say "no"', '"all quoted"', "a\ttab", "two\nlines", '"', '""', "a\r\nb\n\nc"]


@pytest.mark.parametrize("columns", [("text", "label"), ("label", "text"), ("id", "text", "label")])
def test_quoted_cells_of_tables_are_read_as_written(tmp_path, columns):
    values = [*PARTED, *(f"{a} {b}" for a in PARTED for b in PARTED), 'x\t0\ny"\t1\nz']
    table = [{"id": i, "text": text, "label": i % 2} for i, text in enumerate(values)]
    table = [{name: row[name] for name in columns} for row in table]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        path = write_csv(tmp_path / name, table, delimiter)
        rows_read = list(read_rows(path))
        read = [row.cells.get("text") for row in rows_read]
        faults = [row.fault for row in rows_read if row.fault]
        assert all("unclear whether quotation marks enclose" in fault for fault in faults)
        # Each ambiguous row is named, and no other is changed.
        expected = [None if row.fault else x for row, x in zip(rows_read, values, strict=True)]
        assert read == expected
        assert len(faults) <= (delimiter == "\t") * 9


def test_quotation_marks_in_tabbed_tables_without_quoted_cells(tmp_path):
    texts = ['"Great film', 'he said "no"', '"Yes" is a word', 'a " b', '"quoted"', 'the "end']
    lines = [f"{text}\t{i % 2}" for i, text in enumerate(texts)]
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabel\n" + "\n".join(lines))
    read = [row.cells["text"] for row in read_rows(path)]
    assert read == [*texts[:4], "quoted", texts[5]]
    path.write_text("text\tlabel\n" + "\n".join([lines[0], "fine\t1", 'of all"\t1', *lines]))
    found = list(read_rows(path))
    message = (
        "a.tsv, line 2: invalid table row: it is unclear whether quotation marks enclose the text "
        "up to line 4"
    )
    assert message in f"{found[0].location}: {found[0].fault}"
    assert [row.cells["text"] for row in found[1:]] == read
    with pytest.raises(ValueError, match="or belong to the text; write the table as"):
        build(path)


def test_one_column_of_texts_between_tabs(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('text\n"one, two\nthree\n\n"four"\n"five')
    assert [row.cells.get("text") for row in read_rows(path)] == [
        *('"one, two', "three", None, "four", '"five')
    ]


def test_a_quotation_mark_that_is_not_closed_is_named(tmp_path):
    good = write_csv(tmp_path / "a.csv", rows(20)).read_text().splitlines()
    text = "\n".join([*good[:3], '"soup,food', *good[3:]])
    (tmp_path / "a.csv").write_text(text)
    message = "line 4: invalid table row: a quotation mark is not closed; it extends to line 22"
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text(f'{text}\nthe "soup" and,food')
    with pytest.raises(ValueError, match=r"line 4: invalid .*; it extends to line 23"):
        build(tmp_path / "a.csv")


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_and_empty_lines(tmp_path, suffix, end):
    comma = {"csv": ",", "tsv": "\t"}[suffix]
    lines = [f"text{comma}label", *(f"text {i}{comma}{i % 2}" for i in range(8)), "", "", "x"]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(("\ufeff" + end.join(lines)).encode())
    with pytest.raises(ValueError, match=rf"a.{suffix}, line 12: the row has 1 cell, expected 2"):
        build(path)
    data = build(path, on_error="skip", test_fraction=0.25)
    assert sorted(texts_of(data)) == [f"text {i}" for i in range(8)]
    assert data.notes == (
        f"left out 2 empty lines of {path}",
        "2 of 8 examples are held out, because there is no test split",
        f"left out 1 row of {path} that cannot be read",
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,text,label\n", "line 1: there are 2 columns 'text'"),
        ("a.csv", b"text\tlabel\n", "line 1: .* separated by tabs, expected commas"),
        ("a.tsv", b"text,label\n", "line 1: .* separated by commas, expected tabs"),
        ("a.csv", b"text,label\na,0\nb\0c,1\n", "line 3: .* control character"),
        ("a.tsv", b"text\tlabel\na\t0\nb\0c\t1\n", "line 3: .* control character"),
        ("a.csv", b"text,label\na,0,\n", "line 2: the row has 3 cells, expected 2"),
        ("a.csv", "text,label\nab,0\n".encode("utf-16-le"), "a.csv is full of control"),
        (
            "a.csv",
            gzip.compress(b"text,label\n", mtime=0),
            "a.csv is compressed with gzip, expected text",
        ),
        (
            "a.csv.gz",
            gzip.compress(gzip.compress(b"text", mtime=0), mtime=0),
            "a.csv.gz is compressed with gzip",
        ),
    ],
)
def test_other_bad_tables(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build(tmp_path / name)


def test_empty_names_of_columns_are_allowed(tmp_path):
    lines = [",text,label,", *(f"{i},text {i},{i % 2}," for i in range(8))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert len(texts_of(build(tmp_path / "a.csv", test_fraction=0.25))) == 8


def test_files_and_texts_that_are_left_out_are_noted(tmp_path):
    write_csv(tmp_path / "a.csv", rows(20))
    for name in ("b.json", "notes.md", "other.md", "picture.PNG", "README"):
        (tmp_path / name).write_text("x")
    data = build(tmp_path, length=30)
    longer = [sum(len(row.texts[0]) > 30 for row in part.rows) for part in (data.train, data.test)]
    assert data.notes == (
        f"left out 5 files of other types in {tmp_path}: 1 .json, 2 .md, 1 .png, "
        "1 without a suffix",
        "2 of 20 examples are held out, because there is no test split",
        f"{longer[0]} of 18 training texts are longer than 30 tokens and are truncated",
        f"{longer[1]} of 2 test texts are longer than 30 tokens and are truncated",
    )
    assert build(tmp_path, length=3000).notes == data.notes[:2]


def test_test_labels_must_be_classes(tmp_path):
    write_csv(tmp_path / "train.csv", rows(20))
    write_csv(tmp_path / "test.csv", [{"text": "a", "label": "new"}, *rows(4)])
    with pytest.raises(ValueError, match=r"test.csv, line 2: the label 'new' is not in the train"):
        build(tmp_path)
    assert len(build(tmp_path, on_error="skip").test) == 4


def onescan(*argv):
    return main([str(argument) for argument in argv])


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory):
    """Return the folder of a small trained run."""
    out = tmp_path_factory.mktemp("runs")
    assert onescan(*command(texts, out)) == 0
    return out / "seed-0"


def command(path, out):
    small = ("--training.epochs", 12, "--model.depth", 2, "--model.width", 32)
    return ("train", "text_classifier", "--data.path", path, "--out", out, *small)


@pytest.mark.slow
def test_one_command_trains_and_resumes(texts, run, capsys):
    result = json.loads((run / "result.json").read_text())
    assert result["metrics"]["accuracy"] >= 0.95
    assert onescan(*command(texts, run.parent)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("data: 204 training and 36 test texts in 2 classes")
    assert "already finished" in shown


@pytest.mark.slow
def test_texts_and_tables_are_predicted(run, tmp_path, capsys):
    table = [{"id": i, "text": row["text"]} for i, row in enumerate(rows(40, seed=3))]
    write_csv(tmp_path / "new.csv", [{"id": 0, "text": " "}, *table])
    assert onescan("predict", run, "the soup was good", tmp_path / "new.csv", "--top-k", 1) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("the soup was good: food ")
    assert "skipped: " in shown.err
    assert "new.csv, line 2: the text is empty" in shown.err
    out = tmp_path / "predictions.csv"
    assert onescan("predict", run, tmp_path / "new.csv", "--out", out) == 0
    with out.open() as stream:
        predicted = list(csv.DictReader(stream))
    assert [row["text"] for row in predicted] == [row["text"] for row in table]
    labels = [row["label"] for row in rows(40, seed=3)]
    assert sum(map(str.__eq__, labels, (row["class"] for row in predicted))) >= 36
    capsys.readouterr()


@pytest.mark.slow
def test_texts_are_classified_from_python(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "texts").mkdir(parents=True)
    (tmp_path / "runs" / "texts" / "seed-0").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(python_block("own_text.md", "the soup was good"), names)  # noqa: S102
    assert capsys.readouterr().out == "['food', 'weather']\n"
    trained, texts = names["trained"], ["the soup was good", "the rain was cold"]
    want = classify_texts(trained.model, texts, trained.format.open(run))
    torch.testing.assert_close(names["probabilities"], want)


@pytest.mark.slow
def test_new_texts_are_evaluated_as_documented(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = rows(40, seed=3)
    write_csv(tmp_path / "new.csv", [*table[:30], *(row | {"label": "x"} for row in table[30:])])
    assert onescan("predict", run, "new.csv", "--out", "predictions.csv") == 0
    capsys.readouterr()
    exec(python_block("own_data.md", "predictions.csv"), {})  # noqa: S102
    assert re.fullmatch(r"accuracy 7[0-5]\.\d%\n", capsys.readouterr().out)


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("soup", r"inputs is a single string, expected a list, such as \['soup'\]"),
        ([], "inputs is empty"),
        (["soup", 3], r"inputs\[1\] is an int, expected a string"),
        ([("soup", "rain")], r"inputs\[0\] is a tuple, expected a string"),
        (["soup", ""], "has no tokens"),
    ],
)
@pytest.mark.parametrize("kind", ["classifier", "language model"])
def test_batches_that_hold_no_texts_are_refused(kind, texts, message):
    format = TextFormat.of(load_tokenizer("bytes"))
    if kind == "classifier":
        format = PairFormat(text=format, length=16)
    with pytest.raises(ValueError, match=message):
        format.model_input(texts)


def test_texts_are_read_with_the_tokenizer_in_the_run(tmp_path):
    word_tokenizer(framed=True).save_pretrained(tmp_path / "words")
    text = TextFormat.of(load_tokenizer(str(tmp_path / "words")))
    pair = PairFormat(text=text, length=8)
    text.save(tmp_path / "run")
    (tmp_path / "words").rename(tmp_path / "moved")
    tokens, keep = pair.saved_in(tmp_path / "run").model_input(["the cat", "a"])
    assert tokens.tolist() == [[2, 5, 6, 3], [2, 9, 3, 0]]
    assert keep.tolist() == [[True] * 4, [True, True, True, False]]
    tokens, _ = text.saved_in(tmp_path / "run").model_input(["the cat", "a"])
    assert tokens.tolist() == [[5, 6], [9, 0]]


@pytest.mark.slow
def test_column_of_texts_is_selected_and_few_messages_are_printed(run, tmp_path, capsys):
    blank = [{"body": " "}] * 15
    write_csv(tmp_path / "new.csv", [*blank, {"body": "the rain was cold"}])
    assert onescan("predict", run, tmp_path / "new.csv", "--text-column", "body") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("the rain was cold: weather ")
    assert shown.err.count("skipped: ") == 11
    assert "skipped: 5 more" in shown.err


@pytest.mark.slow
def test_inputs_that_are_no_texts_are_rejected(run, tmp_path, capsys):
    (tmp_path / "notes.md").write_text("the rain")
    write_csv(tmp_path / "other.csv", [{"body": "the rain"}])
    for argument, message in [
        (tmp_path / "missing.csv", "there is no file"),
        (tmp_path / "missing.txt", "there is no file"),
        (tmp_path / "notes.md", "notes.md is not a file of texts, expected a name ending in .txt"),
        (tmp_path / "other.csv", "other.csv has no column 'text'; available: body (--text"),
        (" ", "inputs contains an empty text"),
        (tmp_path, "is a folder, expected a text or a file"),
    ]:
        assert onescan("predict", run, argument) == 2
        assert message in capsys.readouterr().err
