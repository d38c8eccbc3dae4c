"""Other libraries know the models: transformers' Auto classes, timm and diffusers by name.

`import onescan` imports none of them. It asks to be called when one is imported, sooner or later.
"""

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# module of another library -> module and function here that is called once that one is imported
ON_IMPORT = {
    "transformers.models.auto.configuration_auto": ("transformers.registration", "add_configs"),
    "transformers.models.auto.modeling_auto": ("transformers.registration", "add_models"),
    "timm.models": ("timm", "add_models"),
    "diffusers.pipelines.pipeline_utils": ("diffusers.registration", "add_pipeline"),
}


def register_on_import() -> None:
    """Have other libraries told of the models: those imported already now, the others then."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in ON_IMPORT:
        if name in sys.modules:
            _tell(name)


class _Finder:
    """Finds no module itself; it has the ones that it knows followed by a call."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the other finders find, with the call added; None for all other modules."""
        if name not in ON_IMPORT:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(name, path, target)
            if spec is not None and spec.loader is not None:
                _follow(spec.loader, name)
                return spec
        return None


def _follow(loader: Any, name: str) -> None:
    execute = loader.exec_module

    def execute_and_tell(module: ModuleType) -> None:
        execute(module)
        _tell(name)

    loader.exec_module = execute_and_tell  # of this one loader, which loads this module only


def _tell(name: str) -> None:
    module, function = ON_IMPORT[name]
    try:
        getattr(import_module(f"onescan.integrations.{module}"), function)()
    except Exception as error:  # keep `import onescan` working
        library = name.partition(".")[0]
        warnings.warn(f"cannot register onescan models with {library}: {error}", stacklevel=2)
