"""Small runs, image files and TorchScript feature extractors for tests of generation scores."""

import warnings

import numpy as np
import torch
from PIL import Image
from tiny_denoiser import BarsConfig, denoiser_run

from onescan.checkpoint.weights import save_weights, whole_weights
from onescan.experiments.evaluation.config import SamplesConfig
from onescan.experiments.evaluation.images import round_to_bytes
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training.config import RunConfig
from onescan.experiments.training.folder import write_manifest
from onescan.inputs.images import to_bytes
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig

CPU = torch.device("cpu")
CLASSIFIER = ImageClassifierConfig(
    image_size=(4, 4),
    channels=1,
    patch_size=(2, 2),
    num_classes=3,
    width=8,
    depth=1,
    mixer=LightNetMixerConfig(num_heads=2, gate_rank=4),
    position=ToeplitzPositionConfig(hidden_states=4, bidirectional=True),
    init_std=0.5,
)


def saved_run(folder, run, seed=0):
    """Write the folder of a run with random weights."""
    torch.manual_seed(seed)
    model = run.model.build()
    with torch.no_grad():
        for weight in model.parameters():  # the last layer of a denoiser is initialized with zeros
            weight += 0.1 * torch.randn_like(weight)
    task = run.task.build(run.data.build())
    write_manifest(folder, run, task, CPU, step=0, processes=1, precision="float32")
    save_weights(folder / "model.safetensors", whole_weights(model), {"metrics": {}})
    return folder


def saved_classifier(folder):
    """Write the run of a classifier of bars."""
    run = RunConfig(
        name="classifier", model=CLASSIFIER, data=BarsConfig(), task=ImageClassificationConfig()
    )
    return saved_run(folder / "runs" / "classifier", run)


def saved_denoiser(folder):
    """Write the run of a denoiser of bars."""
    return saved_run(folder / "runs" / "bars", denoiser_run(), seed=1)


def samples_config(features, **changes):
    defaults = {"samples": 20, "features": str(features), "steps": 2, "batch_size": 6}
    return SamplesConfig(**defaults | changes)


def images_of(count, channels=3, size=4, seed=0):
    """Return random images, rounded to bytes."""
    generator = torch.Generator().manual_seed(seed)
    return round_to_bytes(torch.rand(count, channels, size, size, generator=generator))


def write_pngs(folder, images):
    folder.mkdir(parents=True)
    for i, image in enumerate(to_bytes(images).permute(0, 2, 3, 1).numpy()):
        Image.fromarray(image).save(folder / f"{i:03}.png")
    return folder


def write_npz(path, images, labels=None, **more):
    arrays = {"arr_0": to_bytes(images).permute(0, 2, 3, 1).numpy(), **more}
    np.savez(path, **arrays if labels is None else arrays | {"arr_1": labels.numpy()})
    return path


class Scripted(torch.nn.Module):
    """Has the arguments of NVIDIA's file."""

    def forward(
        self, img: torch.Tensor, return_features: bool = False, no_output_bias: bool = False
    ) -> torch.Tensor:
        pixels = img.float().mean(dim=1).flatten(1) / 255
        if return_features:
            return pixels
        scores = pixels[:, :5] * 3
        if not no_output_bias:
            scores = scores + 100 * torch.ones(1, 5).cumsum(1)
        return scores.softmax(dim=1)


class Tuple(torch.nn.Module):
    """Returns pooled features, spatial features and logits."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pixels = images.float() / 255
        return pixels.mean(dim=1).flatten(1)[:, :, None, None], pixels[:, :1], pixels[:, 0, 0]


class Alone(torch.nn.Module):
    """Returns pooled features only."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().flatten(1) / 255


class Wrong(torch.nn.Module):
    """Returns no features."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean()


def scripted(path, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(path))
    return path


def adm_file(path, images, with_images):
    """Write statistics of `Tuple`'s features, as ADM's evaluator does."""
    pooled = images.mean(dim=1).flatten(1).double().numpy()
    spatial = images[:, 0].flatten(1).double().numpy()
    arrays = {
        "mu": pooled.mean(axis=0),
        "sigma": np.cov(pooled, rowvar=False),
        "mu_s": spatial.mean(axis=0),
        "sigma_s": np.cov(spatial, rowvar=False),
    }
    if with_images:
        return write_npz(path, images, **arrays)
    np.savez(path, **arrays)
    return path
