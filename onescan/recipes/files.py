"""Recipes, and classes for them, in Python files of a user's own."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from onescan.checks import check_choice
from onescan.training.config import RunConfig


def import_file(file: str | Path) -> ModuleType:
    """Run a Python file as a module, after which `load` knows the config classes in it.

    Raises:
        ValueError: there is no such file, it is no Python file, or it fails; says how.
    """
    path = Path(file)
    if not path.exists():
        raise ValueError(f"there is no file {file}")
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{file} is no Python file, expected one that ends in .py")
    spec = spec_from_file_location(str(path), path)  # a path is no other module's name
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where annotations that are strings are looked up
    with _blaming(f"{file} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def recipe_in(file: str, function: str) -> Callable[[], RunConfig]:
    """The recipe that a function in a file is; called, it raises ValueError for any failure."""
    module = import_file(file)
    defined = dict(inspect.getmembers(module, inspect.isfunction))
    check_choice(f"function in {file}", function, defined)
    return _checked(defined[function], f"{file}:{function}")


def _checked(function: Callable[[], Any], name: str) -> Callable[[], RunConfig]:
    @functools.wraps(function)
    def recipe() -> RunConfig:
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ValueError(f"{name} takes arguments, expected a function without any") from error
        with _blaming(f"{name} fails"):
            run = function()
        if not isinstance(run, RunConfig):
            raise ValueError(f"{name} returned a {type(run).__name__}, expected a RunConfig")
        return run

    return recipe


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turn whatever a user's code raises into one ValueError, which has it as its cause."""
    try:
        yield
    except (Exception, SystemExit) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{what}: {type(error).__name__}{first and ': '}{first}") from error
