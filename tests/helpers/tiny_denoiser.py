"""A denoiser that trains in seconds, on images of bars, for tests."""

from dataclasses import dataclass

import torch

from onescan import configs
from onescan.experiments.data import DataConfig, ImageSplits, ImageTensors
from onescan.experiments.tasks import ImageGenerationConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig
from onescan.inputs import ImageFormat
from onescan.layers.basic import GLUConfig
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig

NAMES = ("left", "right", "none")


@dataclass(frozen=True, kw_only=True)
class BarsConfig(DataConfig):
    """Gray images of 4 x 4: a bright half, left or right, or none."""

    examples: int = 24

    def build(self):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(self.examples) % 3
        images = torch.rand(self.examples, 1, 4, 4, generator=generator) / 10
        images[labels == 0, :, :, :2] += 0.8
        images[labels == 1, :, :, 2:] += 0.8
        half = ImageTensors(images=images, labels=labels)
        format = ImageFormat(channels=1, height=4, width=4, mean=(0.5,), std=(0.5,))
        return ImageSplits(train=half, test=half, class_names=NAMES, format=format)


TINY = DenoiserConfig(
    image_size=(4, 4),
    channels=1,
    num_classes=3,
    width=16,
    depth=1,
    mixer=LightNetMixerConfig(num_heads=2, gate_rank=4),
    mlp=GLUConfig(),
    position=ToeplitzPositionConfig(hidden_states=4),
    learn_sigma=False,
    init_std=0.2,
)


def denoiser_run(**changes):
    """Three epochs of three batches; changes by dotted names."""
    run = RunConfig(
        name="bars",
        model=TINY,
        data=BarsConfig(),
        task=ImageGenerationConfig(
            noise=NoiseConfig(prediction="v"),
            sampler=SamplerConfig(steps=5),
            samples_per_class=2,
            evaluation_batch_size=10,
        ),
        training=TrainingConfig(
            epochs=3, batch_size=8, learning_rate=1e-2, ema_decay=0.9, checkpoint_every=0.5
        ),
        machine=MachineConfig(trackers=()),
    )
    return configs.replace(run, changes)
