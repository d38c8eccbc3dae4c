"""Language models trained by recipes, in a second or two."""

import pytest

from onescan.cli import main

TEXT = "The cat sat on the mat.\nA dog looked at it, and at the door.\n" * 60
TINY = [
    *("--model.width", "24", "--model.depth", "1", "--model.mixer.num-heads", "2"),
    *("--data.length", "32", "--training.batch-size", "4", "--training.steps", "6"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def train(name, text, *options):
    """Train a recipe and return its folder."""
    out = text.parent / name
    arguments = ["train", name, "--data.path", str(text), "--out", str(out), *TINY, *options]
    assert main([*arguments, "--overwrite"]) == 0
    return out / "seed-0"
