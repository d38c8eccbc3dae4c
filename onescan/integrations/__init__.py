"""Integrations with other libraries, each of which is imported explicitly.

`import onescan` imports none of them and registers nothing. Importing
`onescan.integrations.transformers` registers the Auto classes, and importing
`onescan.integrations.timm` registers the image classifiers.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onescan.checkpoint.run_folder import has_run_config

REMOTE_MODULE = "modeling_onescan"  # module in saved folders, for trust_remote_code=True


def check_not_native(source: Any, library: str) -> None:
    """Raise ValueError if a path is in onescan's own format, which another library cannot load."""
    path, is_native = Path(str(source)), False
    with suppress(OSError, ValueError):
        is_native = path.exists() and has_run_config(path if path.is_dir() else path.parent)
    if is_native:
        raise ValueError(
            f"'{source}' is in onescan's own format, expected that of {library}; convert it first: "
            f"onescan convert {source} --to {library} --out FOLDER"
        )


def write_remote_module(folder: Any, package: str, classes: Sequence[str]) -> None:
    """Write the module that other libraries import from a folder with ``trust_remote_code=True``.

    It only imports classes of the installed onescan. Our own loading never executes it.

    Args:
        folder: Folder of a saved model; created if needed.
        package: Module of onescan that contains the classes.
        classes: Names of the classes to which the folder's configuration refers.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    imported = "".join(f"    {name},\n" for name in classes)
    exported = "".join(f'    "{name}",\n' for name in classes)
    (path / f"{REMOTE_MODULE}.py").write_text(
        '"""Import the classes of this folder from onescan: pip install onescan."""\n\n'
        f"from {package} import (\n{imported})\n\n__all__ = [\n{exported}]\n",
        encoding="utf-8",
        newline="\n",
    )
