"""GLUE fine-tuning: the five recipes of LION's Table 8, arXiv:2502.16249, and LightNet's.

LION, App. C.5: batch sizes, betas, eps, precision, the warm-up of 6% and the linear decay to 0 are
from the configuration files that its Table 8 names, which do not clip gradients. The head reads the
first token, [CLS], through BERT's pooler (a linear layer and tanh), because LION replaces only
BERT's attention. The weight decay of STS-B in M2-LARGE and Modified is 3e-5, as printed; the files
have 3e-6.

LightNet, arXiv:2405.21022, Sec. 6.1, fine-tunes for 5 epochs with the best of four learning rates.
The paper does not state how the best is chosen; here, it is the best on the dev set, for each task.
All other settings are Cramming's, arXiv:2212.14034, whose pipeline it uses, as in GLUE_sane.yaml.

The averages differ. LION averages eight tasks, where the score of each task is the mean of its
metrics. LightNet's Table 2 averages nine columns: two for MNLI, and one for each other task. The
table does not name its metrics; here they are F1 for QQP and MRPC, as in BERT's paper, and
Pearson correlation for STS-B, as in Cramming.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from onescan.checks import check_choice, check_distinct
from onescan.experiments.data.base import OnError
from onescan.experiments.data.glue import HUB, PROBLEMS, GlueDatasetConfig, GlueTask, find_folder
from onescan.experiments.tasks import GlueConfig
from onescan.experiments.tasks.glue import Scoring
from onescan.experiments.training import MachineConfig, RunConfig, TrainingConfig
from onescan.experiments.training.config import Precision, Schedule
from onescan.experiments.training.folder import check_run_dir
from onescan.inference.loading import load_language_config, load_language_model
from onescan.messages import named_type
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import Pool, SequenceClassifierConfig

ORDER: tuple[GlueTask, ...] = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")
BATCH_SIZES = (48, 16, 16, 16, 16, 32, 32, 32)
MNLI: GlueTask = "mnli"
FROM_MNLI: tuple[GlueTask, ...] = ("rte", "mrpc", "stsb")  # initialized from the MNLI model


@dataclass(frozen=True, kw_only=True)
class GlueRecipe:
    """Settings of all tasks. Tuples have one number per task, in the order of `ORDER`.

    Attributes:
        title: Name in the paper.
        source: The paper.
        learning_rates: Peak learning rates.
        weight_decays: Weight decays of matrices.
        epochs: Passes over the training data.
        adamw: Tasks with AdamW's weight decay; for all others it is decoupled.
        length: Maximum tokens per sequence.
        batch_sizes: Examples per optimizer step.
        warmup: Fraction of the steps with a rising learning rate.
        schedule: Learning rate schedule after the warm-up, which ends at 0.
        dropout: Dropout rate of the model in fine-tuning; None keeps that of pre-training.
        from_mnli: Whether `FROM_MNLI` start from the MNLI model.
        rates_to_try: Peak learning rates of which each task takes the one with the best score on
            the dev set, instead of `learning_rates`.
        scoring: What to average: "tasks", where the score of each is the mean of its metrics, or
            the "columns" of LightNet's Table 2; see `glue_columns`.
    """

    title: str
    source: str = "Table 8 of LION"
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    epochs: tuple[int, ...]
    adamw: tuple[GlueTask, ...] = ()
    length: int = 128
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    warmup: float = 0.06
    schedule: Schedule = "linear"
    dropout: float | None = None
    from_mnli: bool = True
    rates_to_try: tuple[float, ...] = ()
    scoring: Scoring = "tasks"

    def training(self, task: GlueTask) -> TrainingConfig:
        """Return the training settings of a task."""
        index = ORDER.index(task)
        return TrainingConfig(
            epochs=self.epochs[index],
            batch_size=self.batch_sizes[index],
            precision="auto",
            learning_rate=self.learning_rates[index],
            weight_decay=self.weight_decays[index],
            decoupled_weight_decay=task not in self.adamw,
            betas=(0.9, 0.98),
            eps=1e-6,
            warmup=self.warmup,
            schedule=self.schedule,
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
        "lightnet": GlueRecipe(
            title="LightNet",
            source="Sec. 6.1 of its paper",
            learning_rates=(5e-5,) * len(ORDER),
            rates_to_try=(5e-5, 4e-5, 3e-5, 2e-5),
            weight_decays=(0.0,) * len(ORDER),
            epochs=(5,) * len(ORDER),
            adamw=ORDER,
            batch_sizes=(16,) * len(ORDER),
            warmup=0.1,
            schedule="cosine",
            dropout=0.1,
            from_mnli=False,
            scoring="columns",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class GlueRunsConfig:
    """GLUE tasks to fine-tune on. Values given here override the recipe for every task."""

    recipe: str = "modified"
    """Row of LION's Table 8 (bert24, m2_base, m2_large, hydra or modified), or lightnet, which
    trains each task with four learning rates and reports the best on the dev set. Its scores are
    optimistic, because the dev set also selects the learning rate. lightnet averages the nine
    columns of LightNet's Table 2; the others average eight tasks."""
    tasks: tuple[str, ...] = ORDER
    """Tasks, separated by commas or spaces."""
    seeds: tuple[int, ...] = (0,)
    """Random seeds; each task is trained once per seed."""
    path: str = HUB
    """The unpacked GLUE archive, a folder of one task, or a name on the Hugging Face Hub."""
    on_error: OnError = "raise"
    """On an unreadable line of a table, end the run (raise), or skip and report it (skip)."""
    from_mnli: bool = True
    """Fine-tune RTE, MRPC and STS-B from the MNLI model, which is trained first. The recipe
    lightnet never does."""
    from_scratch: bool = False
    """Start every task from random weights, as "no pretrain" in LightNet's Table 2. Only the shape
    and the tokenizer of the checkpoint are used."""
    pool: Pool = "first"
    """Input of the classification head: the first token ([CLS], as in BERT), or the mean, maximum
    or attention pool over all tokens."""
    length: int | None = None
    """Maximum tokens per sequence; by default the recipe's."""
    epochs: int | None = None
    """Passes over the training data; by default the recipe's."""
    batch_size: int | None = None
    """Examples per optimizer step; by default the recipe's."""
    learning_rate: float | None = None
    """Peak learning rate; by default the recipe's. With the recipe lightnet, only this rate is
    tried."""
    precision: Precision | None = None
    """Precision of matrix products; by default the recipe's."""
    machine: MachineConfig = field(default_factory=MachineConfig)

    def selected(self) -> tuple[GlueTask, ...]:
        """Return the tasks in the order of `ORDER`.

        Raises:
            ValueError: If the recipe or a task is unknown, or tasks or seeds are empty or contain
                duplicates.
        """
        check_choice("recipe", self.recipe, GLUE)
        tasks = [task for given in self.tasks for task in given.split(",") if task]
        for task in tasks:
            check_choice("task", task, ORDER)
        check_distinct(tasks=tasks, seeds=self.seeds)
        return tuple(task for task in ORDER if task in tasks)

    @property
    def from_mnli_tasks(self) -> tuple[GlueTask, ...]:
        """Tasks that start from the MNLI model."""
        starts_from_mnli = self.from_mnli and GLUE[self.recipe].from_mnli
        return FROM_MNLI if starts_from_mnli and not self.from_scratch else ()

    @property
    def rates_to_try(self) -> tuple[float, ...]:
        """Learning rates of which the best is chosen; empty if there is only one."""
        return () if self.learning_rate is not None else GLUE[self.recipe].rates_to_try

    def training(self, task: GlueTask, seed: int) -> TrainingConfig:
        """Return the training settings of a task: the recipe's, with the given changes."""
        names = ("epochs", "batch_size", "learning_rate", "precision")
        given = {name: getattr(self, name) for name in names}
        changes = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(GLUE[self.recipe].training(task), seed=seed, **changes)


class GlueRun(NamedTuple):
    """One run of several."""

    task: GlueTask
    seed: int
    config: RunConfig
    folder: Path


def lacks_mnli(options: GlueRunsConfig) -> bool:
    """Return whether tasks would start from an MNLI model, but a local folder has no MNLI data.

    Missing data is an error only if MNLI itself is selected.

    Raises:
        ValueError: If the options are invalid.
    """
    tasks, path = options.selected(), Path(options.path).expanduser()
    if not set(tasks) & set(options.from_mnli_tasks) or MNLI in tasks or not path.is_dir():
        return False
    try:
        find_folder(path, MNLI, PROBLEMS[MNLI])
    except ValueError:
        return True
    return False


def plan_glue(options: GlueRunsConfig, checkpoint: str, out: Path) -> list[GlueRun]:
    """Return the runs in the order of training: MNLI first if other tasks start from it.

    Args:
        options: Tasks and settings.
        checkpoint: A run's folder, or its best.safetensors; or a folder saved by transformers'
            `save_pretrained`, or a name on the hub.
        out: Folder of the runs, which are in OUT/TASK/seed-SEED, or in OUT/TASK/lr-RATE/seed-SEED
            if several learning rates are tried.

    Raises:
        ValueError: If the options are invalid, or the checkpoint is not a masked language model.
        FileNotFoundError: If the run has no saved weights, unless training starts from scratch.
    """
    tasks = options.selected()
    if options.from_scratch:
        model, tokenizer = load_language_config(checkpoint)
    else:
        loaded, tokenizer = load_language_model(checkpoint)
        model = loaded.config
    if not isinstance(model, MaskedLMConfig):
        kind = named_type(model).removesuffix("Config")
        raise ValueError(f"{checkpoint!r} holds {kind}, expected a MaskedLM")
    recipe = GLUE[options.recipe]
    from_mnli = options.from_mnli_tasks
    if MNLI not in tasks and set(tasks) & set(from_mnli):
        tasks = (MNLI, *tasks)
    length = recipe.length if options.length is None else options.length

    def plan(task: GlueTask, rate: float | None, seed: int) -> GlueRun:
        data = GlueDatasetConfig(
            task=task,
            path=options.path,
            tokenizer=tokenizer.name,
            length=length,
            on_error=options.on_error,
        )
        start = out / MNLI / f"seed-{seed}" if task in from_mnli else checkpoint
        training, folder = options.training(task, seed), out / task
        if rate is not None:
            training = dataclasses.replace(training, learning_rate=rate)
            folder /= f"lr-{rate:g}"
        config = RunConfig(
            name=f"glue/{task}",
            model=classifier(
                model,
                len(PROBLEMS[task].class_names) or 1,
                options.pool,
                dropout=recipe.dropout,
            ),
            data=data,
            task=GlueConfig(segments=model.segment_types > 0),
            init_from=None if options.from_scratch else str(start),
            training=training,
            machine=options.machine,
        )
        return GlueRun(task, seed, config, folder / f"seed-{seed}")

    rates = options.rates_to_try or (None,)
    return [plan(task, rate, seed) for task in tasks for rate in rates for seed in options.seeds]


def check_runs(runs: Sequence[GlueRun], *, overwrite: bool) -> None:
    """Check all folders and read all data, to report errors before hours of training.

    Raises:
        ValueError: If a folder holds another run and overwrite is False; or see
            `GlueDatasetConfig.build`.
    """
    for run in runs:
        check_run_dir(run.folder, run.config, overwrite=overwrite)
    for data in dict.fromkeys(run.config.data for run in runs):
        data.build()


def classifier(
    config: MaskedLMConfig, num_classes: int, pool: Pool, *, dropout: float | None = None
) -> SequenceClassifierConfig:
    """Return the config of a classifier with the network of a masked language model.

    Args:
        config: Config of the masked language model.
        num_classes: Number of scores per text.
        pool: Input of the head.
        dropout: Dropout rate. ``None`` keeps that of the masked language model.
    """
    shared = {field.name for field in dataclasses.fields(SequenceClassifierConfig)}
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in shared and field.name != "head_transform"
    }
    if dropout is not None:
        fields["dropout"] = dropout
    return SequenceClassifierConfig(**fields, num_classes=num_classes, pool=pool)
