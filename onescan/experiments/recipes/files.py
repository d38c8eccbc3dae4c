"""Python files of users: recipes, and classes for them."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from onescan.checks import check_choice
from onescan.experiments.training.config import RunConfig
from onescan.messages import named_type


def import_file(file: str | Path) -> ModuleType:
    """Run a Python file as a module, after which `load` knows the config classes in it.

    It can import modules in its folder, as with ``python FILE.py``.

    Raises:
        ValueError: If the file does not exist, is not a Python file, or raises an error.
    """
    path = Path(file)
    if not path.exists():
        raise ValueError(f"there is no file {file}")
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{file} is not a Python file, expected a name that ends in .py")
    spec = spec_from_file_location(str(path), path)  # its path is a unique name of the module
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # annotations that are strings are looked up here
    with _errors_as(f"{file} cannot be imported"), _modules_beside(path):
        spec.loader.exec_module(module)
    return module


def function_in(file: str, name: str) -> Callable[[], RunConfig]:
    """Return a function of a file as a recipe, which raises ValueError for any failure."""
    module = import_file(file)
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    if name not in functions:
        own_names = [key for key, value in functions.items() if value.__module__ == module.__name__]
        check_choice(f"function in {file}", name, own_names)
    function, where = functions[name], f"{file}:{name}"

    @functools.wraps(function)
    def recipe() -> RunConfig:
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ValueError(f"{where} takes arguments, expected a function without any") from error
        with _errors_as(f"{where} fails"), _modules_beside(Path(file)):
            run = function()
        if not isinstance(run, RunConfig):
            raise ValueError(f"{where} returned {named_type(run)}, expected a RunConfig")
        return run

    return recipe


@contextmanager
def _modules_beside(path: Path) -> Iterator[None]:
    """Look for imported modules in a file's folder first."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file has removed it
            sys.path.remove(folder)


@contextmanager
def _errors_as(message: str) -> Iterator[None]:
    """Turn any error of a user's code into one ValueError, with the original as its cause."""
    try:
        yield
    except (Exception, SystemExit) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{message}: {type(error).__name__}{first and ': '}{first}") from error
