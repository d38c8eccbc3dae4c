"""Sequence classification: data sets, padding, loss, evaluation and errors."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from onescan import configs
from onescan.experiments.data import (
    ByteTextConfig,
    Example,
    LabeledSequence,
    ListOpsDataConfig,
    PathfinderDataConfig,
    PixelImageConfig,
    RetrievalConfig,
    SequenceList,
    SequenceSplits,
)
from onescan.experiments.data.long_range import (
    ListOps,
    ListOpsConfig,
    Pathfinder,
    PathfinderConfig,
    write_listops,
)
from onescan.experiments.data.sequences import padded
from onescan.experiments.tasks import SequenceClassificationConfig
from onescan.experiments.training import evaluate
from onescan.inputs.format import Format
from onescan.inputs.listops import ListOpsFormat
from onescan.inputs.sequences import SEPARATOR, ByteFormat, PixelFormat
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import HippoDecayConfig
from onescan.layers.mixers import LionMixerConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

SMALL = ListOpsConfig(min_length=4, max_length=30, max_depth=3, max_args=4)
SEQUENCES = [
    LabeledSequence(np.array(tokens, dtype=np.uint8), label)
    for tokens, label in [([3, 1], 0), ([4, 4, 4, 2, 1], 2), ([5], 1), ([1, 2, 3], 2)]
]


def splits(sequences=SEQUENCES, class_names=("a", "b", "c")):
    data = SequenceList(sequences=sequences)
    return SequenceSplits(
        train=data, test=data, class_names=class_names, format=ByteFormat(max_length=9)
    )


def tiny_model(**changes):
    fields = {"vocab_size": 257, "width": 8, "depth": 2, "num_classes": 3, "position": None}
    fields["mixer"] = LionMixerConfig(num_heads=2, decay=HippoDecayConfig())
    return SequenceClassifierConfig(**fields | {"mlp": MLPConfig(ratio=2.0)} | changes).build()


def batch_of(data, places=None):
    places = range(len(data)) if places is None else places
    return data.read([Example(place) for place in places]).batch


# Batches


def test_a_batch_is_padded_to_its_longest_sequence():
    tokens, keep, labels = padded(SEQUENCES)
    assert tokens.tolist() == [[3, 1, 0, 0, 0], [4, 4, 4, 2, 1], [5, 0, 0, 0, 0], [1, 2, 3, 0, 0]]
    assert keep.sum(dim=1).tolist() == [2, 5, 1, 3]
    assert keep[:, 0].all()
    assert (tokens.dtype, keep.dtype, labels.dtype) == (torch.int64, torch.bool, torch.int64)
    assert labels.tolist() == [0, 2, 1, 2]


def test_numbers_as_labels_are_floats():
    assert padded([LabeledSequence(np.array([1]), 0.5)])[2].dtype == torch.float32


def test_pairs_come_with_segments():
    format = ByteFormat(max_length=3)
    pairs = [format.encode_pair("abcd", "x"), format.encode_pair(b"a", "xyz")]
    tokens, keep, _, segments = padded([LabeledSequence(ids, 0, at) for ids, at in pairs])
    assert tokens.tolist() == [[97, 98, 99, 256, 120], [97, 256, 120, 121, 122]]
    assert segments.tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]
    assert keep.all()
    alone = padded([LabeledSequence(pairs[0][0], 0, 4), LabeledSequence(pairs[1][0][:3], 0, 2)])
    assert alone[3].tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0]]  # padding has segment 0


def test_padding_does_not_change_scores():
    model, data = tiny_model(), splits()
    together, alone = (
        evaluate(model, SequenceClassificationConfig(evaluation_batch_size=size).build(data))
        for size in (4, 1)
    )
    torch.testing.assert_close(together.arrays, alone.arrays)
    assert together.arrays["labels"].tolist() == [0, 2, 1, 2]
    assert together.arrays["confidence"].unique().numel() == 4  # distinct predictions


# Loss and metrics


def test_the_loss_is_the_cross_entropy_of_smoothed_labels():
    model, data = tiny_model(), splits()
    tokens, keep, labels = batch = batch_of(data.train)
    loss, metrics = SequenceClassificationConfig(label_smoothing=0.3).build(data).loss(model, batch)
    scores = model(tokens, keep)
    targets = nn.functional.one_hot(labels, 3) * 0.7 + 0.1
    torch.testing.assert_close(loss, -(targets * scores.log_softmax(dim=1)).sum(dim=1).mean())
    torch.testing.assert_close(metrics["accuracy"], (scores.argmax(1) == labels).float().mean())


def test_metrics_of_given_predictions():
    task = SequenceClassificationConfig().build(splits())
    rows = {
        "labels": torch.tensor([0, 2, 1, 2]),
        "predictions": torch.tensor([0, 2, 2, 2]),
        "losses": torch.tensor([1.0, 2.0, 3.0, 6.0]),
    }
    assert task.evaluate(rows).metrics == {"accuracy": 0.75, "loss": 3.0}
    assert task.score({"accuracy": 0.75, "loss": 3.0}) == 0.75


def numbered():
    return splits([s._replace(label=float(s.label)) for s in SEQUENCES], class_names=())


def test_regression_minimizes_the_squared_error():
    model, data = tiny_model(num_classes=1), numbered()
    tokens, keep, labels = batch = batch_of(data.train)
    task = SequenceClassificationConfig().build(data)
    estimates = model(tokens, keep)[:, 0]
    torch.testing.assert_close(task.loss(model, batch)[0], ((estimates - labels) ** 2).mean())
    evaluation = evaluate(model, task)
    expected = np.corrcoef(estimates.detach().numpy(), labels.numpy())[0, 1]
    assert evaluation.metrics["correlation"] == pytest.approx(expected, rel=1e-4)
    assert evaluation.metrics["loss"] == pytest.approx(task.loss(model, batch)[0].item(), rel=1e-5)
    assert task.score(evaluation.metrics) == evaluation.metrics["correlation"]


def test_a_constant_prediction_has_no_correlation():
    task = SequenceClassificationConfig().build(numbered())
    rows = {"labels": torch.arange(3.0), "predictions": torch.ones(3), "losses": torch.ones(3)}
    assert task.evaluate(rows).metrics["correlation"] == 0.0


def test_the_model_receives_segments():
    pairs = [
        LabeledSequence(ids, 1, at) for ids, at in [ByteFormat(max_length=3).encode_pair("ab", "c")]
    ]
    data = splits(pairs)
    model = tiny_model(segment_types=2).eval()
    task = SequenceClassificationConfig().build(data)
    found = evaluate(model, task).arrays["losses"]
    tokens, keep, labels, segments = batch_of(data.train)
    assert segments.tolist() == [[0, 0, 0, 1]]
    targets = nn.functional.cross_entropy(model(tokens, keep, segments=segments), labels)
    torch.testing.assert_close(found, targets[None])
    assert not torch.allclose(model(tokens, keep), model(tokens, keep, segments=segments))


@pytest.mark.parametrize("task", [{"label_smoothing": 1.0}, {"evaluation_batch_size": 0}])
def test_invalid_settings_are_rejected(task):
    with pytest.raises(ValueError, match=rf"task\.{next(iter(task))} is "):
        SequenceClassificationConfig(**task).build(splits())


def test_label_smoothing_requires_classes():
    with pytest.raises(ValueError, match=r"label_smoothing is 0\.1, expected 0, .* are numbers"):
        SequenceClassificationConfig(label_smoothing=0.1).build(numbered())


@pytest.mark.parametrize(("data", "says"), [(splits(), "of 3 classes"), (numbered(), "one number")])
def test_models_with_another_number_of_scores_are_rejected(data, says):
    task = SequenceClassificationConfig().build(data)
    with pytest.raises(ValueError, match=rf"scores of shape \(4, 2\) for 4 sequences .*{says}"):
        task.loss(tiny_model(num_classes=2), batch_of(data.train))


# ListOps


def listops(**fields):
    sizes = {"expressions": SMALL, "train_examples": 7, "test_examples": 3}
    return ListOpsDataConfig(**sizes | fields)


def test_drawn_expressions_are_the_generators():
    data, generator = listops().build(), ListOps(SMALL)
    for part, split in ((data.train, "train"), (data.test, "test")):
        tokens, keep, labels = batch_of(part)
        drawn = [generator.example(split, place) for place in range(len(part))]
        assert [row[real].tolist() for row, real in zip(tokens, keep, strict=True)] == [
            ids for ids, _ in drawn
        ]
        assert labels.tolist() == [label for _, label in drawn]
    assert (len(data.train), len(data.test)) == (7, 3)
    val = listops(test_split="val").build().test.example(0)
    assert val.tokens.tolist() == generator.example("val", 0)[0]


def write_tables(folder, **splits):
    for split, examples in splits.items():
        write_listops(folder / f"basic_{split}.tsv", examples)


def test_published_tables_are_read(tmp_path):
    generator = ListOps(SMALL)
    rows = {split: [generator.example(split, i) for i in range(4)] for split in ("train", "val")}
    write_tables(tmp_path, **rows)
    data = ListOpsDataConfig(path=str(tmp_path), test_split="val").build()
    for part, split in ((data.train, "train"), (data.test, "val")):
        assert [(sequence.tokens.tolist(), sequence.label) for sequence in part.sequences] == rows[
            split
        ]


def test_what_is_wrong_with_listops_is_said(tmp_path):
    at = {"path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"there is no basic_train\.tsv"):
        ListOpsDataConfig(**at).build()
    write_tables(tmp_path, train=[ListOps(SMALL).example("train", 0)], test=[])
    with pytest.raises(ValueError, match=r"basic_test\.tsv holds no expressions"):
        ListOpsDataConfig(**at).build()
    (tmp_path / "basic_test.tsv").write_text("Source\tTarget\n[MAX 1 2 ]\t2\n[MAX 1 2 ]\t3\n")
    with pytest.raises(
        ValueError, match=r"basic_test\.tsv, line 3: the label is 3, .* evaluates to 2"
    ):
        ListOpsDataConfig(**at).build()
    for drawn in ({"expressions": SMALL}, {"train_examples": 7}):
        with pytest.raises(ValueError, match=r"data\.path is .* data\.expressions, .* is set too"):
            ListOpsDataConfig(**at, **drawn).build()
    with pytest.raises(ValueError, match=r"data\.test_examples is 0"):
        listops(test_examples=0).build()


# Pixels


def pathfinder(**fields):
    images = PathfinderConfig(contour_length=6)
    return PathfinderDataConfig(images=images, train_examples=4, test_examples=2, **fields)


def test_drawn_images_are_the_generators_row_by_row():
    data = pathfinder().build()
    tokens, keep, labels = batch_of(data.test)
    image, label = Pathfinder(PathfinderConfig(contour_length=6)).example("test", 1)
    assert tokens[1].tolist() == image.flatten().tolist()
    assert keep.all()
    assert labels[1] == label
    assert sorted(labels.tolist()) == [0, 1]
    assert data.class_names == ("apart", "joined")
    assert (len(data.train), len(data.test)) == (4, 2)


def write_published(folder, count, side=32):
    (folder / "imgs/0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    lines = []
    for i in range(count):
        gray = np.full((side, side), i, dtype=np.uint8)
        Image.fromarray(gray).save(folder / f"imgs/0/sample_{i}.png")
        lines.append(f"imgs/0 sample_{i}.png {i} {i % 2} 1.8 6")
    (folder / "metadata/0.npy").write_text("\n".join(lines))


def test_a_published_folder_is_cut_in_three(tmp_path):
    write_published(tmp_path, 20)
    config = PathfinderDataConfig(path=str(tmp_path))
    data, val = config.build(), configs.replace(config, {"test_split": "val"}).build()
    seen = [
        sorted(int(part.example(i).tokens[0]) for i in range(len(part)))
        for part in (data.train, val.test, data.test)
    ]
    assert [len(part) for part in seen] == [16, 2, 2]
    assert sorted([*seen[0], *seen[1], *seen[2]]) == list(range(20))
    assert seen[0] != list(range(16))  # shuffled
    assert all(
        sequence.label == sequence.tokens[0] % 2
        for sequence in (data.train.example(i) for i in range(16))
    )
    assert torch.equal(val.train.indices, data.train.indices)


def test_what_is_wrong_with_pathfinder_is_said(tmp_path):
    write_published(tmp_path / "large", 20, side=64)
    wrong = PathfinderDataConfig(path=str(tmp_path / "large")).build()
    with pytest.raises(ValueError, match=r"sample_\d+\.png: .* 64 x 64 pixels, expected 32 x 32"):
        wrong.train.example(0)
    write_published(tmp_path / "few", 1)
    with pytest.raises(ValueError, match="has too few images: 1"):
        PathfinderDataConfig(path=str(tmp_path / "few")).build()
    with pytest.raises(ValueError, match=r"but data\.images\.contour_length, .* is set too"):
        pathfinder(path=str(tmp_path / "large")).build()


def test_images_are_read_as_gray_levels(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(2, 2, 3, 4, 5), dtype=np.uint8)
    for split, images in zip(("train", "test"), pixels, strict=True):
        for name, image in zip(("cat", "dog"), images, strict=True):
            (tmp_path / split / name).mkdir(parents=True)
            gray = Image.fromarray(image[0])
            gray.save(tmp_path / split / name / "a.png")
    data = PixelImageConfig(path=str(tmp_path), image_size=(4, 5)).build()
    tokens, keep, labels = batch_of(data.test)
    assert tokens.tolist() == [image[0].flatten().tolist() for image in pixels[1]]
    assert keep.all()
    assert labels.tolist() == [0, 1]
    assert data.class_names == ("cat", "dog")
    assert data.train.decodes
    one = data.train.example(1)
    assert one.tokens.tolist() == pixels[0, 1, 0].flatten().tolist()
    assert one.label == 1
    order = [example for example, _ in data.train.examples(seed=3, epoch=1)]
    assert order == [example for example, _ in data.train.images.examples(seed=3, epoch=1)]
    with pytest.raises(ValueError, match=r"data\.image_size is 0"):
        PixelImageConfig(path=str(tmp_path), image_size=(0, 5)).build()


# Texts

TEXTS = {"train": [("good é", "pos"), ("bad", "neg"), ("fine", "pos")], "test": [("so so", "neg")]}


def as_folder(folder):
    for split, rows in TEXTS.items():
        for number, (text, label) in enumerate(rows):
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            (folder / split / label / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "train/urls_pos.txt").write_text("http")
    (folder / "train/unsup").mkdir()
    (folder / "train/unsup/0.txt").write_text("who knows")


def as_tables(folder):
    for split, rows in TEXTS.items():
        lines = ["id\tlabel\ttext", *(f"7\t{label}\t{text}" for text, label in rows)]
        (folder / f"{split}.tsv").write_text("\r\n".join(lines), encoding="utf-8")


def as_parquet(folder):
    datasets = pytest.importorskip("datasets")
    features = {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["neg", "pos"]),
    }
    for split, rows in TEXTS.items():
        columns = {
            "text": [text for text, _ in rows],
            "label": [["neg", "pos"].index(label) for _, label in rows],
        }
        table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        table.to_parquet(folder / f"{split}-00000.parquet")


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("write", [as_folder, as_tables, as_parquet])
def test_texts_are_read_byte_by_byte(tmp_path, write, cached):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)
    data = ByteTextConfig(path=str(folder), max_length=7).build()
    assert data.class_names == ("neg", "pos")
    for part, split in ((data.train, "train"), (data.test, "test")):
        read = [part.example(place) for place in range(len(part))]
        found = sorted((bytes(s.tokens), data.class_names[s.label]) for s in read)
        assert found == sorted((text.encode(), label) for text, label in TEXTS[split])
    cut = ByteTextConfig(path=str(folder), max_length=2).build()
    assert bytes(cut.test.example(0).tokens) == b"so"


def test_what_is_wrong_with_texts_is_said(tmp_path):
    def says(message, **fields):
        with pytest.raises(ValueError, match=message):
            ByteTextConfig(path=str(tmp_path), **fields).build()

    as_tables(tmp_path)
    says(
        r"data\.text_column is 'review', but .*train\.tsv has: id, label, text",
        text_column="review",
    )
    says(r"data\.label_column is 'y'", label_column="y")
    says(r"data\.max_length is 0", max_length=0)
    says(r"data\.test_split is 'validation', but .* has: test, train", test_split="validation")
    says(r"train\.tsv, line 2 has the label 'pos', expected one of a, b", class_names=("a", "b"))
    (tmp_path / "train.tsv").write_text("text\tlabel\nfine\tpos\n\tneg\n")
    broken = ByteTextConfig(path=str(tmp_path)).build().train
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: the text is empty"):
        broken.example(1)
    (tmp_path / "train.tsv").write_text("text\tlabel\nfine\tpos\nbad\n")
    says(r"train\.tsv, line 3: 1 cell separated by tabs, expected 2: text, label")
    (tmp_path / "train.tsv").write_text("text\tlabel\nfine\tpos\n")
    says("texts have 1 class, expected at least two")
    (tmp_path / "train.tsv").write_text("text\tlabel\n")
    says(r"train\.tsv holds no rows")
    (tmp_path / "train.tsv").write_bytes(b"\xff\t\n")
    says(r"train\.tsv, line 1 is not UTF-8 text")
    (tmp_path / "train-2.tsv").write_text("text\tlabel\nfine\tpos\n")
    says(r"where 2 tables belong to the split train, expected one: .*train-2\.tsv and .*train\.tsv")
    (tmp_path / "test.tsv").unlink()
    says("has no test split, expected one of validation, valid, val, test")


PAIRS = ["1.0\t12\t13\tfirst paper\tsecond\n", "0.0\t2\t3\ta\tbb\n"]


def write_pairs(folder, lines, split="train"):
    (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))


def test_pairs_are_one_sequence_with_a_separator(tmp_path):
    write_pairs(tmp_path, PAIRS)
    write_pairs(tmp_path, PAIRS[::-1], "eval")
    data = RetrievalConfig(path=str(tmp_path), max_length=5, test_split="eval").build()
    tokens, keep, labels, segments = batch_of(data.train)
    assert tokens[0].tolist() == [*b"first", SEPARATOR, *b"secon"]
    assert tokens[1][keep[1]].tolist() == [*b"a", SEPARATOR, *b"bb"]
    assert segments[1].tolist() == [0, 0, 1, 1, *[0] * 7]
    assert labels.tolist() == [1, 0]
    assert batch_of(data.test)[2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2\t1\t2\ta\tb\n", "line 3: the label is '2', expected 0 or 1"),
        ("1\t1\t2\ta\t\n", "line 3: text2 is empty"),
        (
            "1\t1\t2\ta\n",
            "line 3: 4 cells separated by tabs, expected 5: label, id1, id2, text1, text2",
        ),
    ],
)
def test_what_is_wrong_with_pairs_is_said(tmp_path, line, says):
    write_pairs(tmp_path, [*PAIRS, line])
    with pytest.raises(ValueError, match=rf"new_aan_pairs\.train\.tsv, {says}"):
        RetrievalConfig(path=str(tmp_path)).build()


def test_missing_pairs_are_said(tmp_path):
    write_pairs(tmp_path, PAIRS)
    with pytest.raises(ValueError, match=r"there is no file .*new_aan_pairs\.test\.tsv"):
        RetrievalConfig(path=str(tmp_path)).build()


# Formats


@dataclass(frozen=True)
class Kept:
    format: Format


@pytest.mark.parametrize(
    ("format", "raw", "ids"),
    [
        (ListOpsFormat(), "( [MAX 2 9 ] )", [11, 3, 10, 15]),
        (ByteFormat(max_length=2), "é!", [195, 169]),
        (PixelFormat(height=1, width=2), np.array([[0, 255]], dtype=np.uint8), [0, 255]),
    ],
)
def test_formats_outlive_json_and_encode_as_before(format, raw, ids):
    again = configs.from_dict(Kept, configs.to_dict(Kept(format))).format
    assert again == format
    assert again.encode(raw).tolist() == ids
    assert max(ids) < again.vocab_size


def test_formats_refuse_what_they_do_not_read():
    with pytest.raises(ValueError, match="the text is empty"):
        ByteFormat(max_length=2).encode("")
    with pytest.raises(ValueError, match="an image has 2 x 1 pixels, expected 1 x 1"):
        PixelFormat(height=1, width=1).encode(np.zeros((1, 2), dtype=np.uint8))
    with pytest.raises(ValueError, match="symbol 0 of the expression is '\\[AVG'"):
        ListOpsFormat().encode("[AVG 1 ]")
