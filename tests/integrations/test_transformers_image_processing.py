"""The image processor of transformers: the scores of `onescan predict`, saved and loaded."""

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from test_transformers_images import PRESETS, SMALL, built
from tiny_language_models import CAUSAL, causal
from torch.testing import assert_close
from transformers import pipeline

import onescan
from onescan.inputs.images import ImageFormat, read_image
from onescan.integrations.transformers import OnescanImageProcessor, to_transformers

FORMATS = {
    "whole": {"channels": 3, "height": 16, "width": 16},
    "crop": {"channels": 3, "height": 16, "width": 16, "crop": 1.0},
    "small crop, wide": {"channels": 3, "height": 16, "width": 32, "crop": 0.875},
    "gray, tall": {"channels": 1, "height": 24, "width": 12, "crop": 1.0},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", FORMATS.values(), ids=FORMATS)
def test_a_pipeline_classifies_as_predict_does(fields, tmp_path, monkeypatch):
    mean, std = (0.4, 0.5, 0.6)[: fields["channels"]], (0.2, 0.3, 0.4)[: fields["channels"]]
    images = ImageFormat(**fields, mean=mean, std=std)
    size = (images.height, images.width)
    native = onescan.build(
        "lightnet_tiny", **{**SMALL, "image_size": size}, channels=images.channels
    )
    native.eval()
    to_transformers(native, image_format=images).save_pretrained(tmp_path / "model")
    noise = np.random.default_rng(0).integers(0, 256, (11, 9, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((90, 110))
    picture.save(tmp_path / "picture.png")
    picture.getexif()[ExifTags.Base.Orientation] = 6
    picture.save(tmp_path / "large.jpg", exif=picture.getexif())
    monkeypatch.setattr("builtins.input", pytest.fail)  # asks whether to trust code
    classify = pipeline("image-classification", str(tmp_path / "model"))
    assert classify.image_processor.to_onescan() == images
    for name, tolerance in (("picture.png", 1e-5), ("large.jpg", 0.02)):
        with torch.no_grad():
            want = native(read_image(tmp_path / name, images)[None])[0].softmax(0).tolist()
        got = {guess["label"]: guess["score"] for guess in classify(str(tmp_path / name))}
        assert got == pytest.approx(
            {f"LABEL_{i}": score for i, score in enumerate(want)}, abs=tolerance
        )


def test_the_image_processor_takes_arrays_and_lists():
    processor = OnescanImageProcessor(size={"height": 8, "width": 8}, crop_pct=1.0)
    pixels = torch.randint(256, (20, 30, 3), dtype=torch.uint8)
    same = (
        Image.fromarray(pixels.numpy()),
        pixels.numpy(),
        pixels.permute(2, 0, 1),
        pixels.permute(2, 0, 1) / 255,
    )
    want = processor(same[0]).pixel_values
    assert want.shape == (1, 3, 8, 8)
    for image in same:
        # floats are not rounded to bytes when they are resized
        limit = (
            {"rtol": 0, "atol": 2 / 255} if getattr(image, "dtype", None) == torch.float32 else {}
        )
        assert_close(processor([image, image]).pixel_values, want.repeat(2, 1, 1, 1), **limit)
    assert isinstance(processor(same[0], return_tensors="np").pixel_values, np.ndarray)
    with pytest.raises(ValueError, match="crop is 2"):
        OnescanImageProcessor(crop_pct=2.0)


def test_image_formats_are_for_image_models():
    images = ImageFormat(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
    with pytest.raises(ValueError, match="image_format is a str, expected an ImageFormat"):
        to_transformers(built(*PRESETS["lightnet"]), image_format="vit")
    with pytest.raises(ValueError, match="which reads no images"):
        to_transformers(causal(CAUSAL["lightnet"]), image_format=images)


def same_pixels(processor, image):
    return processor(image).pixel_values[0]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_type_of_an_array_determines_its_range(channels):
    constants = {"image_mean": (0.0,) * channels, "image_std": (1.0,) * channels}
    processor = OnescanImageProcessor(size={"height": 4, "width": 4}, **constants)
    for value in (0, 1):
        want = torch.full((channels, 4, 4), float(value))
        for image in (
            *(want.to(kind) for kind in (torch.float32, torch.float64, torch.float16)),
            *(want.bfloat16(), want.bool(), want.byte() * 255),
            (want * 65535).to(torch.uint16),
            want.numpy().astype(">f4"),
            want.numpy().astype(bool).transpose(1, 2, 0),
            want.clone().requires_grad_(),
        ):
            assert_close(same_pixels(processor, image), want)
    dark = torch.ones(channels, 4, 4, dtype=torch.uint8)
    assert_close(same_pixels(processor, dark), dark / 255)
    assert_close(same_pixels(processor, torch.full((channels, 4, 4), 0.999)).mean().item(), 0.999)
    for kind in (torch.int64, torch.int32, torch.int8):
        with pytest.raises(ValueError, match=rf"pixels have type {kind}, expected uint8"):
            processor(dark.to(kind))
    for floats in (dark * 255.0, dark * float("nan"), -1.0 * dark):
        with pytest.raises(ValueError, match=r"pixels are floats .* expected floats from 0 to 1"):
            processor(floats)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "1"])
def test_constants_of_the_processor_are_finite(bad):
    for fields in ({"image_mean": [bad]}, {"image_std": [bad]}):
        with pytest.raises((ValueError, TypeError)):
            OnescanImageProcessor(**{"image_mean": [0.0], "image_std": [1.0], **fields})


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.uint16])
def test_more_than_bytes_are_not_rounded_to_bytes(kind):
    processor = OnescanImageProcessor(
        size={"height": 2, "width": 3}, image_mean=(0.5,) * 3, image_std=(0.25,) * 3
    )
    levels = torch.tensor([1e-3, 0.4321, 0.9993], dtype=torch.float64)
    stored = (levels * 65535).round().to(kind) if kind == torch.uint16 else levels.to(kind)
    exact = stored.double() / 65535 if kind == torch.uint16 else stored.double()
    pixels = processor(stored[:, None, None].expand(3, 4, 6)).pixel_values[0]
    expected = ((exact - 0.5) / 0.25)[:, None, None].expand(3, 2, 3)
    torch.testing.assert_close(pixels, expected.float(), rtol=1e-5, atol=1e-5)


def test_floats_are_cropped_and_turned_gray_as_images_are():
    processor = OnescanImageProcessor(
        size={"height": 5, "width": 4}, image_mean=(0.0,), image_std=(1.0,), crop_pct=0.8
    )
    stored = torch.randint(256, (3, 12, 9), dtype=torch.uint8)
    pixels, expected = (processor(x).pixel_values for x in (stored / 255, stored))
    assert (pixels - expected).abs().max() < 1.5 / 255


@pytest.mark.parametrize("step", ["do_resize", "do_rescale", "do_normalize"])
def test_no_step_of_the_processor_can_be_turned_off(step):
    with pytest.raises(ValueError, match=f"{step} is False, expected True"):
        OnescanImageProcessor(**{step: False})
    assert OnescanImageProcessor(**{step: True}).do_normalize


def test_the_processor_refuses_images_without_pixels():
    processor = OnescanImageProcessor(size={"height": 2, "width": 2})
    for image in (torch.zeros(3, 0, 4), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(ValueError, match="expected no empty axis"):
            processor(image)
    with pytest.raises(ValueError, match="images is empty"):
        processor([])
    with pytest.raises(ValueError, match="expected the keys 'height' and 'width'"):
        OnescanImageProcessor(size={"shortest_edge": 2})


def test_steps_that_cannot_be_changed_are_named():
    OnescanImageProcessor(resample=3, rescale_factor=1 / 255)
    for name, value in (("resample", 2), ("rescale_factor", 1 / 127.5)):
        with pytest.raises(ValueError, match=f"{name} is .*it cannot be changed"):
            OnescanImageProcessor(**{name: value})
