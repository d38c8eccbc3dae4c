"""The tutorials: MyST Markdown notebooks whose code cells run offline on a CPU, in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "tutorials" / "index.md"
TUTORIALS = sorted(set(INDEX.parent.glob("*.md")) - {INDEX})
# What each tutorial prints: a pattern of a number, and its least and greatest value on all lines
# where it appears. About half of the way from chance to what was measured.
NUMBERS = {
    "forecasting": [
        (r"^error of the forecast: (\S+)", 0, 1.0),
        (r"^error of repeating the year before: (\S+)", 1.2, 2.5),
        (r"^share between the quantiles .*: (\S+)", 0.4, 1),
    ],
    "generate": [(r"^step 300  loss (\S+)", 0, 0.5), (r"^largest difference: (\S+)", 0, 1e-4)],
    "layers": [
        (r"^accuracy on grids of .*: (\S+)", 0.9, 1),
        (r"^without the other cells: (\S+)", 0.5, 0.75),
        (r"^largest difference: (\S+)", 0, 1e-5),
        (r"^without the mask: (\S+)", 1e-3, 1),
    ],
    "long_sequences": [(r"^largest difference of a gradient: (\S+)", 0, 1e-5)],
    "masked_language_model": [
        (r"^step 300  loss (\S+)", 0, 0.8),
        (r"^accuracy before: (\S+)", 0.3, 0.7),
        (r"^accuracy after: (\S+)", 0.85, 1),
    ],
    "replace_attention": [
        (r"^accuracy with softmax attention: (\S+)", 0.8, 1),
        (r"^accuracy after the replacement: (\S+)", 0, 0.85),
        (r"^accuracy after fine-tuning: (\S+)", 0.8, 1),
        (r"^largest difference: (\S+)", 0, 1e-5),
    ],
    "own_images": [(r"^accuracy: (\S+)", 0.8, 1)],
    "sample": [(r"^(\d+)% of the samples are closest to", 70, 100)],
    "segmentation": [
        (r"^accuracy: (\S+)", 0.9, 1),
        (r"^accuracy of predicting background everywhere: (\S+)", 0, 0.96),
        (r"^IoU of .*: (\S+)", 0.5, 1),
    ],
    "video": [
        (r"^accuracy: ([\d.]+)", 0.7, 1),
        (r"direction correct: (\S+)", 0.9, 1),
        (r"^accuracy on new signals: (\S+)", 0.8, 1),
    ],
}
# Sentences that must appear.
SENTENCES = {
    "distributed": ["same weights to the last bit: True", "same losses: True"],
    "generate": ["same text: True"],
    "long_sequences": ["rank 0: logits and gradients equal those of whole images"],
    "replace_attention": ["same accuracy: True"],
    "sample": ["same images: True"],
}
LIMIT = 600  # seconds; a tutorial computes for less than one minute, but the machine may be busy
FRONT_MATTER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# """


def script_of(page):
    """Return the code cells as a script, with every line at its line number in the page."""
    lines, inside = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            inside = line.startswith("```{code-cell}")
            line = ""
        is_option = re.match(r":[\w-]+:", line)
        lines.append(line if inside and not is_option else "")
    return "\n".join(lines) + "\n"


def test_code_cells_keep_their_line_numbers():
    page = (
        "# A\n```{code-cell} ipython3\n:tags: [hide-output]\nx = 1\n```\n```python\ny\n```\nend\n"
    )
    assert script_of(page) == "\n\n\nx = 1\n\n\n\n\n\n"


def test_the_index_lists_every_tutorial():
    tree = re.search(r"^```\{toctree\}\n(.*?)^```", INDEX.read_text(), re.MULTILINE | re.DOTALL)[1]
    listed = [line for line in tree.splitlines() if line and not line.startswith(":")]
    linked = re.findall(r"\]\((\w+)\.md\)", INDEX.read_text())
    assert sorted(listed) == sorted(linked) == [path.stem for path in TUTORIALS]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_a_notebook(path):
    page = path.read_text()
    assert page.startswith(FRONT_MATTER)
    compile(script_of(page), path, "exec")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_and_the_index_state_extras_and_time(path):
    needs, time = re.search(
        r"^You need (.*)\. The code runs in (.*) on two CPU cores\.$",
        path.read_text(),
        re.MULTILINE,
    ).groups()
    row = rf"^\| \[.*\]\({path.stem}\.md\) \| .* \| (.*) \| (.*) \|$"
    extras, minutes = re.search(row, INDEX.read_text(), re.MULTILINE).groups()
    listed = ",".join(re.findall(r"`(\w+)`", extras))
    assert needs == (f"`pip install 'onescan[{listed}]'`" if listed else "no extras")
    times = {
        "< 1 min": "less than a minute",
        "1 min": "about a minute",
        "2 min": "about two minutes",
    }
    assert time == times[minutes]


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path):
    script = tmp_path / "tutorial.py"
    script.write_text(script_of(path.read_text()))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "ONESCAN_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for sentence in SENTENCES.get(path.stem, []):
        assert sentence in run.stdout
    for pattern, least, greatest in NUMBERS.get(path.stem, []):
        found = [float(number) for number in re.findall(pattern, run.stdout, re.MULTILINE)]
        assert found, pattern
        assert all(least <= number <= greatest for number in found), (pattern, found)


def test_every_tutorial_states_a_result():
    assert {path.stem for path in TUTORIALS} == {*NUMBERS, *SENTENCES}
