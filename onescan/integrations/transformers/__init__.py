"""Models with the interface of transformers: Auto classes, generate, pipelines, Trainer.

Importing this package registers the Auto classes.
"""

from typing import Any

import transformers
from transformers.models.auto import modeling_auto

if int(transformers.__version__.split(".")[0]) < 5:  # noqa: PLR2004
    raise ImportError(
        f"onescan needs transformers 5.0 or newer, but {transformers.__version__} is installed: "
        "pip install 'onescan[text]'"
    )

from onescan.integrations.transformers import image_modeling, modeling
from onescan.integrations.transformers.cache import StateCache
from onescan.integrations.transformers.configuration import OnescanImageConfig, OnescanTextConfig
from onescan.integrations.transformers.convert import load_pretrained, to_transformers
from onescan.integrations.transformers.image_modeling import (
    OnescanForImageClassification,
    OnescanImageModel,
)
from onescan.integrations.transformers.modeling import (
    OnescanForCausalLM,
    OnescanForMaskedLM,
    OnescanForSequenceClassification,
    OnescanTextModel,
)

__all__ = [
    "OnescanForCausalLM",
    "OnescanForImageClassification",
    "OnescanForMaskedLM",
    "OnescanForSequenceClassification",
    "OnescanImageConfig",
    "OnescanImageModel",
    "OnescanTextConfig",
    "OnescanTextModel",
    "StateCache",
    "load_pretrained",
    "to_transformers",
]

# Trainer, pipelines and PEFT look up the class of a model here, and whether labels are shifted
TASK_NAMES: dict[str, Any] = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ),
}


def _register() -> None:
    for config in (OnescanTextConfig, OnescanImageConfig):
        transformers.AutoConfig.register(config.model_type, config)
        for auto_class, name in config.auto_classes.items():
            kind = getattr(modeling, name, None) or getattr(image_modeling, name)
            getattr(transformers, auto_class).register(config, kind)
            if auto_class in TASK_NAMES:
                TASK_NAMES[auto_class][config.model_type] = name


_register()
