"""How many files of the package a reader walks through to follow one call."""

import pytest
from walks import preset_walk, walk

from onescan.ops import lrpe_frequencies

# Files that one call may enter at most: the logits of an image, or three generated tokens.
MAX_FILES = {
    "lightnet_tiny": 17,
    "lion_s_tiny": 15,
    "ldn_base": 15,
    "lightnet_lm_45m": 20,
}


@pytest.mark.parametrize("name", MAX_FILES)
def test_a_call_enters_few_files(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the tests of kernels set it
    entered = list(preset_walk(name).lines)
    assert any(file.startswith("ops/") for file in entered)
    assert len(entered) <= MAX_FILES[name], "\n".join(entered)


def test_a_walk_counts_files_lines_and_switches():
    lines, switches = walk(lambda: lrpe_frequencies(4, axes=2))
    assert list(lines) == ["ops/lrpe.py", "checks.py", "ops/numerics.py"]
    assert lines["checks.py"] == 5  # three of check_whole, two of check_positive
    assert switches == 5  # to the checks and back, twice, and to the numerics
