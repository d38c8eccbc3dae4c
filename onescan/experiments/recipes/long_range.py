"""The Long Range Arena and small ListOps: LION-lit, and LION-d and LION-s initialized from HiPPO.

As in LION, arXiv:2502.16249, App. C.2: the widths, depths, batch sizes, epochs, weight decays and
dropout rates of S5 (arXiv:2208.04933, with its published scripts), and AdamW with a cosine schedule
from 5e-4. Settings that neither paper states are ours: layer norms, where S5 has batch norms; 8
heads; LION's default MLP; and positions, which LION-lit always has in the paper. Only the small
recipes have been run.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from onescan import configs
from onescan.experiments.data import (
    ByteTextConfig,
    DataConfig,
    ListOpsDataConfig,
    PathfinderDataConfig,
    PixelImageConfig,
    RetrievalConfig,
)
from onescan.experiments.data.long_range import ListOpsConfig, PathfinderConfig
from onescan.experiments.recipes import row, table
from onescan.experiments.recipes.images import CIFAR10_CLASSES
from onescan.experiments.tasks import SequenceClassificationConfig
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import DecayConfig, HippoDecayConfig, NoDecayConfig
from onescan.layers.mixers import LionMixerConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

DECAYS: dict[str, DecayConfig] = {
    "lit": NoDecayConfig(),
    "d": HippoDecayConfig(selective=False),
    "s": HippoDecayConfig(),
}
NAMES = {
    "lit": "LION-lit",
    "d": "LION-d with HiPPO initialization",
    "s": "LION-s with HiPPO initialization",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A data set of the arena and the settings of its runs."""

    title: str
    data: DataConfig
    model: SequenceClassifierConfig
    """Model without decay and positions, which `_long_range` adds."""
    training: TrainingConfig
    machine: MachineConfig = field(default_factory=MachineConfig)
    flags: str = ""
    """Flags of the command that set the path of the data."""
    all_have_positions: bool = False
    """Whether LION-d and LION-s also have absolute positions."""
    min_step: float = 0.001
    """Minimum step of HiPPO; smaller for longer sequences, which need a longer memory."""


def _model(
    *, width: int, depth: int, vocab_size: int, num_classes: int, dropout: float = 0.0
) -> SequenceClassifierConfig:
    return SequenceClassifierConfig(
        vocab_size=vocab_size,
        width=width,
        depth=depth,
        num_classes=num_classes,
        mixer=LionMixerConfig(num_heads=8),
        mlp=MLPConfig(),
        position=None,
        head_transform=False,
        dropout=dropout,
    )


def _training(
    *, epochs: int, batch_size: int, weight_decay: float, warmup_epochs: int = 1
) -> TrainingConfig:
    return TrainingConfig(
        epochs=epochs,
        batch_size=batch_size,
        weight_decay=weight_decay,
        learning_rate=5e-4,
        warmup=warmup_epochs / epochs,
        final_lr_ratio=0.0,
    )


LISTOPS = Problem(
    title="ListOps of the Long Range Arena, up to 1,999 tokens",
    data=ListOpsDataConfig(),
    model=_model(width=128, depth=8, vocab_size=16, num_classes=10),
    training=_training(epochs=40, batch_size=50, weight_decay=0.04),
)
# Small enough for 2 CPU cores. All three have positions, so they differ only in their decay.
LISTOPS_SMALL = Problem(
    title="ListOps of 15 to 37 tokens",
    data=ListOpsDataConfig(
        expressions=ListOpsConfig(min_length=15, max_length=37, max_depth=3, max_args=5),
        train_examples=64_000,
        test_examples=1_000,
    ),
    model=replace(
        _model(width=32, depth=2, vocab_size=16, num_classes=10),
        mixer=LionMixerConfig(num_heads=4, chunk_size=16),
        mlp=MLPConfig(ratio=2.0),
        init_std=0.1,
    ),
    training=TrainingConfig(
        steps=800,
        batch_size=32,
        learning_rate=5e-3,
        evaluate_every=0.025,
        checkpoint_every=0.1,
    ),
    machine=MachineConfig(workers=0),
    all_have_positions=True,
)
PIXELS = Problem(
    title="grayscale CIFAR-10 as 1,024 pixels",
    data=PixelImageConfig(path="uoft-cs/cifar10", class_names=CIFAR10_CLASSES),
    model=_model(width=512, depth=6, vocab_size=256, num_classes=10, dropout=0.1),
    training=_training(epochs=250, batch_size=50, weight_decay=0.07),
    flags=" --data.path FOLDER",
)
PATHFINDER = Problem(
    title="Pathfinder as 1,024 pixels",
    data=PathfinderDataConfig(),
    model=_model(width=192, depth=6, vocab_size=256, num_classes=2, dropout=0.05),
    training=_training(epochs=200, batch_size=64, weight_decay=0.03),
)
PATHX = Problem(
    title="Path-X as 16,384 pixels",
    data=PathfinderDataConfig(images=PathfinderConfig(side=128)),
    model=_model(width=128, depth=6, vocab_size=256, num_classes=2),
    training=_training(epochs=75, batch_size=32, weight_decay=0.06),
    min_step=0.0001,
)
IMDB = Problem(
    title="IMDB reviews of up to 4,096 bytes",
    data=ByteTextConfig(path="stanfordnlp/imdb"),
    model=_model(width=256, depth=6, vocab_size=257, num_classes=2, dropout=0.1),
    training=_training(epochs=35, batch_size=50, weight_decay=0.07, warmup_epochs=0),
    flags=" --data.path FOLDER",
)
AAN = Problem(
    title="AAN pairs of papers of up to 4,000 bytes each",
    data=RetrievalConfig(path="lra_release/tsv_data"),
    model=replace(_model(width=128, depth=6, vocab_size=257, num_classes=2), segment_types=2),
    training=_training(epochs=20, batch_size=32, weight_decay=0.05),
    flags=" --data.path FOLDER",
)
PROBLEMS = {
    "listops_small": LISTOPS_SMALL,
    "listops": LISTOPS,
    "pixels": PIXELS,
    "pathfinder": PATHFINDER,
    "pathx": PATHX,
    "imdb": IMDB,
    "aan": AAN,
}


def _long_range(problem: str, kind: str) -> RunConfig:
    settings, decay = PROBLEMS[problem], DECAYS[kind]
    if isinstance(decay, HippoDecayConfig):
        decay = replace(decay, min_step=settings.min_step)
    positions = None
    if kind == "lit" or settings.all_have_positions:
        longest = settings.data.max_tokens or TokenPositionConfig().max_tokens
        positions = TokenPositionConfig(max_tokens=longest)
    return RunConfig(
        name=f"{problem}_lion_{kind}",
        model=configs.replace(settings.model, {"mixer.decay": decay, "position": positions}),
        data=settings.data,
        task=SequenceClassificationConfig(),
        training=settings.training,
        machine=settings.machine,
    )


RECIPES = table(
    *(
        row(
            f"{problem}_lion_{kind}",
            partial(_long_range, problem, kind),
            f"{title} on {settings.title}.",
            f"onescan train {problem}_lion_{kind}{settings.flags}",
        )
        for problem, settings in PROBLEMS.items()
        for kind, title in NAMES.items()
    )
)
