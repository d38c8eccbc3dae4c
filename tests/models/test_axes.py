"""Models, data and commands with one, two and three axes."""

from itertools import pairwise

import jaxtyping
import numpy as np
import pytest
import torch

import onescan
from onescan.cli import main
from onescan.configs import replace
from onescan.experiments.data import MovingDigitsConfig
from onescan.experiments.recipes import find_recipe
from onescan.experiments.recipes.infer import for_path, infer
from onescan.experiments.report.images import as_pictures
from onescan.integrations.diffusers import load_pretrained, to_diffusers
from onescan.integrations.export import export_program
from onescan.integrations.transformers import OnescanForImageClassification, to_transformers
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.image_classifier import ImageClassifierConfig

SIGNAL = {"image_size": (40,), "patch_size": (10,)}
VIDEO = {"image_size": (4, 8, 8), "patch_size": (2, 4, 4)}
SIZES = [SIGNAL, VIDEO, {"image_size": (2, 4, 4, 6), "patch_size": (1, 2, 2, 3)}]
over_sizes = pytest.mark.parametrize("sizes", [SIGNAL, VIDEO], ids=["signal", "video"])


@pytest.mark.parametrize("sizes", SIZES, ids=["signal", "video", "four axes"])
@pytest.mark.parametrize("name", ["lightnet_tiny", "lion_s_natural_tiny", "lightnet_dit_s_8"])
def test_presets_build_with_any_axes(name, sizes):
    model = onescan.build(name, **sizes, num_classes=3, width=48, depth=2)
    inputs = model.config.example_inputs()
    assert inputs[0].shape == (1, model.config.channels, *sizes["image_size"])
    output = model.eval()(*inputs)
    assert output.shape in {(1, 3), (1, 8, *sizes["image_size"])}


def test_one_number_stands_for_all_axes():
    assert onescan.preset("lightnet_tiny", image_size=32).image_size == (32, 32)
    config = onescan.preset("lightnet_tiny", image_size=(8, 32, 32), patch_size=8)
    assert config.patch_size == (8, 8, 8)


@pytest.mark.parametrize("config", [ImageClassifierConfig, DenoiserConfig])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image_size": (8, 8, 8), "patch_size": (2, 2)}, "has 2 axes, expected 3"),
        ({"image_size": (), "patch_size": ()}, r"image_size is \(\), expected one number per axis"),
        ({"image_size": (8, 0), "patch_size": (2, 2)}, r"image_size\[1\] is 0"),
        ({"image_size": (8,), "patch_size": (-2,)}, r"patch_size\[0\] is -2"),
    ],
)
def test_sizes_are_checked(config, sizes, message):
    with pytest.raises(ValueError, match=message):
        config(**sizes).build()


@pytest.mark.slow
def test_moving_digits():
    splits, again = (MovingDigitsConfig().build() for _ in range(2))
    assert torch.equal(torch.from_numpy(splits.train.x), torch.from_numpy(again.train.x))
    assert len(splits.train) + len(splits.test) == 4 * 1797
    assert splits.class_names[:4] == ("0 left", "0 right", "0 up", "0 down")
    assert not {p // 4 for p in splits.train.indices.tolist()} & {
        p // 4 for p in splits.test.indices.tolist()
    }
    for direction, (row, column) in enumerate([(0, -1), (0, 1), (-1, 0), (1, 0)]):
        video = torch.from_numpy(splits.train.x[direction])  # the first digit's videos
        assert video.shape == (8, 16, 16)
        for frame, after in pairwise(video):
            assert torch.equal(after, frame.roll((row, column), dims=(0, 1)))
            assert after.sum() == frame.sum() > 0
    other = MovingDigitsConfig(position_seed=1).build()
    assert not torch.equal(torch.from_numpy(splits.train.x), torch.from_numpy(other.train.x))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"frames": 1}, "frames is 1, expected 2"), ({"size": 14}, "size is 14, expected 15")],
)
def test_moving_digits_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        MovingDigitsConfig(**fields).build()


def small(**sizes):
    mixer = LightNetMixerConfig(num_heads=2, gate_rank=8)
    fields = {"channels": 1, "num_classes": 3, "width": 24, "depth": 1, "mixer": mixer, **sizes}
    return ImageClassifierConfig(**fields).build().eval()


def small_denoiser(**sizes):
    mixer = LightNetMixerConfig(num_heads=2, gate_rank=8)
    fields = {"channels": 1, "num_classes": 3, "width": 24, "depth": 1, "mixer": mixer, **sizes}
    return DenoiserConfig(**fields, learn_sigma=False).build().eval()


@over_sizes
def test_transformers_models_take_any_axes(sizes, tmp_path):
    native = small(**sizes)
    to_transformers(native).save_pretrained(tmp_path)
    loaded = OnescanForImageClassification.from_pretrained(tmp_path)
    assert loaded.config.to_onescan(ImageClassifierConfig) == native.config
    x = torch.randn(2, 1, *sizes["image_size"])
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixel_values=x).logits, native(x))


@pytest.mark.sampled
@over_sizes
def test_exported_programs_take_any_axes_and_sizes(sizes, tmp_path):
    model = small(**sizes)
    jaxtyping.config.update("jaxtyping_disable", True)  # sizes are symbols while tracing
    try:
        program = export_program(model).module()
        for factor in (1, 2):
            x = torch.randn(factor, 1, *(factor * side for side in sizes["image_size"]))
            torch.testing.assert_close(program(x), model(x), atol=1e-5, rtol=0)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@over_sizes
def test_denoisers_of_any_axes_sample_through_diffusers(sizes, tmp_path):
    pipe = to_diffusers(small_denoiser(**sizes))
    pipe.save_pretrained(tmp_path)
    options = {"class_labels": [0, 2], "num_inference_steps": 2, "output_type": "pt"}
    seeds = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    images = pipe(**options, generator=seeds).images
    assert images.shape == (2, 1, *sizes["image_size"])
    seeds = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    assert torch.equal(load_pretrained(tmp_path)(**options, generator=seeds).images, images)
    with pytest.raises(ValueError, match=f"'pil', but the model has {images.ndim - 2} ax"):
        pipe(class_labels=[0])
    with pytest.raises(ValueError, match="height is 8 and width is None, expected None for both"):
        pipe(class_labels=[0], output_type="pt", height=8)


@pytest.mark.sampled
@over_sizes
def test_commands_train_evaluate_and_load(sizes, tmp_path, monkeypatch, capsys):
    """From arrays in a file to a report, with sizes inferred from the arrays."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    y = np.arange(80) % 2
    x = generator.normal(size=(80, *sizes["image_size"])) + 2 * y.reshape(
        -1, *[1] * len(sizes["image_size"])
    )
    np.savez("data.npz", x=x.astype(np.float32), y=y)
    argv = ["train", "signal_classifier", "--data.path", "data.npz", "--out", "run"]
    argv += ["--model.depth", "1", "--training.epochs", "4", "--machine.device", "cpu"]
    argv += ["--data.axes", str(len(sizes["image_size"]))]  # 4 frames could be channels
    assert main(argv) == 0
    assert main(["evaluate", "run/seed-0", "--device", "cpu"]) == 0
    assert "accuracy  100.0%" in capsys.readouterr().out
    loaded = onescan.load("run/seed-0")
    assert loaded.model.config.image_size == sizes["image_size"]
    assert loaded.format.shape == sizes["image_size"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Along axis 0" in page


def test_recipe_keeps_given_axes(tmp_path):
    """Signals with more channels than an image has."""
    np.savez(tmp_path / "data.npz", x=np.ones((20, 30, 12)), y=np.arange(20) % 2)
    run = for_path(find_recipe("signal_classifier")(), str(tmp_path / "data.npz"))
    run, _ = infer(replace(run, {"data.axes": 1}), ["data.axes"])
    assert (run.model.image_size, run.model.channels) == ((30,), 12)


def test_signals_and_video_are_drawn_as_images():
    video = torch.rand(2, 1, 5, 4, 6)
    frames = as_pictures(video)  # 2 rows of 3 frames, each with a gap of 1 pixel
    assert frames.shape == (2, 1, 10, 21)
    assert torch.equal(frames[:, :, 5:9, 7:13], video[:, :, 4])
    rising = as_pictures(torch.linspace(0, 1, 500)[None, None])[0, 0]
    assert rising[-1, 0] == rising[0, -1] == 0 < rising[0, 0] == rising[-1, -1] == 1
    assert as_pictures(torch.ones(1, 2, 1)).shape == (1, 1, *rising.shape)
    assert torch.equal(as_pictures(video[:, :, 0]), video[:, :, 0])
