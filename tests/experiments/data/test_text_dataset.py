"""Text datasets: finding, reading, tokenizing, packing, caching and streaming text."""

import gzip
import io
import json
import re
import shutil
import zipfile
from dataclasses import replace
from inspect import unwrap
from itertools import islice
from multiprocessing import get_context
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tiny_images import serve_hub
from tiny_run import assert_same, press_ctrl_c_at, tiny_run
from tiny_tokenizers import WORDS, word_tokenizer

from onescan.checkpoint.files import to_json
from onescan.cli import main
from onescan.experiments.data import derive_seed, epoch_order
from onescan.experiments.data.text import PackedText, TextDatasetConfig, dataset
from onescan.experiments.data.text.corpus import Corpus, encode_documents
from onescan.experiments.data.text.files import read_file
from onescan.experiments.evaluation.needle import read_haystack
from onescan.experiments.tasks import LanguageModellingConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig, train
from onescan.inference.loading import load, load_language_model
from onescan.inputs.tokenizer import ByteTokenizer, TextFormat, load_tokenizer
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.causal_lm import CausalLM, CausalLMConfig

pytestmark = pytest.mark.usefixtures("offline")

END = ByteTokenizer.end
STREAM = {"streaming": True, "train_rows": 9}
over_streaming = pytest.mark.parametrize("streaming", [{}, STREAM])
TEXTS = ["one", "two and more", "drei", "four, four", "fünf", "6", "seven is long enough for rows"]


ONE_LINE = '{"text": "To be, or not to be"}'


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def write_parquet(path, texts, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"text": texts, **columns}), path, row_group_size=3)
    return str(path)


def objects(texts, column="text"):
    return [json.dumps({"number": 3, column: text}) for text in texts]


def build(path, **options):
    fields = {"path": str(path), "length": 8, "sample_by": "line", **options}
    return TextDatasetConfig(**fields).build()


def whole(data, **options):
    return [example for example, _ in data.examples(**options)]


def rows(data, **options):
    """Every row of a pass: its ids, and which documents they are of."""
    tokens, documents = data.read(whole(data, **options)).batch
    return list(zip(tokens.tolist(), documents.tolist(), strict=True))


def texts_of(data):
    """The documents of a data set, put together again from its rows in the stored order."""
    cells = [cell for row in rows(data, seed=None) for cell in zip(*row, strict=True)]
    ids = [token for token, document in cells if document >= 0]
    return bytes(10 if token == END else token for token in ids).decode().splitlines()


def packed(texts, length):
    """The rows of texts in their order, made slowly."""
    stream = [(token, i) for i, text in enumerate(texts) for token in [*text.encode(), END]]
    return cut(stream, length, END)


def cut(stream, length, padding):
    found = []
    for begin in range(0, len(stream), length):
        part = stream[begin : begin + length]
        numbers, last = [], None
        for _, document in part:
            changes = last is not None and document != last
            numbers.append((numbers[-1] if numbers else 0) + changes)
            last = document
        room = length - len(part)
        found.append(([token for token, _ in part] + [padding] * room, numbers + [-1] * room))
    return found


# Packing


@pytest.mark.parametrize("length", [1, 4, 8, 200])
def test_rows_in_the_stored_order_equal_a_slow_packing(tmp_path, length):
    path = write(tmp_path / "a.txt", *TEXTS)
    splits = build(path, length=length, test_path=path)
    for data in (splits.train, splits.test):
        assert rows(data, seed=None) == packed(TEXTS, length)
        assert len(data) == len(packed(TEXTS, length))
    tokens, documents = splits.train.read(whole(splits.train, seed=None)).batch
    assert tokens.dtype == documents.dtype == torch.int64


def numbered(lengths, row):
    """A data set whose every token has an id of its own."""
    corpus = Corpus(tokens=np.arange(sum(lengths), dtype=np.uint32), ends=np.cumsum(lengths))
    return PackedText(corpus=corpus, length=row, padding=10**6)


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any),
    row=st.integers(1, 14),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
)
def test_rows_of_an_epoch_equal_a_slow_packing(lengths, row, seed, epoch):
    data, total = numbered(lengths, row), sum(lengths)
    ends = np.cumsum(lengths)
    documents = [
        [(token, i) for token in range(end - length, end)]
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
    order = epoch_order(len(lengths), seed=derive_seed(seed, "documents"), epoch=epoch)
    stream = [token for i in order for token in documents[i]]
    offset = derive_seed(seed, "offset", epoch) % total
    last = [(token, -1 - i) for token, i in stream[:offset]]  # a beginning apart from its end
    laid = cut(stream[offset:] + last, row, 10**6)
    shuffled = [
        laid[i] for i in epoch_order(len(laid), seed=derive_seed(seed, "rows"), epoch=epoch)
    ]
    assert rows(data, seed=seed, epoch=epoch) == shuffled
    assert sorted(t for ids, _ in shuffled for t in ids if t < total) == list(range(total))


@pytest.mark.parametrize("lengths", [[100], [7, 30, 1, 22, 40]])
def test_rows_differ_between_epochs_and_seeds(lengths):
    data = numbered(lengths, 10)
    passes = [
        {tuple(ids) for ids, _ in rows(data, seed=seed, epoch=epoch)}
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert all(len(one & other) < 5 for i, one in enumerate(passes) for other in passes[:i])


def test_resuming_gives_the_rest_of_the_epoch():
    data, options = numbered([5, 9, 1, 30, 12], 4), {"seed": 3, "epoch": 2}
    every = whole(data, **options)
    assert len({example.seed for example in every}) == len(every) == len(data)
    for start in range(len(data)):
        assert whole(data, start=start, **options) == every[start:]
    repeated = whole(data, repeats=3, **options)
    assert len(repeated) == len(data)
    assert [e.source for e in repeated[:6]] == [e.source for e in every[:2] for _ in range(3)]
    assert len({example.seed for example in repeated}) == len(data)


def batches(path, share, **options):
    """Ids that one of two processes reads of the first batches."""
    task = LanguageModellingConfig().build(build(path, **options))
    plan = task.batches(step=0, batch_size=4, seed=5)
    planned = islice(plan, task.steps_per_epoch(4))
    return [task.train.read(group.examples[share]).batch[0].tolist() for group in planned]


@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "train_rows": 16}])
def test_two_processes_share_every_batch(tmp_path, streaming):
    path = write(tmp_path / "a.txt", *(3 * f"{i:02}" for i in range(21)))
    options = {"test_path": path, **streaming}
    both = [batches(path, share, **options) for share in (slice(0, 2), slice(2, 4))]
    ids = [{tuple(row) for batch in own for row in batch} for own in both]
    assert [len(own) for own in ids] == [8, 8]
    assert not ids[0] & ids[1]


# Where text is found


def hub(monkeypatch, texts):
    data = datasets.Dataset.from_dict({"body": texts})
    return serve_hub(monkeypatch, data, "train", "validation")


def packed_file(root, texts):
    (root / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(objects(texts)).encode()))
    return root / "a.jsonl.gz"


def book(root, texts):
    for i, text in enumerate(texts):
        write(root / "book" / f"{i}" / "page.txt", text)
    (root / "book" / ".hidden").write_text("hidden")
    return root / "book"


def saved(root, texts):
    datasets.Dataset.from_dict({"text": texts, "other": texts}).save_to_disk(root / "saved")
    return root / "saved"


KINDS = {
    "lines": lambda root, texts: write(root / "a.txt", *texts, "", " "),
    "windows": lambda root, texts: write(root / "a.txt", "\ufeff" + "\r\n".join(texts)),
    "folder": lambda root, texts: book(root, texts),
    "objects": lambda root, texts: write(root / "a.jsonl", *objects(texts), "", *objects([""])),
    "a list": lambda root, texts: write(root / "a.json", f"[{','.join(objects(texts))}]"),
    "a list or lines": lambda root, texts: write(root / "a.json", *objects(texts)),
    "packed": packed_file,
    "csv": lambda root, texts: write(
        root / "a.csv", "number,text", "", *(f'1,"{text}"' for text in texts)
    ),
    "tsv": lambda root, texts: write(root / "a.tsv", "text\tn", *(f"{t}\t1" for t in texts)),
    "parquet": lambda root, texts: write_parquet(root / "a.parquet", texts),
    "two files": lambda root, texts: (
        write_parquet(root / "b" / "0.parquet", texts[:3])
        and write_parquet(root / "b" / "1.parquet", texts[3:])
        and root / "b"
    ),
    "saved": saved,
}
over_kinds = pytest.mark.parametrize("kind", KINDS)


@over_kinds
def test_every_kind_of_source(tmp_path, kind):
    path = KINDS[kind](tmp_path, TEXTS)
    data = build(path, test_path=str(path)).train
    assert len(data.corpus.ends) == len(TEXTS)
    assert rows(data, seed=None) == packed(TEXTS, 8)


PLAIN = "\na\nb\n\n \nc\n\n\nd\ne"


@pytest.mark.parametrize(
    ("name", "content", "sample_by", "documents"),
    [
        ("a.txt", PLAIN, "file", [PLAIN]),
        ("a.txt", PLAIN, "paragraph", ["a\nb", "c", "d\ne"]),
        ("a.txt", PLAIN, "line", [*"abcde"]),
        ("a.csv", 'text,n\n"a\nb, ""c""",1\nd,2\n', "line", ['a\nb, "c"', "d"]),
    ],
)
def test_documents_of_a_file(tmp_path, name, content, sample_by, documents):
    (tmp_path / name).write_text(content)
    path = str(tmp_path / name)
    data = build(path, sample_by=sample_by, test_path=path).train
    assert rows(data, seed=None) == packed(documents, 8)


def test_file_names_define_splits(tmp_path):
    for name in ("train", "valid", "test"):
        write(tmp_path / f"wiki.{name}.tokens", name)
    splits = build(tmp_path)
    assert (texts_of(splits.train), texts_of(splits.test)) == (["train"], ["valid"])
    assert splits.notes == ("splits not used: test",)
    assert texts_of(build(tmp_path, test_split="test").test) == ["test"]
    for name in ("Train", "TEST"):
        write(tmp_path / "capital" / f"{name}.txt", name)
    splits = build(tmp_path / "capital")
    assert (texts_of(splits.train), texts_of(splits.test)) == (["Train"], ["TEST"])
    assert splits.notes == ()
    write(tmp_path / "README.md", "about it")
    with pytest.raises(ValueError, match=r"README\.md names no split"):
        build(tmp_path)
    write(tmp_path / "other" / "test.txt", "a", "b")
    assert texts_of(build(tmp_path / "other").train) == ["a"]  # without train there are no splits


def test_the_last_documents_are_held_out(tmp_path):
    texts = [f"text {i}" for i in range(30)]
    splits = build(write(tmp_path / "a.txt", *texts))
    assert (texts_of(splits.train), texts_of(splits.test)) == (texts[:27], texts[27:])
    splits = build(tmp_path / "a.txt", test_fraction=0.5, test_rows=2)
    assert len(splits.test) == 2
    assert rows(splits.test, seed=None) == packed(texts[15:], 8)[:2]


def test_the_last_tokens_of_a_single_document_are_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 50 + "y" * 9)
    splits = build(tmp_path / "a.txt", sample_by="file", length=10)
    learnt = [token for tokens, _ in rows(splits.train, seed=0) for token in tokens]
    assert sorted(learnt)[:54] == [120] * 50 + [121] * 4
    (held,) = rows(splits.test, seed=None)
    assert held == ([121] * 5 + [END] * 5, [0] * 6 + [-1] * 4)


def test_a_hub_dataset(monkeypatch):
    calls = hub(monkeypatch, TEXTS)
    splits = build("some/thing", name="plain", text_column="body")
    assert calls == [("some/thing", "plain", s, False) for s in ("train", "validation")]
    assert rows(splits.train, seed=None) == packed(TEXTS, 8)
    with pytest.raises(ValueError, match="there is no column 'text', expected one of: body"):
        build("some/thing")


@pytest.mark.parametrize(
    ("has_end", "lines", "want"),
    [  # no [CLS] and one [SEP], which is the end
        (True, ("the cat sat", "a dog on"), ([5, 6, 7, 3, 9, 11, 8, 3], [0] * 4 + [1] * 4)),
        (False, ("the cat", "a dog sat"), ([5, 6, 9, 11, 7, 0, 0, 0], [0, 0, 1, 1, 1] + [-1] * 3)),
    ],
)
def test_a_pretrained_tokenizer(tmp_path, has_end, lines, want):
    tokenizer = word_tokenizer(framed=has_end)
    if not has_end:
        tokenizer.sep_token = None
    tokenizer.save_pretrained(tmp_path / "words")
    path = write(tmp_path / "a.txt", *lines)
    splits = build(path, tokenizer=str(tmp_path / "words"), test_path=path)
    assert rows(splits.train, seed=None) == rows(splits.test, seed=None) == [want]
    assert splits.tokenizer.size == splits.format.vocab_size == len(WORDS)


def test_splitting_long_texts_does_not_change_ids(monkeypatch, tmp_path):
    text = "".join(f"the {'cat    ' * (i % 7)}\n{' sat' * (i % 3)}\n\n on\n" for i in range(200))
    path = write(tmp_path / "a.txt", text)
    assert main(["tokenizer", path, "--out", str(tmp_path / "pairs"), "--vocab-size", "300"]) == 0
    for tokenizer in (ByteTokenizer(), load_tokenizer(str(tmp_path / "pairs"))):
        want = [*tokenizer.encode(text), tokenizer.end]
        for size in (1, 10, 10**6):
            monkeypatch.setattr("onescan.experiments.data.text.corpus.PIECE", size)
            monkeypatch.setattr(
                "onescan.experiments.data.text.corpus.CHARACTERS_PER_CALL", 20 * size
            )
            encoded = list(encode_documents([text, "a", text], tokenizer))
            assert [ids.tolist() for ids in encoded[::2]] == [want, want]
            assert encoded[1].tolist() == [*tokenizer.encode("a"), tokenizer.end]


# Encodings


def documents(path, sample_by="line", **options):
    return texts_of(build(path, sample_by=sample_by, test_path=str(path), **options).train)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_every_system(tmp_path, end):
    (tmp_path / "a.txt").write_bytes(end.join(["one", "two", "", "three", "", "four"]).encode())
    assert documents(tmp_path / "a.txt") == ["one", "two", "three", "four"]
    found = build(tmp_path / "a.txt", sample_by="paragraph", test_path=str(tmp_path / "a.txt"))
    assert rows(found.train, seed=None) == packed([f"one{end}two", "three", "four"], 8)
    (tmp_path / "a.jsonl").write_bytes(
        end.join([*objects(["one"]), "", *objects(["two"])]).encode()
    )
    assert documents(tmp_path / "a.jsonl") == ["one", "two"]
    bad = end.join(["one", "two", "caf\udce9", "four"]).encode(errors="surrogateescape")
    (tmp_path / "bad.txt").write_bytes(bad)
    for sample_by in ("file", "line", "paragraph"):
        with pytest.raises(ValueError, match=r"bad.txt, line 3: this is not UTF-8: .*iconv"):
            documents(tmp_path / "bad.txt", sample_by)
    (tmp_path / "bad.json").write_bytes(end.join(['[{"text": "a"},', "{", "]"]).encode())
    with pytest.raises(ValueError, match=r"bad.json, line 3: this is not JSON"):
        documents(tmp_path / "bad.json")


def test_lines_that_end_in_carriage_returns_resume(tmp_path):
    content = "\r".join([*TEXTS[:4], "", *TEXTS[4:]]) + "\r\nlast\n"
    (tmp_path / "a.txt").write_bytes(content.encode())
    every = list(read_file(tmp_path / "a.txt", {}, "text", "line"))
    assert [document.text for document, _ in every] == [*TEXTS[:4], "", *TEXTS[4:], "last"]
    for place, (_, mark) in enumerate(every, start=1):
        assert list(read_file(tmp_path / "a.txt", mark, "text", "line")) == every[place:]


def test_byte_order_marks_of_concatenated_files_are_removed(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n\ufefftwo\nthree\ufefffour", encoding="utf-8")
    assert documents(tmp_path / "a.txt") == ["one", "two", "threefour"]


TEXT = "To be, or not to be: that is the question\n" * 3
PDF = b"%PDF-1.4\n1 0 obj << /Type /Catalog >> endobj\ntrailer << /Root 1 0 R >>\n%%EOF\n"


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", TEXT.encode("utf-16"), "a.txt is text in UTF-16, expected text in UTF-8"),
        ("a.txt", TEXT.encode("utf-32"), "a.txt is text in UTF-32"),
        ("a.jsonl", b"\xfe\xff" + ONE_LINE.encode("utf-16-be"), "a.jsonl is text in UTF-16"),
        ("a.txt", TEXT.encode("utf-16-le"), "a.txt is full of control characters"),
        ("a.txt", TEXT.encode("utf-32-be"), "a.txt is full of control characters"),
        ("a.jsonl", ONE_LINE.encode("utf-16-le"), "a.jsonl is full of control characters"),
        ("a.json", f"[{ONE_LINE}]".encode("utf-16-be"), "a.json is full of control characters"),
        ("a.txt", 2 * TEXT.encode() + b"a\0b", r"a.txt, line 7: .* control characters '.x00'"),
        ("a.txt", "日本".encode("iso2022_jp") + TEXT.encode(), r"line 1: .* control characters"),
        ("a.txt", TEXT.encode() + "é".encode("latin-1"), "line 4: this is not UTF-8: .*latin1"),
        ("a.txt", PDF, "a.txt is a PDF document"),
        ("a.pdf", PDF, "a.pdf', which is not text"),
        ("a.zip", TEXT.encode(), "a.zip', which is not text"),
        ("a", zipped(), "a is a zip archive"),
        ("a.txt", b"{\\rtf1 text}", "a.txt is a document in the rich text format"),
        ("a.txt", b"\x89PNG\r\n\x1a\n", "a.txt is a PNG image"),
        ("a.txt", gzip.compress(TEXT.encode(), mtime=0), "a.txt is compressed with gzip"),
        (
            "a.txt.gz",
            gzip.compress(gzip.compress(b"text", mtime=0), mtime=0),
            "a.txt.gz is compressed with gzip",
        ),
    ],
)
@pytest.mark.parametrize("sample_by", ["file", "line"])
def test_files_that_are_not_utf8_are_named(tmp_path, name, content, message, sample_by):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build(tmp_path / name, sample_by=sample_by)
    if name != "a.zip":
        with pytest.raises(ValueError, match=r"haystack is .*, which is not UTF-8"):
            read_haystack(tmp_path / name, ByteTokenizer())


def test_what_is_left_out_is_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("ONESCAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("onescan.experiments.data.text.corpus.MIN_CACHED_BYTES", 1)
    folder = tmp_path / "texts"
    write(folder / "a.jsonl", *objects(["one", "", " ", "two", "three"]), "oops")
    for name in ("README.md", "b.md", "c.png"):
        write(folder / name, "x")
    for _ in range(2):  # the second time from the cache
        data = build(folder, on_error="skip")
        assert data.notes == (
            f"left out 3 files of other types in {folder}: 2 .md, 1 .png",
            f"left out 1 of 4 documents of {folder} (split train), which cannot be read",
            f"left out 2 empty documents of {folder} (split train)",
            "the last 6 of 14 tokens are held out, because there is no test split",
        )
    write(tmp_path / "plain" / "a.txt", "one", "", "two")
    write(tmp_path / "plain" / "b.log", "three")
    (tmp_path / "plain" / "c.png").write_bytes(b"\x89PNG")
    data = build(tmp_path / "plain")
    assert (texts_of(data.train), texts_of(data.test)) == (["one", "two"], ["three"])
    assert data.notes == (
        f"left out 1 file of other types in {tmp_path / 'plain'}: 1 .png",
        f"left out 1 empty document of {tmp_path / 'plain'} (split train)",
        "the last 6 of 14 tokens are held out, because there is no test split",
    )
    for name in ("a", "b", "c"):
        (tmp_path / "files" / f"{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "files" / f"{name}.txt").write_text("" if name == "b" else name)
    data = build(tmp_path / "files", sample_by="file")
    assert data.notes[0] == f"left out 1 empty document of {tmp_path / 'files'} (split train)"


def test_repeated_names_of_columns_are_refused(tmp_path):
    from pyarrow import Table, parquet

    table = Table.from_arrays([["one"], ["two"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text('[{"text": "one", "text": "two"}]')
    with pytest.raises(ValueError, match="there are 2 columns 'text'"):
        build(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the name 'text' occurs more than once"):
        build(tmp_path / "a.json")


# Mistakes


ONE = objects(["a"])
BAD = [  # file, lines, message, texts that can be read
    ("a.jsonl", [*ONE, '{"text": "b"', *objects(["c"])], "line 2", "ac"),
    ("a.jsonl", [*ONE, "[1]"], "line 2: .* list", "a"),
    ("a.jsonl", [*ONE, *objects(["b"], "body")], "line 2: .*'text', .*: number, body", "a"),
    ("a.jsonl", [*ONE, *objects([3])], "line 2: .*'text' holds int", "a"),
    ("a.jsonl", [*ONE, '{"text": "\\ud83d"}'], "line 2: .*'text' holds half", "a"),
    ("a.jsonl", [*ONE, "[" * 100_000], "line 2", "a"),
    ("a.jsonl", [*ONE, "1" * 5000], "line 2", "a"),
    ("a.csv", ["text,n", "a,1", "b"], "line 3: .* 1 cell, expected 2", "a"),
    ("a.csv", ["text,n", "a,1", '"b,1'], "line 3", "a"),
    ("a.csv", ["text", "a", "\udcff", "b"], "line 3: .* UTF-8", "ab"),
    ("a.txt", ["a", "b", "c \udcff", "d"], "line 3: .* UTF-8", "abd"),
    ("a.json", ['[{"text": "a"}, 3, {"text": "b"}]'], "row 1: .* int", "ab"),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "lines", "found", "readable"), BAD)
@over_streaming
def test_unreadable_documents(tmp_path, caplog, name, lines, found, readable, streaming):
    (tmp_path / name).write_bytes(
        "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    )
    options = {"test_path": write(tmp_path / "good.txt", "good"), **streaming}
    with pytest.raises(ValueError, match=rf"{name}, {found}"):
        whole(build(tmp_path / name, **options).train, seed=0)
    data = build(tmp_path / name, on_error="skip", **options).train
    assert texts_of(data) == [*readable]
    messages = data.read(whole(data, seed=0)).failures if streaming else caplog.messages
    assert re.search(rf"{name}, {found}", messages[0])


NO_TEXT = r"a\..*', where train holds no text"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "lines", "options", "found"),
    [
        ("a.csv", ["body,n", "a,1"], {}, r"a\.csv, line 1: .*'text', .*: body, n"),
        ("a.csv", [], {}, r"a\.csv, line 1: .*'text'"),
        ("a.json", ["[", "{]"], {}, r"a\.json, line 2"),
        ("a.json", ["[" * 100_000], {}, r"a\.json"),
        ("a.parquet", ["no table"], {}, r"a\.parquet"),
        ("a.jsonl.gz", ["not gzip"], {}, r"a\.jsonl\.gz is damaged"),
        ("a.txt", ["", " "], {}, NO_TEXT),
        ("a.txt", [], {}, NO_TEXT),
        ("a.jsonl", objects([""]), {}, NO_TEXT),
        ("a.txt", ["a", "b", "", " c ", " \udcff"], {"sample_by": "file"}, r"a\.txt, line 5: "),
        ("a.txt", ["a", "", "b", "\udcff"], {"sample_by": "paragraph"}, r"a\.txt, line 4: "),
        ("a.txt", TEXTS, {"path": "no/such/file.txt"}, "data.path is 'no/such/file.txt'"),
        ("a.txt", TEXTS, {"test_path": "./nowhere"}, "data.test_path is './nowhere'"),
        ("a.txt", TEXTS, {"name": "plain"}, "data.name is 'plain'"),
        ("a.txt", TEXTS, {"train_split": "learn"}, "data.train_split is 'learn', .*: train"),
        ("a.txt", TEXTS, {"test_split": "test"}, "data.test_split is 'test', .*: train"),
        ("a.txt", TEXTS, {"test_split": "train"}, "data.test_split is 'train'"),
        ("a.txt", TEXTS, {"length": 0}, "data.length is 0"),
        ("a.txt", TEXTS, {"test_rows": 0}, "data.test_rows is 0"),
        ("a.txt", TEXTS, {"test_fraction": 1.0}, "data.test_fraction is 1.0"),
        ("a.txt", TEXTS, {"train_rows": 5}, "data.train_rows .* data.streaming"),
        ("a.txt", TEXTS, {"streaming": True}, "data.train_rows is None"),
        ("a.txt", TEXTS, STREAM, "data.streaming .* data.test_path"),
        ("a.txt", TEXTS, {"tokenizer": "./nowhere"}, "'./nowhere'"),
        ("a.txt", TEXTS, {"add_special_tokens": True}, "data.add_special_tokens is .* 'bytes'"),
        ("a.txt", TEXTS, {"add_special_tokens": True, "length": 2}, "data.length is 2, .* 2"),
    ],
)
def test_unusable_files_and_settings_are_rejected(tmp_path, name, lines, options, found):
    content = "".join(f"{line}\n" for line in lines)
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=found):
        build(**{"path": tmp_path / name, **options})


def test_a_damaged_column_of_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["a", None, "c"], other=[1, 2, 3])
    for column, found in {
        "text": r"a\.parquet, row 1: the column 'text' holds nothing",
        "body": r"a\.parquet cannot be read: there is no column 'body'",
        "other": r"a\.parquet, row 0: the column 'other' holds int",
    }.items():
        with pytest.raises(ValueError, match=found):
            build(path, text_column=column)


@over_streaming
def test_long_documents_may_be_rejected(tmp_path, streaming):
    path, good = write(tmp_path / "a.txt", *TEXTS), write(tmp_path / "b.txt", "a")
    options = {"long_documents": "raise", "test_path": good, **streaming}
    with pytest.raises(ValueError, match=r"a\.txt, line 7: .* 30 tokens, .* 29; .*data\.length"):
        whole(build(path, length=29, **options).train, seed=0)
    assert len(whole(build(path, length=30, **options).train, seed=0)) > 2


# Cache


@pytest.fixture
def encoded(monkeypatch):
    """Texts that were tokenized, while everything is cached."""
    texts = []
    encode = ByteTokenizer.encode_many
    monkeypatch.setattr("onescan.experiments.data.text.corpus.MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(
        ByteTokenizer, "encode_many", lambda self, new: texts.extend(new) or encode(self, new)
    )
    return texts


def test_tokenized_text_is_cached(tmp_path, encoded, caplog):
    path = write(tmp_path / "a.jsonl", *objects(TEXTS), "oops")
    first = build(path, on_error="skip").train
    messages = list(caplog.messages)
    caplog.clear()
    again = build(path, on_error="skip").train
    assert encoded == TEXTS
    assert caplog.messages == messages
    assert any("skipped 1 of 8 " in message for message in messages)
    assert all(isinstance(data.corpus.tokens.base, np.memmap) for data in (first, again))
    assert rows(again, seed=1) == rows(first, seed=1)


def test_changed_text_is_tokenized_again(tmp_path, encoded):
    path = write(tmp_path / "a.txt", *TEXTS)
    build(path)
    write(tmp_path / "a.txt", "an", "other")
    assert texts_of(build(path).train) == ["an"]
    build(path)
    assert encoded == [*TEXTS, "an", "other"]
    encoded.clear()
    build(path, sample_by="file")
    assert encoded == ["an\nother\n"]


def test_one_of_several_processes_fills_the_cache(tmp_path, encoded):
    path, context = write(tmp_path / "a.txt", *TEXTS * 50), get_context("fork")
    queue = context.Queue()

    def build_and_send():
        queue.put((rows(build(path).train, seed=0), len(encoded)))

    processes = [context.Process(target=build_and_send) for _ in range(3)]
    for process in processes:
        process.start()
    found, counts = zip(*(queue.get(timeout=60) for _ in processes), strict=True)
    for process in processes:
        process.join()
    assert list(found) == [rows(build(path).train, seed=0)] * 3
    assert sorted(counts) == [0, 0, 50 * len(TEXTS)]
    assert encoded == []


def test_the_cache_distinguishes_tokenizers_of_one_name(tmp_path, encoded):
    path, words = write(tmp_path / "a.txt", "the cat", "a dog"), tmp_path / "words"
    word_tokenizer().save_pretrained(words)
    first = build(path, tokenizer=str(words), test_path=path)
    word_tokenizer(words=[*WORDS[:5], *reversed(WORDS[5:])]).save_pretrained(words)
    second = build(path, tokenizer=str(words), test_path=path)
    assert rows(first.test, seed=None)[0][0][:2] == [5, 6]
    assert rows(second.test, seed=None)[0][0][:2] == [11, 10]
    assert first.format != second.format


def test_small_text_is_not_cached(tmp_path, encoded, monkeypatch):
    path, place = write(tmp_path / "a.txt", *TEXTS), tmp_path / "cache"
    monkeypatch.setenv("ONESCAN_CACHE", str(place))
    build(path, cache=False)
    monkeypatch.setattr("onescan.experiments.data.text.corpus.MIN_CACHED_BYTES", 10**6)
    build(path)
    assert not place.exists()
    monkeypatch.setattr("onescan.experiments.data.text.corpus.MIN_CACHED_BYTES", 0)
    build(path)
    assert place.exists()
    assert encoded == TEXTS * 3


@pytest.mark.parametrize("file", ["notes.json", "tokens.npy", "ends.npy"])
def test_a_damaged_cache_is_replaced(tmp_path, encoded, monkeypatch, file):
    path, place = write(tmp_path / "a.txt", *TEXTS), tmp_path / "cache"
    monkeypatch.setenv("ONESCAN_CACHE", str(place))
    want = rows(build(path).train, seed=0)
    (cached,) = place.glob(f"text/*/{file}")
    (place / "text" / f"{cached.parent.name}.partial").mkdir()  # left by a killed process
    cached.write_bytes(cached.read_bytes()[:-9])
    for _ in range(2):
        assert rows(build(path).train, seed=0) == want
        assert encoded == TEXTS * 2
    assert not list(place.glob("text/*partial*"))


def test_a_cache_that_cannot_be_written(tmp_path, encoded, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONESCAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file/text.*ONESCAN_CACHE"):
        build(write(tmp_path / "a.txt", *TEXTS))


# Streams


def streamed(path, root, **options):
    good = write(root / "good.txt", "good")
    fields = {"train_rows": 12, "shuffle_block": 3, **options}
    return build(path, streaming=True, test_path=good, **fields).train


def shape(examples):
    """What tells examples apart, in types that can be compared."""
    return [
        ([part.tolist() for part in e.source.parts], e.source.failures, e.seed, after)
        for e, after in examples
    ]


def assert_resumes(data, step=1, **options):
    """Resume a stream at every `step`-th example, from the state that a file keeps."""
    every = shape(data.examples(**options))
    for start in range(1, len(every), step):
        state = json.loads(json.dumps(every[start - 1][-1]))
        assert shape(data.examples(start=start, data_state=state, **options)) == every[start:]
    return every


@pytest.mark.sampled(4)
@over_kinds
@pytest.mark.parametrize("seed", [None, 4])
def test_a_stream_resumes_exactly(tmp_path, monkeypatch, kind, seed):
    monkeypatch.setattr("onescan.experiments.data.text.files.ROWS", 1)
    monkeypatch.setattr("onescan.experiments.data.text.source.GROUP", 3)
    path = KINDS[kind](tmp_path, TEXTS)
    data = streamed(path, tmp_path, length=5, train_rows=40)  # more than two rounds
    every = assert_resumes(data, seed=seed, epoch=1)
    assert shape(data.examples(seed=seed, epoch=1, start=17)) == every[17:]
    if seed is None:
        assert rows(data, seed=None) == packed(TEXTS, 5)
    else:
        assert len(every) == 40


def hub_stream(monkeypatch, root):
    hub(monkeypatch, [f"text {i}" for i in range(20)])
    return streamed("some/thing", root, text_column="body", length=5, train_rows=70)


def test_a_hub_stream_resumes_exactly(monkeypatch, tmp_path):
    monkeypatch.setattr("onescan.experiments.data.sources.GROUP", 3)
    assert_resumes(hub_stream(monkeypatch, tmp_path), step=3, seed=2)


HOSTILE = (None, -1, True, 1.5, "x", [], {"evil": 1}, 10**30)


@pytest.mark.parametrize("kind", ["lines", "csv", "parquet", "saved", "hub"])
def test_a_damaged_data_state_is_rejected(tmp_path, monkeypatch, kind):
    if kind == "hub":
        data = hub_stream(monkeypatch, tmp_path)
    else:
        data = streamed(KINDS[kind](tmp_path, TEXTS), tmp_path)
    _, state = next(data.examples(seed=4))
    changed = [{**state, name: value} for name in state for value in HOSTILE]
    changed += [
        {**state, "mark": {**state["mark"], name: value}}
        for name in ("row", "offset", "line")
        for value in HOSTILE
    ]
    changed += [
        {**state, "mark": {"row": 1, "group": 0, "state": library_state}}
        for library_state in (3, [], {"evil": 1})
        if kind == "hub"
    ]
    for damaged in [*changed, {"row": 0}, {**state, "evil": 1}]:
        with pytest.raises(ValueError, match=r"data_state is .*, but .* must be|cannot be read"):
            list(data.examples(seed=4, start=1, data_state=damaged))


def test_every_round_contains_all_documents_in_another_order(tmp_path):
    texts = [f"{i:03}" for i in range(50)]
    for i in range(5):
        write(tmp_path / "lines" / f"{i}.txt", *texts[10 * i : 10 * i + 10])
    data = streamed(tmp_path / "lines", tmp_path, length=4, train_rows=150, shuffle_block=7)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        ids = [bytes(tokens[:3]).decode() for tokens, _ in rows(data, seed=seed, epoch=epoch)]
        orders += [ids[:50], ids[50:100], ids[100:]]
    assert all(sorted(order) == texts for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    files = [text[1] for text in orders[0]]
    assert len(set(files[:7])) <= 2  # neighbors come together


def test_blocks_are_shuffled_independently(tmp_path):
    path = write(tmp_path / "a.txt", *(f"{i:03}" for i in range(40)))
    data = streamed(path, tmp_path, length=4, train_rows=80, shuffle_block=10)
    order = [int(bytes(tokens[:3])) for tokens, _ in rows(data, seed=0)]
    blocks = [tuple(i % 10 for i in order[begin : begin + 10]) for begin in range(0, 80, 10)]
    assert len(set(blocks)) == 8
    assert all(sorted(block) == list(range(10)) for block in blocks)


def test_a_resumed_stream_encodes_only_its_block(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", *(f"text {i}" for i in range(200)))
    data = streamed(path, tmp_path, train_rows=150, shuffle_block=5)
    every = list(data.examples(seed=0))
    made = []
    encode = ByteTokenizer.encode_many
    monkeypatch.setattr(
        ByteTokenizer, "encode_many", lambda self, texts: made.extend(texts) or encode(self, texts)
    )
    example, _ = next(data.examples(seed=0, start=120, data_state=every[119][1]))
    assert example.seed == every[120][0].seed
    assert 0 < len(made) <= 10


def test_repeated_examples_of_a_stream(tmp_path):
    data = streamed(write(tmp_path / "a.txt", *TEXTS), tmp_path)
    once, every = shape(data.examples(seed=0)), assert_resumes(data, seed=0, repeats=3)
    assert [row[0] for row in every] == [row[0] for row in once[:4] for _ in range(3)]
    assert len({seed for _, _, seed, _ in every}) == 12


def test_skipped_documents_of_a_stream_are_reported_with_their_row(tmp_path):
    lines = [line for text in TEXTS for line in (*objects([text]), "oops")]
    data = streamed(write(tmp_path / "a.jsonl", *lines), tmp_path, on_error="skip", train_rows=9)
    assert_resumes(data, seed=0)
    failures = data.read(whole(data, seed=0)).failures
    assert len(failures) >= 6
    assert all("a.jsonl, line " in failure for failure in failures)


@pytest.mark.parametrize("lines", [[""], ["oops", "oops"]])
def test_a_stream_without_text_ends(tmp_path, lines):
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ValueError, match="no text"):
        whole(streamed(path, tmp_path, on_error="skip"), seed=0)


# Runs


def text_run(root, tokenizer, size, steps=2):
    mixer = LightNetMixerConfig(num_heads=2, direction="forward")
    model = CausalLMConfig(vocab_size=size, width=24, depth=1, mixer=mixer)
    path = write(root / "a.txt", *["the cat sat", "a dog sat on the mat"] * 20)
    data = TextDatasetConfig(path=path, tokenizer=tokenizer, length=8, sample_by="line")
    training = TrainingConfig(batch_size=4, steps=steps)
    machine = MachineConfig(trackers=())
    return RunConfig(
        name="text",
        task=LanguageModellingConfig(),
        data=data,
        model=model,
        training=training,
        machine=machine,
    )


def test_a_run_is_self_contained(tmp_path, capsys):
    words = tmp_path / "words"
    word_tokenizer().save_pretrained(words)
    run = text_run(tmp_path, str(words), len(WORDS))
    folder = train(run, tmp_path / "run").folder
    for file in words.iterdir():
        file.unlink()
    assert isinstance(load(folder).model, CausalLM)
    assert isinstance(load(folder).format, TextFormat)
    for name in (folder, folder / "best.safetensors"):
        model, tokenizer = load_language_model(str(name))
        assert tokenizer.encode("the cat") == [5, 6]
        assert not model.training
    capsys.readouterr()
    assert main(["generate", str(folder), "--prompt", "the cat", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert train(run, folder).reused


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda f: flip(f / "tokenizer_config.json"), r"tokenizer_config\.json is damaged"),
        (lambda f: flip(f / "tokenizer.json"), r"tokenizer\.json is damaged"),
        (lambda f: flip(f / "checksums.json"), r"checksums\.json is damaged"),
        (
            lambda f: (f / "checksums.json").write_text(to_json({})),
            r"json is not in its list of files",
        ),
        (lambda f: (f / "checksums.json").unlink(), r"no checksums\.json"),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda f: (f / "vocab.txt").touch(), r"vocab\.txt is not in its list of"),
    ],
)
def test_a_damaged_tokenizer_of_a_run_is_rejected(text_folder, tmp_path, damage, found):
    folder = shutil.copytree(text_folder, tmp_path / "run")
    damage(folder / "tokenizer")
    with pytest.raises(ValueError, match=found):
        load_language_model(str(folder))


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    word_tokenizer().save_pretrained(root / "words")
    return train(text_run(root, str(root / "words"), len(WORDS)), root / "run").folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_replacing_a_run_removes_its_tokenizer(tmp_path):
    word_tokenizer().save_pretrained(tmp_path / "words")
    folder = train(text_run(tmp_path, str(tmp_path / "words"), len(WORDS)), tmp_path / "run").folder
    assert (folder / "tokenizer").is_dir()
    train(text_run(tmp_path, "bytes", 258), folder, overwrite=True)
    assert not (folder / "tokenizer").exists()
    assert load_language_model(str(folder))[1].name == "bytes"


@pytest.mark.sampled
@pytest.mark.parametrize("streaming", [{}, {**STREAM, "train_rows": 40}])
def test_an_interrupted_run_resumes_exactly(tmp_path, streaming):
    run = text_run(tmp_path, "bytes", 258, steps=6)
    good = write(tmp_path / "good.txt", "good")
    run = replace(run, data=replace(run.data, test_path=good, shuffle_block=4, **streaming))
    undisturbed = train(run, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "cut", progress=press_ctrl_c_at(3))
    assert_same(train(run, tmp_path / "cut"), undisturbed)


def test_a_run_of_another_model_is_rejected(tmp_path):
    folder = train(tiny_run(steps=1), tmp_path / "run").folder
    with pytest.raises(ValueError, match=r"TinyModel.* CausalLM"):
        load_language_model(str(folder))


def test_a_run_does_not_resume_with_another_tokenizer(tmp_path):
    words = tmp_path / "words"
    word_tokenizer().save_pretrained(words)
    run = text_run(tmp_path, str(words), len(WORDS), steps=9)
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "run", progress=press_ctrl_c_at(3))
    word_tokenizer(words=[*WORDS[:5], *reversed(WORDS[5:])]).save_pretrained(words)
    with pytest.raises(ValueError, match="the data has changed since the run"):
        train(run, tmp_path / "run")


# Truncated documents


def truncated(texts, length):
    """The rows of texts in their order, one each."""
    ids = [[*text.encode(), END][:length] for text in texts]
    return [
        (row + [END] * (length - len(row)), [0] * len(row) + [-1] * (length - len(row)))
        for row in ids
    ]


@over_streaming
def test_without_packing_each_row_begins_one_document(tmp_path, streaming):
    path = write(tmp_path / "a.txt", *TEXTS)
    splits = build(path, length=6, packing=False, test_path=path, test_rows=3, **streaming)
    assert rows(splits.train, seed=None) == truncated(TEXTS, 6)
    assert rows(splits.test, seed=None) == truncated(TEXTS, 6)[:3]
    assert len(splits.test) == 3
    drawn = rows(splits.train, seed=4)
    assert len(drawn) == len(splits.train) == (9 if streaming else len(TEXTS))
    assert sorted(drawn[: len(TEXTS)]) == sorted(truncated(TEXTS, 6))
    assert drawn != rows(splits.train, seed=4, epoch=1)
    if streaming:
        assert_resumes(splits.train, seed=4)
    else:
        assert whole(splits.train, seed=4, start=2) == whole(splits.train, seed=4)[2:]


def test_truncated_documents_are_counted(tmp_path):
    path = write(tmp_path / "a.txt", "abcdefgh", "abcde", "abcdef", "ab")  # and an end each
    test = write(tmp_path / "b.txt", "abcdefghij", "a")
    notes = build(path, length=6, packing=False, test_path=test).notes
    assert notes[-2:] == (
        "2 of 4 training documents are longer than 6 tokens and are truncated: 4 of 25 tokens are "
        "left out",
        "1 of 2 test documents is longer than 6 tokens and is truncated: 5 of 13 tokens are left "
        "out",
    )
    for options in ({"length": 20, "packing": False}, {"length": 6}):
        assert not any("truncated" in note for note in build(path, test_path=test, **options).notes)
    stream = {"streaming": True, "train_rows": 4, "packing": False, "test_path": test}
    assert any("stream that are longer than 6" in n for n in build(path, length=6, **stream).notes)


def test_tokens_of_framed_documents_that_are_truncated_are_counted(tmp_path):
    notes = framed(tmp_path, LINES, length=5, packing=False, test_fraction=0.5).notes
    assert notes[-1].startswith("1 of 2 test documents is longer than 5 tokens")
    data = framed(tmp_path, LINES, length=5, packing=False, test_fraction=0.5).test
    kept = sum(
        end - begin for example, _ in data.examples(seed=None) for begin, end in example.source
    )
    assert f": {len(data.corpus.tokens) - kept} of " in notes[-1]


def test_one_row_is_too_few_for_a_batch(tmp_path):
    path = write(tmp_path / "a.txt", "abc")
    task = LanguageModellingConfig().build(build(path, length=9, test_path=path))
    with pytest.raises(ValueError, match="is 2, but there is 1 training row: pass a smaller"):
        task.steps_per_epoch(2)


def test_held_out_documents_are_truncated_one_per_row(tmp_path):
    path = write(tmp_path / "a.txt", *TEXTS)
    splits = build(path, length=6, packing=False, test_fraction=0.4, test_rows=2)
    assert rows(splits.train, seed=None) == truncated(TEXTS[:4], 6)
    assert rows(splits.test, seed=None) == truncated(TEXTS[4:6], 6)


# Framed rows

CLS, SEP = WORDS.index("[CLS]"), WORDS.index("[SEP]")
LINES = ["the cat sat on a mat", "dog", "a dog sat", "the mat on the mat on the mat on a dog cat"]


def framed(tmp_path, lines, **options):
    word_tokenizer(framed=True).save_pretrained(tmp_path / "words")
    path = write(tmp_path / "a.txt", *lines)
    return build(path, tokenizer=str(tmp_path / "words"), add_special_tokens=True, **options)


def parts(data, length, **options):
    """Yield the parts of documents in rows, without [CLS] and [SEP]."""
    laid = rows(data, **options)
    assert (
        sum(documents.count(-1) > 2 for _, documents in laid) <= 1
    )  # only the last row may have more padding
    for tokens, documents in laid:
        assert len(tokens) == length
        for number in dict.fromkeys(documents):
            part = [token for token, d in zip(tokens, documents, strict=True) if d == number]
            if number >= 0:
                assert (part[0], part[-1]) == (CLS, SEP)
                assert not {CLS, SEP} & {*part[1:-1]}
                yield part[1:-1]


@pytest.mark.parametrize("length", [3, 5, 8, 60])
@over_streaming
@pytest.mark.parametrize("lines", [LINES, [LINES[3]]])
def test_every_part_of_a_document_is_framed_and_no_token_is_lost(
    tmp_path, lines, length, streaming
):
    test = {"test_path": write(tmp_path / "b.txt", *lines)} if streaming or len(lines) > 1 else {}
    splits = framed(tmp_path, lines, length=length, **test, **streaming)
    words = [WORDS.index(word) for line in lines for word in line.split()]
    stored = [
        [token for part in parts(data, length, seed=None) for token in part]
        for data in (splits.train, splits.test)
    ]
    if test:
        assert stored == [words, words]
    else:  # part of a single document is held out
        assert stored[0] + stored[1] == words
    if not streaming:
        drawn = parts(splits.train, length, seed=4)
        assert sorted(token for part in drawn for token in part) == sorted(stored[0])


@over_streaming
def test_truncated_documents_fill_the_row_with_their_frame(tmp_path, streaming):
    test = {"test_path": write(tmp_path / "b.txt", *LINES)}
    data = framed(tmp_path, LINES, length=5, packing=False, **test, **streaming).train
    for (tokens, documents), line in zip(rows(data, seed=None), LINES, strict=True):
        words = [WORDS.index(word) for word in line.split()][:3]
        assert tokens[: len(words) + 2] == [CLS, *words, SEP]
        assert documents == [0] * (len(words) + 2) + [-1] * (3 - len(words))


@over_streaming
def test_framed_rows_resume_exactly_and_test_rows_limits_them(tmp_path, streaming):
    test_path = write(tmp_path / "b.txt", *LINES)
    splits = framed(tmp_path, LINES, length=6, test_path=test_path, test_rows=3, **streaming)
    data = splits.train
    every = list(data.examples(seed=3))
    want = data.read([example for example, _ in every]).batch[0]
    for start in range(1, len(every)):
        rest = data.examples(seed=3, start=start, data_state=every[start - 1][1])
        got = data.read([example for example, _ in rest]).batch[0]
        assert torch.equal(got, want[start:])
    assert len(splits.test) == len(rows(splits.test, seed=None)) == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_nul_characters_of_json_are_refused_as_in_files(tmp_path, name):
    path = write(tmp_path / name, '{"text": "a\\u0000b"}')
    with pytest.raises(ValueError, match="the column 'text' holds a NUL character"):
        build(path)


def test_a_document_too_short_to_be_split_is_refused():
    def split_point(count, fraction):
        corpus = SimpleNamespace(ends=[count], tokens=range(count))
        return unwrap(dataset._split_point)(corpus, fraction, "a.txt")

    assert split_point(4, 0.25) == 3
    for count, fraction in ((1, 0.9), (4, 0.99), (4, 0.01)):
        with pytest.raises(ValueError, match=f"has {count} tokens: too few to hold out"):
            split_point(count, fraction)
