"""Linear-attention models for data of any number of dimensions, causal and bidirectional.

The functional ops are in `onescan.ops`, layers for your own networks in `onescan.nn`. Names are
imported on first use, so that `import onescan` and `onescan --help` do not import torch.
"""

from typing import TYPE_CHECKING

from onescan import nn as nn
from onescan import zoo as zoo
from onescan.lazy import lazy_attributes

if TYPE_CHECKING:
    from onescan import ops as ops
    from onescan.checkpoint.generation_state import load_generation_state as load_generation_state
    from onescan.checkpoint.generation_state import save_generation_state as save_generation_state
    from onescan.experiments.training.convert import convert as convert
    from onescan.experiments.training.linearize import linearize as linearize
    from onescan.experiments.training.loop import train as train
    from onescan.inference.loading import load as load
    from onescan.inference.loading import load_language_model as load_language_model
    from onescan.inference.windows import predict_windows as predict_windows
    from onescan.models.causal_lm import CausalLM as CausalLM
    from onescan.models.causal_lm import CausalLMConfig as CausalLMConfig
    from onescan.models.causal_lm import Sampling as Sampling
    from onescan.models.denoiser import Denoiser as Denoiser
    from onescan.models.denoiser import DenoiserConfig as DenoiserConfig
    from onescan.models.dense_predictor import DensePredictor as DensePredictor
    from onescan.models.dense_predictor import DensePredictorConfig as DensePredictorConfig
    from onescan.models.image_classifier import ImageClassifier as ImageClassifier
    from onescan.models.image_classifier import ImageClassifierConfig as ImageClassifierConfig
    from onescan.models.masked_lm import MaskedLM as MaskedLM
    from onescan.models.masked_lm import MaskedLMConfig as MaskedLMConfig
    from onescan.models.presets import PRESETS as PRESETS
    from onescan.models.presets import build as build
    from onescan.models.presets import preset as preset
    from onescan.models.sequence_classifier import SequenceClassifier as SequenceClassifier
    from onescan.models.sequence_classifier import (
        SequenceClassifierConfig as SequenceClassifierConfig,
    )
    from onescan.models.sequence_decoder import SequenceDecoder as SequenceDecoder
    from onescan.models.sequence_decoder import SequenceDecoderConfig as SequenceDecoderConfig
    from onescan.ops.backend import use_backend as use_backend
    from onescan.ops.parallel import SequenceGroup as SequenceGroup
    from onescan.ops.parallel import sequence_parallel as sequence_parallel
    from onescan.shapes import Grid as Grid

__version__ = "0.27.0"

# name -> module that defines it
_MODULES = {
    "CausalLM": "models.causal_lm",
    "CausalLMConfig": "models.causal_lm",
    "Denoiser": "models.denoiser",
    "DenoiserConfig": "models.denoiser",
    "DensePredictor": "models.dense_predictor",
    "DensePredictorConfig": "models.dense_predictor",
    "Grid": "shapes",
    "ImageClassifier": "models.image_classifier",
    "ImageClassifierConfig": "models.image_classifier",
    "MaskedLM": "models.masked_lm",
    "MaskedLMConfig": "models.masked_lm",
    "PRESETS": "models.presets",
    "Sampling": "models.causal_lm",
    "SequenceClassifier": "models.sequence_classifier",
    "SequenceClassifierConfig": "models.sequence_classifier",
    "SequenceDecoder": "models.sequence_decoder",
    "SequenceDecoderConfig": "models.sequence_decoder",
    "SequenceGroup": "ops.parallel",
    "build": "models.presets",
    "convert": "experiments.training.convert",
    "linearize": "experiments.training.linearize",
    "load": "inference.loading",
    "load_generation_state": "checkpoint.generation_state",
    "load_language_model": "inference.loading",
    "predict_windows": "inference.windows",
    "preset": "models.presets",
    "save_generation_state": "checkpoint.generation_state",
    "sequence_parallel": "ops.parallel",
    "train": "experiments.training.loop",
    "use_backend": "ops.backend",
}

__all__ = ["__version__", *_MODULES]
__getattr__ = lazy_attributes(__name__, _MODULES | {"ops": "ops"})


def __dir__() -> list[str]:
    return sorted(__all__)
