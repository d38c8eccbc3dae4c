"""Associative recall with three mixers, small enough for 2 CPU cores.

Width, training and MD-TPE, which gives each value access to the key before it, are the same for
all; the models differ only in their mixer.
"""

from dataclasses import replace
from functools import partial

from onescan.data import RecallConfig
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LionMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.recipes import row, table
from onescan.tasks import RecallTaskConfig
from onescan.training import MachineConfig, RunConfig, TrainingConfig

DATA = RecallConfig()
MODEL = CausalLMConfig(
    vocab_size=1 + DATA.keys + DATA.values,
    width=64,
    depth=2,
    position=ToeplitzPositionConfig(hidden_states=16),
    init_std=0.1,
)
TRAINING = TrainingConfig(
    steps=1000,
    batch_size=32,
    learning_rate=3e-3,
    betas=(0.9, 0.98),
    evaluate_every=0.05,
    checkpoint_every=0.1,
)
MIXERS: dict[str, tuple[str, MixerConfig]] = {
    "lightnet": ("LightNet", LightNetMixerConfig(num_heads=2, gate_rank=16, causal=True)),
    "lion_s": ("Causal LION-s", LionMixerConfig(num_heads=2, direction="forward")),
    "softmax": ("Softmax attention", SoftmaxMixerConfig(num_heads=2, causal=True)),
}


def _recall(kind: str) -> RunConfig:
    return RunConfig(
        name=f"recall_{kind}",
        model=replace(MODEL, mixer=MIXERS[kind][1]),
        data=DATA,
        task=RecallTaskConfig(),
        training=TRAINING,
        machine=MachineConfig(workers=0),
    )


RECIPES = table(
    *(
        row(
            f"recall_{kind}",
            partial(_recall, kind),
            f"{title} on associative recall of 1 to 8 key-value pairs.",
            f"onescan train recall_{kind}",
        )
        for kind, (title, _) in MIXERS.items()
    )
)
