"""What surrounds the code agrees with it: version, extras, README, Makefile, and the fixtures."""

import re
import subprocess
import tomllib
from pathlib import Path

import jaxtyping
import pytest
import torch

import onescan
import onescan.ops
from onescan.checks import in_a_line
from onescan.ops.lrpe import _axis_angles

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "train": {"scikit-learn", "scipy", "matplotlib", "jinja2", "markupsafe", "filelock"},
    "vision": {"kornia", "datasets"},
    "text": {"transformers", "tokenizers", "accelerate", "datasets"},
    "export": {"onnx", "onnxscript", "onnxruntime"},
    "generation": {"diffusers"},
    "eval": {"lm-eval"},
    "log": {"tensorboard"},
    "gpu": {"triton"},
    "medical": {"nibabel"},
    "timm": {"timm"},
    "docs": {"sphinx", "pydata-sphinx-theme", "myst-nb", "ipykernel"},
    "dev": {"pytest", "pytest-xdist", "hypothesis", "beartype", "ruff", "mypy", "pre-commit"},
}


PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "tutorials" not in page.parts and "```python\n" in page.read_text()
]
LONG = ("docs/howto/export.md", "docs/integrations.md")  # take half a minute each


def test_one_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == onescan.__version__ == PROJECT["version"]


def test_extras_hold_what_they_promise():
    held = {
        extra: {re.match(r"[\w-]+", line)[0] for line in lines}
        for extra, lines in PROJECT["optional-dependencies"].items()
    }
    assert held.keys() == EXTRAS.keys()
    assert not {extra: lacks for extra in EXTRAS if (lacks := EXTRAS[extra] - held[extra])}


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx uses it itself
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in PAGES]
)
def test_what_pages_show_runs(name, tmp_path, monkeypatch):
    page = (ROOT / name).read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert blocks
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks:
        above = page.count("\n", 0, block.start(1))
        exec(compile("\n" * above + block[1], ROOT / name, "exec"), names)  # noqa: S102


def test_the_api_reference_has_the_public_interface():
    text = "".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    described = {
        name.rpartition(".")[2] for name in re.findall(r"^\.\. auto\w+:: (\S+)", text, re.M)
    }
    public = {*onescan.__all__, *onescan.ops.__all__} - {"PRESETS", "__version__"}
    assert not public - described
    assert ".. automodule:: onescan.nn\n   :members:\n   :imported-members:" in text


def test_help_lists_every_target():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  ([a-z]+) +\S", run.stdout, re.MULTILINE))
    assert listed == targets > {"help", "setup", "demo", "test", "check", "gpu", "bench"}


def test_types_and_shapes_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="theta"):
        _axis_angles(4, 0, torch.ones(2, 3, 4))
    with pytest.raises(TypeError, match="in_a_line"):
        in_a_line("a text")


def test_unwritten_memory_shows():
    assert torch.empty(3).isnan().all()
    assert torch.ones(3).new_empty(3).isnan().all()
