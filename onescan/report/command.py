"""The command that trains the same runs again."""

import shlex
from typing import Any

from onescan.models.presets import ABLATIONS
from onescan.recipes import RECIPES, find_recipe
from onescan.report.runs import RunGroup, config_differences


def repeat_command(study: RunGroup) -> list[str] | None:
    """Spell the command, quoted for a shell.

    None where the runs are no recipe's, or are made of other parts than the recipe's.
    """
    name = study.config.name
    base, _, row = name.partition("/")
    if base not in RECIPES or row not in ("", *ABLATIONS):
        return None
    words = ["onescan", "train", name, "--seeds", *(str(run.seed) for run in study.runs)]
    for path, old, new in config_differences(find_recipe(name)(), study.config):
        if path.endswith("type") or not (_is_plain(old) and _is_plain(new)):
            return None
        words += _flag(path, new)
    return [shlex.quote(word) for word in words]


def _flag(path: str, value: Any) -> list[str]:
    """One field, as the command line wants it.

    >>> _flag("model.mixer.num_heads", 8), _flag("model.mixer.lrpe", False)
    (['--model.mixer.num-heads', '8'], ['--model.mixer.no-lrpe'])
    """
    *parents, name = path.replace("_", "-").split(".")
    if isinstance(value, bool):
        return ["--" + ".".join([*parents, name if value else f"no-{name}"])]
    values = value if isinstance(value, tuple) else (value,)
    return ["--" + ".".join([*parents, name]), *map(str, values)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple)
