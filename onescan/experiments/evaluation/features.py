"""Feature extractors for images: trained classifiers, and Inception-v3 as a TorchScript file."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from onescan import configs, zoo
from onescan.checkpoint.run_folder import locate
from onescan.checks import in_a_line
from onescan.experiments.evaluation.config import short_name
from onescan.experiments.tasks.feature_distance import convert_images, extract_features
from onescan.inference.loading import Checkpoint, load
from onescan.inputs import ImageFormat
from onescan.inputs.images import to_bytes
from onescan.models.image_classifier import ImageClassifier
from onescan.shapes import Images

TORCHSCRIPT = (".pt", ".pth", ".ts", ".jit")
MAP_CHANNELS, MAP_SIZE = 7, 17  # of the feature map that sFID reads, arXiv:2103.03841


class FeatureBatch(NamedTuple):
    """Features of a batch of images.

    Attributes:
        pooled: Features for the Fréchet distance, precision and recall.
        spatial: Flattened feature map; None if there is none.
        probabilities: Probability of each class; None if the extractor is not a classifier.
    """

    pooled: Float[Tensor, "B F"]
    spatial: Float[Tensor, "B S"] | None
    probabilities: Float[Tensor, "B classes"] | None


class FeatureSizes(NamedTuple):
    """Numbers of features of one image; 0 if there are none."""

    pooled: int
    spatial: int
    classes: int


class FeatureExtractor(ABC):
    """Computes features of images."""

    device: torch.device
    name: str
    cache_key: str
    """Identifies the weights and settings."""
    is_inception: bool
    """Whether its scores may be called FID and Inception Score."""
    class_names: tuple[str, ...] = ()
    """Classes of the probabilities, if known."""

    @abstractmethod
    def __call__(self, images: Images) -> FeatureBatch:
        """Compute features of pixels from 0 to 1, rounded to bytes, in 1 or 3 channels."""

    def sizes(self, size: tuple[int, int]) -> FeatureSizes:
        """Return the numbers of features of images of a height and width."""
        features = self(torch.zeros(2, 3, *size))
        return FeatureSizes(*(0 if part is None else part.shape[1] for part in features))


def open_features(path: str | Path, device: torch.device) -> FeatureExtractor:
    """Open a feature extractor.

    Args:
        path: A TorchScript file (.pt, .pth, .ts, .jit) for `InceptionFeatures`; or a run's folder,
            best.safetensors in it or "zoo/NAME", for `ClassifierFeatures`.
        device: Device to run on.

    Raises:
        FileNotFoundError: If the path does not exist.
        ValueError: If it is neither, or damaged.
    """
    path = zoo.resolve(Path(path))
    if not path.exists():
        raise FileNotFoundError(f"features is '{path}', which does not exist")
    if path.suffix in TORCHSCRIPT:
        return InceptionFeatures(path, device)
    return ClassifierFeatures(load(path), path, device)


class ClassifierFeatures(FeatureExtractor):
    """Features of a classifier trained with onescan.

    Images are converted to the size and channels that it was trained on. Pooled features are the
    input of the head. Spatial features are the first 7 channels of the patch tokens, averaged to at
    most 17 x 17 positions, as many as sFID takes from Inception-v3.
    """

    is_inception = False

    def __init__(self, checkpoint: Checkpoint, path: Path, device: torch.device) -> None:
        if not isinstance(checkpoint.model, ImageClassifier):
            kind = type(checkpoint.model).__name__
            raise ValueError(f"features is '{path}', a {kind}, expected an ImageClassifier")
        if (target := checkpoint.target.kind) != "class":
            raise ValueError(f"features is '{path}', with targets of kind {target}, expected class")
        assert isinstance(checkpoint.format, ImageFormat)
        self.model, self.format, self.device = (
            checkpoint.model.to(device),
            checkpoint.format,
            device,
        )
        self.name, self.class_names = short_name(path), checkpoint.class_names
        _, weights = locate(path if path.is_file() else checkpoint.folder)
        settings = [configs.to_dict(config) for config in (checkpoint.model.config, self.format)]
        self.cache_key = file_key(weights, settings)

    @torch.no_grad()
    def __call__(self, images: Images) -> FeatureBatch:
        features = extract_features(self.model, self.format, images.to(self.device))
        image = (self.format.channels, self.format.height, self.format.width)
        height, width = self.model.patchify.grid_shape(image)
        patches = features.tokens[:, self.model.prefix :, :MAP_CHANNELS]
        maps = rearrange(patches, "b (y x) c -> b c y x", y=height, x=width)
        spatial = F.adaptive_avg_pool2d(maps, (min(height, MAP_SIZE), min(width, MAP_SIZE)))
        return FeatureBatch(features.pooled, spatial.flatten(1), features.probabilities)


class InceptionFeatures(FeatureExtractor):
    """Features of a TorchScript file, Inception-v3 by convention.

    It is called with bytes `[B, 3, H, W]` from 0 to 255 at the images' own size. If `forward` has
    an argument `return_features`, as in NVIDIA's inception-2015-12-05.pt, that returns the pooled
    features, and `no_output_bias`, if it exists, the probabilities. Otherwise the result is pooled
    features, or a tuple (pooled, spatial, logits) whose last entries may be missing.
    """

    is_inception = True

    def __init__(self, path: Path, device: torch.device) -> None:
        with _ignore_deprecations():
            try:
                self.module = torch.jit.load(str(path), map_location=device).eval()
                arguments = self.module.forward.schema.arguments
            except RuntimeError as error:
                raise ValueError(
                    f"features is '{path}', which is damaged or not a TorchScript file: "
                    f"{in_a_line(error)}"
                ) from error
        self.path, self.name, self.device = path, path.name, device
        self.options = {argument.name for argument in arguments}
        self.cache_key = file_key(path, None)

    @torch.no_grad()
    def __call__(self, images: Images) -> FeatureBatch:
        height, width = images.shape[2:]
        rgb = convert_images(images.to(self.device), channels=3, height=height, width=width)
        pixels = to_bytes(rgb)
        with _ignore_deprecations():
            try:
                pooled, spatial, probabilities = self._run(pixels)
            except (RuntimeError, torch.jit.Error) as error:
                raise ValueError(
                    f"features is '{self.path}', which fails on bytes of shape "
                    f"{tuple(pixels.shape)}: {str(error).strip().splitlines()[-1]}"
                ) from error
        for part in (pooled, spatial, probabilities):
            if part is not None or part is pooled:
                self._check(part, len(images), is_map=part is spatial)
        return FeatureBatch(
            pooled.flatten(1).float(),
            None if spatial is None else spatial.flatten(1).float(),
            None if probabilities is None else probabilities.float(),
        )

    def _run(self, pixels: Tensor) -> tuple[Any, Any, Any]:
        if "return_features" in self.options:
            has_classes = "no_output_bias" in self.options
            probabilities = self.module(pixels, no_output_bias=True) if has_classes else None
            return self.module(pixels, return_features=True), None, probabilities
        features = self.module(pixels)
        parts = tuple(features) if isinstance(features, tuple | list) else (features,)
        pooled, spatial, logits = (*parts, None, None)[:3]
        is_tensor = isinstance(logits, Tensor)
        return pooled, spatial, logits.float().softmax(dim=1) if is_tensor else logits

    def _check(self, part: Any, count: int, *, is_map: bool) -> None:
        is_batch = isinstance(part, Tensor) and part.ndim > 1 and len(part) == count
        if is_batch and (is_map or part.shape[2:].numel() == 1):
            return
        described = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise ValueError(
            f"features is '{self.path}', which returned {described} for {count} images, expected "
            "features [B, F], or a tuple (pooled, spatial, logits)"
        )


def file_key(file: Path, settings: Any) -> str:
    """Hash the content of a file together with settings of JSON types."""
    with file.open("rb") as content:
        start = blake2b(json.dumps(settings).encode(), digest_size=16)
        return file_digest(content, lambda: start).hexdigest()


@contextmanager
def _ignore_deprecations() -> Iterator[None]:
    """Hide torch's deprecation warnings of torch.jit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
