"""The package as users install it: built, installed in an empty environment, and run there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onescan.zoo import names

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
def test_installed_wheel_runs_the_demo(tmp_path):
    """Build the wheel from the sdist, so that one test covers both."""
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    wheel = next(tmp_path.glob("onescan-*.whl"))
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
