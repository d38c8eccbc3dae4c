"""A folder of latents claimed for one encoding, which another may not mix with."""

import reprlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from onescan import configs
from onescan.checkpoint.files import LOCK, PARTIAL, locked
from onescan.data import ImageDatasetConfig
from onescan.data.latents.shards import NOTES, read_json
from onescan.training.folder import write_json

# of the images' config, what changes no latent, or is told by the notes
INDIFFERENT = (
    *("mean", "std", "train_crop", "on_error", "class_names"),
    *("streaming", "train_examples", "shuffle_block"),
)
INDIFFERENT_NOTES = ("onescan", "shards")
SHOWN_DIFFERENCES = 3


def identity(data: ImageDatasetConfig, **others: Any) -> dict[str, Any]:
    """What an encoding is of: with any of it changed, it is another."""
    source = {k: v for k, v in configs.to_dict(data).items() if k not in INDIFFERENT}
    place = Path(data.path).expanduser()
    if place.exists():
        source["path"] = str(place.absolute())
    return {"source": source, **others}


def check_folder(out: Path) -> None:
    """Raise ValueError for what is no folder for latents."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is '{out}', which is a file, expected a folder for the latents")
    if not out.exists() or (out / NOTES).exists():
        return
    if strangers := [p.name for p in out.iterdir() if p.name != LOCK and p.suffix != PARTIAL]:
        raise ValueError(
            f"out is '{out}', which holds {min(strangers)!r} and no latents; choose another folder"
        )


def claim(out: Path, written: dict[str, Any]) -> None:
    """Write down what is encoded; what has no shard yet counts for nothing.

    Raises:
        ValueError: the folder holds latents of something else; says what differs.
    """
    if not any(out.glob("*.safetensors")):
        write_json(out / NOTES, written)
        return
    there, here = (_leaves(notes) for notes in (read_json(out), written))
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    names = [name for name in names if name.partition(".")[0] not in INDIFFERENT_NOTES]
    if not names:
        return
    listed = [
        f"{n} is {reprlib.repr(there.get(n))} there and {reprlib.repr(here.get(n))} here"
        for n in names
    ]
    more = len(listed) - SHOWN_DIFFERENCES
    raise ValueError(
        f"{out} holds latents of something else: {', '.join(listed[:SHOWN_DIFFERENCES])}"
        + (f", and {more} more" if more > 0 else "")
        + "; choose another folder"
    )


def _leaves(data: Any, path: str = "") -> dict[str, Any]:
    """JSON objects as one, by dotted names."""
    if not isinstance(data, dict):
        return {path: data}
    below = [_leaves(value, f"{path}.{name}" if path else name) for name, value in data.items()]
    return {name: value for part in below for name, value in part.items()}


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other processes out of a folder.

    Raises:
        ValueError: another is at work in it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(out))
        except ValueError as error:
            raise ValueError(
                f"another process encodes into {out}: wait for its end, or choose another folder"
            ) from error
        yield
