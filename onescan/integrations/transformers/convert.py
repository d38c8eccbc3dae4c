"""A model of onescan as one of transformers, to be saved, shared and trained there."""

from typing import Any

import torch
from torch import nn

from onescan.configs import differences
from onescan.integrations.transformers.base import OnescanModel, mark_initialized
from onescan.integrations.transformers.image import OnescanForImageClassification
from onescan.integrations.transformers.text import (
    OnescanForCausalLM,
    OnescanForMaskedLM,
    OnescanForSequenceClassification,
)
from onescan.models.causal_lm import CausalLM
from onescan.models.image_classifier import ImageClassifier
from onescan.models.masked_lm import MaskedLM
from onescan.models.sequence_classifier import SequenceClassifier

KINDS: dict[type[nn.Module], type[OnescanModel]] = {
    CausalLM: OnescanForCausalLM,
    MaskedLM: OnescanForMaskedLM,
    SequenceClassifier: OnescanForSequenceClassification,
    ImageClassifier: OnescanForImageClassification,
}


def to_transformers(model: nn.Module, **fields: Any) -> OnescanModel:
    """The same model as transformers has them; both share their weights.

    `to_transformers(model, eos_token_id=0).save_pretrained(folder)` makes a folder that its
    `from_pretrained` loads wherever onescan is imported. `to_onescan()` is the way back.

    Args:
        model: a language model or a classifier.
        fields: of transformers' config, such as id2label, eos_token_id or problem_type.

    Raises:
        ValueError: transformers has no such model, or a field says what the model is not.
    """
    if type(model) not in KINDS:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(f"model is a {type(model).__name__}, expected one of {known}")
    kind: Any = KINDS[type(model)]
    config = kind.config_class.of(model.config, dtype=next(model.parameters()).dtype, **fields)
    for name, told, is_so in differences(config.native(type(model.config)), model.config):
        raise ValueError(f"{name} is {told!r}, but the model's is {is_so!r}")
    with torch.device("meta"):
        converted: OnescanModel = kind(config)
    converted.adopt(model)
    mark_initialized(converted)
    return converted.train(model.training)
