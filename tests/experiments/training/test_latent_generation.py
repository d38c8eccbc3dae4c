"""A denoiser of latents: encode, train, sample and decode."""

import dataclasses

import pytest
import torch
from PIL import Image
from tiny_denoiser import denoiser_run
from tiny_vae import CLASSES, SIZE, save_vae

from onescan import configs
from onescan.experiments.data import DeitAugmentConfig, ImageDatasetConfig
from onescan.experiments.data.latents import LatentsConfig
from onescan.experiments.report import write_report
from onescan.experiments.tasks import ImageGenerationConfig
from onescan.experiments.training import train
from onescan.experiments.training.encode import EncodeConfig, encode
from onescan.experiments.training.logging import read_pictures
from onescan.experiments.training.sampling import load_pipeline

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """Latents of 4 channels and half the side, of 24 images of two classes."""
    root = tmp_path_factory.mktemp("latents")
    rng = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("test", 4)):
        for name in CLASSES:
            (root / "images" / split / name).mkdir(parents=True)
            for place in range(count):
                pixels = torch.randint(256, (SIZE, SIZE, 3), dtype=torch.uint8, generator=rng)
                file = root / "images" / split / name / f"{place}.png"
                Image.fromarray(pixels.numpy()).save(file)
    data = ImageDatasetConfig(path=str(root / "images"), image_size=(SIZE, SIZE))
    encode(data, EncodeConfig(vae=save_vae(root / "vae"), batch_size=8), root / "latents")
    return root / "latents"


def latent_run(latents, **changes):
    side = SIZE // 2
    model = {
        "channels": 4, "image_size": (side, side), "num_classes": 2, "learn_sigma": True,
    }  # fmt: skip
    run = denoiser_run(**{f"model.{name}": value for name, value in model.items()})
    task = dataclasses.replace(run.task, noise=ImageGenerationConfig().noise)
    return configs.replace(
        dataclasses.replace(run, data=LatentsConfig(path=str(latents)), task=task),
        {"training.epochs": 1} | changes,
    )


@pytest.mark.slow
def test_training_decodes_pictures_as_the_pipeline_does(latents, tmp_path):
    run = latent_run(latents)
    result = train(run, tmp_path / "run")
    assert list(read_pictures(result.folder)) == [3]
    with Image.open(read_pictures(result.folder)[3]) as grid:
        assert grid.size == (130, 130)  # two classes twice, in color, by a gap
        assert grid.mode == "RGB"
    assert "Generated images" in write_report([result], tmp_path / "report.html").read_text()
    task = run.task.build(run.data.build())
    pipe = load_pipeline(result.folder)
    seeds, labels = [3, 4], torch.tensor([0, 1])
    ours = task.generate(pipe.transformer.to_onescan().eval(), labels, seeds)
    theirs = pipe(
        class_labels=[0, 1],
        num_inference_steps=5,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="pt",
    ).images
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_a_missing_vae_is_found_before_the_first_step(latents, tmp_path):
    run = latent_run(latents, **{"data.vae": "no/vae/here"})
    with pytest.raises(ValueError, match="vae is 'no/vae/here'"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    result = train(configs.replace(run, {"task.samples_per_class": 0}), tmp_path / "run")
    assert read_pictures(result.folder) == {}


@pytest.mark.parametrize("name", ["augment", "classifier"])
def test_latents_have_no_augmentation_or_classifier(name, latents):
    value = DeitAugmentConfig(num_ops=0, random_erasing=0.0) if name == "augment" else "runs/x"
    config = dataclasses.replace(ImageGenerationConfig(samples_per_class=0), **{name: value})
    with pytest.raises(ValueError, match=f"task.{name} is set, but the data are latents"):
        config.build(LatentsConfig(path=str(latents)).build())
