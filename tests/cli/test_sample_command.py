"""onescan sample: a grid, an array or files; each image depends only on its seed and label."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vae import tiny_vae
from torch import nn

from onescan import __version__, configs
from onescan.checkpoint.weights import BEST, WEIGHTS, save_weights, whole_weights
from onescan.cli import main
from onescan.experiments.data import DigitsConfig
from onescan.experiments.data.image_grid import GAP, image_bytes, image_grid
from onescan.experiments.tasks.image_generation import ImageGenerationConfig
from onescan.experiments.training import RunConfig, sampling
from onescan.experiments.training.folder import CONFIG, Manifest, write_json
from onescan.experiments.training.sampling import (
    SampleConfig,
    load_pipeline,
    sample_seed,
    write_samples,
)
from onescan.inputs import ImageFormat
from onescan.inputs.latents import LatentFormat
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig

NAMES = ("zero", "1", "great white shark, a/b", "0")
GRAY = ImageFormat(channels=1, height=4, width=4, mean=(0.5,), std=(0.5,))
SMALL = DenoiserConfig(
    image_size=(4, 4),
    channels=1,
    num_classes=4,
    width=12,
    depth=1,
    mixer=LightNetMixerConfig(num_heads=2),
)


def save_run(folder, form=GRAY, names=NAMES, task=None, **changes):
    """A run's folder as training leaves it, with weights that were never trained."""
    model = replace(SMALL, **changes).build().eval()
    for parameter in model.unpatchify.parameters():
        nn.init.normal_(parameter, std=0.2)
    task = ImageGenerationConfig() if task is None else task
    manifest = Manifest(
        onescan=__version__,
        run=RunConfig(name="tiny", model=model.config, data=DigitsConfig(), task=task),
        format=form,
        class_names=names,
        examples=1,
        environments=(),
    )
    folder.mkdir()
    write_json(folder / CONFIG, configs.to_dict(manifest))
    for name in (WEIGHTS, BEST):
        save_weights(folder / name, whole_weights(model), {})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    return save_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def sample(run, tmp_path, capsys):
    def command(*argv, out, run=run, code=0):
        argv = ["sample", str(run), "--steps", "4", "--device", "cpu", *map(str, argv)]
        assert main([*argv, "--out", str(tmp_path / out)]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return command


def array(path):
    with np.load(path, allow_pickle=False) as file:
        return file["arr_0"], file["arr_1"]


def is_close(a, b):
    """Whether images are equal up to rounding to bytes."""
    return a.shape == b.shape and np.abs(a.astype(int) - b.astype(int)).max() <= 1


def test_an_array_holds_bytes_and_labels(sample, tmp_path):
    printed = sample("--labels", 2, "zero", "--num-images", 3, out="a.npz")
    assert printed == f"{tmp_path / 'a.npz'}: 6 images\n"
    images, labels = array(tmp_path / "a.npz")
    assert images.dtype == np.uint8
    assert images.shape == (6, 4, 4, 1)
    assert labels.tolist() == [2, 0] * 3
    assert images.std(axis=(1, 2, 3)).min() > 0


def test_images_do_not_depend_on_batch_size_and_number(sample, tmp_path):
    sample("--num-images", 6, "--guidance-scale", 2, out="whole.npz")
    sample("--num-images", 6, "--guidance-scale", 2, "--batch-size", 4, out="parts.npz")
    sample("--num-images", 3, "--guidance-scale", 2, out="fewer.npz")
    sample("--num-images", 6, "--guidance-scale", 2, out="again.npz")
    sample("--num-images", 6, "--guidance-scale", 2, "--seed", 1, out="others.npz")
    whole, labels = array(tmp_path / "whole.npz")
    assert labels.tolist() == [0, 1, 2, 3, 0, 1]
    assert is_close(array(tmp_path / "parts.npz")[0], whole)
    assert is_close(array(tmp_path / "fewer.npz")[0], whole[:3])
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not is_close(array(tmp_path / "others.npz")[0], whole)


def test_seeds_of_images_differ():
    seeds = [sample_seed(seed, i) for seed in (0, 1) for i in range(100)]
    assert len(set(seeds)) == 200


def test_runs_and_saved_pipelines_generate_the_same(run, sample, tmp_path):
    load_pipeline(run).save_pretrained(tmp_path / "pipe")
    sample("--num-images", 2, out="run.npz")
    sample("--num-images", 2, out="best.npz", run=run / BEST)
    sample("--num-images", 2, out="pipe.npz", run=tmp_path / "pipe")
    whole = (tmp_path / "run.npz").read_bytes()
    assert (tmp_path / "best.npz").read_bytes() == whole
    assert (tmp_path / "pipe.npz").read_bytes() == whole


@pytest.mark.slow
def test_a_sampler_is_chosen_by_name(run, sample, tmp_path):
    load_pipeline(run).save_pretrained(tmp_path / "pipe")
    images = []
    for name in ("ddim", "ddpm", "dpm"):
        sample("--num-images", 2, "--sampler", name, out=f"{name}.npz")
        sample("--num-images", 2, "--sampler", name, out="pipe.npz", run=tmp_path / "pipe")
        images.append(array(tmp_path / f"{name}.npz")[0])
        assert np.array_equal(array(tmp_path / "pipe.npz")[0], images[-1])
    assert not is_close(images[0], images[1])
    assert not is_close(images[1], images[2])
    sample("--num-images", 2, out="default.npz")
    assert np.array_equal(array(tmp_path / "default.npz")[0], images[0])


def test_pipelines_use_the_sampler_and_noise_of_the_run(tmp_path):
    noise, sampler = NoiseConfig(prediction="v", betas="cosine"), SamplerConfig(sampler="ddpm")
    task = ImageGenerationConfig(noise=noise, sampler=sampler)
    pipe = load_pipeline(save_run(tmp_path / "run", task=task))
    assert pipe.noise == noise
    assert type(pipe.scheduler).__name__ == "DDPMScheduler"
    assert pipe.scheduler.config.clip_sample_range == 1
    assert not pipe.transformer.training
    assert pipe.names == dict(enumerate(NAMES))
    flow = ImageGenerationConfig(noise=NoiseConfig(prediction="flow"))
    pipe = load_pipeline(save_run(tmp_path / "flow", task=flow))
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    with pytest.raises(ValueError, match="sampler is 'dpm'"):
        load_pipeline(tmp_path / "flow", sampler="dpm")


@pytest.mark.slow
def test_a_grid_contains_the_same_images(sample, tmp_path):
    sample("--num-images", 2, "--labels", 0, 1, 3, "--size", 4, 6, out="a.png")
    sample("--num-images", 2, "--labels", 0, 1, 3, "--size", 4, 6, out="a.npz")
    images = torch.from_numpy(array(tmp_path / "a.npz")[0])
    assert images.shape == (6, 4, 6, 1)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.mode == "L"
        pixels = np.array(picture)
    tall, wide = 4 * 11 + GAP, 6 * 11 + GAP  # scaled up so that 6 pixels become 64 or more
    assert pixels.shape == (2 * tall - GAP, 3 * wide - GAP)
    for i, image in enumerate(images):
        top, left = i // 3 * tall, i % 3 * wide
        shown = pixels[top : top + tall - GAP : 11, left : left + wide - GAP : 11]
        assert np.array_equal(shown, image[..., 0])
    assert (pixels[tall - GAP : tall] == 255).all()


def test_a_folder_contains_one_file_per_image(sample, tmp_path):
    sample("--num-images", 2, "--labels", "zero", 2, "--seed", 7, out="many")
    sample("--num-images", 2, "--labels", "zero", 2, "--seed", 7, out="a.npz")
    names = ["great_white_shark_a_b-seed-7-00001.png", "great_white_shark_a_b-seed-7-00003.png"]
    names += ["zero-seed-7-00000.png", "zero-seed-7-00002.png"]
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == names
    for name in names:
        with Image.open(tmp_path / "many" / name) as image:
            shown = np.array(image)
        number = int(name[-9:-4])
        assert np.array_equal(shown, array(tmp_path / "a.npz")[0][number, ..., 0])


def test_a_label_is_a_name_before_it_is_a_number(sample, tmp_path):
    sample("--num-images", 1, "--labels", "1", "0", "2", out="a.npz")
    assert array(tmp_path / "a.npz")[1].tolist() == [1, 3, 2]


def test_models_without_classes_and_of_color_images(sample, tmp_path):
    color = replace(GRAY, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    run = save_run(tmp_path / "run", color, (), channels=3, num_classes=0)
    sample("--num-images", 5, out="a.npz", run=run)
    with np.load(tmp_path / "a.npz") as file:
        assert file.files == ["arr_0"]
        assert file["arr_0"].shape == (5, 4, 4, 3)
    sample("--num-images", 2, out="many", run=run)
    assert (tmp_path / "many" / "image-seed-0-00001.png").exists()
    assert "labels [1]" in sample("--labels", 1, out="b.npz", run=run, code=2)


def test_latents_are_decoded_by_the_vae_of_the_run(sample, tmp_path):
    tiny_vae().save_pretrained(tmp_path / "vae")
    form = LatentFormat(channels=4, height=4, width=4, scale=0.5, vae=str(tmp_path / "vae"))
    run = save_run(tmp_path / "run", form, channels=4)
    sample("--num-images", 2, out="a.npz", run=run)
    assert array(tmp_path / "a.npz")[0].shape == (2, 8, 8, 3)
    (tmp_path / "vae").rename(tmp_path / "moved")
    assert "there is no such folder" in sample(out="b.npz", run=run, code=2)
    sample("--num-images", 2, "--vae", tmp_path / "moved", out="b.npz", run=run)
    assert (tmp_path / "b.npz").read_bytes() == (tmp_path / "a.npz").read_bytes()
    other = save_run(tmp_path / "other", replace(form, scale=0.25), channels=4)
    assert "(0.5, 0.0)" in sample("--vae", tmp_path / "moved", out="c.npz", run=other, code=2)


@pytest.mark.parametrize(
    ("argv", "out", "message"),
    [
        ([], "a.jpg", "a.jpg"),
        ([], "file/x.png", "file"),
        (["--labels", "zer"], "a.png", "label 'zer' is unknown (perhaps you meant 'zero')"),
        (["--labels", "4"], "a.png", "expected 0 to 3"),
        (["--num-images", "0"], "a.png", "--num-images is 0"),
        (["--batch-size", "0"], "a.png", "--batch-size is 0"),
        (["--seed", "-1"], "a.png", "--seed is -1"),
        (["--steps", "0"], "a.png", "--steps is 0, expected 1 to 1000"),
        (["--steps", "30"], "a.png", "expected 25 or 40"),
        (["--guidance-scale", "-1"], "a.npz", "--guidance-scale is -1.0"),
        (["--guidance-scale", "nan"], "a.png", "--guidance-scale is nan"),
        (["--sampler", "dmp"], "many", "sampler 'dmp' is unknown (perhaps you meant"),
        (["--sampler", "euler"], "many", "--sampler is 'euler'"),
        (["--size", "0", "8"], "a.png", "--size is (0, 8)"),
    ],
)
def test_mistakes_are_reported_before_writing(sample, tmp_path, argv, out, message):
    (tmp_path / "file").write_text("mine")
    assert message in sample(*argv, out=out, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_existing_paths_of_the_other_kind_are_rejected(run, sample, tmp_path, capsys):
    (tmp_path / "a.png").mkdir()
    (tmp_path / "file").write_text("")
    assert "which is a folder, expected a file" in sample(out="a.png", code=2)
    assert "expected a folder" in sample(out="file", code=2)
    assert main(["sample", str(run), "--out", ""]) == 2
    assert "--out is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "model_index.json is damaged"),
        (json.dumps({"_class_name": "DiTPipeline"}), "DiTPipeline"),
        (
            json.dumps(
                {
                    "_class_name": ["modeling_onescan", "DenoiserPipeline"],
                    "transformer": ["os", "DenoiserModel"],
                }
            ),
            "transformer is ['os', 'DenoiserModel'], expected",
        ),
    ],
    ids=["damaged", "another", "module"],
)
def test_invalid_pipelines_are_rejected(sample, tmp_path, index, message):
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "model_index.json").write_text(index)
    assert message in sample(out="a.png", run=tmp_path / "pipe", code=2)
    assert "no run at" in sample(out="a.png", run=tmp_path / "nowhere", code=2)


def test_a_failed_write_keeps_the_older_file(run, tmp_path, monkeypatch):
    out = tmp_path / "a.npz"
    out.write_text("older")

    def fail(path, arrays):
        path.write_text("partial")
        raise OSError("no space left")

    monkeypatch.setattr(sampling, "_write_arrays", fail)
    pipe = load_pipeline(run)
    with pytest.raises(OSError, match="no space left"):
        write_samples(pipe, SampleConfig(num_images=1, steps=2), out)
    assert out.read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_progress_is_shown_on_stderr(run, tmp_path, capsys):
    config = SampleConfig(num_images=3, steps=2, batch_size=2)
    write_samples(load_pipeline(run), config, tmp_path / "a.png", progress=True)
    assert "4/4" in capsys.readouterr().err
    write_samples(load_pipeline(run), config, tmp_path / "a.png")
    assert capsys.readouterr() == ("", "")


def test_a_grid_ends_in_white_and_keeps_the_size_of_large_images():
    pixels = torch.zeros(3, 3, 64, 80)
    picture = np.array(image_grid(pixels, columns=2))
    assert picture.shape == (64 * 2 + GAP, 80 * 2 + GAP, 3)
    assert not picture[:64, :80].any()
    assert (picture[64 + GAP :, 80 + GAP :] == 255).all()
    assert np.array(image_grid(pixels, columns=9)).shape == (64, 3 * 80 + 2 * GAP, 3)
    assert image_bytes(torch.tensor([[[[-1.0, 2.0]]]])).flatten().tolist() == [0, 255]
    with pytest.raises(ValueError, match="columns is 0 for 3 images"):
        image_grid(pixels, columns=0)
    with pytest.raises(ValueError, match="images have 4 channels, expected 1 or 3"):
        image_grid(torch.zeros(1, 4, 2, 2), columns=1)


def test_steps_and_guidance_scale_default_to_the_runs(tmp_path):
    own = SamplerConfig(steps=4, guidance_scale=2.0)
    run = save_run(tmp_path / "run", task=ImageGenerationConfig(sampler=own))
    images = []
    for argv in ([], ["--guidance-scale", "2", "--steps", "4"], ["--guidance-scale", "1"]):
        out = tmp_path / "a.npz"
        shared = ["--num-images", "2", "--device", "cpu", "--out", str(out)]
        assert main(["sample", str(run), *shared, *argv]) == 0
        images.append(array(out)[0])
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])
