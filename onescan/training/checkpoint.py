"""Load a trained model from its run's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onescan.checkpoint.files import damaged, is_number
from onescan.checkpoint.run_folder import CONFIG, locate
from onescan.checkpoint.weights import REMEDY, load_model
from onescan.configs import ModelConfig
from onescan.data import Format, ImageFormat
from onescan.data.latents import LatentFormat
from onescan.data.text import TextFormat
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.denoiser import DenoiserConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig
from onescan.models.sequence_decoder import SequenceDecoderConfig
from onescan.training.folder import read_manifest
from onescan.training.run import RunConfig

# config.json names classes; `load` knows those of this package because they are imported here
FORMATS: tuple[type[Format], ...] = (ImageFormat, LatentFormat, TextFormat)
MODELS: tuple[type[ModelConfig], ...] = (
    ImageClassifierConfig,
    DenoiserConfig,
    CausalLMConfig,
    MaskedLMConfig,
    SequenceClassifierConfig,
    SequenceDecoderConfig,
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A trained model, with its config, input format and classes."""

    folder: Path
    config: RunConfig
    model: nn.Module
    """On the CPU, in evaluation mode."""
    format: Format
    """How to convert raw input to the model's input."""
    class_names: tuple[str, ...]
    metrics: dict[str, float]
    """Metrics of these weights on held-out data; empty if they were not evaluated."""


def load(path: str | Path) -> Checkpoint:
    """Load a trained model from its run's folder, or from any file in that folder.

    The weights are those of the last checkpoint; for best.safetensors, of the best evaluation.

    Nothing is unpickled and no module is imported: import the module of a custom model first.

    Raises:
        FileNotFoundError: If there is no such path, or the run has not saved any weights yet.
        ValueError: If the folder holds no run or was written by an unsupported version, or if the
            weights are damaged (names the file), do not match the model or do not fit into memory.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no run at {path}")
    folder, weights = locate(path)
    if path != folder and not (folder / CONFIG).is_file():
        raise ValueError(f"'{path}' is no file of a run: there is no {CONFIG} beside it")
    manifest = read_manifest(folder)
    with torch.random.fork_rng(devices=[]):  # keep the caller's random state
        model, notes = load_model(weights, manifest.run.model)
    return Checkpoint(
        folder=folder,
        config=manifest.run,
        model=model,
        format=manifest.format,
        class_names=manifest.class_names,
        metrics=_metrics(notes, weights),
    )


def _metrics(notes: dict[str, Any], path: Path) -> dict[str, float]:
    metrics = notes.get("metrics", {})
    if isinstance(metrics, dict) and all(map(is_number, metrics.values())):
        return metrics
    raise damaged(path, metrics, REMEDY)
