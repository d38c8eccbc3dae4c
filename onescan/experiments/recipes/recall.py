"""Associative recall with five mixers, causal and bidirectional, small enough for 2 CPU cores.

Width, training and MD-TPE, which gives each value access to the key before it, are the same for
all. The models differ only in their mixer, and in the MLP's width, which gives them equally many
parameters.
"""

from dataclasses import replace
from functools import partial

from onescan import configs
from onescan.experiments.data import RecallConfig
from onescan.experiments.recipes import row, table
from onescan.experiments.tasks import RecallTaskConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig
from onescan.layers.basic import GLUConfig
from onescan.layers.decays import KDADecayConfig
from onescan.layers.mixers import (
    GatedDeltaNetMixerConfig,
    KDAMixerConfig,
    LightNetMixerConfig,
    LionMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

DATA = RecallConfig()
CAUSAL = CausalLMConfig(
    vocab_size=1 + DATA.keys + DATA.values,
    width=64,
    depth=2,
    position=ToeplitzPositionConfig(hidden_states=16),
    init_std=0.1,
)
BIDIRECTIONAL = MaskedLMConfig(
    vocab_size=CAUSAL.vocab_size,
    width=CAUSAL.width,
    depth=CAUSAL.depth,
    position=ToeplitzPositionConfig(hidden_states=16, bidirectional=True),
    init_std=CAUSAL.init_std,
    head_transform=False,
)
TRAINING = TrainingConfig(
    steps=1000,
    batch_size=32,
    learning_rate=3e-3,
    betas=(0.9, 0.98),
    evaluate_every=0.05,
    checkpoint_every=0.1,
)
RANK = 16  # of gates and decays
NARROW = GLUConfig(ratio=7 / 3)  # for mixers with a fifth matrix of width x width
# name -> title, bidirectional mixer, MLP
MIXERS: dict[str, tuple[str, MixerConfig, GLUConfig]] = {
    "lightnet": ("LightNet", LightNetMixerConfig(num_heads=2, gate_rank=RANK), GLUConfig()),
    "lion_s": ("LION-s", LionMixerConfig(num_heads=2), GLUConfig()),
    "gated_deltanet": (
        "Gated DeltaNet",
        GatedDeltaNetMixerConfig(num_heads=2, value_expansion=1),
        NARROW,
    ),
    "kda": (
        "KDA",
        KDAMixerConfig(num_heads=2, decay=KDADecayConfig(rank=RANK), gate_rank=RANK),
        NARROW,
    ),
    "softmax": ("Softmax attention", SoftmaxMixerConfig(num_heads=2), GLUConfig()),
}


def _recall(kind: str, *, causal: bool) -> RunConfig:
    _, mixer, mlp = MIXERS[kind]
    model: CausalLMConfig | MaskedLMConfig = BIDIRECTIONAL
    if causal:
        model = CAUSAL
        mixer = configs.replace(mixer, {"direction": "forward"})
    return RunConfig(
        name=_name(kind, causal=causal),
        model=replace(model, mixer=mixer, mlp=mlp),
        data=DATA,
        task=RecallTaskConfig(),
        training=TRAINING,
        machine=MachineConfig(workers=0),
    )


def _name(kind: str, *, causal: bool) -> str:
    return f"recall_{kind}" if causal else f"recall_bidirectional_{kind}"


RECIPES = table(
    *(
        row(
            _name(kind, causal=causal),
            partial(_recall, kind, causal=causal),
            f"{title}, {'causal' if causal else 'bidirectional'}, on associative recall of 1 to 8 "
            "key-value pairs.",
            f"onescan train {_name(kind, causal=causal)}",
        )
        for causal in (True, False)
        for kind, (title, _, _) in MIXERS.items()
    )
)
