"""Integrations with other libraries, each of which is imported explicitly.

`import onescan` imports none of them and registers nothing. Importing
`onescan.integrations.transformers` registers the Auto classes, and importing
`onescan.integrations.timm` registers the image classifiers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

REMOTE_MODULE = "modeling_onescan"  # module in saved folders, for trust_remote_code=True


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
