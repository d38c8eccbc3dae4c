"""The runs that fine-tune a masked language model on tasks of GLUE, in their order."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from onescan.checks import check_choice
from onescan.data.base import OnError
from onescan.data.glue import HUB, PROBLEMS, GlueDatasetConfig, GlueTask
from onescan.models.masked_lm import MaskedLM, MaskedLMConfig
from onescan.models.sequence_classifier import Pool, SequenceClassifierConfig
from onescan.recipes.glue import FROM_MNLI, GLUE, ORDER
from onescan.tasks import GlueConfig
from onescan.training import MachineConfig, RunConfig, TrainingConfig
from onescan.training.config import Precision
from onescan.training.folder import check_run_dir
from onescan.training.loading import load_language_model

MNLI: GlueTask = "mnli"


@dataclass(frozen=True, kw_only=True)
class GlueStudy:
    """GLUE tasks to fine-tune on. Values given here override the recipe for every task."""

    recipe: str = "modified"
    """Row of LION's Table 8: bert24, m2_base, m2_large, hydra or modified."""
    tasks: tuple[str, ...] = ORDER
    """Tasks, separated by commas or spaces."""
    seeds: tuple[int, ...] = (0,)
    """Random seeds; each task is trained once per seed."""
    path: str = HUB
    """The unpacked GLUE archive, a folder of one task, or a name on the Hugging Face hub."""
    on_error: OnError = "raise"
    """On an unreadable line of a table, end the run (raise), or skip and report it (skip)."""
    from_mnli: bool = True
    """Fine-tune RTE, MRPC and STS-B from the MNLI model, which is trained first."""
    pool: Pool = "first"
    """Input of the classification head: the first token ([CLS], as in BERT), or the mean, maximum
    or attention pool over all tokens."""
    length: int | None = None
    """Maximum tokens per sequence."""
    epochs: int | None = None
    """Passes over the training data."""
    batch_size: int | None = None
    """Examples per optimizer step."""
    learning_rate: float | None = None
    """Peak learning rate."""
    precision: Precision | None = None
    """Precision of matrix products."""
    machine: MachineConfig = field(default_factory=MachineConfig)

    def chosen(self) -> tuple[GlueTask, ...]:
        """The tasks, one by one.

        Raises:
            ValueError: one is unknown, or comes twice, or there is none; or a seed comes twice, or
                there is none; or the recipe is unknown.
        """
        check_choice("recipe", self.recipe, GLUE)
        words = [word for given in self.tasks for word in given.split(",") if word]
        for word in words:
            check_choice("task", word, ORDER)
        for name, values in (("tasks", words), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {', '.join(map(str, values))!r}, expected each once")
        return tuple(task for task in ORDER if task in words)


class GlueRun(NamedTuple):
    """One run of a study.

    Attributes:
        task: what is learnt.
        seed: what its chance comes from.
        config: of the run.
        folder: where it is.
    """

    task: GlueTask
    seed: int
    config: RunConfig
    folder: Path


def plan_glue(study: GlueStudy, checkpoint: str, out: Path) -> list[GlueRun]:
    """Say what is to be trained, one after the other; MNLI comes first where others begin with it.

    Args:
        study: what is fine-tuned, and how.
        checkpoint: a run's folder, or best.safetensors in it; or a folder that transformers'
            `save_pretrained` wrote, or a name on the hub.
        out: the folder for the runs, in OUT/TASK/seed-SEED.

    Raises:
        ValueError: the study is refused, or there is no masked language model at the checkpoint.
        FileNotFoundError: the run there has not saved any weights.
    """
    tasks = study.chosen()
    model, tokenizer = load_language_model(checkpoint)
    if not isinstance(model, MaskedLM):
        raise ValueError(f"{checkpoint!r} holds a {type(model).__name__}, expected a MaskedLM")
    maker = _Maker(study, checkpoint, out, model.config, tokenizer.name)
    return [maker.run(task, seed) for task in _in_order(study, tasks) for seed in study.seeds]


def check_runs(runs: Sequence[GlueRun], *, overwrite: bool) -> None:
    """Look at every folder and at all data: to know what is wrong before hours of training.

    Raises:
        ValueError: a folder holds another run, which is not to be overwritten; or as
            `GlueDatasetConfig.build`.
    """
    for run in runs:
        check_run_dir(run.folder, run.config, overwrite=overwrite)
    for data in dict.fromkeys(run.config.data for run in runs):
        data.build()


@dataclass(frozen=True)
class _Maker:
    """A study, and what of the checkpoint its runs are made with."""

    study: GlueStudy
    checkpoint: str
    out: Path
    model: MaskedLMConfig
    tokenizer: str

    def run(self, task: GlueTask, seed: int) -> GlueRun:
        data = GlueDatasetConfig(
            task=task,
            path=self.study.path,
            tokenizer=self.tokenizer,
            length=self._length(),
            on_error=self.study.on_error,
        )
        config = RunConfig(
            name=f"glue/{task}",
            model=classifier(self.model, len(PROBLEMS[task].class_names) or 1, self.study.pool),
            data=data,
            task=GlueConfig(segments=self.model.segment_types > 0),
            init_from=self._start(task, seed),
            training=self._training(task, seed),
            machine=self.study.machine,
        )
        return GlueRun(task, seed, config, self._folder(task, seed))

    def _length(self) -> int:
        given = self.study.length
        return GLUE[self.study.recipe].length if given is None else given

    def _folder(self, task: GlueTask, seed: int) -> Path:
        return self.out / task / f"seed-{seed}"

    def _start(self, task: GlueTask, seed: int) -> str:
        has_learnt = self.study.from_mnli and task in FROM_MNLI
        return str(self._folder(MNLI, seed)) if has_learnt else self.checkpoint

    def _training(self, task: GlueTask, seed: int) -> TrainingConfig:
        names = ("epochs", "batch_size", "learning_rate", "precision")
        given = {name: getattr(self.study, name) for name in names}
        changes = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(GLUE[self.study.recipe].training(task), seed=seed, **changes)


def classifier(config: MaskedLMConfig, num_classes: int, pool: Pool) -> SequenceClassifierConfig:
    """A classifier on a masked language model's network.

    Args:
        config: the masked language model's.
        num_classes: scores per text.
        pool: what the head reads.
    """
    shared = {each.name for each in dataclasses.fields(SequenceClassifierConfig)}
    fields = {
        each.name: getattr(config, each.name)
        for each in dataclasses.fields(config)
        if each.name in shared and each.name != "head_transform"
    }
    return SequenceClassifierConfig(**fields, num_classes=num_classes, pool=pool)


def _in_order(study: GlueStudy, tasks: Sequence[GlueTask]) -> Iterator[GlueTask]:
    if MNLI not in tasks and study.from_mnli and set(tasks) & set(FROM_MNLI):
        yield MNLI
    yield from tasks
