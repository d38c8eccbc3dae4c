"""Learned token positions for the sequence length of a recipe."""

from onescan.data import DataConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.presets import BERT_MAX_TOKENS, GPT2_MAX_TOKENS
from onescan.models.token_network import TokenNetworkConfig


def token_positions(data: DataConfig, *, at_least: int = 1) -> TokenPositionConfig:
    """Return learned positions for the longest sequence in `data`, or `at_least` tokens."""
    longest = data.max_tokens or TokenPositionConfig().max_tokens
    return TokenPositionConfig(max_tokens=max(longest, at_least))


def text_positions(model: TokenNetworkConfig, data: DataConfig) -> TokenPositionConfig:
    """Return learned positions for a text model.

    Language models get at least as many as BERT (512) or GPT-2 (1024), because fine-tuning and
    generation may use longer sequences than pre-training.
    """
    at_least = 1
    if isinstance(model, MaskedLMConfig):
        at_least = BERT_MAX_TOKENS
    elif isinstance(model, CausalLMConfig):
        at_least = GPT2_MAX_TOKENS
    return token_positions(data, at_least=at_least)
