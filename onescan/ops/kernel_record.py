"""The record of kernels that have passed `onescan check-gpu` on this machine.

It is a JSON file in the cache folder, one for each combination of versions of onescan, torch and
Triton, because each of them changes the compiled kernels:

    {"onescan": "0.16.0", "torch": "2.13.0+cu130", "triton": "3.7.1",
     "gpus": {"NVIDIA H100 80GB HBM3": {"additive_decay.one_scan": true, "lrpe": false}}}

A record can only choose between kernels and torch; nothing in it is executed.
"""

import json
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from onescan import __version__
from onescan.cache import cache_root

FOLDER = "kernels"  # in the folder of all caches


def versions() -> dict[str, str] | None:
    """Return the versions that a record is for; None without Triton."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return None
    return {"onescan": __version__, "torch": str(torch.__version__), "triton": triton}


def record_path(of: dict[str, str]) -> Path:
    """Return the file of the record for some versions."""
    name = "-".join(f"{package}-{number}" for package, number in of.items())
    return cache_root() / FOLDER / f"{name}.json"


def read_results() -> dict[str, dict[str, bool]]:
    """Return whether each op passed, by GPU; empty without a record.

    A record that is damaged or for other versions is ignored with a warning.
    """
    try:
        # finding the versions takes longer than importing this module
        here = versions() if (cache_root() / FOLDER).is_dir() else None
        if here is None or not record_path(here).exists():
            return {}
        data = json.loads(record_path(here).read_bytes())
    except (OSError, ValueError, RuntimeError) as error:  # damaged, too deep, or no home folder
        warnings.warn(f"ignored the record of onescan check-gpu: {error}", stacklevel=2)
        return {}
    match data:
        case {"gpus": dict(gpus), **rest} if rest == here and all(map(_are_results, gpus.values())):
            return gpus
    path = record_path(here)
    warnings.warn(f"ignored {path}: it does not contain results for {here}", stacklevel=2)
    return {}


def read_record() -> frozenset[tuple[str, str]]:
    """Return the GPUs and ops that passed, as pairs (GPU, op)."""
    return frozenset(
        (gpu, op)
        for gpu, results in read_results().items()
        for op, has_passed in results.items()
        if has_passed
    )


def _are_results(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, bool) for each in value.values())
