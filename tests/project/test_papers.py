"""docs/papers.md: commands parse, names and links exist, and no row of a paper is missing."""

import ast
import importlib
import inspect
import pkgutil
import re
import shlex
import typing
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro

import onescan
import onescan.cli
from onescan.cli import COMMANDS, main
from onescan.experiments.recipes import RECIPES, find_recipe
from onescan.layers.mixers import LINEAR_TRANSFORMERS
from onescan.models.presets import ABLATIONS, PRESETS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "papers.md").read_text()
TEXT = re.sub(r"^```.*?^```\n", "", PAGE, flags=re.MULTILINE | re.DOTALL)  # without blocks of code
HEADER = ("Here", "State", "Deviation")  # after "In the paper" or "In the summary"
STATES = ("unit-tested", "not run", "not implemented")
MEASURED = re.compile(r"\[measured\]\((results|performance|study)\.md#[\w-]+\)")
# A row is trained if our results say so, or if a test trains it.
TRAINED = re.compile(
    r"\[trained\]\((?:results|study)\.md#[\w-]+\)|trained in `(?P<test>tests/[\w/]+\.py)`"
)
TRAINS = re.compile(r"\btrain\(|optimizer\.step\(\)")
ONLY_PUBLISHED = "published figure only"

# What the papers number: chapter of the page -> kind -> numbers.
PAPERS = {
    "LightNet": {
        "Sec.": ["3", "4.1", "4.2", "4.3", "5", "5.1", "5.2", "6.1", "6.2", "6.3"],
        "App.": ["A.1", "A.2", "B", "B.1", "B.2"],
        "Eq.": [*map(str, range(1, 29))],
        "Theorem": ["4.1"],
        "Proposition": ["4.2"],
        "Table": [*map(str, range(1, 16))],
        "Figure": [*map(str, range(1, 6))],
    },
    "LION": {
        "Sec.": ["3.1", "3.2", "3.3", "4.1", "4.2", "4.3", "4.4", "4.5"],
        "App.": [
            *("A", "A.1", *(f"B.{i}" for i in range(1, 12))),
            *(*(f"C.{i}" for i in range(1, 18)), "D"),
        ],
        "Eq.": [*map(str, range(1, 245))],
        "Theorem": ["3.1", "3.2", "B.1", "B.2"],
        "Table": [*map(str, range(1, 17))],
        "Figure": [*map(str, range(1, 13))],
    },
    "LDN": {
        "Sec.": [
            *(
                f"{section}.{i}"
                for section, last in (("3", 7), ("4", 4))
                for i in range(1, last + 1)
            ),
            *(f"5.{i}" for i in range(1, 7)),
        ],
        "Theorem": ["1"],
        "Table": [*map(str, range(1, 5))],
        "Figure": [*map(str, range(1, 3))],
    },
    "Open questions and next checks": {
        kind: ["1", "2", "3"] for kind in ("Mechanism", "Experiment", "Open question", "Next check")
    },
}
V1 = {"Table": ["7", "10"]}  # of LightNet's first version, where it differs
KINDS = sorted({kind for kinds in PAPERS.values() for kind in kinds}, key=len, reverse=True)
NUMBER = r"(?:[A-D](?:\.\d+)?|\d+(?:\.\d+)?)(?:-\d+)?"
REFERENCE = re.compile(
    rf"({'|'.join(map(re.escape, KINDS))})s? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)(?!\w)"
)


# Reading the page


def chapters():
    """Return the text of each chapter by the first words of its heading."""
    parts = re.split(r"^## (.*)$", TEXT, flags=re.MULTILINE)[1:]
    titles = (title.partition(" (")[0] for title in parts[::2])
    return dict(zip(titles, parts[1::2], strict=True))


def rows(text):
    """Return the cells of each row of the tables with `HEADER`."""
    found: list[tuple[str, ...]] = []
    for table in re.findall(r"^\| In the .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        lines = [tuple(cell.strip() for cell in row.split("|")[1:-1]) for row in table.splitlines()]
        found += lines
    assert text.count(f"| {' | '.join(HEADER)} |") == len(re.findall(r"^\| In the ", text, re.M))
    assert all(len(row) == 1 + len(HEADER) for row in found)
    return found


def references(cell):
    """Return what a first cell names: kind -> numbers."""
    named: dict[str, set[str]] = {}
    for kind, numbers in REFERENCE.findall(cell):
        for number in re.findall(NUMBER, numbers):
            first, _, last = number.partition("-")
            every = map(str, range(int(first), int(last) + 1)) if last else [first]
            named.setdefault(kind, set()).update(every)
    return named


def expand(text):
    """Return the texts that a text with {a,b} stands for.

    >>> expand("lion_{d,s}_tiny")
    ['lion_d_tiny', 'lion_s_tiny']
    """
    braces = re.search(r"\{([^{}]*)\}", text)
    if not braces:
        return [text]
    before, after = text[: braces.start()], text[braces.end() :]
    return [x for choice in braces[1].split(",") for x in expand(before + choice + after)]


IN_CODE = [x for code in re.findall(r"`([^`\n]+)`", TEXT) for x in expand(code)]
IS_COMMAND = re.compile(r"(onescan|python) ")
SHELL = sorted({code for code in IN_CODE if IS_COMMAND.match(code)})
NAMES = sorted({code for code in IN_CODE if not IS_COMMAND.match(code)})


# Completeness


@pytest.mark.parametrize("chapter", PAPERS)
def test_every_number_of_a_paper_has_a_row(chapter):
    named: dict[str, set[str]] = {}
    first_version: dict[str, set[str]] = {}
    for cell, *_ in rows(chapters()[chapter]):
        target = first_version if cell.startswith("v1, ") else named
        for kind, numbers in references(cell.partition(": ")[0]).items():
            target.setdefault(kind, set()).update(numbers)
    for kind, numbers in PAPERS[chapter].items():
        assert sorted(set(numbers) - named.get(kind, set())) == [], f"{kind} without a row"
    for kind, numbers in named.items():
        unknown = numbers - set(PAPERS[chapter].get(kind, ()))
        assert sorted(unknown) == [], f"{kind} is not in the paper"
    if chapter == "LightNet":
        assert first_version == {kind: set(numbers) for kind, numbers in V1.items()}


@pytest.mark.parametrize("chapter", PAPERS)
def test_every_row_has_a_state_and_something_here(chapter):
    found = rows(chapters()[chapter])
    assert found
    for paper, here, state, _deviation in found:
        assert paper
        trained = TRAINED.fullmatch(state)
        assert state in STATES or trained or MEASURED.fullmatch(state), (paper, state)
        if trained and trained["test"]:
            assert TRAINS.search((ROOT / trained["test"]).read_text()), (paper, state)
        is_missing = here in ("", ONLY_PUBLISHED)
        assert ("`" in here) != is_missing, (paper, here)
        assert (state == "not implemented") == is_missing, (paper, state)


def test_the_page_explains_every_state():
    found = {state for text in chapters().values() for _, _, state, _ in rows(text)}
    used = {re.split(r" in |\]", state.lstrip("["))[0] for state in found}
    explained = re.findall(r"^- \*\*([\w -]+)\*\*:", PAGE, re.MULTILINE)
    assert sorted(used) == sorted(explained)
    trained = {state for state in found if "results.md" in state and "trained" in state}
    assert len(trained) > 3


# Commands


class ParsedError(Exception):
    """A command has parsed its options; it is stopped there."""


@pytest.fixture
def _only_parse(monkeypatch):
    for found in pkgutil.iter_modules(onescan.cli.__path__, "onescan.cli."):
        module = importlib.import_module(found.name)
        if found.name != "onescan.cli.options" and hasattr(module, "parse"):
            monkeypatch.setattr(module, "parse", parse_and_stop(module.parse))


def parse_and_stop(parse):
    def stopped(*args, **kwargs):
        options = parse(*args, **kwargs)
        for value in vars(options).values():
            if hasattr(value, "selected"):  # GLUE's recipe and tasks
                value.selected()
        raise ParsedError

    return stopped


@pytest.mark.usefixtures("_only_parse")
@pytest.mark.parametrize("program", [pytest.param("onescan", marks=pytest.mark.slow), "python"])
def test_every_command_parses(program):
    commands = [shlex.split(command) for command in SHELL if command.startswith(f"{program} ")]
    assert commands
    for _, name, *arguments in commands:
        if program == "python":
            script = importlib.import_module(Path(name).stem)
            assert name == f"benchmarks/{script.__name__}.py"
            options = tyro.cli(script.Options, args=arguments)
            presets = getattr(options, "presets", ())  # such as lion_d_base/recurrent
            assert {each.partition("/")[0] for each in presets} <= PRESETS.keys()
        elif name == "train" and not arguments:
            continue  # the command alone, without a recipe
        elif name == "show" or not arguments:
            COMMANDS[name](arguments)
        else:
            with pytest.raises(ParsedError):
                COMMANDS[name](arguments)


def test_runs_in_commands_are_those_of_recipes():
    runs = {run for code in IN_CODE for run in re.findall(r"runs/([\w/]+?)(?:/seed-|\s|$)", code)}
    assert runs
    for run in runs:
        assert find_recipe(run)().name == run


# Names


@cache
def modules_by_name():
    """Return the modules that define each name at their top level, without importing them."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "onescan").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in top_level(path):
            found.setdefault(name, []).append(module)
    return found


def top_level(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def resolve(name):
    """Return the object of a name of the package, such as LightNetMixer or DecayOutput.key."""
    first, *rest = name.split(".")
    if first not in modules_by_name():
        raise LookupError(f"{first} is defined nowhere in onescan/")
    found = getattr(importlib.import_module(modules_by_name()[first][0]), first)
    for attribute in rest:
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[attribute] if attribute in fields else getattr(found, attribute)
    return found


def check_name(name):
    """Raise an error if a text in code font is neither a file, nor a name, nor a valid call."""
    if name in {*PRESETS, *RECIPES, *ABLATIONS, *LINEAR_TRANSFORMERS}:
        return
    if "/" in name or re.fullmatch(r"\w+\.(py|md)", name):
        assert (ROOT / name).exists()
        return
    tree = ast.parse(name, mode="eval").body
    if not isinstance(tree, ast.Call):
        resolve(name)
        return
    target: Any = resolve(ast.unparse(tree.func))
    hints = typing.get_type_hints(target)
    assert not tree.args
    for keyword in tree.keywords:
        assert keyword.arg in inspect.signature(target).parameters
        value = ast.literal_eval(keyword.value)
        assert is_allowed(value, hints[keyword.arg]), f"{keyword.arg}={value!r}"


def is_allowed(value, hint):
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_args(hint):
        return any(is_allowed(value, each) for each in typing.get_args(hint))
    return type(value) is hint


@pytest.mark.sampled(86)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name):
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("lightnet_huge", "cifar10_lightnet/without_all", "onescan/ops/wkv.py", "Missing"),
        *("DecayOutput.value", "decay_attention(decays=1)", "decay_attention(form='fast')"),
        *("decay_attention(causal=1)", "benchmarks/none.py", "other.py"),
    ],
)
def test_what_does_not_exist_is_found(name):
    with pytest.raises((AssertionError, AttributeError, LookupError, SyntaxError)):
        check_name(name)


def test_files_define_the_names_that_are_said_to_be_in_them():
    listed = re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/]+\.py)`", TEXT)
    assert len(listed) > 20
    for names, path in listed:
        assert {*re.findall(r"\w+", names.replace(" and ", " "))} <= {*top_level(ROOT / path)}, path


# Links


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_lead_to_headings():
    links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", TEXT)
    assert links
    for file, anchor in links:
        page = DOCS / (file or "papers.md")
        assert page.is_file(), file
        assert not anchor or anchor in anchors(page), f"{file}#{anchor}"


# Counts


LIST = re.search(r"^\$ onescan models --ablations\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


def test_counts_are_those_of_the_command(capsys):
    assert main(["models", "--ablations"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert LIST.splitlines() == lines, "python docs/counts.py updates docs/papers.md"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_near_what_is_printed_or_has_its_whole_millions(name):
    known = PRESETS[name]
    row = re.search(rf"^{name} +([\d,]+)", LIST, re.MULTILINE)
    parameters = int(row[1].replace(",", ""))
    # no whole number of squares of the width is closer to LDN's table than 7 in each layer, and
    # LightNet prints its language models as 0.15B and 1B. The 1.18 GMACs of the smallest
    # Vision-RWKV are printed as 1.2.
    near = 0.02 if name.startswith(("ldn", "lightnet_lm", "vision_rwkv")) else 0.01
    if known.printed_millions is None:
        without = {"lightnet_mlm_base", "crammed_bert", "mamba2_lm_1300m"}
        without |= {f"{kind}_dit_{size}_8" for kind in ("retnet", "hgrn2") for size in "sb"}
        assert name in without or "no paper describes this model" in known.source
        return
    if isinstance(known.printed_millions, int):  # 21.98 million are printed as 22M
        assert parameters // 1_000_000 in (known.printed_millions - 1, known.printed_millions)
    else:
        assert parameters / 1e6 == pytest.approx(known.printed_millions, rel=near)
    if known.printed_gmacs is not None and name != "vit_huge":  # see test_models.py
        gmacs, printed, _ = LIST[row.end() :].partition("\n")[0].split()[-3:]
        assert float(printed) == known.printed_gmacs
        assert float(gmacs) == pytest.approx(known.printed_gmacs, rel=near)
