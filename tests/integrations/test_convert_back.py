"""Native models with softmax attention as models of other libraries, and back: equal outputs."""

import dataclasses
import inspect
import json

import numpy as np
import pytest
import torch
from PIL import Image
from test_convert_denoisers import inputs, of_diffusers
from test_convert_text import bert, gpt2
from test_convert_vision import of_transformers, randomized
from tiny_tokenizers import word_tokenizer

import onescan
from onescan import configs
from onescan.cli import main
from onescan.experiments.training.convert import image_processor
from onescan.inputs.images import ImageFormat, read_image
from onescan.integrations.weights import convert_back, convert_model, read

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")
SMALL = {"width": 24, "depth": 2, "mixer.num_heads": 3}
IMAGES = {**SMALL, "image_size": (24, 16), "patch_size": (8, 4), "num_classes": 5, "mlp.ratio": 1.7}
TEXT = {**SMALL, "vocab_size": 31, "position.max_tokens": 16, "dropout": 0.2, "mixer.dropout": 0.3}
DIT = {**SMALL, "image_size": (8, 8), "num_classes": 10, "inclusive_frequencies": True}
# preset, library, changed fields, class of the other library
NATIVE = {
    "ViT": ("deit_tiny", "transformers", IMAGES, "ViTForImageClassification"),
    "DeiT": (
        "deit_tiny",
        "transformers",
        {**IMAGES, "distillation_token": True, "mlp.activation": "gelu_tanh"},
        "DeiTForImageClassificationWithTeacher",
    ),
    "GPT-2": ("gpt2_small", "transformers", TEXT, "GPT2LMHeadModel"),
    "GPT-2, untied": (
        "gpt2_small",
        "transformers",
        {**TEXT, "tie_embeddings": False, "mlp.multiple_of": 10, "mlp.activation": "silu"},
        "GPT2LMHeadModel",
    ),
    "BERT": ("bert_base", "transformers", TEXT, "BertForMaskedLM"),
    "DiT": ("dit_s_2", "diffusers", DIT, "DiTTransformer2DModel"),
    "DiT, mean only": (
        "dit_s_2",
        "diffusers",
        {**DIT, "learn_sigma": False, "mlp_norm_eps": 1e-5, "mlp.activation": "gelu_tanh"},
        "DiTTransformer2DModel",
    ),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def native_model(preset, changes):
    return randomized(configs.replace(onescan.preset(preset), changes).build())


def outputs(native, other):
    """Return what a native model and its counterpart compute for the same random input."""
    with torch.no_grad():
        if isinstance(native, onescan.Denoiser):
            noisy, timesteps, labels = inputs()
            theirs = other(noisy, timestep=timesteps, class_labels=labels).sample
            return native(noisy, timesteps, labels), theirs
        x = torch.randint(31, (2, 9))
        if isinstance(native, onescan.ImageClassifier):
            config = native.config
            x = torch.randn(2, config.channels, *config.image_size, dtype=torch.double)
        ours = native(x)
        return ours[0] if isinstance(ours, tuple) else ours, other(x).logits


def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(("preset", "library", "changes", "name"), NATIVE.values(), ids=NATIVE)
def test_outputs_are_equal_and_weights_return(preset, library, changes, name):
    native = native_model(preset, changes)
    other = convert_back(native, library)
    assert type(other).__name__ == name
    ours, theirs = outputs(native, other)
    assert ours.std() > 0.1
    # diffusers computes the frequencies of timesteps in float32
    tolerance = 1e-5 if library == "diffusers" else 1e-10
    torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)
    returned = convert_model(read(other))
    assert_same_weights(returned, native)
    changed = {field for field, *_ in configs.differences(returned.config, native.config)}
    assert changed <= {"drop_path", "mlp.multiple_of", "mlp.ratio"}


@pytest.mark.parametrize(
    "build",
    [
        lambda: of_transformers("ViT"),
        lambda: of_transformers("DeiT"),
        gpt2,
        lambda: gpt2(n_inner=40, tie_word_embeddings=False),
        bert,
        of_diffusers,
    ],
)
def test_models_of_other_libraries_return(build):
    model = build()
    library = "diffusers" if isinstance(model, diffusers.ModelMixin) else "transformers"
    assert_same_weights(convert_back(convert_model(read(model)), library), model)


@pytest.mark.parametrize(
    ("preset", "library", "changes", "message"),
    [
        (
            "lightnet_tiny",
            "transformers",
            {},
            "mixer.type is 'LightNetMixerConfig', expected 'Soft",
        ),
        (
            "deit_tiny",
            "transformers",
            {"pool": "mean"},
            "pool is 'mean', expected 'class_token', a",
        ),
        ("deit_tiny", "transformers", {"image_size": (32,), "patch_size": (8,)}, "expected 2 axes"),
        ("deit_tiny", "transformers", {"position": None}, "position is None, expected AbsolutePo"),
        (
            "gpt2_small",
            "transformers",
            {"norm": "rms"},
            "norm is 'rms', expected 'layer', as in GPT2",
        ),
        (
            "gpt2_small",
            "transformers",
            {"mixer.rotary": True},
            "mixer.rotary is True, expected False",
        ),
        (
            "bert_base",
            "transformers",
            {"mlp.activation": "relu"},
            "mlp.activation is 'relu', expect",
        ),
        ("bert_base", "transformers", {"segment_types": 0}, "segment_types is 0, expected a whole"),
        ("dit_s_2", "diffusers", {}, "inclusive_frequencies is False, expected True, as in DiTT"),
        ("dit_s_2", "diffusers", {**DIT, "num_classes": 0}, "num_classes is 0, expected"),
        ("dit_s_2", "diffusers", {**DIT, "mlp.ratio": 2.0}, "mlp.ratio is 2.0, expected 4.0"),
        (
            "dit_s_2",
            "diffusers",
            {**DIT, "mlp.activation": "silu"},
            "mlp.activation 'silu' is unkno",
        ),
        ("dit_s_2", "diffusers", {**DIT, "image_size": (8, 16)}, "expected two equal sides"),
        ("dit_s_2", "transformers", DIT, "expected one of ImageClassifier, CausalLM, MaskedLM"),
        (
            "deit_tiny",
            "diffusers",
            IMAGES,
            "which cannot be converted to diffusers; expected one of",
        ),
    ],
)
def test_fields_without_a_counterpart_are_named(preset, library, changes, message):
    config = configs.replace(onescan.preset(preset), {**SMALL, **changes})
    with pytest.raises(ValueError, match=message):
        convert_back(config.build(), library)


def test_a_run_is_written_with_its_classes_and_image_processor(tmp_path, capsys):
    model = of_transformers("ViT", image_size=32, id2label={i: f"class {i}" for i in range(5)})
    model.float().save_pretrained(tmp_path / "vit")
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"shortest_edge": 40}}
    settings["do_center_crop"] = True
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    onescan.convert(tmp_path / "vit", tmp_path / "run")
    command = ["convert", str(tmp_path / "run"), "--to", "transformers", "--out"]
    assert main([*command, str(tmp_path / "back")]) == 0
    assert "back: ViTForImageClassification with" in capsys.readouterr().out
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "back")
    assert_same_weights(back, model)
    assert back.config.id2label == model.config.id2label
    assert back.config.label2id == {f"class {i}": i for i in range(5)}


def test_the_image_processor_prepares_images_as_the_run_does(tmp_path):
    form = ImageFormat(
        channels=3, height=32, width=32, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop=0.8
    )
    rows, columns = np.mgrid[:48, :60]
    pixels = np.stack([rows * 4, columns * 4, rows + columns], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "gradient.png")
    expected = read_image(tmp_path / "gradient.png", form)
    processor = image_processor(form)
    found = processor(Image.open(tmp_path / "gradient.png"), return_tensors="pt")["pixel_values"]
    # transformers resizes the whole image before the crop, and rounds in between
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0.1)
    with pytest.raises(
        ValueError, match=r"crop 0.8 and size \(32, 16\), expected crop None or a sq"
    ):
        image_processor(dataclasses.replace(form, width=16))


@pytest.mark.parametrize(("build", "auto"), [(gpt2, "CausalLM"), (bert, "MaskedLM")])
def test_a_language_model_is_written_with_its_tokenizer(build, auto, tmp_path):
    tokenizer = word_tokenizer()
    model = build(vocab_size=len(tokenizer)).float()
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    onescan.convert(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(ValueError, match=r"which is a model of onescan; in Python, to_onescan\(\)"):
        onescan.convert(tmp_path / "ours")
    onescan.convert(tmp_path / "ours", tmp_path / "back", to="transformers")
    auto_class = getattr(transformers, f"AutoModelFor{auto}")
    back, info = auto_class.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    assert_same_weights(back, model)
    assert back.config.pad_token_id == tokenizer.pad_token_id
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert saved("the cat").input_ids == tokenizer("the cat").input_ids


def test_a_pipeline_is_written_as_a_transformer_of_diffusers(tmp_path):
    model = of_diffusers().float()
    onescan.convert(model, tmp_path / "pipeline")
    with pytest.raises(ValueError, match=r"which is a model of onescan; in Python, to_onescan\(\)"):
        onescan.convert(tmp_path / "pipeline")
    onescan.convert(tmp_path / "pipeline", tmp_path / "back", to="diffusers")
    assert_same_weights(diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "back"), model)


def test_bad_arguments_of_the_way_back_are_named(tmp_path):
    native = native_model("deit_tiny", IMAGES)
    with pytest.raises(ValueError, match="to 'timm' is unknown"):
        inspect.unwrap(onescan.convert)(native, to="timm")  # without the check of types
    with pytest.raises(ValueError, match="num_heads is 3 with to='transformers', expected None"):
        onescan.convert(native, to="transformers", num_heads=3)
    with pytest.raises(ValueError, match="model is a Linear, expected one of CausalLM, "):
        onescan.convert(torch.nn.Linear(2, 2), to="transformers")
    with pytest.raises(FileNotFoundError):
        onescan.convert(tmp_path / "nothing" / "here", to="transformers")
    with pytest.raises(ValueError, match="which is a run; to='transformers' or to='diff"):
        onescan.convert(onescan.zoo.path("digits_lightnet"))


def test_a_folder_of_another_library_is_named_as_such(tmp_path):
    of_transformers("ViT").save_pretrained(tmp_path / "vit")
    says = "holds ViTForImageClassification, expected one of .*; `onescan convert` reads models of"
    with pytest.raises(ValueError, match=says):
        onescan.convert(tmp_path / "vit", to="transformers")
