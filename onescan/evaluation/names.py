"""What a checkpoint is called, wherever it lies."""

from pathlib import Path

WEIGHTS = ".safetensors"  # the ending of a file in it


def short_name(checkpoint: str | Path) -> str:
    """The end of its folder's path, which for a name on the hub is all of it.

    >>> short_name("/home/me/runs/mine/seed-0/best.safetensors"), short_name("my-model")
    ('mine/seed-0', 'my-model')
    """
    path = Path(checkpoint)
    path = path.parent if path.suffix == WEIGHTS else path
    return "/".join((path.resolve() if path.is_dir() else path).parts[-2:])
