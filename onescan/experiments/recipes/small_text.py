"""Small language models of bytes, with about a million parameters, and how to train them."""

from dataclasses import replace

from onescan.experiments.tasks import MaskedLanguageModellingConfig
from onescan.experiments.training import TrainingConfig
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

SMALL_WIDTH, SMALL_DEPTH, BYTES = 128, 4, 258
SMALL_INIT_STD = 0.08  # of initial weights: about 1 / sqrt(width); large models use 0.02
LIGHTNET = LightNetMixerConfig(num_heads=4, gate_rank=32)
POSITION = ToeplitzPositionConfig(hidden_states=16)
SMALL_LM = CausalLMConfig(
    vocab_size=BYTES,
    width=SMALL_WIDTH,
    depth=SMALL_DEPTH,
    mixer=replace(LIGHTNET, direction="forward"),
    position=POSITION,
    init_std=SMALL_INIT_STD,
)
SMALL_MLM = MaskedLMConfig(
    vocab_size=BYTES,
    width=SMALL_WIDTH,
    depth=SMALL_DEPTH,
    mixer=LIGHTNET,
    position=replace(POSITION, bidirectional=True),
    init_std=SMALL_INIT_STD,
)
SMALL_MASKS = MaskedLanguageModellingConfig(whole_word_mask=True)
SMALL_TRAINING = TrainingConfig(
    steps=2400,
    batch_size=16,
    learning_rate=3e-3,
    weight_decay=0.1,
    betas=(0.9, 0.99),
    evaluate_every=1.0,
)
