"""The package as users install it: built, installed in an empty environment, and run there."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from onescan import __version__
from onescan.zoo import names

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/onescan"
ABSOLUTE = ("https://", "#")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def metadata(repository):
    """Return the metadata that hatchling writes for an address of the repository."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"] = repository
    return ProjectMetadata(str(ROOT), PluginManager(), config).core


def links(text):
    return re.findall(r"\]\((.*?)\)", text)


def code(text):
    return re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)


def test_an_unpublished_package_has_no_links_to_files():
    core, readme = metadata(""), (ROOT / "README.md").read_text(encoding="utf-8")
    assert core.urls == {}
    assert not [link for link in links(core.readme) if not link.startswith(ABSOLUTE)]
    assert all(text in core.readme for text in re.findall(r"(?<!!)\[([^\]]+)\]\(", readme))
    assert code(core.readme) == code(readme)


def test_links_of_a_published_package_are_those_of_the_readme():
    core = metadata(REPOSITORY)
    addresses = re.compile(rf"{REPOSITORY}/(blob|raw)/v{__version__}/")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert addresses.sub("", core.readme) == readme
    for link in links(core.readme):
        assert not addresses.match(link) or (ROOT / addresses.sub("", link)).is_file(), link
        assert link.startswith(ABSOLUTE)
        assert ("/raw/" in link) == link.endswith((".svg", ".png"))
    assert core.urls["Changelog"] == f"{REPOSITORY}/blob/v{__version__}/CHANGELOG.md"
    assert core.urls["Source"] == REPOSITORY


@pytest.mark.slow
def test_installed_wheel_runs_the_demo(tmp_path):
    """Build the wheel from the sdist, so that one test covers both."""
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    wheel = next(tmp_path.glob("onescan-*.whl"))
    run(
        sys.executable,
        "-m",
        "twine",
        "check",
        "--strict",
        *tmp_path.glob("onescan-*"),
        cwd=tmp_path,
    )
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-c", constraints, f"{wheel}[train]", cwd=tmp_path)

    imported = run(python, "-c", "import onescan; print(onescan.__file__)", cwd=tmp_path)
    assert (tmp_path / "venv") in Path(imported.strip()).parents
    checked = "from onescan import zoo; print(*[zoo.path(name).name for name in zoo.names()])"
    assert run(python, "-c", checked, cwd=tmp_path).split() == names()
    onescan = python.with_name("onescan")
    shown = run(onescan, "train", "digits", "--training.epochs", "1", cwd=tmp_path)
    assert "test accuracy" in shown
    report = tmp_path / "runs" / "digits" / "report.html"
    assert "<svg" in report.read_text()
