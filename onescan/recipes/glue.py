"""GLUE fine-tuning: the five recipes of LION's Table 8, arXiv:2502.16249, App. C.5.

Batch sizes, betas, eps, precision, the warm-up of 6% and the linear decay to 0 are from the
configuration files that the table names, which do not clip gradients. The head reads the first
token, [CLS], through BERT's pooler (a linear layer and tanh), because LION replaces only BERT's
attention. The weight decay of STS-B in M2-LARGE and Modified is 3e-5, as printed; the files have
3e-6.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onescan.data.glue import GlueTask
from onescan.training import TrainingConfig

ORDER: tuple[GlueTask, ...] = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")
BATCH_SIZES = (48, 16, 16, 16, 16, 32, 32, 32)
FROM_MNLI: tuple[GlueTask, ...] = ("rte", "mrpc", "stsb")  # which begin with its weights


@dataclass(frozen=True, kw_only=True)
class GlueRecipe:
    """A row of Table 8: a number for each task, in `ORDER`.

    Attributes:
        title: what the table calls it.
        learning_rates: the highest.
        weight_decays: of matrices.
        epochs: passes over the training data.
        adamw: the tasks whose weight decay is AdamW's own; all others' is decoupled.
        length: tokens of a sequence.
    """

    title: str
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    epochs: tuple[int, ...]
    adamw: tuple[GlueTask, ...] = ()
    length: int = 128

    def training(self, task: GlueTask) -> TrainingConfig:
        """How a task is learnt."""
        place = ORDER.index(task)
        return TrainingConfig(
            epochs=self.epochs[place],
            batch_size=BATCH_SIZES[place],
            precision="bfloat16",
            learning_rate=self.learning_rates[place],
            weight_decay=self.weight_decays[place],
            decoupled_weight_decay=task not in self.adamw,
            betas=(0.9, 0.98),
            eps=1e-6,
            warmup=0.06,
            schedule="linear",
            final_lr_ratio=0.0,
            max_grad_norm=None,
        )


M2_LARGE = GlueRecipe(
    title="M2-LARGE",
    learning_rates=(5e-5, 5e-5, 3e-5, 5e-5, 3e-5, 8e-5, 5e-5, 8e-5),
    weight_decays=(5e-6, 1e-6, 3e-6, 1e-6, 3e-6, 8e-6, 1e-6, 3e-5),
    epochs=(3, 10, 5, 2, 3, 10, 10, 8),
    adamw=("rte",),
)
GLUE: Mapping[str, GlueRecipe] = MappingProxyType(
    {
        "bert24": GlueRecipe(
            title="BERT24",
            learning_rates=(5e-5, 1e-5, 3e-5, 1e-5, 3e-5, 8e-5, 5e-5, 3e-5),
            weight_decays=(5e-6, 1e-5, 3e-6, 1e-6, 3e-6, 8e-5, 5e-6, 3e-6),
            epochs=(3, 10, 5, 3, 3, 10, 10, 10),
            length=256,
        ),
        "m2_base": GlueRecipe(
            title="M2-BASE",
            learning_rates=(5e-5, 5e-5, 3e-5, 1e-5, 3e-5, 8e-5, 8e-5, 8e-5),
            weight_decays=(5e-6, 1e-5, 3e-6, 1e-6, 3e-6, 8e-5, 5e-6, 3e-6),
            epochs=(3, 10, 5, 3, 3, 10, 10, 10),
            adamw=("stsb",),
        ),
        "m2_large": M2_LARGE,
        "hydra": GlueRecipe(
            title="Hydra",
            learning_rates=(1e-4, 5e-5, 5e-5, 1e-5, 5e-5, 8e-5, 1e-4, 3e-5),
            weight_decays=(5e-6, 1e-6, 3e-6, 1e-6, 3e-6, 8e-6, 8e-6, 3e-6),
            epochs=(2, 7, 3, 3, 2, 10, 10, 8),
            adamw=("rte",),
            length=256,
        ),
        "modified": GlueRecipe(
            title="Modified",
            learning_rates=(1e-5,) * len(ORDER),
            weight_decays=M2_LARGE.weight_decays,
            epochs=M2_LARGE.epochs,
            adamw=M2_LARGE.adamw,
        ),
    }
)
