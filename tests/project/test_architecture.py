"""Rules for the source of the package: imports, exports, dependencies and forbidden calls."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import onescan.ops

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "onescan"
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
EVERYWHERE = SOURCES | {
    path: ast.parse(path.read_text())
    for folder in ("tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

FILES = {"lazy", "messages", "cache", "shapes", "checks", "configs", "allocation", "progress"}


def layers() -> list[set[str]]:
    """Return the folders in CONTRIBUTING's diagram, from bottom to top."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (diagram,) = re.findall(r"```text\n(cli .*?)```", text, re.DOTALL)
    found = []
    for line in diagram.splitlines():
        names, about = re.split(r"  +", line)
        if names == "experiments":
            found += [{f"experiments.{name}"} for name in about.split(" > ")]
            alone = ("installation", "linearize_config", "locks")
            found.append({"experiments", *(f"experiments.{name}" for name in alone)})
        else:
            found += [{name} for name in names.split(" > ")]
    assert found[0] == {"cli"}
    assert set(found[-1].pop().removesuffix(", ...").split(", ")) < FILES
    return [FILES, *found[-2::-1][:-1], {"cli", "__main__"}]


LAYERS = layers()  # a layer imports itself and the layers before it


def name_of(path: Path) -> str:
    """Return the name of the module in a file, such as onescan.ops.lrpe."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> int:
    """Return the layer of a module; onescan itself, which imports all, is in the last one."""
    names = module.split(".")[1:]
    part = ".".join(names[: 1 + (names[0] == "experiments")]) if names else ""
    layers = [layer for layer, parts in enumerate(LAYERS) if part in parts]
    if part and not layers:
        raise LookupError(f"{module} is in no layer: add {part!r} to LAYERS")
    return layers[0] if layers else len(LAYERS) - 1


def imports(tree: ast.AST, *, at_import: bool = False) -> Iterator[tuple[int, str]]:
    """Yield line and full name of each import; at_import skips those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif not (at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(node, at_import=at_import)


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call and the source of the called expression."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def assert_rule(rule: str, broken: list[str]) -> None:
    assert not broken, f"{rule}:\n" + "\n".join(broken)


def at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_point_down():
    broken = [
        f"{at(path, line)} imports {module}"
        for path, tree in SOURCES.items()
        if path != PACKAGE / "__init__.py"
        for line, module in imports(tree)
        if module.split(".")[0] == "onescan" and module != "onescan.__version__"
        if layer_of(module) > layer_of(name_of(path))
    ]
    assert_rule(
        "a file imports its own layer, lower layers and onescan.__version__",
        broken,
    )


def is_launch_file(path: Path) -> bool:
    """Return whether a file launches kernels: ops/NAME/launch.py, ops/NAME_launch.py."""
    return PACKAGE / "ops" in path.parents and path.stem.endswith("launch")


def test_only_kernels_import_triton():
    broken = [
        at(path, line)
        for path, tree in SOURCES.items()
        if not (is_launch_file(path) or path.parent == PACKAGE / "kernels")
        for line, module in imports(tree)
        if module.split(".")[0] == "triton"
    ]
    assert_rule("only onescan/kernels and launch files import triton", broken)


def test_device_code_imports_triton_alone():
    broken = [
        f"{at(path, line)} imports {module}"
        for path, tree in SOURCES.items()
        if path.parent == PACKAGE / "kernels"
        for line, module in imports(tree)
        if module.split(".")[0] not in {*sys.stdlib_module_names, "triton"}
        if not module.startswith("onescan.kernels.")
    ]
    assert_rule("onescan/kernels imports the standard library, triton and itself", broken)


OPS_WITH_KERNELS = (
    "__init__.py",
    "op.py",
    "lrpe.py",
    "feature_maps.py",
    "gating.py",
    "cross_entropy.py",
)


def test_kernels_are_imported_by_ops_on_use():
    broken = [
        f"{at(path, line)} imports {module}"
        for path, tree in SOURCES.items()
        if not is_launch_file(path)
        for line, module in imports(tree, at_import=path.name in OPS_WITH_KERNELS)
        if re.search(r"\.ops\.(\w+\.|lrpe_|feature_map_|gating_|cross_entropy_)launch\b", module)
    ]
    assert_rule("launch files are imported only by the front of an op, inside functions", broken)


def test_extras_are_imported_on_use():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        MODULES.get(name := re.match(r"[\w-]+", line)[0], name.replace("-", "_"))
        for extra, lines in project["optional-dependencies"].items()
        if extra != "dev"
        for line in lines
    }
    broken = [
        f"{at(path, line)} imports {module}"
        for path, tree in SOURCES.items()
        if PACKAGE / "integrations" not in path.parents and path.parent != PACKAGE / "kernels"
        if PACKAGE / "experiments" / "report" not in path.parents and not is_launch_file(path)
        for line, module in imports(tree, at_import=True)
        if module.split(".")[0] in extras
    ]
    assert_rule("outside integrations/ and report/, extras are imported inside functions", broken)


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.match(r"[\w-]+", line)[0] for lines in groups for line in lines}
    known = {*sys.stdlib_module_names, *(MODULES.get(n, n.replace("-", "_")) for n in declared)}
    broken = [
        f"{at(path, line)} imports {module}"
        for path, tree in SOURCES.items()
        for line, module in imports(tree)
        if module.split(".")[0] not in known
    ]
    assert_rule("every package that is imported is declared in pyproject.toml", broken)


def test_annotations_are_not_strings():
    broken = [
        at(path, line)
        for path, tree in EVERYWHERE.items()
        for line, module in imports(tree)
        if module == "__future__.annotations"
    ]
    assert_rule(
        "annotations in strings are not checked; do not import __future__.annotations", broken
    )


def test_only_the_command_line_and_progress_print():
    broken = [
        at(path, call.lineno)
        for path, tree in SOURCES.items()
        if path.parent != PACKAGE / "cli" and path != PACKAGE / "progress.py"
        for call, name in calls(tree)
        if name in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert_rule("only the files of cli/ and progress.py print", broken)


def is_text_of_unknown_encoding(call: ast.Call, name: str) -> bool:
    """Return whether a call opens a text file in the encoding of the system."""
    method, keywords = name.rpartition(".")[2], {keyword.arg for keyword in call.keywords}
    if "encoding" in keywords or method not in ("open", "read_text", "write_text"):
        return False
    modes = [value for arg in call.args if isinstance(value := getattr(arg, "value", None), str)]
    if method == "open":  # other methods with this name take no mode
        return any(set(mode) <= set("rwaxt+") for mode in modes)
    return len(call.args) == (method == "write_text")


def test_text_files_have_a_declared_encoding():
    broken = [
        at(path, call.lineno)
        for path, tree in EVERYWHERE.items()
        if ROOT / "tests" not in path.parents
        for call, name in calls(tree)
        if is_text_of_unknown_encoding(call, name)
    ]
    assert_rule('text files are opened with encoding="utf-8", or another one', broken)


def is_text_with_lines_of_the_system(call: ast.Call, name: str) -> bool:
    """Return whether a call writes a text file whose line ends depend on the system."""
    method, keywords = name.rpartition(".")[2], {keyword.arg for keyword in call.keywords}
    modes = {value for arg in call.args if isinstance(value := getattr(arg, "value", None), str)}
    writes = method == "write_text" or (method == "open" and modes & {"a", "w", "x"})
    return bool(writes) and "newline" not in keywords


def test_text_files_have_declared_line_ends():
    broken = [
        at(path, call.lineno)
        for path, tree in SOURCES.items()
        for call, name in calls(tree)
        if is_text_with_lines_of_the_system(call, name)
    ]
    assert_rule('text is written with newline="\\n", so that checksums match everywhere', broken)


def test_ops_exports_documented_functions_and_classes():
    broken = [
        name
        for name in onescan.ops.__all__
        for exported in [getattr(onescan.ops, name)]
        if not (callable(exported) and (exported.__doc__ or "").strip())
    ]
    assert_rule("onescan.ops exports functions and classes with docstrings", broken)
    assert sorted(onescan.ops.__all__) == list(onescan.ops.__all__)


MODULES = {
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "pyyaml": "yaml",
}  # name of the imported module
NOT_IMPORTED = {
    "onescan": "the extras that the tests use",
    "sphinx": "a command",
    "pydata-sphinx-theme": "named in docs/conf.py",
    "myst-nb": "named in docs/conf.py",
    "sphinx-mathjax-offline": "named in docs/conf.py",
    "ipykernel": "runs the notebooks of the documentation",
    "beartype": "pytest's --jaxtyping-packages option",
    "mypy": "a command",
    "build": "a command",
    "onnxruntime": "runs exported models",
    "pre-commit": "a command",
    "pytest-cov": "pytest's --cov option",
    "pytest-xdist": "pytest's -n option",
    "ruff": "a command",
    "twine": "a command",
    "tensorboard": "torch.utils.tensorboard imports it",
    "types-tqdm": "types for mypy",
}


def test_declared_dependencies_are_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [
        (re.match(r"[\w-]+", line)[0], extra)
        for extra, lines in {"dependencies": project["dependencies"], **extras}.items()
        for line in lines
    ]
    imported = {
        kind: {module.split(".")[0] for tree in trees.values() for _, module in imports(tree)}
        for kind, trees in (("package", SOURCES), ("dev", EVERYWHERE))
    }
    broken = [
        f"{name} of {extra}"
        for name, extra in declared
        if name not in NOT_IMPORTED
        and MODULES.get(name, name.replace("-", "_"))
        not in imported["dev" if extra == "dev" else "package"]
    ]
    broken += [f"{name} is not declared" for name in set(NOT_IMPORTED) - {n for n, _ in declared}]
    assert_rule("declared dependencies are imported, or have a reason in NOT_IMPORTED", broken)


SAFE = {"weights_only": "True", "allow_pickle": "False"}


def test_nothing_is_unpickled():
    imported = [
        at(path, line)
        for path, tree in EVERYWHERE.items()
        for line, module in imports(tree)
        if module.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib", "shelve")
    ]
    called = [
        at(path, call.lineno)
        for path, tree in EVERYWHERE.items()
        for call, _ in calls(tree)
        for keyword in call.keywords
        if SAFE.get(keyword.arg, said := ast.unparse(keyword.value)) != said
    ]
    assert_rule("pickle can run arbitrary code; do not use it", imported + called)


def loaded_after(code: str) -> set[str]:
    """Return the modules that a new Python process has imported after running code."""
    code += "\nimport sys; print(*sys.modules, file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return set(run.stderr.split())


def test_importing_the_package_is_light():
    loaded = loaded_after("import onescan")
    assert "onescan" in loaded
    assert "torch" not in loaded


def test_importing_the_presets_does_not_import_the_compiler():
    loaded = loaded_after("import onescan.models.size")
    assert "torch" in loaded
    assert not loaded & {"torch._dynamo", "sympy"}


HELP = """
import contextlib, io, sys
from onescan.cli import main
sys.argv = ["onescan", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main()
assert "usage" in out.getvalue()
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_device_code_loads_without_torch():
    loaded = loaded_after(
        "from importlib import import_module; from onescan.kernels import FILES\n"
        "for name in FILES: import_module(f'onescan.kernels.{name}')"
    )
    assert "triton" in loaded
    assert "torch" not in loaded


def test_help_is_light():
    assert not loaded_after(HELP) & {"torch", "transformers"}
