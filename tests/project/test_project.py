"""What surrounds the code agrees with it: version, extras, README, Makefile, and the fixtures."""

import inspect
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

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


ALL_PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
]
PAGES = [
    page
    for page in ALL_PAGES
    if "docs/tutorials/" not in page and "```python\n" in (ROOT / page).read_text()
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


@cache
def reference():
    """Return what the API reference describes: full names, and the objects that they stand for."""
    names = set()
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        module = ""
        for kind, name, options in re.findall(
            r"^\.\. (currentmodule|py:\w+|auto\w+):: (\S+)\n((?:   :.*\n)*)", page.read_text(), re.M
        ):
            if kind in ("currentmodule", "automodule", "py:module"):
                names.add(module := name)
            elif name.startswith("onescan."):
                names.add(name)
            else:
                names.add(f"{module}.{name}")
            if kind == "automodule" and "   :members:" in options:
                names |= {f"{name}.{each}" for each in members(name, ":imported" in options)}
    known = [find(name) for name in names - {"onescan", "onescan.integrations.timm"}]
    return names, [each for each in known if not inspect.ismodule(each)]


def find(name):
    """Return what a full name stands for: an attribute rather than a module of the same name."""
    found = resolve_name(name)  # imports the module
    parent, _, last = name.rpartition(".")
    return getattr(resolve_name(parent), last, found)


def members(module, imported):
    """Return the public names of a module, by default those that it defines."""
    return [
        name
        for name in dir(resolve_name(module))
        if not name.startswith("_")
        and (imported or getattr(find(f"{module}.{name}"), "__module__", "") == module)
    ]


def names_used(page):
    """Return the full names of onescan's that code blocks of a page import or use."""
    code = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", page, re.M | re.S))
    names = re.findall(r"(?<![\w./\"'-])onescan(?:\.\w+)+", code)
    for module, imported in re.findall(
        r"^(?:>>> )?from (onescan[\w.]*) import (\([^)]*\)|[^(\n]+)$", code, re.M
    ):
        imported = re.sub(r"#.*|\bas \w+", "", imported)
        names += [f"{module}.{name}" for name in re.findall(r"\w+", imported)]
    return sorted(set(names))


def test_the_api_reference_has_the_public_interface():
    public = {
        f"{package.__name__}.{name}"
        for package in (onescan, onescan.ops, onescan.nn)
        for name in package.__all__
    }
    constants = {"onescan.PRESETS", "onescan.__version__"}
    assert not [name for name in sorted(public - constants) if not is_described(name)]


@pytest.mark.parametrize("page", ALL_PAGES)
def test_the_api_reference_has_what_a_page_uses(page):
    used = names_used((ROOT / page).read_text())
    assert not [name for name in used if not is_described(name)]


def is_described(name):
    """Return whether a name, its object or its class is described, or whether it is a module."""
    names, objects = reference()
    if name in names or inspect.ismodule(found := find(name)):
        return True
    parent = name.rpartition(".")[0]
    is_member = inspect.isclass(resolve_name(parent))
    return any(found is each for each in objects) or (is_member and is_described(parent))


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
