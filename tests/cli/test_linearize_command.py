"""`onescan linearize`: saved encoders of transformers, on text, tables and images."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from onescan.cli import main
from onescan.experiments.training import linearize_folder
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


def altered(folder, model, path, **fields):
    """Copy a model to `path`, and change fields of its config."""
    shutil.copytree(folder / model, path)
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_table(path, names, rows=10):
    path.write_text("text,label\n" + "".join(f"the king,{name}\n" for name in names) * rows)
    return path


def run(folder, model, data, out, *options):
    words = [str(folder / model), "--data", str(folder / data), "--out", str(out)]
    return main(["linearize", *words, *FAST, *options])


def test_divergence_names_the_option(folder, tmp_path, capsys):
    assert run(folder, "masked", "text.txt", tmp_path / "a", "--learning-rate", "1e30") == 1
    error = capsys.readouterr().err
    assert "onescan: error: training diverged at step " in error
    assert error.endswith("; try a smaller --learning-rate (now 1e+30)\n")


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
    assert printed.endswith(
        f"{out}: saved. To load the model in Python:\n"
        "  from onescan.integrations.transformers import load_linearized\n"
        f"  model = load_linearized({str(out)!r})\n"
    )
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
        ("masked", "none.txt", ("--kind", "lion", "--decay", "foo"), "decay 'foo' is unknown"),
        ("masked", "none.txt", ("--exclude", "foo"), "exclude contains 'foo'"),
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


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("masked", {"architectures": None}, "architectures is None in its config.json"),
        ("masked", {"architectures": "BertForMaskedLM"}, "architectures is 'BertForMaskedLM'"),
        ("masked", {"num_hidden_layers": 3}, "its files lack 16 tensors of BertForMaskedLM, such"),
        ("masked", {"model_type": "onescan_linearized"}, "its attention is already linear"),
        (
            "base",
            {"architectures": ["GPT2LMHeadModel"]},
            "it is GPT2LMHeadModel, a decoder, and only encoders are supported; for GPT-2, use "
            "onescan convert MODEL --out FOLDER, then onescan train linearize_gpt2",
        ),
        ("base", {"architectures": ["BertForMaskedLM"]}, "its files lack 6 tensors"),
        ("classes", {"problem_type": "multi_label_classification"}, "problem_type is 'multi_label"),
        ("classes", {"problem_type": "regression"}, "problem_type is 'regression'"),
        ("vit", {"problem_type": "multi_label_classification"}, "problem_type is 'multi_label"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error(folder, tmp_path, capsys, model, fields, reason):
    changed = altered(folder, model, tmp_path / "model", **fields)
    data = {"vit": "images", "classes": "table.csv"}.get(model, "text.txt")
    assert run(folder, changed, data, tmp_path / "o") == 2
    assert reason in capsys.readouterr().err


def test_one_class_is_an_error(folder, tmp_path, capsys):
    config = transformers.BertConfig(**TEXT, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    for file in (folder / "classes").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    assert run(folder, tmp_path / "model", "table.csv", tmp_path / "o") == 2
    assert "it has 1 class, expected two or more" in capsys.readouterr().err


def test_a_model_without_tokenizer_files_is_an_error(folder, tmp_path, capsys):
    model = altered(folder, "masked", tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert run(folder, model, "text.txt", tmp_path / "o") == 2
    assert "its tokenizer has only special tokens" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_an_error(folder, tmp_path, capsys):
    model = altered(folder, "masked", tmp_path / "model")
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["queen"] = 99
    file.write_text(json.dumps(tokenizer))
    assert run(folder, model, "text.txt", tmp_path / "o") == 2
    assert "its tokenizer has token ids up to 99, but the model has 13" in capsys.readouterr().err


def test_native_models_are_an_error(folder, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"onescan": "1.0"}')
    for model in (tmp_path / "run", "zoo/digits_lightnet"):
        assert main(["linearize", str(model), "--data", "x", "--out", str(tmp_path / "o")]) == 2
        assert "native onescan model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--steps", "-1"), "--steps is -1"),
        (("--transfer-steps", "-1"), "--transfer-steps is -1"),
        (("--learning-rate", "0"), "--learning-rate is 0.0"),
        (("--transfer-learning-rate", "nan"), "--transfer-learning-rate is nan"),
        (("--softmax-every", "1"), "--softmax-every is 1"),
        (("--length", "0"), "--length is 0"),
        (("--device", "foo"), "--device is 'foo', expected auto"),
        (("--data", ""), "--data is ''"),
        (("--out", "{file}/x/y"), "file/x/y', but {file} is not a folder"),
    ],
)
def test_options_are_checked_before_the_model_is_loaded(
    folder, tmp_path, capsys, monkeypatch, options, reason
):
    monkeypatch.setattr(linearize_folder, "_load", None)
    (tmp_path / "file").touch()
    options = [option.format(file=tmp_path / "file") for option in options]
    assert run(folder, "masked", "text.txt", tmp_path / "o", *options) == 2
    assert reason.format(file=tmp_path / "file") in capsys.readouterr().err


def test_an_empty_model_is_an_error(tmp_path, capsys):
    assert main(["linearize", "", "--data", "x", "--out", str(tmp_path / "o")]) == 2
    assert "model is '', expected a path or a name" in capsys.readouterr().err


def test_a_link_is_not_overwritten(folder, tmp_path, capsys):
    (tmp_path / "o").symlink_to(tmp_path / "nowhere")
    assert run(folder, "masked", "text.txt", tmp_path / "o") != 0
    assert "already exists, expected a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "data", "options", "reason"),
    [
        ("classes", "table.csv", ("--batch-size", "99"), "such as --batch-size 4"),
        ("classes", "table.csv", ("--label-column", "x"), "--label-column is 'x', but"),
        ("classes", "table.csv", ("--text-column", "x"), "--text-column is 'x', but"),
        ("classes", "table.csv", ("--length", "2"), "--length is 2, expected 6 or more"),
        ("classes", "table.csv", ("--test-fraction", "0.99"), "--test-fraction is 0.99, which"),
        ("masked", "text.txt", ("--length", "2"), "--length is 2, expected 6 or more"),
        ("masked", "text.txt", ("--test-fraction", "2"), "--test-fraction is 2.0, expected"),
        ("vit", "images", ("--test-fraction", "0.01"), "--test-fraction is 0.01, which"),
        ("vit", "images", ("--data", "nowhere/x/y"), "--data is 'nowhere/x/y': there is no such"),
    ],
)
def test_errors_name_the_options_of_this_command(
    folder, tmp_path, capsys, monkeypatch, model, data, options, reason
):
    monkeypatch.setattr(linearize_folder, "evaluate", None)
    assert run(folder, model, data, tmp_path / "o", *options) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert not any(f"{name}." in error.replace("table.csv", "") for name in ("data", "training"))


def test_columns_are_options(folder, tmp_path):
    text = (folder / "table.csv").read_text().replace("text,label", "review,stars")
    (tmp_path / "data.csv").write_text(text)
    columns = ("--text-column", "review", "--label-column", "stars")
    assert run(folder, "classes", tmp_path / "data.csv", tmp_path / "o", *columns) == 0


def test_classes_in_another_order_are_matched_by_name(folder, tmp_path):
    order = {"0": "yes", "1": "no"}
    model = altered(
        folder, "classes", tmp_path / "model", id2label=order, label2id={"yes": 0, "no": 1}
    )
    losses = []
    for source, names in (("classes", ("no", "yes")), (model, ("yes", "no"))):
        # the first class of the model has the same texts
        rows = [f"the king,{names[0]}", f"is dead,{names[1]}"] * 15
        (tmp_path / "data.csv").write_text("\n".join(["text,label", *rows]))
        out = tmp_path / f"o{len(losses)}"
        assert run(folder, source, tmp_path / "data.csv", out, "--test-fraction", "0.2") == 0
        losses.append(json.loads((out / "linearize.json").read_text())["original"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert load_linearized(tmp_path / "o1").config.id2label == {0: "yes", 1: "no"}


def test_a_numbered_model_gets_the_names_of_the_data(folder, tmp_path, capsys):
    config = transformers.BertConfig(**TEXT, num_labels=11)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    for file in (folder / "classes").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    names = [f"class{i}" for i in range(11)]
    data = write_table(tmp_path / "data.csv", names)
    assert run(folder, tmp_path / "model", data, tmp_path / "o") == 0
    note = "data: classes of the data, and of the model: class0 is LABEL_0, class1 is LABEL_1, "
    assert note in capsys.readouterr().out
    saved = load_linearized(tmp_path / "o").config
    assert saved.id2label == dict(enumerate(names))
    assert json.loads((tmp_path / "o" / "linearize.json").read_text())["notes"]
    assert saved.label2id == {name: i for i, name in enumerate(names)}


def test_softmax_in_no_layer_is_said(folder, tmp_path, capsys):
    assert run(folder, "masked", "text.txt", tmp_path / "o", "--softmax-every", "3") == 0
    assert (
        "in 2 layers, softmax attention in no layer (softmax_every is 3)" in capsys.readouterr().out
    )


def test_notes_on_the_data_are_printed(folder, tmp_path, capsys):
    assert run(folder, "classes", "table.csv", tmp_path / "o") == 0
    assert "data: 3 of 30 examples are held out" in capsys.readouterr().out


def test_an_unreadable_image_is_found_before_evaluation(folder, tmp_path, capsys, monkeypatch):
    shutil.copytree(folder / "images", tmp_path / "images")
    content = (tmp_path / "images" / "red" / "0.png").read_bytes()
    for i in range(9):  # at least 8 of them are for training
        (tmp_path / "images" / "red" / f"{i}.png").write_bytes(content[: len(content) // 2])
    assert run(folder, "vit", tmp_path / "images", tmp_path / "a", "--on-error", "skip") == 0
    capsys.readouterr()
    monkeypatch.setattr(linearize_folder, "evaluate", None)
    assert run(folder, "vit", tmp_path / "images", tmp_path / "b") == 2
    error = capsys.readouterr().err
    assert ".png) cannot be read as an image" in error


def test_the_saved_image_processor_makes_the_pixels_of_training(folder, tmp_path, monkeypatch):
    model = altered(folder, "vit", tmp_path / "model")
    fields = {
        "image_processor_type": "DeiTImageProcessor", "size": {"height": 10, "width": 20},
        "crop_size": {"height": 8, "width": 16}, "do_center_crop": True, "resample": 0,
        "rescale_factor": 0.01, "do_normalize": False,
    }  # fmt: skip
    (model / "preprocessor_config.json").write_text(json.dumps(fields))
    seen = []
    forward = transformers.ViTForImageClassification.forward

    def record(self, pixel_values, **kwargs):
        seen.append(pixel_values)
        return forward(self, pixel_values, **kwargs)

    monkeypatch.setattr(transformers.ViTForImageClassification, "forward", record)
    images = tmp_path / "images"
    rng = np.random.default_rng(0)
    for name in COLORS:
        (images / name).mkdir(parents=True)
        pixels = rng.integers(0, 255, (30, 40, 3)).astype(np.uint8)
        for i in range(10):
            Image.fromarray(pixels).save(images / name / f"{i}.png")
    assert run(folder, model, images, tmp_path / "o", "--no-augment") == 0
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "o")
    opened = [Image.open(images / name / "0.png") for name in COLORS]
    expected = processor(opened, return_tensors="pt")["pixel_values"]
    real = torch.cat([x for x in seen if x.any()])
    distances = (real[:, None] - expected[None]).abs().amax(dim=(2, 3, 4)).amin(dim=1)
    assert distances.max() < 1e-3


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_models_with_a_vision_config(folder, tmp_path, kind):
    vision = {
        "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 16,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision, id2label=dict(enumerate(COLORS)),
        label2id={name: i for i, name in enumerate(COLORS)},
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    model.save_pretrained(tmp_path / "model")
    size = {"height": 8, "width": 8}
    fields = {"image_processor_type": f"{kind}ImageProcessor", "size": size, "crop_size": size}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(fields))
    options = ("--exclude", "vision_model.head") if hasattr(model.vision_model, "head") else ()
    assert run(folder, tmp_path / "model", "images", tmp_path / "o", *options) == 0
    (described,) = describe_replacements(load_linearized(tmp_path / "o"))
    assert described["shape"] == [2, 2]
    assert described["prefix"] == (1 if kind == "CLIP" else 0)


def test_convolutions_are_an_error(folder, tmp_path, capsys):
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 4], depths=[1, 1], num_labels=3
    )
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    fields = {"image_processor_type": "ConvNextImageProcessor"}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(fields))
    assert run(folder, tmp_path / "model", "images", tmp_path / "o") == 2
    assert "without softmax attention to replace" in capsys.readouterr().err
