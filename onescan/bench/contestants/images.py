"""Image classifiers, ours and timm's, in inference and training."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.bench.contest.trial import INFERENCE, TRAINING, Field, Trial
from onescan.bench.contestants.language_models import check_backend, parameters, placed
from onescan.bench.contestants.ops import imported, noise
from onescan.bench.contests import ModelsOptions
from onescan.checks import check_choice
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import PRESETS, preset
from onescan.models.size import count_macs

CLASSES = 1000
TIMES_IN_TRAINING = 3  # a backward has two products for each of the forward's
TIMM = {f"timm/deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")}
OURS = [name for name, p in PRESETS.items() if isinstance(p.config, ImageClassifierConfig)]


def contestants(options: ModelsOptions) -> Field:
    """The presets that are asked for.

    Raises:
        ValueError: one that is no image classifier, or patches that do not divide a size.
    """
    for name in options.presets:
        check_choice("preset", name, [*OURS, *TIMM])
    for name in options.presets:
        for size in options.image_size if name in OURS else ():
            _check_size(name, size)
    works = (INFERENCE, TRAINING) if options.gradients else (INFERENCE,)
    return Field(options.presets, works, prepare)


def prepare(name: str, work: str, size: int, options: ModelsOptions) -> Trial:
    """Noise through a model; in training to the gradient of each weight."""
    macs = 0
    build: Callable[[], nn.Module]
    if name in TIMM:
        build = partial(_timm, name, size)
    else:
        config = preset(name, image_size=size)
        assert isinstance(config, ImageClassifierConfig)
        check_backend(config.mixer, options)
        build = config.build
        macs = options.batch_size * count_macs(config, torch.zeros(1, 3, size, size))
    model = placed(build, options).train(work == TRAINING)
    images = noise(options, options.batch_size, 3, size, size)
    known = {"items": options.batch_size, "parameters": parameters(model)}
    if work == INFERENCE:
        return Trial(_inference(model, images), macs=macs, **known)
    return Trial(_training(model, images), macs=TIMES_IN_TRAINING * macs, **known)


def _timm(name: str, size: int) -> nn.Module:
    """Timm's model, with fresh weights.

    Raises:
        RefusalError: timm is not installed.
        ImportError: it cannot be imported.
    """
    model: nn.Module = imported("timm", "timm").create_model(
        TIMM[name], img_size=size, num_classes=CLASSES
    )
    return model


def _inference(model: nn.Module, images: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        return model(images)

    return call


def _training(model: nn.Module, images: Tensor) -> Callable[[], object]:
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    weights = list(model.parameters())

    def call() -> object:
        loss = F.cross_entropy(model(images), labels)
        return torch.autograd.grad(loss, weights, allow_unused=True)

    return call


def _check_size(name: str, size: int) -> None:
    config = preset(name)
    assert isinstance(config, ImageClassifierConfig)
    if any(size % side for side in config.patch_size):
        patch = " x ".join(map(str, config.patch_size))
        raise ValueError(
            f"image_size has {size}, expected a multiple of {name}'s patch size {patch}"
        )
