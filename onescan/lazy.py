"""Import the names of a package on first use, so that importing the package is fast."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the module that defines a name.

    Args:
        package: Name of the package.
        modules: Module of each name, relative to the package; the name itself if it is a module.

    >>> lazy_attributes("onescan", {"Grid": "shapes"})("Grid").__module__
    'onescan.shapes'
    """

    def getattr_of_package(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{modules[name]}")
        return module if name == modules[name] else getattr(module, name)

    return getattr_of_package
