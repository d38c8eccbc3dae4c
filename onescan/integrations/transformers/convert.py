"""Convert native models to models of transformers, and load saved ones as native models."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from onescan.checks import LOAD_ERRORS, in_a_line
from onescan.configs import differences
from onescan.inputs.images import ImageFormat
from onescan.inputs.tokenizer import Tokenizer
from onescan.integrations.transformers.configuration import OnescanTextConfig
from onescan.integrations.transformers.image_modeling import OnescanForImageClassification
from onescan.integrations.transformers.image_processing import OnescanImageProcessor
from onescan.integrations.transformers.modeling import (
    OnescanForCausalLM,
    OnescanForMaskedLM,
    OnescanForSequenceClassification,
    OnescanModel,
    mark_initialized,
)
from onescan.integrations.transformers.segmentation import OnescanForSemanticSegmentation
from onescan.messages import expected_model, named_type
from onescan.models.causal_lm import CausalLM
from onescan.models.dense_predictor import DensePredictor
from onescan.models.image_classifier import ImageClassifier
from onescan.models.masked_lm import MaskedLM
from onescan.models.sequence_classifier import SequenceClassifier

CONVERTED: dict[type[nn.Module], type[OnescanModel]] = {
    CausalLM: OnescanForCausalLM,
    MaskedLM: OnescanForMaskedLM,
    SequenceClassifier: OnescanForSequenceClassification,
    ImageClassifier: OnescanForImageClassification,
    DensePredictor: OnescanForSemanticSegmentation,
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LANGUAGE_MODELS: dict[str, Any] = {
    kind.__name__: kind for kind in (OnescanForCausalLM, OnescanForMaskedLM)
}


def to_transformers(
    model: nn.Module, *, image_format: Any = None, tokenizer: Any = None, **fields: Any
) -> OnescanModel:
    """Convert a native model to a model of transformers. Both share their weights.

    `to_transformers(model, eos_token_id=0).save_pretrained(folder)` writes a folder for
    `from_pretrained`. `to_onescan()` of the result returns a native model again.

    Args:
        model: A language model, a classifier, or a `DensePredictor` of two axes, whose output
            channels are classes.
        image_format: An `onescan.inputs.images.ImageFormat`, as in `onescan.load(...).format`.
            `save_pretrained` then also writes an image processor, which pipelines read.
        tokenizer: An `onescan.inputs.Tokenizer`, as returned by `onescan.load_language_model`.
            `save_pretrained` then also writes it, and the ids of its special tokens are the
            defaults of bos_token_id, eos_token_id and pad_token_id.
        fields: Fields of transformers' configs, such as id2label, eos_token_id or problem_type.

    Raises:
        ValueError: If the class of the model is not supported, a field contradicts the model, an
            image format is given for a model that reads no images, or one with a crop for a
            `DensePredictor`, or a tokenizer for a model that reads no text or has a smaller
            vocabulary.
    """
    if type(model) not in CONVERTED:
        known = ", ".join(kind.__name__ for kind in CONVERTED)
        raise expected_model(model, f"one of {known}")
    kind: Any = CONVERTED[type(model)]
    native: Any = model.config
    processor = None
    reads_images = kind.main_input_name == "pixel_values"
    if image_format is not None:
        if not reads_images:
            raise ValueError(
                f"image_format was given for {named_type(model)}, which reads no images"
            )
        if not isinstance(image_format, ImageFormat):
            raise ValueError(f"image_format is {named_type(image_format)}, expected an ImageFormat")
        if kind is OnescanForSemanticSegmentation and image_format.crop is not None:
            raise ValueError(
                f"image_format.crop is {image_format.crop}, expected None: pixels outside of the "
                "crop would have no class"
            )
        processor = OnescanImageProcessor.from_onescan(image_format)
    if tokenizer is not None:
        if reads_images:
            raise ValueError(f"tokenizer was given for {named_type(model)}, which reads no text")
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(
                f"tokenizer is {named_type(tokenizer)}, expected an onescan.inputs.Tokenizer"
            )
        tokenizer.check_vocabulary(native.vocab_size)
        processor = tokenizer.to_transformers()
        fields = special_ids(processor) | fields
    dtype = next(model.parameters()).dtype
    config = kind.config_class.from_onescan(native, dtype=dtype, **fields)
    for name, given, actual in differences(config.to_onescan(type(native)), native):
        raise ValueError(f"{name} is {given!r}, but the model's is {actual!r}")
    with torch.device("meta"):
        converted: OnescanModel = kind(config)
    converted.wrap(model)
    mark_initialized(converted)
    converted.processor = processor
    return converted.train(model.training)


def special_ids(source: Any) -> dict[str, int]:
    """Return the token ids that transformers' configs have, from a tokenizer of transformers."""
    ids = {name: getattr(source, name, None) for name in TOKEN_IDS}
    return {name: i for name, i in ids.items() if i is not None}


def load_pretrained(name: str) -> CausalLM | MaskedLM:
    """Load a saved language model as a native model, without executing code from its folder.

    Args:
        name: Folder written by `save_pretrained`, or a name on the Hugging Face Hub.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        ValueError: If the model cannot be loaded, has another architecture or quantized weights,
            or if weights are missing or unexpected.
    """
    try:
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise _unusable(name, error) from error
    saved = (config.architectures or ["nothing"])[0]
    if not isinstance(config, OnescanTextConfig) or saved not in LANGUAGE_MODELS:
        raise ValueError(
            f"{name!r} holds {saved}, expected one of {', '.join(LANGUAGE_MODELS)}; `onescan "
            "convert` reads models of other libraries"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name!r} has quantized weights, expected floating-point weights")
    try:
        model, info = LANGUAGE_MODELS[saved].from_pretrained(
            name,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",  # never load a kernel that the config names
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        raise _unusable(name, error) from error
    for keys, what in (("missing_keys", "missing"), ("unexpected_keys", "unexpected")):
        if names := info[keys]:
            raise ValueError(f"{name!r} has {len(names)} {what} weights, such as {min(names)}")
    return model.eval().to_onescan()


def _unusable(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name!r} holds no model that can be loaded: {in_a_line(error)}")
