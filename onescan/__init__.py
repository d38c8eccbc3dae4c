"""Linear-cost sequence models in any number of dimensions, causal and bidirectional.

Names are imported on first use, so that `import onescan` and `onescan --help` do not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.9.0"

# name -> module that defines it
_HOMES = {
    "AdditiveDecayState": "onescan.ops.additive_decay",
    "CausalLM": "onescan.models.causal_lm",
    "CausalLMConfig": "onescan.models.causal_lm",
    "DecayState": "onescan.ops.decay_attention",
    "DecayStates": "onescan.ops.decay_attention",
    "DeltaState": "onescan.ops.delta_rule",
    "DeltaStates": "onescan.ops.delta_rule",
    "Denoiser": "onescan.models.denoiser",
    "DenoiserConfig": "onescan.models.denoiser",
    "DiffusionState": "onescan.ops.linear_diffusion",
    "Grid": "onescan.shapes",
    "ImageClassifier": "onescan.models.image_classifier",
    "ImageClassifierConfig": "onescan.models.image_classifier",
    "MaskedLM": "onescan.models.masked_lm",
    "MaskedLMConfig": "onescan.models.masked_lm",
    "PRESETS": "onescan.models.presets",
    "Sampling": "onescan.models.sampling",
    "SequenceClassifier": "onescan.models.sequence_classifier",
    "SequenceClassifierConfig": "onescan.models.sequence_classifier",
    "SequenceDecoder": "onescan.models.sequence_decoder",
    "SequenceDecoderConfig": "onescan.models.sequence_decoder",
    "ToeplitzState": "onescan.ops.toeplitz_position",
    "additive_decay": "onescan.ops.additive_decay",
    "build": "onescan.models.presets",
    "decay_attention": "onescan.ops.decay_attention",
    "delta_rule": "onescan.ops.delta_rule",
    "gaussian_kernel": "onescan.ops.linear_diffusion",
    "linear_diffusion": "onescan.ops.linear_diffusion",
    "load": "onescan.training.checkpoint",
    "load_state": "onescan.training.states",
    "lrpe": "onescan.ops.lrpe",
    "lrpe_angles": "onescan.ops.lrpe",
    "merge_states": "onescan.ops.additive_decay",
    "preset": "onescan.models.presets",
    "save_state": "onescan.training.states",
    "stable_step": "onescan.ops.linear_diffusion",
    "toeplitz_position": "onescan.ops.toeplitz_position",
    "train": "onescan.training.loop",
    "use_backend": "onescan.ops.backend",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onescan' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from onescan.models.causal_lm import CausalLM as CausalLM
    from onescan.models.causal_lm import CausalLMConfig as CausalLMConfig
    from onescan.models.denoiser import Denoiser as Denoiser
    from onescan.models.denoiser import DenoiserConfig as DenoiserConfig
    from onescan.models.image_classifier import ImageClassifier as ImageClassifier
    from onescan.models.image_classifier import ImageClassifierConfig as ImageClassifierConfig
    from onescan.models.masked_lm import MaskedLM as MaskedLM
    from onescan.models.masked_lm import MaskedLMConfig as MaskedLMConfig
    from onescan.models.presets import PRESETS as PRESETS
    from onescan.models.presets import build as build
    from onescan.models.presets import preset as preset
    from onescan.models.sampling import Sampling as Sampling
    from onescan.models.sequence_classifier import SequenceClassifier as SequenceClassifier
    from onescan.models.sequence_classifier import (
        SequenceClassifierConfig as SequenceClassifierConfig,
    )
    from onescan.models.sequence_decoder import SequenceDecoder as SequenceDecoder
    from onescan.models.sequence_decoder import SequenceDecoderConfig as SequenceDecoderConfig
    from onescan.ops.additive_decay import AdditiveDecayState as AdditiveDecayState
    from onescan.ops.additive_decay import additive_decay as additive_decay
    from onescan.ops.additive_decay import merge_states as merge_states
    from onescan.ops.backend import use_backend as use_backend
    from onescan.ops.decay_attention import DecayState as DecayState
    from onescan.ops.decay_attention import DecayStates as DecayStates
    from onescan.ops.decay_attention import decay_attention as decay_attention
    from onescan.ops.delta_rule import DeltaState as DeltaState
    from onescan.ops.delta_rule import DeltaStates as DeltaStates
    from onescan.ops.delta_rule import delta_rule as delta_rule
    from onescan.ops.linear_diffusion import DiffusionState as DiffusionState
    from onescan.ops.linear_diffusion import gaussian_kernel as gaussian_kernel
    from onescan.ops.linear_diffusion import linear_diffusion as linear_diffusion
    from onescan.ops.linear_diffusion import stable_step as stable_step
    from onescan.ops.lrpe import lrpe as lrpe
    from onescan.ops.lrpe import lrpe_angles as lrpe_angles
    from onescan.ops.toeplitz_position import ToeplitzState as ToeplitzState
    from onescan.ops.toeplitz_position import toeplitz_position as toeplitz_position
    from onescan.shapes import Grid as Grid
    from onescan.training.states import load_state as load_state
    from onescan.training.states import save_state as save_state
