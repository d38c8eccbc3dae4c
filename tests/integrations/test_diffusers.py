"""Denoisers in diffusers: the same numbers, saved, loaded, trained, averaged, swapped."""

import json
import math
import os
import re
import subprocess
import sys
from inspect import unwrap

import numpy as np
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)
from diffusers.training_utils import EMAModel
from huggingface_hub import ModelCard
from PIL.Image import Image
from safetensors.torch import load_file
from tiny_vae import tiny_vae
from torch import nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from onescan.inputs import ImageFormat
from onescan.integrations.diffusers import (
    DenoiserModel,
    DenoiserPipeline,
    find_labels,
    sample,
    to_diffusers,
)
from onescan.integrations.diffusers.pipeline import clip_range
from onescan.integrations.diffusers.sampling import SCHEDULERS
from onescan.layers.mixers import LightNetMixerConfig, SoftmaxMixerConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig

KINDS = {
    "lightnet": {"mixer": LightNetMixerConfig(num_heads=2)},
    "dit": {
        "mixer": SoftmaxMixerConfig(num_heads=2),
        "condition": "adaln_zero",
        "learn_sigma": False,
    },
}
over_kinds = pytest.mark.parametrize("kind", KINDS)
NAMES = ("cat", "dog", "crane", "crane")


def native(kind="lightnet", **changes):
    fields = {"image_size": (4, 4), "channels": 1, "num_classes": 4, "width": 12, "depth": 2}
    model = DenoiserConfig(**fields | KINDS[kind] | changes).build().eval()
    for name, parameter in model.named_parameters():
        if "unpatchify" in name or "modulation" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


UNCONDITIONAL = "unconditional-image-generation"


@pytest.mark.parametrize("kind", [DenoiserModel, DenoiserPipeline])
def test_native_folders_are_not_read_as_those_of_diffusers(kind, tmp_path):
    native().save_pretrained(tmp_path / "run")
    advice = "onescan's own format.*: onescan convert .*run --to diffusers --out FOLDER"
    with pytest.raises(ValueError, match=advice):
        kind.from_pretrained(tmp_path / "run")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changes", "tag", "shape"),
    [
        ({}, None, (4, 4)),
        ({"num_classes": 0, "channels": 4}, UNCONDITIONAL, (4, 4, 4)),
        ({"image_size": (8,), "patch_size": (2,)}, None, (8, 1)),
    ],
    ids=["pixels", "latents", "signals"],
)
def test_saved_pipelines_have_a_model_card(changes, tag, shape, tmp_path, monkeypatch):
    pipe = pipeline(native(**changes))
    pipe.save_pretrained(tmp_path / "path/to/folder")
    card = ModelCard.load(tmp_path / "path/to/folder/README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("diffusers", tag)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], names)  # noqa: S102
    assert np.shape(names["image"]) == shape


def pipeline(model=None, **parts):
    made = to_diffusers(native() if model is None else model, **parts)
    made.set_progress_bar_config(disable=True)
    return made


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def made_by(pipe, labels=(0, 1), **options):
    defaults = {"num_inference_steps": 4, "output_type": "pt", "generator": seeded(1, 2)}
    return pipe(list(labels), **defaults | options).images


def inputs(model):
    channels = model.config.channels
    return torch.randn(2, channels, 4, 6), torch.tensor([3, 999]), torch.tensor([0, 4])


@over_kinds
def test_a_model_is_called_as_transformers_of_diffusers_are(kind):
    model = native(kind)
    noisy, times, labels = inputs(model)
    converted = DenoiserModel.from_onescan(model)
    assert torch.equal(converted(noisy, times, labels).sample, model(noisy, times, labels))
    (told,) = converted(noisy, 7, return_dict=False)
    assert torch.equal(told, model(noisy, torch.tensor([7, 7])))
    for time in (torch.tensor(7), torch.tensor([7]), 7.0):
        assert torch.equal(converted(noisy, time).sample, told)


@over_kinds
def test_weights_are_shared(kind):
    model = native(kind).train()
    converted = DenoiserModel.from_onescan(model)
    assert converted.to_onescan() is model
    assert converted.training
    assert {id(p) for p in converted.parameters()} == {id(p) for p in model.parameters()}


@over_kinds
@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_comes_back_with_the_same_bits(kind, shards, tmp_path):
    model = native(kind)
    size = sum(p.numel() * 4 for p in model.parameters())
    DenoiserModel.from_onescan(model).save_pretrained(
        tmp_path, max_shard_size=size // shards + 1000
    )
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    assert not list(tmp_path.glob("*.bin"))
    loaded = DenoiserModel.from_pretrained(tmp_path)
    assert not loaded.training
    assert loaded.to_onescan().config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.to_onescan().state_dict()[name], weight), name
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["denoiser"]["mixer"]["type"] == type(model.config.mixer).__name__


def test_a_model_is_loaded_in_bfloat16_but_for_angles(tmp_path):
    model = native()
    DenoiserModel.from_onescan(model).save_pretrained(tmp_path)
    loaded = DenoiserModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    for name, weight in loaded.to_onescan().named_parameters():
        whole = model.get_parameter(name)
        expected = whole if name.endswith("theta") else whole.bfloat16()
        assert torch.equal(weight, expected), name
    assert loaded.dtype == torch.bfloat16
    noisy, times, labels = inputs(model)
    told = loaded(noisy.bfloat16(), times, labels).sample
    assert_close(told.float(), model(noisy, times, labels), rtol=0.1, atol=0.1)


@over_kinds
def test_recomputed_gradients_are_the_same(kind):
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = DenoiserModel.from_onescan(native(kind))
        assert not model.is_gradient_checkpointing
        if recompute:
            model.enable_gradient_checkpointing()
        assert model.is_gradient_checkpointing == recompute
        assert all(block.recompute == recompute for block in model.network.blocks)
        model(torch.ones(2, 1, 4, 4), 3, torch.tensor([0, 1])).sample.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    model.disable_gradient_checkpointing()
    assert not any(block.recompute for block in model.network.blocks)
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


# EMAModel loads in a way that diffusers itself will drop
@pytest.mark.filterwarnings("ignore:It is deprecated to pass a pretrained model name:FutureWarning")
def test_a_step_of_training_with_diffusers_and_its_mean_of_weights(tmp_path):
    model = DenoiserModel.from_onescan(native(learn_sigma=False, label_dropout=0.0)).train()
    mean = EMAModel(
        model.parameters(), decay=0.5, model_cls=DenoiserModel, model_config=model.config
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, clean = DDPMScheduler(), torch.rand(8, 1, 4, 4)
    noise, times = torch.randn(8, 1, 4, 4), torch.randint(1000, (8,))
    noisy, labels = scheduler.add_noise(clean, noise, times), torch.arange(8) % 4
    losses = []
    for _ in range(3):
        loss = mse_loss(model(noisy, times, labels).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.step(model.parameters())
        losses.append(loss.item())
    assert losses[2] < losses[0]
    trained = [p.detach().clone() for p in model.parameters()]
    mean.store(model.parameters())
    mean.copy_to(model.parameters())
    averaged = [p.detach().clone() for p in model.parameters()]
    assert not torch.equal(
        torch.cat([*map(torch.ravel, averaged)]), torch.cat([*map(torch.ravel, trained)])
    )
    mean.restore(model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))
    mean.save_pretrained(tmp_path)
    loaded = EMAModel.from_pretrained(tmp_path, DenoiserModel)
    assert all(torch.equal(p, q) for p, q in zip(loaded.shadow_params, averaged, strict=True))
    assert (loaded.decay, loaded.optimization_step) == (0.5, 3)


def test_a_pipeline_draws_what_draw_draws():
    model = native()
    pipe = pipeline(model, class_names=NAMES)
    found = made_by(pipe, ["dog", 3], guidance_scale=2.0)
    options = {"size": (4, 4), "seeds": [1, 2], "labels": [1, 3], "steps": 4, "guidance": 2.0}
    drawn = sample(model, pipe.scheduler, **options)
    assert torch.equal(found, (drawn / 2 + 0.5).clamp(0, 1))
    assert torch.equal(made_by(pipe, [1, 3], guidance_scale=2.0, output_type="latent"), drawn)


def test_outputs_are_what_was_asked_for():
    pipe = pipeline(class_names=NAMES)
    tensor, array, images = (made_by(pipe, output_type=kind) for kind in ("pt", "np", "pil"))
    assert tensor.shape == (2, 1, 4, 4)
    assert 0 <= tensor.min() < tensor.max() <= 1
    assert array.shape == (2, 4, 4, 1)
    assert torch.equal(torch.from_numpy(array).permute(0, 3, 1, 2), tensor)
    assert [(type(image), image.size, image.mode) for image in images] == [(Image, (4, 4), "L")] * 2
    assert torch.equal(
        pipe([0, 1], 4, generator=seeded(1, 2), output_type="pt", return_dict=False)[0], tensor
    )
    assert made_by(pipe, height=6, width=2).shape == (2, 1, 6, 2)
    assert made_by(pipeline(native(channels=3)), output_type="pil")[0].mode == "RGB"


def test_pixels_come_back_by_their_mean_and_spread():
    form = ImageFormat(channels=3, height=4, width=4, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    pipe = pipeline(native(channels=3), format=form)
    assert pipe.scheduler.config.clip_sample_range == pytest.approx(1.8)
    made = torch.randn(2, 3, 4, 4) * 0.1
    expected = made * torch.tensor(form.std)[:, None, None] + torch.tensor(form.mean)[:, None, None]
    assert_close(pipe.decode(made), expected.clamp(0, 1))
    assert_close(
        form.standardize(pipe.decode(made)).clamp(-9, 9), made.clamp(-0.15, 9), atol=0.2, rtol=1
    )
    assert clip_range(None) is None
    assert clip_range({"mean": [0.5], "std": [0.5]}) == 1


@pytest.mark.slow
def test_latents_are_decoded_by_their_vae(tmp_path):
    vae = tiny_vae(shift_factor=0.25)
    pipe = pipeline(native(channels=4), vae=vae)
    assert not pipe.scheduler.config.clip_sample
    assert pipe.image_size == (8, 8)
    latents = made_by(pipe, output_type="latent")
    assert latents.shape == (2, 4, 4, 4)
    pixels = made_by(pipe)
    assert pixels.shape == (2, 3, 8, 8)
    with torch.no_grad():
        expected = vae.decode(latents / 0.5 + 0.25).sample / 2 + 0.5
    assert torch.equal(pixels, expected.clamp(0, 1))
    assert made_by(pipe, height=16, width=12).shape == (2, 3, 16, 12)
    assert made_by(pipe, height=10, width=6).shape == (2, 3, 10, 6)  # patches have 4 pixels
    with pytest.raises(ValueError, match="are 8 and 7, expected positive multiples of 2"):
        made_by(pipe, width=7)
    pipe.save_pretrained(tmp_path)
    again = DenoiserPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(made_by(again), pixels)


def test_where_chance_comes_from():
    pipe = pipeline()
    torch.manual_seed(3)
    first = made_by(pipe, generator=None)
    assert not torch.equal(first, made_by(pipe, generator=None))
    torch.manual_seed(3)
    assert torch.equal(first, made_by(pipe, generator=None))
    one = [made_by(pipe, generator=seeded(5)[0]) for _ in range(2)]
    assert torch.equal(*one)
    assert_close(one[0][:1], made_by(pipe, [0], generator=seeded(5)), rtol=1e-4, atol=1e-5)
    assert pipe(None, 2, generator=seeded(1, 2, 3), output_type="pt").images.shape[0] == 3
    assert pipe(num_inference_steps=2, batch_size=2, output_type="pt").images.shape[0] == 2
    assert pipe(num_inference_steps=2, output_type="pt").images.shape[0] == 1


def test_models_without_classes_make_images():
    pipe = pipeline(native(num_classes=0))
    assert pipe(None, 2, generator=seeded(1), output_type="pt").images.shape == (1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"labels \[0\] are given, but the model has no classes"):
        pipe([0])


def test_schedulers_are_swapped_as_everywhere_in_diffusers():
    pipe = pipeline(native(channels=4), vae=tiny_vae(), sampler=SamplerConfig(sampler="ddpm"))
    assert pipe.scheduler.config.variance_type == "learned_range"
    found = [made_by(pipe, output_type="latent")]
    for name in ("dpm", "ddim", "ddpm"):
        pipe.scheduler = SCHEDULERS[name].from_config(pipe.scheduler.config)
        found.append(made_by(pipe, output_type="latent"))
        by_name = pipeline(pipe.transformer.to_onescan(), vae=pipe.vae)
        by_name.use_sampler(name)
        assert torch.equal(made_by(by_name, output_type="latent"), found[-1]), name
    assert torch.equal(found[0], found[3])
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert not torch.allclose(found[1], found[2], atol=1e-3)


def test_flow_matching_walks_by_euler(tmp_path):
    pipe = pipeline(noise=NoiseConfig(prediction="flow"))
    assert isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler)
    found = made_by(pipe)
    pipe.save_pretrained(tmp_path)
    again = DenoiserPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.noise == NoiseConfig(prediction="flow")
    assert torch.equal(made_by(again), found)
    shifted = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=3.0)
    again.scheduler = shifted
    assert not torch.allclose(made_by(again), found, atol=1e-3)


REFUSED = [
    (NoiseConfig(prediction="v"), DPMSolverMultistepScheduler(), "prediction_type='epsilon', but"),
    (NoiseConfig(betas="cosine"), DPMSolverMultistepScheduler(), "beta_schedule='linear', but"),
    (NoiseConfig(prediction="flow"), DPMSolverMultistepScheduler(), "expected FlowMatchEuler"),
    (NoiseConfig(), FlowMatchEulerDiscreteScheduler(), "FlowMatchEulerDiscreteScheduler with"),
    (NoiseConfig(), PNDMScheduler(), "scheduler 'PNDMScheduler' is unknown"),
]


@pytest.mark.parametrize(("noise", "scheduler", "says"), REFUSED, ids=range(len(REFUSED)))
def test_a_scheduler_of_another_noise_is_refused(noise, scheduler, says):
    pipe = pipeline(noise=noise)
    pipe.scheduler = scheduler
    with pytest.raises(ValueError, match=says):
        made_by(pipe)
    with pytest.raises(ValueError, match=says):
        DenoiserPipeline(pipe.transformer, scheduler, noise=pipe.config["noise"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"class_labels": ["cta"]},
            r"label 'cta' is unknown \(perhaps you meant 'cat'\); available",
        ),
        ({"class_labels": ["crane"]}, r"label 'crane' is the name of several .* numbers \[2, 3\]"),
        ({"class_labels": [5]}, "label 5 is not a class, expected 0 to 3, or 4 for none"),
        ({"class_labels": [0], "height": 0}, "height and width are 0 and 4, expected positive"),
        ({"class_labels": [0], "output_type": "jpg"}, "output_type 'jpg' is unknown"),
        (
            {"class_labels": [0, 1], "generator": seeded(1)},
            "generator is a list of 1, expected one for each of 2 images",
        ),
        ({"class_labels": None, "guidance_scale": 2.0}, "guidance is 2.0, but labels is None"),
    ],
)
def test_what_cannot_be_made_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        pipeline(class_names=NAMES)(num_inference_steps=2, **options)


def test_names_among_very_many_are_not_all_listed():
    pipe = pipeline(native(num_classes=30), class_names=[f"class {i}" for i in range(30)])
    with pytest.raises(
        ValueError, match=r"label 'class' is unknown; similar: class \d, class \d"
    ) as e:
        pipe(["class"])
    assert str(e.value).count("class ") == 3


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="vae has latents of 4 channels, but the model has 1"):
        pipeline(vae=tiny_vae())
    with pytest.raises(ValueError, match="class_names has 2 names, expected one for each of 4"):
        pipeline(class_names=["a", "b"])
    with pytest.raises(ValueError, match="model is a Linear"):
        to_diffusers(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="output_type is 'pt', but there is no vae"):
        made_by(pipeline(native(channels=4)))
    assert made_by(pipeline(native(channels=4)), output_type="latent").shape == (2, 4, 4, 4)
    pipe = pipeline(native(channels=4), vae=tiny_vae())
    with pytest.raises(ValueError, match="vae and pixels are given"):
        DenoiserPipeline(**pipe.components, pixels={"mean": [0.5], "std": [0.5]})
    parts = pipeline(native()).components
    for pixels in ({"mean": [math.nan], "std": [0.5]}, {"mean": [0.5], "std": [math.inf]}):
        with pytest.raises(ValueError, match=r"pixels\..* expected finite numbers"):
            DenoiserPipeline(**parts, pixels=pixels)


ELSEWHERE = """
import sys
import torch
from diffusers import AutoModel, DiffusionPipeline
from safetensors.torch import save_file

def images(kind, **options):
    pipe = kind.from_pretrained(sys.argv[1], **options)
    assert type(pipe).__module__ == "onescan.integrations.diffusers.pipeline"
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    return pipe(
        ["dog", 0], 4, guidance_scale=2.0, output_type="pt", generator=generators
    ).images

try:
    DiffusionPipeline.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
assert "onescan" not in sys.modules
found = {"trusted": images(DiffusionPipeline, trust_remote_code=True)}
model = AutoModel.from_pretrained(sys.argv[1] + "/transformer", trust_remote_code=True)
assert type(model).__name__ == "DenoiserModel"

from onescan.integrations.diffusers import DenoiserPipeline
read = len([name for name in sys.modules if "modeling_onescan" in name])
found["imported"] = images(DenoiserPipeline)
assert read == len([name for name in sys.modules if "modeling_onescan" in name])
save_file(found, sys.argv[2])
"""


@pytest.mark.slow
def test_another_process_generates_the_same_images(tmp_path):
    pipe = pipeline(class_names=NAMES, sampler=SamplerConfig(sampler="ddpm"))
    expected = made_by(pipe, ["dog", 0], guidance_scale=2.0)
    pipe.save_pretrained(tmp_path / "pipe")
    words = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "pipe"), str(tmp_path / "images")]
    cache = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **cache})
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "images")
    assert torch.equal(found["trusted"], expected)
    assert torch.equal(found["imported"], expected)
    assert "not expected" not in done.stderr
    assert "Expected types" not in done.stderr


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([2.5], "label 2.5 is neither a number nor a name"),
        ([True], "label True is neither a number nor a name"),
        ([], "class_labels is empty"),
    ],
    ids=["float", "bool", "empty"],
)
def test_labels_that_are_none_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        unwrap(find_labels)(asked, {0: "cat"}, num_classes=3)


@pytest.mark.parametrize("asked", ["three", 3])
def test_a_single_label_is_no_list(asked):
    with pytest.raises(ValueError, match="class_labels is"):
        unwrap(find_labels)(asked, {0: "three"}, num_classes=3)


@pytest.mark.sampled
@pytest.mark.parametrize("labels", [1, "dog", torch.tensor(1), [[1]], torch.tensor([[1]])])
def test_a_label_may_be_bare_or_nested(labels):
    pipe = pipeline(class_names=NAMES)
    options = {"num_inference_steps": 2, "output_type": "pt"}
    found = pipe(labels, generator=seeded(1), **options).images
    assert torch.equal(found, pipe([1], generator=seeded(1), **options).images)


def test_several_images_of_each_class():
    pipe = pipeline()
    seeds, options = (1, 2, 3, 4), {"num_inference_steps": 2, "output_type": "pt"}
    found = pipe([0, 1], num_images_per_prompt=2, generator=seeded(*seeds), **options).images
    assert torch.equal(found, pipe([0, 0, 1, 1], generator=seeded(*seeds), **options).images)
    free = pipe(None, num_images_per_prompt=3, **options).images
    assert len(free) == 3
    with pytest.raises(ValueError, match="num_images_per_prompt is 0"):
        pipe([0], num_images_per_prompt=0)


def test_initial_latents_replace_the_noise():
    pipe = pipeline()
    options = {"num_inference_steps": 2, "output_type": "pt"}
    noise = torch.cat([torch.randn(1, 1, 4, 4, generator=each) for each in seeded(1, 2)])
    found = pipe([0, 1], latents=noise, **options).images
    assert torch.equal(found, made_by(pipe, num_inference_steps=2))
    assert len(pipe(None, latents=noise, **options).images) == 2
    with pytest.raises(ValueError, match=r"latents has shape \(2, 1, 4, 4\).*expected \(1, 1, 4"):
        pipe([0], latents=noise, **options)


def test_a_callback_sees_and_changes_each_step():
    pipe = pipeline()
    seen = []

    def watch(given, step, timestep, tensors):
        assert given is pipe
        seen.append((step, int(timestep), tensors["latents"].clone()))
        return {"latents": torch.zeros_like(tensors["latents"])} if step == 3 else tensors

    latents = made_by(pipe, output_type="latent", callback_on_step_end=watch)
    assert [step for step, _, _ in seen] == [0, 1, 2, 3]
    assert [time for _, time, _ in seen] == [999, 749, 499, 249]
    assert torch.equal(seen[-1][2], made_by(pipe, output_type="latent"))
    assert not latents.any()
    assert torch.equal(made_by(pipe, callback_on_step_end=lambda *_: None), made_by(pipe))
    with pytest.raises(ValueError, match="callback_on_step_end_tensor_inputs 'prompt'"):
        made_by(pipe, callback_on_step_end_tensor_inputs=["prompt"])


def test_a_callback_changes_the_guidance_scale():
    pipe, batches, scales = pipeline(), [], []
    pipe.transformer.register_forward_pre_hook(lambda _, given: batches.append(len(given[0])))

    def reduce(given, step, timestep, tensors):
        scales.append(given.guidance_scale)
        given._guidance_scale = max(1.0, given.guidance_scale - 1)

    reduced = made_by(pipe, guidance_scale=3.0, callback_on_step_end=reduce)
    assert scales == [3.0, 2.0, 1.0, 1.0]
    assert batches == [4, 4, 2, 2]
    assert pipe.guidance_scale == 1
    assert pipe.num_timesteps == 4
    assert not torch.allclose(reduced, made_by(pipe, guidance_scale=3.0))
    always = pipeline(native(label_dropout=0.0))
    with pytest.raises(ValueError, match=r"guidance is 2.0, but the model was trained with label"):
        made_by(always, callback_on_step_end=lambda given, *_: setattr(given, "_guidance_scale", 2))
