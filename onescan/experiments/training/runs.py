"""Read the config of a trained run, and open its data again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from onescan import zoo
from onescan.checkpoint.run_folder import holds_only_model, locate, read_config
from onescan.experiments.tasks import Task
from onescan.experiments.training.config import RunConfig
from onescan.experiments.training.folder import check_same_data, read_manifest
from onescan.inference.loading import Checkpoint, is_run, load_pretrained_model


def run_config(checkpoint: str | Path) -> RunConfig | None:
    """Return the config of the run that trained a model; None if it has none.

    A model that was saved with `save_pretrained` has no such config.

    Args:
        checkpoint: A run's folder, a file in it, or "zoo/NAME".

    Raises:
        ValueError: If config.json is damaged, or names a class that is not imported.
    """
    path = zoo.resolve(Path(checkpoint))
    folder, _ = locate(path)
    if not is_run(path) or holds_only_model(read_config(folder)):
        return None
    return read_manifest(folder).run


def model_config(name: str) -> Any:
    """Return the config of a trained model: a run, or another model that a run can start from.

    Args:
        name: See `load_pretrained_model`.
    """
    run = run_config(name)
    return load_pretrained_model(name).model.config if run is None else run.model


def build_task(checkpoint: Checkpoint, split: str | None = None) -> Task:
    """Open a run's data again and build its task, to evaluate the model.

    Args:
        checkpoint: The trained model.
        split: Split to evaluate on instead of the run's own.

    Raises:
        ValueError: If the data cannot be read, or its classes, their order or its format have
            changed since the run began.
    """
    manifest = read_manifest(checkpoint.folder)
    data: Any = manifest.run.data
    if split is not None and not hasattr(data, "test_split"):
        raise ValueError(f"split is {split!r}, but {type(data).__name__} has no named splits")
    try:
        changed = data if split is None else replace(data, test_split=split)
        task = manifest.run.build_task(changed)
    except ValueError as error:
        if split is None:
            raise
        raise ValueError(str(error).replace("data.test_split", "split")) from error
    check_same_data(manifest, task, checkpoint.folder)
    return task
