"""A run of a fraction of a second, with randomness in every part, for tests of training."""

import signal
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from onescan.configs import ModelConfig
from onescan.experiments.data import AffineConfig, DataConfig, ImageSplits, ImageTensors
from onescan.experiments.tasks import ImageClassificationConfig
from onescan.experiments.training import (
    MachineConfig,
    RunConfig,
    TrainingConfig,
    read_metrics,
    train,
)
from onescan.experiments.training.logging import TIMING
from onescan.inputs import ImageFormat

STEPS = 12  # of tiny_run: 3 epochs of 4 batches


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig(ModelConfig):
    pixels: int = 16
    width: int = 6
    num_classes: int = 3
    tied: bool = False  # two layers with one weight

    def build(self):
        return TinyModel(self)

    def example_inputs(self):
        return (torch.zeros(1, 1, 4, self.pixels // 4),)


class TinyModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Linear(config.pixels, config.width)
        self.inner = nn.Linear(config.width, config.width)
        self.outer = self.inner if config.tied else nn.Linear(config.width, config.width)
        self.norm = nn.BatchNorm1d(config.width, momentum=0.5)  # has buffers
        self.drop = nn.Dropout(0.2)  # draws from torch's global generator
        self.spare = nn.Parameter(torch.ones(2, 2))  # no gradient reaches it
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, images):
        x = self.drop(self.embed(images.flatten(1)))
        return self.head(self.norm(self.outer(self.inner(x).relu())))


@dataclass(frozen=True, kw_only=True)
class StripesConfig(DataConfig):
    """Three classes of 4 x 4 images: rows, columns, noise."""

    examples: int = 33

    def build(self):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(self.examples) % 3
        images = torch.randn(self.examples, 1, 4, 4, generator=generator)
        images[labels == 0, :, ::2] += 2
        images[labels == 1, :, :, ::2] += 2
        half = ImageTensors(images=images, labels=labels)
        format = ImageFormat(channels=1, height=4, width=4, mean=(0.0,), std=(1.0,))
        return ImageSplits(
            train=half, test=half, class_names=("rows", "columns", "noise"), format=format
        )


def tiny_run(**training):
    defaults = {"epochs": 3, "batch_size": 8, "checkpoint_every": 0.5, "learning_rate": 0.03}
    return RunConfig(
        name="tiny",
        model=TinyModelConfig(),
        data=StripesConfig(),
        task=ImageClassificationConfig(augment=AffineConfig(), label_smoothing=0.1),
        training=TrainingConfig(**defaults | training),
        machine=MachineConfig(trackers=()),
    )


class KilledError(BaseException):
    """A substitute for SIGKILL, which nothing in the package handles."""


def assert_same(result, whole):
    """Check that weights, evaluation and all metrics but the timing are bit-identical."""
    assert result.metrics == whole.metrics
    for name, array in whole.evaluation.arrays.items():
        assert torch.equal(result.evaluation.arrays[name], array)
    assert untimed(result.folder) == untimed(whole.folder)
    ours, theirs = ((r.folder / "model.safetensors").read_bytes() for r in (result, whole))
    assert ours == theirs


def untimed(folder):
    lines = read_metrics(folder)
    return [{k: v for k, v in line.items() if k not in TIMING} for line in lines]


def interrupt(run, folder, step):
    """Train until Ctrl-C is pressed after a step."""
    with pytest.raises(KeyboardInterrupt):
        train(run, folder, progress=press_ctrl_c_at(step))


def crash(run, folder, step):
    """Train until an error is raised after a step."""
    with pytest.raises(RuntimeError, match="crash"):
        train(run, folder, progress=raise_at(step, RuntimeError("crash")))


def press_ctrl_c_at(step):
    def show(now):
        if now.step == step:
            signal.raise_signal(signal.SIGINT)

    return show


def raise_at(step, error):
    def show(now):
        if now.step == step:
            raise error

    return show
