"""Models with the interface of transformers: Auto classes, generate, pipelines, Trainer.

Importing this package registers the Auto classes.
"""

from typing import Any

try:
    import transformers
    from transformers.models.auto import modeling_auto
except ModuleNotFoundError as error:
    from onescan.messages import missing_package

    what = "onescan.integrations.transformers"
    raise missing_package(what, "transformers", "text", error) from error

if int(transformers.__version__.split(".")[0]) < 5:  # noqa: PLR2004
    raise ImportError(
        f"onescan needs transformers 5.0 or newer, but {transformers.__version__} is installed: "
        "pip install 'onescan[text]'"
    )

from onescan.integrations.transformers.cache import StateCache
from onescan.integrations.transformers.configuration import (
    OnescanImageConfig,
    OnescanSegmentationConfig,
    OnescanTextConfig,
)
from onescan.integrations.transformers.convert import load_pretrained, to_transformers
from onescan.integrations.transformers.heads import (
    OnescanForMultipleChoice,
    OnescanForQuestionAnswering,
    OnescanForTokenClassification,
)
from onescan.integrations.transformers.image_modeling import (
    OnescanBackbone,
    OnescanForImageClassification,
    OnescanImageModel,
)
from onescan.integrations.transformers.image_processing import OnescanImageProcessor
from onescan.integrations.transformers.linearized import (
    OnescanLinearizedConfig,
    load_linearized,
    register,
    save_linearized,
)
from onescan.integrations.transformers.modeling import (
    OnescanForCausalLM,
    OnescanForMaskedLM,
    OnescanForSequenceClassification,
    OnescanTextModel,
)
from onescan.integrations.transformers.segmentation import OnescanForSemanticSegmentation

__all__ = [
    "OnescanBackbone",
    "OnescanForCausalLM",
    "OnescanForImageClassification",
    "OnescanForMaskedLM",
    "OnescanForMultipleChoice",
    "OnescanForQuestionAnswering",
    "OnescanForSemanticSegmentation",
    "OnescanForSequenceClassification",
    "OnescanForTokenClassification",
    "OnescanImageConfig",
    "OnescanImageModel",
    "OnescanImageProcessor",
    "OnescanLinearizedConfig",
    "OnescanSegmentationConfig",
    "OnescanTextConfig",
    "OnescanTextModel",
    "StateCache",
    "load_linearized",
    "load_pretrained",
    "save_linearized",
    "to_transformers",
]

# Trainer, pipelines and PEFT look up the class of a model here, and whether labels are shifted
TASK_NAMES: dict[str, Any] = {
    "AutoBackbone": modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES,
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForMultipleChoice": modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForSemanticSegmentation": modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    "AutoModelForSequenceClassification": (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ),
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


def _register() -> None:
    for config in (OnescanTextConfig, OnescanImageConfig, OnescanSegmentationConfig):
        transformers.AutoConfig.register(config.model_type, config)
        for auto_class, name in config.auto_classes.items():
            getattr(transformers, auto_class).register(config, globals()[name])
            if auto_class in TASK_NAMES:
                TASK_NAMES[auto_class][config.model_type] = name
    register()


_register()
