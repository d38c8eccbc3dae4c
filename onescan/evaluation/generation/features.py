"""What turns images into the features that are compared: a classifier of ours, or Inception."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from onescan import configs
from onescan.checkpoint.weights import BEST, WEIGHTS
from onescan.checks import in_a_line
from onescan.data import ImageFormat
from onescan.data.images import to_bytes
from onescan.evaluation.names import short_name
from onescan.models.image_classifier import ImageClassifier
from onescan.shapes import Images
from onescan.tasks.classifier_features import fitted, look
from onescan.training.loading import Checkpoint, load

SCRIPTED = (".pt", ".pth", ".ts", ".jit")
CHANNELS, SIDE = 7, 17  # of the map that sFID reads, arXiv:2103.03841
READ = 1 << 20  # bytes at once

Features2d = Float[Tensor, "B F"]


class FeatureBatch(NamedTuple):
    """Of some images.

    Attributes:
        pooled: what Frechet distance, precision and recall compare.
        spatial: what knows where in the image something is; None where there is no such thing.
        probabilities: of the classes; None where there are none.
    """

    pooled: Features2d
    spatial: Float[Tensor, "B S"] | None
    probabilities: Float[Tensor, "B classes"] | None


class Features(ABC):
    """Turns images into features."""

    name: str
    """For people."""
    fingerprint: str
    """What other weights have another of."""
    is_inception: bool
    """Whether the distance is FID, and the score the Inception Score."""
    class_names: tuple[str, ...]
    """What the probabilities are of, where that is known."""

    @abstractmethod
    def __call__(self, images: Images) -> FeatureBatch:
        """Look at images of 3 channels or 1, in 256 steps from 0 to 1, on the features' device."""


def open_features(path: str | Path, device: torch.device) -> Features:
    """Open a file of TorchScript, or a run of ours that is a classifier.

    Args:
        path: a file that ends in .pt, .pth, .ts or .jit, for `InceptionFeatures`; or a run's
            folder, or best.safetensors in it, for `ClassifierFeatures`.
        device: where images are looked at.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: it is neither, or is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"features is '{path}', where there is nothing")
    if path.suffix in SCRIPTED:
        return InceptionFeatures(path, device)
    return ClassifierFeatures(load(path), path, device)


class ClassifierFeatures(Features):
    """Features of a classifier that was trained with onescan.

    Images are brought to the size, the channels and the scale that it was trained on. Pooled
    features are what the head reads. Spatial ones are the first 7 channels of the patches' tokens,
    averaged to 17 x 17 places where there are more: sFID takes as many of Inception's.
    """

    is_inception = False

    def __init__(self, checkpoint: Checkpoint, path: Path, device: torch.device) -> None:
        if not isinstance(checkpoint.model, ImageClassifier):
            kind = type(checkpoint.model).__name__
            raise ValueError(f"features is '{path}', a {kind}, expected an ImageClassifier")
        assert isinstance(checkpoint.format, ImageFormat)
        self.model, self.format = checkpoint.model.to(device), checkpoint.format
        self.name, self.class_names = short_name(path), checkpoint.class_names
        weights = checkpoint.folder / (BEST if path.name == BEST else WEIGHTS)
        settings = [configs.to_dict(config) for config in (checkpoint.config.model, self.format)]
        self.fingerprint = fingerprint(weights, json.dumps(settings))

    @torch.no_grad()
    def __call__(self, images: Images) -> FeatureBatch:
        seen = look(self.model, self.format, images)
        return FeatureBatch(seen.pooled, self._spatial(seen.tokens), seen.probabilities)

    def _spatial(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B S"]:
        image = (self.format.channels, self.format.height, self.format.width)
        height, width = self.model.patchify.grid_shape(image)
        patches = tokens[:, self.model.prefix :, :CHANNELS]
        maps = rearrange(patches, "b (y x) c -> b c y x", y=height, x=width)
        return F.adaptive_avg_pool2d(maps, (min(height, SIDE), min(width, SIDE))).flatten(1)


class InceptionFeatures(Features):
    """Features of a TorchScript file that the user has, Inception-v3's by custom.

    It is called with bytes `[B, 3, H, W]` from 0 to 255, of whatever size the images are, and sees
    to the rest. Of two kinds of files the schema of `forward` tells which it is: one with an
    argument `return_features`, as NVIDIA's inception-2015-12-05.pt, gives pooled features with
    that set, and probabilities with `no_output_bias` set, if it has that; any other gives
    pooled features, or a tuple (pooled, spatial, logits) of which the last may be left out.
    """

    is_inception = True
    class_names = ()

    def __init__(self, path: Path, device: torch.device) -> None:
        with _without_deprecations():
            try:
                module = torch.jit.load(str(path), map_location=device).eval()
                arguments = module.forward.schema.arguments
            except RuntimeError as error:
                raise ValueError(
                    f"features is '{path}', which is no TorchScript file, or a damaged one: "
                    f"{in_a_line(error)}"
                ) from error
        self.module, self.path, self.name = module, path, path.name
        self.options = {argument.name for argument in arguments}
        self.fingerprint = fingerprint(path, "")

    @torch.no_grad()
    def __call__(self, images: Images) -> FeatureBatch:
        _, _, height, width = images.shape
        shown = to_bytes(fitted(images, channels=3, height=height, width=width))
        with _without_deprecations():
            try:
                found = self._look(shown)
            except (RuntimeError, torch.jit.Error) as error:
                raise ValueError(
                    f"features is '{self.path}', which fails on {tuple(shown.shape)} bytes: "
                    f"{str(error).strip().splitlines()[-1]}"
                ) from error
            return self._checked(found, len(shown))

    def _look(self, shown: Tensor) -> list[Any]:
        """Pooled features, spatial ones, probabilities; those that are not given are None."""
        if "return_features" in self.options:
            has_classes = "no_output_bias" in self.options
            shares = self.module(shown, no_output_bias=True) if has_classes else None
            return [self.module(shown, return_features=True), None, shares]
        given = self.module(shown)
        parts = list(given) if isinstance(given, tuple | list) else [given]
        pooled, spatial, logits = (*parts, None, None)[:3]
        shares = logits.float().softmax(dim=1) if isinstance(logits, Tensor) else logits
        return [pooled, spatial, shares]

    def _checked(self, given: list[Any], count: int) -> FeatureBatch:
        pooled, spatial, shares = given
        for part in [pooled, *(part for part in (spatial, shares) if part is not None)]:
            is_tensor = isinstance(part, Tensor) and part.ndim > 1 and len(part) == count
            if not (is_tensor and (part is spatial or part.shape[2:].numel() == 1)):
                found = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
                raise ValueError(
                    f"features is '{self.path}', which gave {found} for {count} images, expected "
                    "features [B, F], or a tuple (pooled, spatial, logits)"
                )
        return FeatureBatch(
            pooled.flatten(1).float(),
            None if spatial is None else spatial.flatten(1).float(),
            None if shares is None else shares.float(),
        )


def same_classes(class_names: tuple[str, ...], features: Features) -> bool:
    """Whether what features tell can be compared with classes of these names."""
    return bool(class_names) and class_names == features.class_names


def fingerprint(file: Path, settings: str) -> str:
    """What another file, or other settings, have another of."""
    digest = blake2b(settings.encode(), digest_size=16)
    with file.open("rb") as content:
        while piece := content.read(READ):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Spare a user torch's warnings of its own torch.jit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
