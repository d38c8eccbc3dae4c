"""Load a saved pipeline without importing any modules that its folder names or contains."""

import json
import logging as levels
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.utils import logging

from onescan.checks import LOAD_ERRORS, in_a_line
from onescan.integrations import REMOTE_MODULE
from onescan.integrations.diffusers.pipeline import DenoiserModel, DenoiserPipeline
from onescan.integrations.diffusers.sampling import SCHEDULERS

INDEX = "model_index.json"  # written by diffusers
# classes that model_index.json may name for each component, by (library, class name)
COMPONENTS: dict[str, dict[tuple[str, str], Any]] = {
    "transformer": {(REMOTE_MODULE, DenoiserModel.__name__): DenoiserModel},
    "scheduler": {("diffusers", kind.__name__): kind for kind in SCHEDULERS.values()},
    "vae": {("diffusers", AutoencoderKL.__name__): AutoencoderKL},
}
SETTINGS = ("noise", "pixels", "id2label")  # arguments of the pipeline that are plain data


def load_pretrained(folder: Path, *, vae: Any = None) -> DenoiserPipeline:
    """Load a pipeline written by `DenoiserPipeline.save_pretrained` on the CPU.

    The classes named in model_index.json are compared with a fixed list, and these classes load the
    components. `DiffusionPipeline.from_pretrained` would import modules that the folder names or
    contains.

    Args:
        folder: Folder of the pipeline.
        vae: Decoder to use instead of the saved one.

    Raises:
        ValueError: If model_index.json is damaged, or names another pipeline or an unknown
            component or class, or if a component cannot be loaded.
    """
    index = read_index(folder)
    kinds = {name: _class_of(folder, name, index[name]) for name in COMPONENTS if name in index}
    try:
        parts: dict[str, Any] = {
            name: _load(kind, folder, name) for name, kind in kinds.items() if kind is not None
        }
        if vae is not None:
            parts["vae"] = vae
        return DenoiserPipeline(
            **parts, **{name: index[name] for name in SETTINGS if name in index}
        )
    except LOAD_ERRORS as error:
        raise ValueError(f"cannot load a pipeline from '{folder}': {in_a_line(error)}") from error


def read_index(folder: Path) -> dict[str, Any]:
    """Read model_index.json of a saved `DenoiserPipeline`.

    Raises:
        ValueError: If it is damaged, names another pipeline, or contains an unknown component.
    """
    path = folder / INDEX
    try:
        index = dict(json.loads(path.read_bytes()))
        saved = index["_class_name"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {in_a_line(error)}") from error
    if saved != DenoiserPipeline.saved_fields["_class_name"]:
        raise ValueError(
            f"'{folder}' holds a {saved}, expected a {DenoiserPipeline.__name__} of this version"
        )
    for name in index:
        if not name.startswith("_") and name not in (*COMPONENTS, *SETTINGS):
            raise ValueError(
                f"{path}: component {name!r} is unknown, expected {', '.join(COMPONENTS)}"
            )
    return index


def _class_of(folder: Path, name: str, named: Any) -> Any:
    """Return the class of a component; None if the pipeline was saved without it."""
    if named == [None, None] and name == "vae":
        return None
    allowed = COMPONENTS[name]
    for (library, kind), component in allowed.items():
        if named == [library, kind]:
            return component
    expected = " or ".join(".".join(each) for each in allowed)
    raise ValueError(f"{folder / INDEX}: {name} is {named!r}, expected {expected}")


def _load(kind: Any, folder: Path, name: str) -> Any:
    if name == "scheduler":
        return kind.from_pretrained(folder, subfolder=name, local_files_only=True)
    with _silent():
        part, info = kind.from_pretrained(
            folder,
            subfolder=name,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
        )
    if missing := info["missing_keys"]:
        raise ValueError(f"{name} has {len(missing)} missing weights, such as {min(missing)}")
    return part.eval()


@contextmanager
def _silent() -> Iterator[None]:
    """Disable logging and progress bars of diffusers."""
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(levels.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
