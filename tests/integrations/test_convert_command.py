"""onescan.convert and `onescan convert`: the folders that they write, and what reads them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from test_convert_denoisers import inputs, of_diffusers
from test_convert_text import bert, gpt2
from test_convert_vision import of_transformers, timm_weights
from tiny_tokenizers import word_tokenizer

import onescan
from onescan.cli import main
from onescan.experiments.training.sampling import load_pipeline
from onescan.inference.loading import load_language_model


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_an_image_classifier_is_written_as_a_run(tmp_path, capsys):
    model = of_transformers("ViT", id2label={i: f"class {i}" for i in range(5)}).float()
    source, out = tmp_path / "vit", tmp_path / "converted"
    model.save_pretrained(source)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"shortest_edge": 32}}
    settings["do_center_crop"] = True
    (source / "preprocessor_config.json").write_text(json.dumps(settings))
    assert main(["convert", str(source), "--out", str(out)]) == 0
    assert "converted: ImageClassifier with" in capsys.readouterr().out
    loaded = onescan.load(out)
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), model(images).logits, rtol=1e-5, atol=1e-5)
    assert loaded.format.mean == (0.5,) * 3
    assert loaded.format.crop == 24 / 32
    Image.fromarray(np.zeros((40, 40, 3), dtype=np.uint8)).save(tmp_path / "black.png")
    assert main(["predict", str(out), str(tmp_path / "black.png")]) == 0
    assert "class " in capsys.readouterr().out


def test_folders_of_timm_state_their_pixels_and_classes(tmp_path):
    from safetensors.torch import save_file

    source = tmp_path / "timm"
    source.mkdir()
    save_file(timm_weights(), source / "model.safetensors")
    config = {
        "architecture": "vit_tiny_patch16_224", "label_names": list("abcde"),
        "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9},
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    onescan.convert(source, tmp_path / "out", num_heads=3)
    loaded = onescan.load(tmp_path / "out")
    assert loaded.class_names == tuple("abcde")
    assert (loaded.format.std, loaded.format.crop) == ((0.5,) * 3, 0.9)


@pytest.mark.parametrize("build", [gpt2, bert])
def test_a_language_model_is_written_for_transformers(build, tmp_path, capsys):
    tokenizer = word_tokenizer()
    model = build(vocab_size=len(tokenizer)).float()
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    capsys.readouterr()
    onescan.convert(tmp_path / "source", tmp_path / "out")
    assert "Writing model shards" not in capsys.readouterr().err
    native, saved = load_language_model(str(tmp_path / "out"))
    ids = torch.tensor([saved.encode("the cat sat on a mat")])
    with torch.no_grad():
        scores = native(ids)
        scores = scores[0] if isinstance(scores, tuple) else scores
        torch.testing.assert_close(scores, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_denoiser_is_written_as_a_pipeline(tmp_path):
    model = of_diffusers().float()
    native = onescan.convert(model, tmp_path / "out")
    pipeline = load_pipeline(tmp_path / "out")
    noisy, timesteps, labels = inputs()
    with torch.no_grad():
        expected = native(noisy.float(), timesteps, labels)
        actual = pipeline.transformer(noisy.float(), timesteps, labels).sample
    torch.testing.assert_close(actual, expected)


def test_an_existing_folder_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="which is not empty, expected a new folder"):
        onescan.convert(tmp_path, tmp_path)
    assert main(["convert", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]) == 2
    assert "there is no file or folder" in capsys.readouterr().err


def test_a_number_of_heads_that_contradicts_the_source_is_refused(tmp_path):
    of_transformers("ViT").save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="num_heads is 2, but the source has 3 heads"):
        onescan.convert(tmp_path / "vit", num_heads=2)
    assert onescan.convert(tmp_path / "vit", num_heads=3).config.mixer.num_heads == 3


def test_onnx_is_written_in_python(capsys):
    for flags in (["--to", "onnx"], ["--to=onnx"]):
        assert main(["convert", "zoo/digits_lightnet", *flags, "--out", "a"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("onescan: error: --to is 'onnx', expected")
        assert "export_onnx of onescan.integrations.export writes ONNX files" in error
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["convert", "--to", "onnx", "--help"])
    assert "Library to convert to" in capsys.readouterr().out


def test_constants_of_imagenet_are_noted(tmp_path, caplog):
    onescan.convert(of_transformers("ViT"), tmp_path / "a")
    (note,) = caplog.messages
    assert note.startswith("note: the source does not state the mean and standard deviation of its")


@pytest.mark.parametrize(
    ("settings", "mean", "std"),
    [
        ({"do_normalize": False}, 0.0, 1.0),
        ({"do_normalize": False, "do_rescale": False}, 0.0, 1 / 255),
        ({"image_mean": [127.5] * 3, "image_std": [51] * 3, "do_rescale": False}, 0.5, 0.2),
        ({"image_mean": [1] * 3, "image_std": [1] * 3, "rescale_factor": 2 / 255}, 0.5, 0.5),
    ],
)
def test_the_steps_of_an_image_processor_are_kept(settings, mean, std, tmp_path, caplog):
    of_transformers("ViT").save_pretrained(tmp_path / "vit")
    caplog.clear()
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    onescan.convert(tmp_path / "vit", tmp_path / "run")
    assert not caplog.messages
    form = onescan.load(tmp_path / "run").format
    assert (form.mean, form.std) == (pytest.approx((mean,) * 3), pytest.approx((std,) * 3))


def test_other_interpolation_is_noted(tmp_path, caplog):
    of_transformers("ViT").save_pretrained(tmp_path / "vit")
    caplog.clear()
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    onescan.convert(tmp_path / "vit", tmp_path / "run")
    (note,) = caplog.messages
    assert note.startswith("note: the source resizes images with bilinear interpolation")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"is not valid JSON"),
        ("[]", r"is not a JSON object"),
        ('{"image_mean": null, "image_std": null}', r"has invalid settings for images"),
        ('{"image_mean": "0.5", "image_std": [1]}', r"has invalid settings for images"),
        ('{"rescale_factor": "1"}', r"has invalid settings for images"),
        ('{"rescale_factor": 0}', r"has invalid settings for images"),
        ('{"resample": 9}', r"has invalid settings for images: 9 is not a valid Resampling"),
        ('{"do_center_crop": true, "size": "32"}', r"has invalid settings for images"),
        ('{"do_center_crop": true, "size": {}}', r"has invalid settings for images"),
        ('{"do_center_crop": true, "size": 0}', r"has invalid settings for images"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_damaged_image_processor_is_named(content, message, tmp_path):
    of_transformers("ViT").save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"vit/preprocessor_config\.json {message}"):
        onescan.convert(tmp_path / "vit", tmp_path / "run")


def test_a_damaged_pretrained_cfg_is_named(tmp_path):
    from safetensors.torch import save_file

    save_file(timm_weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {"mean": 0.5}}')
    with pytest.raises(ValueError, match=r"config\.json has invalid settings for images"):
        onescan.convert(tmp_path, tmp_path / "out", num_heads=3)


def test_grayscale_images_need_the_constants_of_their_pixels(tmp_path, caplog):
    of_transformers("ViT", num_channels=1).save_pretrained(tmp_path / "gray")
    with pytest.raises(
        ValueError, match=r"preprocessor_config\.json .* 1 channel, but no image_mean"
    ):
        onescan.convert(tmp_path / "gray", tmp_path / "run")
    constants = {"image_mean": [0.5], "image_std": [0.25]}
    caplog.clear()
    (tmp_path / "gray" / "preprocessor_config.json").write_text(json.dumps(constants))
    onescan.convert(tmp_path / "gray", tmp_path / "run")
    assert not caplog.messages
    form = onescan.load(tmp_path / "run").format
    assert (form.channels, form.mean, form.std) == (1, (0.5,), (0.25,))
