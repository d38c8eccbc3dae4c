"""Tiny image classifiers and their data, for tests of reports."""

import dataclasses
from dataclasses import dataclass

import torch

from onescan.experiments.data import DataConfig, ImageSplits, ImageTensors
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig
from onescan.inputs import ImageFormat
from onescan.layers.decays import FixedDecayConfig
from onescan.layers.mixers import LightNetMixerConfig, LinearDiffusionMixerConfig, LionMixerConfig
from onescan.layers.position import AbsolutePositionConfig, ToeplitzPositionConfig
from onescan.models.image_classifier import ImageClassifierConfig

HOSTILE = ("<script>alert(1)</script>", "a & b", "$x^2$", '"quoted" \x01', "\u6570\u5b57")


@dataclass(frozen=True, kw_only=True)
class PatternsConfig(DataConfig):
    """Images of 4 x 8 with one bright column, which is the class."""

    class_names: tuple[str, ...] = HOSTILE
    test_examples: int = 40

    def build(self):
        generator = torch.Generator().manual_seed(0)
        train, test = (self.split(n, generator) for n in (48, self.test_examples))
        format = ImageFormat(channels=1, height=4, width=8, mean=(0.5,), std=(0.25,))
        return ImageSplits(train=train, test=test, class_names=self.class_names, format=format)

    def split(self, examples, generator):
        labels = torch.randint(len(self.class_names), (examples,), generator=generator)
        images = torch.randn(examples, 1, 4, 8, generator=generator) / 4 + 0.5
        images[torch.arange(examples), :, :, labels % 8] += 0.75
        return ImageTensors(images=images.clamp(0, 1), labels=labels)


LIGHTNET = ImageClassifierConfig(
    image_size=(4, 8),
    channels=1,
    patch_size=(2, 2),
    num_classes=len(HOSTILE),
    width=16,
    depth=2,
    mixer=LightNetMixerConfig(num_heads=2, gate_rank=4),
    position=ToeplitzPositionConfig(hidden_states=4),
)


def model(**changes):
    return dataclasses.replace(LIGHTNET, **changes)


LION = model(mixer=LionMixerConfig(num_heads=2, decay=FixedDecayConfig()), depth=3)
LDN = model(
    mixer=LinearDiffusionMixerConfig(num_heads=2),
    mlp=None,
    position=AbsolutePositionConfig(),
    depth=3,
    pool="mean",
    drop_path=0.0,
)


def run_config(model=LIGHTNET, seed=0, **data):
    return RunConfig(
        name="a <b>recipe</b> & more",
        model=model,
        data=PatternsConfig(**data),
        task=ImageClassificationConfig(augment=None),
        training=TrainingConfig(epochs=2, batch_size=16, seed=seed),
        machine=MachineConfig(device="cpu", trackers=()),
    )
