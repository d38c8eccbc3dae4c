"""What is judged: images that a denoiser makes as they are needed, or that were made before."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onescan import configs
from onescan.checkpoint.weights import BEST, WEIGHTS
from onescan.data import DataConfig, derive_seed
from onescan.evaluation.asked import SamplesConfig
from onescan.evaluation.generation.features import Features, fingerprint
from onescan.evaluation.generation.folders import FolderSource
from onescan.evaluation.generation.npz import NpzSource
from onescan.evaluation.generation.source import Source
from onescan.evaluation.generation.stamp import digest
from onescan.evaluation.names import short_name
from onescan.shapes import Images, Labels
from onescan.tasks import ImageGenerationConfig
from onescan.training.folder import Manifest, read_manifest
from onescan.training.loading import is_run
from onescan.training.pipeline import INDEX, load_pipeline, usual_sampler
from onescan.training.samples import sample_seed

if TYPE_CHECKING:
    from onescan.integrations.diffusers import DenoiserPipeline

NPZ = ".npz"
CHANCES = 2**64  # seeds that there are


class Samples(ABC):
    """Images to judge, of which there may be several sets: one at each guidance scale."""

    name: str
    stamp: str
    size: tuple[int, int]
    class_names: tuple[str, ...] = ()
    guidances: tuple[float | None, ...] = (None,)
    sampler: str | None = None
    steps: int | None = None
    data: DataConfig | None = None
    """What a run was trained on."""
    is_made: bool = False
    """Whether a model makes them, from a seed."""

    @abstractmethod
    def at(self, guidance: float | None, frequencies: Sequence[int] | None) -> Source:
        """One set: the classes asked for come by turns, or as frequent as these numbers say."""


def open_samples(
    path: str | Path, asked: SamplesConfig, features: Features, device: torch.device
) -> Samples:
    """Open whatever can be judged.

    Args:
        path: a run's folder, or best.safetensors in it; a folder that `DenoiserPipeline`'s
            save_pretrained wrote; a .npz file; or a folder of images.
        asked: how images are made.
        features: whose classes labels in a .npz file are of.
        device: where images are made.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ValueError: what is there is none of these; or images are there already, and something is
            asked for that would make others.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is nothing at {path}")
    if path.suffix != NPZ and (is_run(path) or (path / INDEX).is_file()):
        return DenoiserSamples(path, asked, device)
    usual = SamplesConfig()
    for field in ("guidance_scale", "sampler", "steps", "class_distribution", "seed"):
        if (value := getattr(asked, field)) != getattr(usual, field):
            raise ValueError(f"{field} is {value!r}, but the images of {path} are there already")
    if path.is_dir():
        return FileSamples(FolderSource(path))
    source = NpzSource(path)
    if source.labels is not None and source.labels.numel():
        least, most = source.labels.aminmax()
        if least >= 0 and most < len(features.class_names):
            source.class_names = features.class_names
    return FileSamples(source)


class FileSamples(Samples):
    """Images that were made before."""

    def __init__(self, source: Source) -> None:
        self.source, self.name, self.stamp = source, source.name, source.stamp
        self.size, self.class_names = source.size, source.class_names

    def at(self, guidance: float | None, frequencies: Sequence[int] | None) -> Source:
        del guidance, frequencies
        return self.source


class DenoiserSamples(Samples):
    """Images that a denoiser makes, in pixels or through its VAE."""

    is_made = True

    def __init__(self, path: Path, asked: SamplesConfig, device: torch.device) -> None:
        manifest = read_manifest(path if path.is_dir() else path.parent) if is_run(path) else None
        usual = usual_sampler(path)
        self.pipeline = load_pipeline(path, sampler=asked.sampler).to(device)
        self.device, self.asked = device, asked
        self.name, self.size = short_name(path), self.pipeline.image_size
        self.class_names = _class_names(self.pipeline)
        self.guidances = tuple(sorted(asked.guidance_scale)) or (usual.guidance_scale,)
        if not self.class_names and set(self.guidances) == {1.0}:
            self.guidances = (None,)  # no class can be asked for
        self.sampler = asked.sampler or _usual_sampler(self.pipeline, manifest)
        self.steps: int = asked.steps or usual.steps
        self.data = manifest.run.data if manifest else None
        self.stamp = _stamp(path, manifest)

    def at(self, guidance: float | None, frequencies: Sequence[int] | None) -> Source:
        return _Drawn(self, 1.0 if guidance is None else guidance, frequencies)


class _Drawn(Source):
    """The images that come of one guidance scale: of image i, seed and class come of i alone."""

    def __init__(
        self, samples: DenoiserSamples, guidance: float, frequencies: Sequence[int] | None
    ) -> None:
        self.samples, self.guidance = samples, guidance
        self.name, self.stamp = samples.name, samples.stamp
        self.size, self.class_names = samples.size, samples.class_names
        self.ends = list(accumulate(frequencies)) if frequencies else None

    def __len__(self) -> int:
        return self.samples.asked.samples or 0

    def images(self, start: int, stop: int) -> tuple[Images, Labels | None]:
        samples, seed = self.samples, self.samples.asked.seed
        labels = [self._label(i) for i in range(start, stop)] if self.class_names else None
        chance = [torch.Generator().manual_seed(sample_seed(seed, i)) for i in range(start, stop)]
        made = samples.pipeline(
            class_labels=labels,
            num_inference_steps=samples.steps,
            guidance_scale=self.guidance,
            generator=chance,
            batch_size=stop - start,
            output_type="pt",
            return_dict=False,
            callback=_unseen,
        )[0]
        return made, None if labels is None else torch.tensor(labels)

    def _label(self, i: int) -> int:
        if self.ends is None:
            return i % len(self.class_names)
        chance = derive_seed(self.samples.asked.seed, "label", i) / CHANCES
        return next(k for k, end in enumerate(self.ends) if chance * self.ends[-1] < end)


def _usual_sampler(pipeline: "DenoiserPipeline", manifest: Manifest | None) -> str:
    if manifest is None:
        return type(pipeline.scheduler).__name__
    assert isinstance(manifest.run.task, ImageGenerationConfig)
    return manifest.run.task.sampler.resolved(manifest.run.task.noise)


def _class_names(pipeline: "DenoiserPipeline") -> tuple[str, ...]:
    """A name for each class that the model can be asked for; its number where it has none."""
    count, names = pipeline.transformer.network.config.num_classes, pipeline.names
    return tuple(names.get(label, str(label)) for label in range(count))


def _stamp(path: Path, manifest: Manifest | None) -> str:
    """What another model has another of, wherever it lies."""
    if manifest is None:
        files = sorted(file for file in path.rglob("*") if file.suffix in (".safetensors", ".json"))
        return digest([[str(file.relative_to(path)), fingerprint(file, "")] for file in files])
    assert isinstance(manifest.run.task, ImageGenerationConfig)
    parts = (manifest.run.model, manifest.format, manifest.run.task.noise)
    settings = json.dumps([configs.to_dict(part) for part in parts])
    folder, weights = (path, WEIGHTS) if path.is_dir() else (path.parent, path.name)
    return fingerprint(folder / (weights if weights == BEST else WEIGHTS), settings)


def _unseen(step: int) -> None:
    """Stand in for a bar over the steps of a batch."""
    del step
