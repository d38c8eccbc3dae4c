"""`onescan linearize`: saved encoders of transformers, on text, tables and images."""

import csv
import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from onescan.cli import main
from onescan.integrations.transformers import load_linearized
from onescan.nn.replace import describe_replacements

WORDS = ["the", "king", "is", "good", "bad", "dead", "not", "a"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = {
    "vocab_size": len(SPECIAL + WORDS), "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
FAST = ("--transfer-steps", "2", "--steps", "3", "--batch-size", "4", "--device", "cpu")
COLORS = ("blue", "green", "red")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models with random weights, and data for them."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("linearize")
    words = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    names = {0: "no", 1: "yes"}
    for name, kind, fields in (
        ("masked", transformers.BertForMaskedLM, {}),
        ("classes", transformers.BertForSequenceClassification,
         {"id2label": names, "label2id": {name: i for i, name in names.items()}}),
        ("base", transformers.BertModel, {}),
    ):  # fmt: skip
        kind(transformers.BertConfig(**TEXT, **fields)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    image = transformers.ViTConfig(
        image_size=(8, 16), patch_size=4, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=16, id2label=dict(enumerate(COLORS)),
        label2id={name: i for i, name in enumerate(COLORS)},
    )  # fmt: skip
    transformers.ViTForImageClassification(image).save_pretrained(root / "vit")
    (root / "vit" / "preprocessor_config.json").write_text(
        json.dumps(
            {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 16},
             "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        )
    )  # fmt: skip
    write_data(root)
    return root


def write_data(root):
    rng = np.random.default_rng(0)
    text = " ".join(rng.choice(WORDS, 600))
    (root / "text.txt").write_text(text)
    with (root / "table.csv").open("w") as file:
        rows = [(" ".join(rng.choice(WORDS, 5)), label) for label in ("no", "yes") * 15]
        csv.writer(file).writerows([("text", "label"), *rows])
    for i, color in enumerate(COLORS):
        (root / "images" / color).mkdir(parents=True)
        for j in range(10):
            pixels = rng.integers(0, 60, (8, 16, 3)).astype(np.uint8)
            pixels[..., 2 - i] += 150
            Image.fromarray(pixels).save(root / "images" / color / f"{j}.png")


def run(folder, model, data, out, *options):
    words = [str(folder / model), "--data", str(folder / data), "--out", str(out)]
    return main(["linearize", *words, *FAST, *options])


@pytest.mark.parametrize(
    ("model", "data", "metrics"),
    [
        ("masked", "text.txt", {"loss", "accuracy", "perplexity", "bits_per_byte"}),
        ("classes", "table.csv", {"loss", "accuracy"}),
        ("vit", "images", {"loss", "accuracy"}),
    ],
)
def test_models_are_linearized(folder, tmp_path, capsys, model, data, metrics):
    out = tmp_path / "linear"
    assert run(folder, model, data, out) == 0
    printed = capsys.readouterr().out
    assert "linear attention (lightnet) in 2 layers" in printed
    assert "held-out accuracy: " in printed
    results = json.loads((out / "linearize.json").read_text())
    assert set(results["original"]) == set(results["linear"]) == metrics
    restored = load_linearized(out)
    (described,) = describe_replacements(restored)
    assert described["modules"] == results["replaced"]
    assert described["shape"] == ([2, 4] if model == "vit" else None)
    assert described["prefix"] == (1 if model == "vit" else 0)
    kind = transformers.AutoImageProcessor if model == "vit" else transformers.AutoTokenizer
    kind.from_pretrained(out)


def test_the_same_seed_gives_the_same_weights(folder, tmp_path):
    for name in "ab":
        assert run(folder, "masked", "text.txt", tmp_path / name) == 0
    a, b = (load_linearized(tmp_path / name).state_dict() for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_options_reach_the_layers(folder, tmp_path, capsys):
    options = ("--kind", "lion", "--decay", "fixed", "--softmax-every", "2", "--length", "8")
    assert run(folder, "classes", "table.csv", tmp_path / "o", *options) == 0
    assert (
        "linear attention (lion) in 1 layer, softmax attention in 1 layer"
        in capsys.readouterr().out
    )
    (described,) = describe_replacements(load_linearized(tmp_path / "o"))
    assert described["options"] == {"decay": "fixed"}
    assert described["modules"] == ["bert.encoder.layer.0.attention.self"]


@pytest.mark.parametrize(
    ("model", "data", "options", "reason"),
    [
        ("base", "text.txt", (), "it is BertModel, expected a class whose name ends in"),
        ("masked", "text.txt", ("--length", "17"), "length is 17, but the model has 16 positions"),
        ("masked", "text.txt", ("--kind", "foo"), "kind 'foo' is unknown"),
        ("masked", "text.txt", ("--decay", "fixed"), "decay is 'fixed' with kind='lightnet'"),
        ("masked", "text.txt", ("--exclude", "foo"), "exclude contains 'foo'"),
        ("masked", "text.txt", ("--batch-size", "0"), "batch_size is 0"),
        ("masked", "none.txt", (), "none.txt"),
        ("vit", "table.csv", (), "expected a folder or a parquet file"),
        ("classes", "images", (), "a folder without"),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, capsys, model, data, options, reason):
    assert run(folder, model, data, tmp_path / "o", *options) == 2
    assert reason in capsys.readouterr().err.replace("--", "").replace("batch-size", "batch_size")
    assert not (tmp_path / "o").exists()


def test_other_classes_are_an_error(folder, tmp_path, capsys):
    (tmp_path / "data.csv").write_text("text,label\n" + "the king,yes\na king,maybe\n" * 9)
    assert run(folder, "classes", tmp_path / "data.csv", tmp_path / "o") == 2
    assert "--data has the classes maybe, yes, but the model has no, yes" in (
        capsys.readouterr().err
    )


def test_an_existing_folder_is_not_overwritten(folder, tmp_path, capsys):
    (tmp_path / "o").mkdir()
    assert run(folder, "masked", "text.txt", tmp_path / "o") != 0
    assert "exists, expected a new folder" in capsys.readouterr().err
    assert not list((tmp_path / "o").iterdir())
