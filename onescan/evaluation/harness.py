"""A causal language model judged by lm-eval on its tasks."""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from onescan import __version__
from onescan.evaluation.asked import SETS, TasksConfig
from onescan.evaluation.names import short_name
from onescan.training.distributed import Ranks, choose_device
from onescan.training.loading import load_language_model

KEPT = ("results", "groups", "versions", "n-shot", "n-samples")  # of what lm-eval returns


class TaskScores(NamedTuple):
    """What lm-eval found.

    Attributes:
        tables: its table of the tasks, and of their groups if there are any.
        data: the same numbers, and what they were measured with, to be kept as JSON.
    """

    tables: tuple[str, ...]
    data: dict[str, Any]


def judge_by_tasks(checkpoint: str, asked: TasksConfig, *, device: str = "auto") -> TaskScores:
    """Have lm-eval judge a model; it fetches what a task is made of, unless that is local.

    Args:
        checkpoint: what `load_language_model` takes.
        asked: which tasks.
        device: as `choose_device` has it.

    Raises:
        ValueError: an unknown task, a number out of its range, or a model that is not causal.
        ImportError: lm-eval is not installed.
    """
    asked.check()
    lm_eval = _import_lm_eval()
    from lm_eval.utils import make_table

    from onescan.integrations.lm_eval import OnescanLM

    if asked.include_path is not None:
        _check_yaml(asked.include_path)
    manager = _manager_of(asked)
    _check_tasks(asked.names, manager)
    model, tokenizer = load_language_model(checkpoint)
    judged = OnescanLM(
        model.to(choose_device(device, Ranks())), tokenizer, batch_size=asked.batch_size
    )
    found = lm_eval.simple_evaluate(
        model=judged,
        tasks=asked.names,
        num_fewshot=asked.num_fewshot,
        limit=asked.limit,
        task_manager=manager,
        log_samples=False,
    )
    columns = [column for column in ("results", "groups") if found.get(column)]
    return TaskScores(
        tables=tuple(make_table(found, column) for column in columns),
        data={
            "checkpoint": short_name(checkpoint),
            "limit": asked.limit,
            "num_fewshot": asked.num_fewshot,
            "onescan": __version__,
            "lm_eval": lm_eval.__version__,
            **{name: _plain(found[name]) for name in KEPT if name in found},
        },
    )


def register() -> None:
    """Let lm-eval know the model "onescan", whose model_args are `checkpoint` and `device`.

    Raises:
        ImportError: lm-eval is not installed.
    """
    _import_lm_eval()
    from onescan.integrations.lm_eval import register

    register(load_language_model)


def _manager_of(asked: TasksConfig) -> Any:
    """What knows the tasks; lm-eval's own, thousands of files, are read only where one is asked."""
    from lm_eval.tasks import TaskManager

    if asked.include_path is None:
        return TaskManager()
    folder = str(asked.include_path)
    local = TaskManager(include_path=folder, include_defaults=False)
    if set(asked.names) <= set(local.all_subtasks):  # groups may hold lm-eval's own
        return local
    return TaskManager(include_path=folder)


def _check_tasks(names: list[str], manager: Any) -> None:
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(
                f"tasks has {name!r}, which lm-eval does not know; `lm_eval ls tasks` lists all, "
                f"and {', '.join(SETS)} is known here"
            )


def _check_yaml(folder: Path) -> None:
    """Raise ValueError for a file that lm-eval would pass over."""
    import yaml

    for path in sorted(folder.rglob("*.yaml")):
        try:
            list(yaml.parse(path.read_text(encoding="utf-8")))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"include_path has {path}, which is no YAML: {error}") from error


def _plain(value: Any) -> Any:
    """What JSON has words for."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def _import_lm_eval() -> ModuleType:
    try:
        import lm_eval
    except ImportError as error:
        raise ImportError("tasks need lm-eval: pip install 'onescan[eval]'") from error
    return lm_eval
