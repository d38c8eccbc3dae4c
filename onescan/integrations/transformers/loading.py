"""A language model that transformers saved, as onescan's own."""

from typing import Any

from transformers import AutoConfig

from onescan.checks import LOAD_ERRORS, in_a_line
from onescan.integrations.transformers.configuration import OnescanTextConfig
from onescan.integrations.transformers.text import OnescanForCausalLM, OnescanForMaskedLM
from onescan.models.causal_lm import CausalLM
from onescan.models.masked_lm import MaskedLM

KINDS: dict[str, type[OnescanForCausalLM] | type[OnescanForMaskedLM]] = {
    kind.__name__: kind for kind in (OnescanForCausalLM, OnescanForMaskedLM)
}


def load_pretrained(name: str) -> CausalLM | MaskedLM:
    """Load a model on the CPU in evaluation mode, without running any code that comes with it.

    Args:
        name: Folder that `save_pretrained` wrote, or a name on the Hugging Face Hub.

    Raises:
        ValueError: If the model cannot be loaded, has another architecture or quantized weights,
            or if weights are missing or unexpected.
    """
    try:
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise _unusable(name, error) from error
    saved = (config.architectures or ["nothing"])[0]
    if not isinstance(config, OnescanTextConfig) or saved not in KINDS:
        raise ValueError(f"{name!r} holds {saved}, expected one of {', '.join(KINDS)}")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name!r} has quantized weights, expected floating-point weights")
    try:
        kind: Any = KINDS[saved]
        model, found = kind.from_pretrained(
            name,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",  # never load a kernel that the config names
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        raise _unusable(name, error) from error
    for keys, what in (("missing_keys", "missing"), ("unexpected_keys", "unexpected")):
        if names := found[keys]:
            raise ValueError(f"{name!r} has {len(names)} {what} weights, such as {min(names)}")
    return model.eval().to_onescan()


def _unusable(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name!r} holds no model that can be loaded: {in_a_line(error)}")
