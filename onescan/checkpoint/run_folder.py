"""Find the files of a run, and read and write its config.json.

config.json may be edited by hand, so a checksum mismatch is only a warning.
"""

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from onescan import __version__
from onescan.checkpoint.files import matches, parse_json, to_json, write_text_atomically
from onescan.checkpoint.weights import AVERAGE, BEST, WEIGHTS

CONFIG = "config.json"
TOKENIZER = "tokenizer"  # folder of the tokenizer, in runs on text
OLDEST = (0, 9)  # oldest version of onescan whose run folders can be read
LINEARIZED = "onescan_linearized"  # model_type in folders that `save_linearized` wrote
NATIVE = "onescan_"  # beginning of the model_type of folders in transformers' format
INDENT = 2

log = logging.getLogger("onescan")


def locate(path: Path) -> tuple[Path, Path]:
    """Return the folder of a run and the file of the weights that a path selects.

    Args:
        path: The folder, or any file in it. best.safetensors selects the weights of the best
            evaluation, ema.safetensors the EMA of the last checkpoint in runs that report raw
            weights, and any other path the weights of the last checkpoint.
    """
    folder = path if path.is_dir() else path.parent
    return folder, path if path.name in (AVERAGE, BEST) else folder / WEIGHTS


def runs_in(folder: Path) -> list[Path]:
    """Return the runs that ``onescan train`` has written to a folder, one per seed."""
    return sorted(config.parent for config in folder.glob(f"seed-*/{CONFIG}"))


def only_run(folder: Path) -> Path | None:
    """Return the run in a folder that holds exactly one and is no run itself; None for others."""
    runs = runs_in(folder)
    return runs[0] if len(runs) == 1 and not (folder / CONFIG).exists() else None


def has_run_config(folder: Path) -> bool:
    """Return whether a folder has a config.json written by onescan.

    Raises:
        ValueError: If config.json is missing, or is not a JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}")
    data = parse_json(path.read_bytes(), path, "restore it from a backup")
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return "onescan" in data


def is_linearized(folder: Path) -> bool:
    """Return whether a folder has a config.json written by `save_linearized`."""
    with suppress(OSError, ValueError):
        data = parse_json((folder / CONFIG).read_bytes(), folder / CONFIG, "")
        return isinstance(data, dict) and data.get("model_type") == LINEARIZED
    return False


def linearized_error(folder: Path) -> ValueError:
    """Return the error for a folder written by `save_linearized`, where a run is expected."""
    return ValueError(
        f"{folder} holds a linearized transformers model, which onescan's commands do not read: "
        "load it with load_linearized of onescan.integrations.transformers or, after `import "
        "onescan.integrations.transformers`, with transformers' Auto classes and pipelines"
    )


def holds_only_model(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json has no data and no task, as `save_pretrained` writes it."""
    run = config.get("run")
    return isinstance(run, Mapping) and set(run) == {"model"}


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json atomically, replacing an older one."""
    text = to_json(config, indent=INDENT)
    write_text_atomically(folder / CONFIG, text)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json without its checksum.

    Raises:
        ValueError: If it is missing or damaged, or was written by an unsupported version or by
            `save_linearized`.
    """
    path = folder / CONFIG
    if not path.is_file():
        seeds = [run.name for run in runs_in(folder)]
        hint = f"; name one of the runs in it: {', '.join(seeds)}" if seeds else ""
        raise ValueError(f"{folder} holds no run: it has no {CONFIG}{hint}")
    content = path.read_bytes()
    data = parse_json(content, path, "restore it from a backup")
    if isinstance(data, dict) and data.get("model_type") == LINEARIZED:
        raise linearized_error(folder)
    if isinstance(data, dict) and str(data.get("model_type")).startswith(NATIVE):
        names = data.get("architectures")
        of_class = f"{names[0]}." if isinstance(names, list) and names else ""
        raise ValueError(
            f"{folder} holds a model of onescan in transformers' format, expected a run: in "
            f"Python, load it with {of_class}from_pretrained of onescan.integrations.transformers, "
            "get the native model with to_onescan(), and write a run with its save_pretrained"
        )
    if not (isinstance(data, dict) and isinstance(data.get("onescan"), str)):
        raise ValueError(f"{folder} holds no run: its {CONFIG} was not written by onescan")
    _check_version(path, data["onescan"])
    if not matches(data, content, indent=INDENT):
        _warn(path, content)
    return data


def _check_version(path: Path, version: str) -> None:
    written_by, installed = _parts(version), _parts(__version__)
    if written_by < OLDEST:
        raise ValueError(
            f"{path} was written by onescan {version}, but onescan {__version__} reads runs of "
            f"{OLDEST[0]}.{OLDEST[1]} or newer: use onescan {version}"
        )
    if written_by > installed:
        raise ValueError(
            f"{path} was written by onescan {version}, which is newer than the installed "
            f"{__version__}: use onescan {version} or newer"
        )


def _parts(version: str) -> tuple[int, int]:
    """Parse the major and minor version; (0, 0) if `version` is not a version number."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


@cache
def _warn(path: Path, content: bytes) -> None:
    """Warn about a checksum mismatch, once for each content of the file."""
    del content
    log.warning("%s has changed since it was written (checksum mismatch)", path)
