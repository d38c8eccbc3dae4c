"""onescan sample: a grid, files or an array, each image by its seed and label alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from test_diffusers import tiny_vae
from torch import nn

from onescan import __version__, configs
from onescan.checkpoint.weights import BEST, WEIGHTS, save_weights, whole_weights
from onescan.cli import main
from onescan.data import DigitsConfig, ImageFormat
from onescan.data.image_grid import GAP, image_bytes, image_grid
from onescan.data.latents import LatentFormat
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig
from onescan.tasks.image_generation import ImageGenerationConfig
from onescan.training import RunConfig, sampling
from onescan.training.folder import CONFIG, Manifest, write_json
from onescan.training.sampling import SampleConfig, load_pipeline, sample_seed, write_samples

NAMES = ("zero", "1", "great white shark, a/b", "0")
GREY = ImageFormat(channels=1, height=4, width=4, mean=(0.5,), std=(0.5,))
SMALL = DenoiserConfig(
    image_size=(4, 4),
    channels=1,
    num_classes=4,
    width=12,
    depth=1,
    mixer=LightNetMixerConfig(num_heads=2),
)


def save_run(folder, form=GREY, names=NAMES, task=None, **changes):
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
    def command(*words, out, run=run, code=0):
        words = ["sample", str(run), "--steps", "4", "--device", "cpu", *map(str, words)]
        assert main([*words, "--out", str(tmp_path / out)]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return command


def array(path):
    with np.load(path, allow_pickle=False) as file:
        return file["arr_0"], file["arr_1"]


def near(a, b):
    """Equal but for the rounding of a pixel that lies between two bytes."""
    return a.shape == b.shape and np.abs(a.astype(int) - b.astype(int)).max() <= 1


def test_an_array_holds_bytes_and_labels(sample, tmp_path):
    said = sample("--labels", 2, "zero", "--num-images", 3, out="a.npz")
    assert said == f"{tmp_path / 'a.npz'}: 6 images\n"
    images, labels = array(tmp_path / "a.npz")
    assert images.dtype == np.uint8
    assert images.shape == (6, 4, 4, 1)
    assert labels.tolist() == [2, 0] * 3
    assert images.std(axis=(1, 2, 3)).min() > 0


def test_an_image_is_the_same_in_any_batch_and_number(sample, tmp_path):
    sample("--num-images", 6, "--guidance-scale", 2, out="whole.npz")
    sample("--num-images", 6, "--guidance-scale", 2, "--batch-size", 4, out="parts.npz")
    sample("--num-images", 3, "--guidance-scale", 2, out="fewer.npz")
    sample("--num-images", 6, "--guidance-scale", 2, out="again.npz")
    sample("--num-images", 6, "--guidance-scale", 2, "--seed", 1, out="others.npz")
    whole, labels = array(tmp_path / "whole.npz")
    assert labels.tolist() == [0, 1, 2, 3, 0, 1]
    assert near(array(tmp_path / "parts.npz")[0], whole)
    assert near(array(tmp_path / "fewer.npz")[0], whole[:3])
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert not near(array(tmp_path / "others.npz")[0], whole)


def test_seeds_of_images_differ():
    seeds = [sample_seed(seed, i) for seed in (0, 1) for i in range(100)]
    assert len(set(seeds)) == 200


def test_the_run_and_its_best_weights_and_saved_pipelines_make_the_same(run, sample, tmp_path):
    load_pipeline(run).save_pretrained(tmp_path / "pipe")
    sample("--num-images", 2, out="run.npz")
    sample("--num-images", 2, out="best.npz", run=run / BEST)
    sample("--num-images", 2, out="pipe.npz", run=tmp_path / "pipe")
    whole = (tmp_path / "run.npz").read_bytes()
    assert (tmp_path / "best.npz").read_bytes() == whole
    assert (tmp_path / "pipe.npz").read_bytes() == whole


def test_other_samplers_make_others(run, sample, tmp_path):
    load_pipeline(run).save_pretrained(tmp_path / "pipe")
    made = []
    for name in ("ddim", "ddpm", "dpm"):
        sample("--num-images", 2, "--sampler", name, out=f"{name}.npz")
        sample("--num-images", 2, "--sampler", name, out="pipe.npz", run=tmp_path / "pipe")
        made.append(array(tmp_path / f"{name}.npz")[0])
        assert np.array_equal(array(tmp_path / "pipe.npz")[0], made[-1])
    assert not near(made[0], made[1])
    assert not near(made[1], made[2])
    sample("--num-images", 2, out="usual.npz")
    assert np.array_equal(array(tmp_path / "usual.npz")[0], made[0])


def test_a_run_s_own_sampler_and_noise_are_used(tmp_path):
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
    with pytest.raises(ValueError, match="sampler is 'dpm', but the model was trained with noise"):
        load_pipeline(tmp_path / "flow", sampler="dpm")


def test_a_grid_is_one_picture_of_the_same_images(sample, tmp_path):
    sample("--num-images", 2, "--labels", 0, 1, 3, "--size", 4, 6, out="a.png")
    sample("--num-images", 2, "--labels", 0, 1, 3, "--size", 4, 6, out="a.npz")
    images = torch.from_numpy(array(tmp_path / "a.npz")[0])
    assert images.shape == (6, 4, 6, 1)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.mode == "L"
        pixels = np.array(picture)
    tall, wide = 4 * 11 + GAP, 6 * 11 + GAP  # scaled up so that 6 pixels become 64 or more
    assert pixels.shape == (2 * tall - GAP, 3 * wide - GAP)
    for place, image in enumerate(images):
        top, left = place // 3 * tall, place % 3 * wide
        shown = pixels[top : top + tall - GAP : 11, left : left + wide - GAP : 11]
        assert np.array_equal(shown, image[..., 0])
    assert (pixels[tall - GAP : tall] == 255).all()


def test_a_folder_holds_a_file_each(sample, tmp_path):
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


def test_a_name_goes_before_a_number(sample, tmp_path):
    sample("--num-images", 1, "--labels", "1", "0", "2", out="a.npz")
    assert array(tmp_path / "a.npz")[1].tolist() == [1, 3, 2]


def test_models_without_classes_and_colours(sample, tmp_path):
    colour = replace(GREY, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    run = save_run(tmp_path / "run", colour, (), channels=3, num_classes=0)
    sample("--num-images", 5, out="a.npz", run=run)
    with np.load(tmp_path / "a.npz") as file:
        assert file.files == ["arr_0"]
        assert file["arr_0"].shape == (5, 4, 4, 3)
    sample("--num-images", 2, out="many", run=run)
    assert (tmp_path / "many" / "image-seed-0-00001.png").exists()
    says = sample("--labels", 1, out="b.npz", run=run, code=2)
    assert "labels [1] are given, but the model has no classes" in says


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
    says = sample("--vae", tmp_path / "moved", out="c.npz", run=other, code=2)
    assert "which scales and shifts latents by (0.5, 0.0), but" in says


@pytest.mark.parametrize(
    ("words", "out", "says"),
    [
        ([], "a.jpg", "expected a name that ends in .png for one grid or in .npz"),
        (["--labels", "zer"], "a.png", "label 'zer' is unknown (perhaps you meant 'zero')"),
        (["--labels", "7"], "a.png", "expected 0 to 3"),
        (["--num-images", "0"], "a.png", "num_images is 0, expected a number above 0"),
        (["--batch-size", "0"], "a.png", "batch_size is 0, expected a number above 0"),
        (["--seed", "-1"], "a.png", "seed is -1, expected 0 or more"),
        (["--steps", "0"], "a.png", "steps is 0, expected 1 to 1000"),
        (["--steps", "30"], "a.png", "expected 25 or 40, or another sampler"),
        (["--guidance-scale", "-1"], "a.npz", "guidance_scale is -1.0, expected 0 or more"),
        (["--sampler", "dmp"], "many", "sampler 'dmp' is unknown (perhaps you meant"),
        (["--sampler", "euler"], "many", "sampler is 'euler', but the model was trained with"),
        (["--size", "4", "5"], "many", "height and width are 4 and 5, expected multiples of 2"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_written(sample, tmp_path, words, out, says):
    assert says in sample(*words, out=out, code=2)
    assert not list(tmp_path.iterdir())


def test_names_that_are_taken_are_refused(sample, tmp_path):
    (tmp_path / "a.png").mkdir()
    (tmp_path / "file").write_text("")
    assert "which is a folder, expected a file's name" in sample(out="a.png", code=2)
    assert "which is a file, expected a folder" in sample(out="file", code=2)


def test_what_makes_no_images_is_told(sample, tmp_path):
    assert "there is no run at" in sample(out="a.png", run=tmp_path / "nowhere", code=2)
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    (pipe / "model_index.json").write_text("{")
    assert "model_index.json is damaged" in sample(out="a.png", run=pipe, code=2)
    (pipe / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline"}))
    says = sample(out="a.png", run=pipe, code=2)
    assert "holds a DiTPipeline, expected a DenoiserPipeline" in says
    index = {"_class_name": ["modeling_onescan", "DenoiserPipeline"]}
    index["transformer"] = ["os", "DenoiserModel"]
    (pipe / "model_index.json").write_text(json.dumps(index))
    assert "transformer is ['os', 'DenoiserModel'], expected" in sample(
        out="a.png", run=pipe, code=2
    )


def test_a_write_that_fails_leaves_nothing_half(run, tmp_path, monkeypatch):
    out = tmp_path / "a.npz"
    out.write_text("older")

    def fail(path, arrays):
        path.write_text("half")
        raise OSError("no space left")

    monkeypatch.setattr(sampling, "_write_arrays", fail)
    pipe = load_pipeline(run)
    with pytest.raises(OSError, match=r"no space left; files saved earlier are intact"):
        write_samples(pipe, SampleConfig(num_images=1, steps=2), out)
    assert out.read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_bar_is_drawn_on_stderr(run, tmp_path, capsys):
    asked = SampleConfig(num_images=3, steps=2, batch_size=2)
    write_samples(load_pipeline(run), asked, tmp_path / "a.png", progress=True)
    assert "4/4" in capsys.readouterr().err
    write_samples(load_pipeline(run), asked, tmp_path / "a.png")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_grid_ends_in_white_and_large_images_stay_as_they_are():
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


def test_steps_and_guidance_are_the_runs_own_where_none_are_asked_for(tmp_path):
    own = SamplerConfig(steps=4, guidance_scale=2.0)
    run = save_run(tmp_path / "run", task=ImageGenerationConfig(sampler=own))
    words = ["sample", str(run), "--num-images", "2", "--device", "cpu", "--out"]
    assert main([*words, str(tmp_path / "own.npz")]) == 0
    spelt = [*words, str(tmp_path / "spelt.npz"), "--steps", "4", "--guidance-scale", "2"]
    assert main(spelt) == 0
    assert main([*spelt[:-2], "--guidance-scale", "1", "--out", str(tmp_path / "without.npz")]) == 0
    own, spelt, without = (
        array(tmp_path / f"{name}.npz")[0] for name in ("own", "spelt", "without")
    )
    assert np.array_equal(own, spelt)
    assert not np.array_equal(own, without)


@pytest.mark.parametrize(
    ("words", "out", "message"),
    [
        (["--labels", "4"], "a.png", "expected 0 to 3"),
        (["--guidance-scale", "nan"], "a.png", "guidance_scale is nan, expected 0 or more"),
        (["--size", "0", "8"], "a.png", "size is (0, 8), expected a height and a width above 0"),
        ([], "file/x.png", "but nothing can be written to"),
    ],
    ids=["none", "nan", "size", "parent"],
)
def test_mistakes_are_told_before_any_image_is_made(sample, tmp_path, words, out, message):
    (tmp_path / "file").write_text("mine")
    assert message in sample(*words, out=out, code=2)
    assert not (tmp_path / "a.png").exists()


def test_no_name_is_no_place_to_write_to(run, capsys):
    assert main(["sample", str(run), "--out", ""]) == 2
    assert "out is empty" in capsys.readouterr().err
