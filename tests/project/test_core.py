"""The core installation, without any extra: README's first examples, commands, training."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = ("torch", "einops", "jaxtyping", "numpy", "safetensors", "tyro", "tqdm", "pillow")
MODULES = {
    "scikit-learn": "sklearn",
    "pyyaml": "yaml",
    "lm-eval": "lm_eval",
    "huggingface-hub": "huggingface_hub",
}

# Python then says of these packages that they are not installed. torch itself uses some of them.
BLOCK = """
import sys, torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        caller = sys._getframe(1)
        while caller and "importlib" in caller.f_code.co_filename:
            caller = caller.f_back
        if name.split(".")[0] in {names} and "onescan" in caller.f_globals.get("__name__", ""):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in [name for name in sys.modules if name.split(".")[0] in {names}]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
"""
TRAINING = """
import torch, onescan
from torch.nn.functional import cross_entropy

model = onescan.build("lightnet_tiny", num_classes=3, image_size=8, patch_size=4, width=48, depth=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
for step in range(20):
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert loss.item() < 0.5
"""


def extras():
    lines = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    names = {re.match(r"[\w-]+", line)[0] for line in lines} - {"onescan", *CORE}
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def on_the_core(code, *, cwd):
    """Run code in a new process that can import the core's dependencies and no others."""
    block = BLOCK.format(names=sorted(extras()))
    return subprocess.run(
        [sys.executable, "-c", f"{block}\n{code}"],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def command(*argv):
    return f"from onescan.cli import main\nraise SystemExit(main({list(argv)!r}))"


def blocks_of_readme():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "diffusers" not in block]  # needs the extra [generation]


def test_the_core_is_what_the_design_lists():
    assert [re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]] == list(CORE)


@pytest.mark.slow
def test_first_examples_run(tmp_path):
    blocks = blocks_of_readme()
    assert len(blocks) >= 4
    done = on_the_core("\n".join(blocks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_is_trained(tmp_path):
    done = on_the_core(TRAINING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "shows"),
    [
        (["predict", "zoo/digits_lightnet", "digit.png"], "digit.png: "),
        (["embed", "digit.png", "--model", "zoo/digits_lightnet", "--out", "a.npz"], "1 vector"),
        (["embed", "To be", "--model", "zoo/shakespeare_lightnet", "--out", "a.npz"], "1 vector"),
        (["generate", "zoo/shakespeare_lightnet", "--max-new-tokens", "5", "--prompt", "A"], "A"),
        (["zoo"], "cifar10_lightnet"),
        (["models"], "lightnet_tiny"),
        (["recipes"], "digits"),
        (["show", "digits"], "LightNetMixerConfig"),
        (["train", "digits", "--help"], "--training.batch-size"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_runs(tmp_path, argv, shows):
    from PIL import Image

    Image.new("L", (8, 8)).save(tmp_path / "digit.png")
    done = on_the_core(command(*argv), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shows in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ["train", "digits"],
        ["glue", "zoo/shakespeare_lightnet"],
        ["evaluate", "zoo/digits_lightnet"],
        ["compare", "runs"],
        ["needle", "zoo/shakespeare_lightnet"],
        ["encode", "images"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_command_names_the_missing_extra(tmp_path, argv):
    done = on_the_core(command(*argv), cwd=tmp_path)
    (message,) = done.stderr.splitlines()
    assert message.startswith(f"onescan: error: onescan {argv[0]} needs ")
    assert message.endswith("pip install 'onescan[train]'")
    assert done.returncode == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("digits_lightnet", "transformers", "text"),
        ("shakespeare_lightnet", "transformers", "text"),
        ("digits_denoiser", "diffusers", "generation"),
    ],
)
def test_conversions_name_the_missing_extra(tmp_path, name, library, extra):
    done = on_the_core(
        command("convert", f"zoo/{name}", "--to", library, "--out", "x"), cwd=tmp_path
    )
    (message,) = done.stderr.splitlines()
    assert message.endswith(f" needs {library}: pip install 'onescan[{extra}]'")


@pytest.mark.parametrize(
    ("module", "package"), [("transformers", "transformers"), ("lm_eval", "lm-eval")]
)
def test_an_integration_names_the_missing_extra(tmp_path, module, package):
    done = on_the_core(f"import onescan.integrations.{module}", cwd=tmp_path)
    message = f"ImportError: onescan.integrations.{module} needs {package}: pip install 'onescan["
    assert message in done.stderr


@pytest.mark.slow
def test_training_from_python_names_the_missing_extra(tmp_path):
    code = "import onescan\nfrom onescan.experiments.recipes import find_recipe\n"
    done = on_the_core(code + "onescan.train(find_recipe('digits')(), 'run')", cwd=tmp_path)
    assert "ImportError: onescan.train needs " in done.stderr
    assert "pip install 'onescan[train]'" in done.stderr
