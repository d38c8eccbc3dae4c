"""Evaluation of causal language models on lm-eval's tasks."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from onescan import __version__
from onescan.experiments.evaluation.config import (
    COMMONSENSE,
    TASK_SETS,
    TasksConfig,
    short_name,
)
from onescan.experiments.training.distributed import Ranks, choose_device
from onescan.inference.loading import load_language_model
from onescan.messages import missing_package

KEPT = ("results", "groups", "versions", "n-shot", "n-samples")  # entries of lm-eval's results


class TaskScores(NamedTuple):
    """Results of lm-eval.

    Attributes:
        tables: Its tables of tasks and of groups, in plain text.
        data: The same scores and their settings, to be saved as JSON, with the average of
            LightNet's Table 9 if all of its tasks were evaluated.
    """

    tables: tuple[str, ...]
    data: dict[str, Any]


def commonsense_average(results: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the average of LightNet's Table 9 over its six tasks; None if one is missing.

    Args:
        results: lm-eval's results: the metrics of each task, such as "acc_norm,none".
    """
    scores = [results.get(task, {}).get(f"{metric},none") for task, metric in COMMONSENSE.items()]
    measured = [score for score in scores if score is not None]
    return statistics.mean(measured) if len(measured) == len(scores) else None


def evaluate_tasks(checkpoint: str, config: TasksConfig, *, device: str = "auto") -> TaskScores:
    """Evaluate a model with lm-eval, which downloads the data of tasks that are not local.

    Args:
        checkpoint: Model, as for `load_language_model`.
        config: Tasks.
        device: As for `choose_device`.

    Raises:
        ValueError: If a task is unknown, a number is out of range, or the model is not causal.
        ImportError: If lm-eval is not installed.
    """
    config.check()
    lm_eval = _import_lm_eval()
    from lm_eval.utils import make_table

    from onescan.integrations.lm_eval import OnescanLM

    if config.include_path is not None:
        _check_yaml(config.include_path)
    manager = task_manager(config)
    for name in config.names:
        if name not in manager.all_tasks:
            raise ValueError(
                f"tasks contains {name!r}, which is not a task of lm-eval; `lm_eval ls tasks` "
                f"lists them, and {', '.join(TASK_SETS)} is a set of tasks"
            )
    model, tokenizer = load_language_model(checkpoint)
    model = model.to(choose_device(device, Ranks()))
    results = lm_eval.simple_evaluate(
        model=OnescanLM(model, tokenizer, batch_size=config.batch_size),
        tasks=config.names,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        task_manager=manager,
        log_samples=False,
    )
    columns = [column for column in ("results", "groups") if results.get(column)]
    tables = [make_table(results, column) for column in columns]
    average = commonsense_average(results["results"])
    if average is not None:
        tables.append(
            f"commonsense average: {100 * average:.2f} (acc_norm for hellaswag, arc_challenge and "
            "openbookqa, acc for the others)"
        )
    return TaskScores(
        tables=tuple(tables),
        data={
            "checkpoint": short_name(checkpoint),
            "limit": config.limit,
            "num_fewshot": config.num_fewshot,
            "onescan": __version__,
            "lm_eval": lm_eval.__version__,
            **({} if average is None else {"commonsense_average": average}),
            **{name: _to_json_types(results[name]) for name in KEPT if name in results},
        },
    )


def register() -> None:
    """Register the model "onescan" with lm-eval; its model_args are `checkpoint` and `device`.

    Raises:
        ImportError: If lm-eval is not installed.
    """
    _import_lm_eval()
    from onescan.integrations.lm_eval import register

    register(load_language_model)


def task_manager(config: TasksConfig) -> Any:
    """Return lm-eval's index of tasks; its own thousands of files are read only if needed."""
    from lm_eval.tasks import TaskManager

    if config.include_path is None:
        return TaskManager()
    folder = str(config.include_path)
    local = TaskManager(include_path=folder, include_defaults=False)
    if set(config.names) <= set(local.all_subtasks):  # groups may contain lm-eval's own tasks
        return local
    return TaskManager(include_path=folder)


def _check_yaml(folder: Path) -> None:
    """Raise ValueError for an invalid file, which lm-eval would ignore."""
    import yaml

    for path in sorted(folder.rglob("*.yaml")):
        try:
            list(yaml.parse(path.read_text(encoding="utf-8")))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"include_path contains {path}, which is not YAML: {error}") from error


def _to_json_types(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _to_json_types(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_types(inner) for inner in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def _import_lm_eval() -> ModuleType:
    try:
        import lm_eval
    except ImportError as error:
        raise missing_package("evaluating tasks", "lm-eval", "eval", error) from error
    return lm_eval
