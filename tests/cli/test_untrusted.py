"""Commands on untrusted folders and files.

Each `attack` damages a copy of a valid folder. The command must print a one-line error, change no
other files, start no process, and import no module from the folder.
"""

import builtins
import json
import shutil
import sys
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from test_sample_command import save_run
from tiny_language_models import BOTH, CAUSAL, causal, masked
from tiny_run import interrupt, tiny_run
from tiny_tokenizers import word_tokenizer

from onescan.checkpoint.files import to_json
from onescan.cli import main
from onescan.experiments.training import train
from onescan.experiments.training.sampling import load_pipeline
from onescan.integrations.transformers import to_transformers

STARTED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"
DEEP = "[" * 100_000
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m"

_started = []


def _watch(event, arguments):
    if event.startswith(STARTED) and "git" not in str(arguments):  # a run records its commit
        _started.append(f"{event} {arguments}")


sys.addaudithook(_watch)


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def nothing_else_changes(tmp_path, monkeypatch):
    """Check for changes of other files, new processes, imports and prompts."""
    outside = tmp_path / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "thesis.txt").write_text("years of work")
    (outside / "empty").mkdir(exist_ok=True)
    here = tmp_path / "here"
    here.mkdir(exist_ok=True)
    for place in [here, *(path for path in (tmp_path / "bad").rglob("*") if path.is_dir())]:
        write_evil(place, outside)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asks a question"))
    before, started = snapshot(outside), len(_started)
    yield
    assert snapshot(outside) == before
    assert _started[started:] == []
    assert "evil" not in sys.modules


def write_evil(folder, outside, name="evil"):
    """Write a module that creates a file when it is imported."""
    code = f"open({str(outside / 'imported')!r}, 'w').close()\nclass Evil: pass\n"
    (folder / f"{name}.py").write_text(code)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    def call(*words, code=2):
        with nothing_else_changes(tmp_path, monkeypatch):
            assert main([str(word) for word in words]) == code
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        assert not set("\x1b\x07\x9b") & set(shown.out + shown.err)
        if code:
            assert shown.err.splitlines()[-1].startswith("onescan: ")
        return shown.err if code else shown.out

    return call


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Create a valid folder of each kind."""
    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    train(tiny_run(epochs=1), folder / "classifier")
    interrupt(tiny_run(), folder / "stopped" / "seed-0", 5)
    load_pipeline(save_run(folder / "denoiser")).save_pretrained(folder / "pipeline")
    for name, model in (("lm", causal(CAUSAL["lightnet"])), ("mlm", masked(BOTH["lion"]))):
        to_transformers(model.float()).save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def bad(good, tmp_path):
    """Copy a valid folder, to be damaged."""

    def copy(name):
        return shutil.copytree(good / name, tmp_path / "bad" / name)

    return copy


def edit(path, change):
    """Change JSON in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def add_weight(path, name):
    save_file(load_file(path) | {name: torch.ones(1)}, path, metadata={"format": "pt"})


def model_of(data):
    return data["run"]["model"]


MANIFESTS = {
    "nested": lambda path: path.write_text(DEEP),
    "nested below": lambda path: path.write_text('{"onescan": "0.8.0", "run": ' + DEEP),
    "a list": lambda path: path.write_text("[]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "another class": lambda path: edit(path, lambda d: model_of(d).update(type="evil.Evil")),
    "a class that is a list": lambda path: edit(path, lambda d: model_of(d).update(type=["evil"])),
    "a run that is text": lambda path: edit(path, lambda d: d.update(run="evil")),
    "an unknown field": lambda path: edit(path, lambda d: model_of(d).update({ESCAPES: 1})),
    "a text for a number": lambda path: edit(path, lambda d: model_of(d).update(width=ESCAPES)),
    "a negative size": lambda path: edit(path, lambda d: model_of(d).update(width=-1)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attack", MANIFESTS.values(), ids=MANIFESTS)
def test_a_damaged_config_of_a_run(attack, bad, command, tmp_path):
    folder = bad("classifier")
    attack(folder / "config.json")
    picture = tmp_path / "x.png"
    Image.new("L", (4, 4)).save(picture)
    command("evaluate", folder, "--device", "cpu")
    command("predict", folder, picture)
    command("train", "--config", folder, "--out", tmp_path / "out")


@pytest.mark.parametrize("data", [[], "evil", {"channels_first": ESCAPES}, None])
def test_predictions_read_no_damaged_data_settings(data, bad, tmp_path):
    folder, picture = bad("classifier"), tmp_path / "x.png"
    edit(folder / "config.json", lambda d: d["run"].update(data=data))
    Image.new("L", (4, 4)).save(picture)
    np.save(tmp_path / "x.npy", np.zeros((1, 4, 4), np.uint8))
    assert main(["predict", str(folder), str(picture), str(tmp_path / "x.npy")]) == 0


def test_a_config_without_class_names(bad, command, tmp_path):
    folder, picture = bad("classifier"), tmp_path / "x.png"
    edit(folder / "config.json", lambda d: d.update(class_names=[]))
    Image.new("L", (4, 4)).save(picture)
    assert "class_names has 0 names, expected" in command("predict", folder, picture)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


WEIGHTS = {
    "cut": cut,
    "quantized": lambda path: add_weight(path, f"embed.weight.absmax{ESCAPES}"),
    "no file of weights": lambda path: path.write_bytes(b"\x80\x04cevil\nEvil\n."),
    "a header of any size": lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f{}"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attack", WEIGHTS.values(), ids=WEIGHTS)
def test_damaged_weights_of_a_run(attack, bad, command):
    folder = bad("classifier")
    attack(folder / "model.safetensors")
    assert "model.safetensors" in command("evaluate", folder, "--device", "cpu")


def test_control_characters_are_escaped(bad, command, tmp_path):
    folder = bad("classifier")
    edit(folder / "config.json", lambda d: d.update(class_names=[ESCAPES + "\n", "a", "b"]))
    picture = tmp_path / f"x{ESCAPES}.png"
    Image.new("L", (4, 4)).save(picture)
    shown = command("predict", folder, picture, code=0)
    assert "\\x1b]0;owned\\x07" in shown
    assert len(shown.splitlines()) == 1
    picture.write_bytes(b"no image")
    assert "\\x1b]0;owned\\x07" in command("predict", folder, picture)


def test_image_formats_are_restricted(bad, command, tmp_path):
    picture = tmp_path / "x.png"
    picture.write_bytes(EPS)
    assert "is not an image in one of the formats PNG" in command(
        "predict", bad("classifier"), picture
    )


def image_table(path, *images):
    rows = [{"bytes": image, "path": None} for image in images]
    table = pa.table({"image": rows, "label": [0, 1, 2] * (len(rows) // 3)})
    parquet.write_table(table, path)
    return path


def test_damaged_image_tables(bad, command, tmp_path):
    folder = bad("classifier")
    path = image_table(tmp_path / "images.parquet", *[EPS] * 30)

    def read_it(data):
        data["run"]["data"] = {"type": "ImageDatasetConfig", "path": str(path)}
        data["run"]["data"] |= {"image_size": [4, 4], "channels": 1, "mean": [0], "std": [1]}
        data["run"]["data"]["test_crop"] = None
        data["class_names"] = [str(i) for i in range(len(data["class_names"]))]

    edit(folder / "config.json", read_it)
    words = ("evaluate", folder, "--device", "cpu", "--workers", "0")
    assert "is not an image in one of the formats PNG" in command(*words)
    path.write_bytes(path.read_bytes()[:-99])
    assert "images.parquet" in command(*words)
    path.write_bytes(b"PAR1" + b"\xff" * 64 + b"PAR1")
    assert "images.parquet" in command(*words)


def test_damaged_text_tables(command, tmp_path):
    path = tmp_path / "text.parquet"
    parquet.write_table(pa.table({"text": ["a cat sat"] * 50}), path)
    data = bytearray(path.read_bytes())
    data[4:40] = b"\xff" * 36
    path.write_bytes(data)
    assert "text.parquet" in command("tokenizer", path, "--out", tmp_path / "out")


def component(name, *named):
    return lambda folder: edit(folder / "model_index.json", lambda d: d.update({name: [*named]}))


def own_library(folder):
    """Write a module with the name of an allowed library, which diffusers looks for first."""
    write_evil(folder / "scheduler", folder.parent.parent / "outside", "diffusers")


PIPELINES = {
    "a scheduler's module": (component("scheduler", "evil", "Evil"), "scheduler is ['evil', 'Evi"),
    "another class": (component("scheduler", "diffusers", "DiffusionPipeline"), "scheduler is ['d"),
    "a module of Python": (component("transformer", "os", "system"), "transformer is ['os', 'sy"),
    "a new component": (component("evil", "evil", "Evil"), "component 'evil' is unknown"),
    "a component in settings": (component("noise", "evil", "Evil"), "cannot load a pipeline"),
    "a pipeline's module": (
        lambda folder: edit(
            folder / "model_index.json",
            lambda d: d.update(_class_name=["evil", "DenoiserPipeline"]),
        ),
        "expected a DenoiserPipeline",
    ),
    "nested": (lambda f: (f / "model_index.json").write_text(DEEP), "model_index.json is damaged"),
    "a nested part": (
        lambda folder: (folder / "transformer" / "config.json").write_text(DEEP),
        "cannot load a pipeline",
    ),
    "no weights": (
        lambda folder: (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink(),
        "cannot load a pipeline",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("attack", "says"), PIPELINES.values(), ids=PIPELINES)
def test_a_damaged_pipeline(attack, says, bad, command, tmp_path):
    folder = bad("pipeline")
    attack(folder)
    words = ("sample", folder, "--num-images", 1, "--steps", 2, "--device", "cpu")
    assert says in command(*words, "--out", tmp_path / "x.png")


def test_modules_in_a_pipeline_folder_are_not_imported(bad, command, tmp_path):
    folder = bad("pipeline")
    own_library(folder)
    for path in (folder / "None.py", *folder.rglob("modeling_onescan.py")):
        path.write_text((folder / "scheduler" / "diffusers.py").read_text())
    assert (folder / "transformer" / "modeling_onescan.py").is_file()
    words = ("sample", folder, "--num-images", 1, "--steps", 2, "--device", "cpu")
    command(*words, "--out", tmp_path / "x.png", code=0)


def auto_map(kind, **others):
    return lambda data: data.update(auto_map={kind: "evil.Evil"}, **others)


def tokenizer_json(text):
    return lambda folder: (folder / "tokenizer.json").write_text(text)


LANGUAGE_MODELS = {
    "a tokenizer's class": lambda folder: edit(
        folder / "tokenizer_config.json",
        lambda d: d.update(auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil"),
    ),
    "a config's class": lambda folder: edit(
        folder / "config.json", auto_map("AutoConfig", model_type="evil")
    ),
    "a nested tokenizer": tokenizer_json(DEEP),
    "an empty tokenizer": tokenizer_json("{}"),
    "a nested config of a tokenizer": lambda f: (f / "tokenizer_config.json").write_text(DEEP),
    "a nested config": lambda folder: (folder / "config.json").write_text(DEEP),
    "a text for a number": lambda f: edit(f / "config.json", lambda d: d.update(width=ESCAPES)),
    "quantized": lambda folder: edit(
        folder / "config.json",
        lambda d: d.update(quantization_config={"quant_method": "bitsandbytes_4bit"}),
    ),
    "a quantized weight": lambda folder: add_weight(
        folder / "model.safetensors", f"network.embedding.weight.absmax{ESCAPES}"
    ),
    "cut weights": lambda folder: cut(folder / "model.safetensors"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("attack", LANGUAGE_MODELS.values(), ids=LANGUAGE_MODELS)
def test_a_damaged_language_model(attack, bad, command):
    for name, words in (("lm", ("generate",)), ("mlm", ("fill",))):
        folder = bad(name)
        attack(folder)
        text = ("--prompt", "the cat") if name == "lm" else ("the [MASK]",)
        command(*words, folder, *text, "--device", "cpu")


def test_modules_in_a_model_folder_are_not_imported(bad, command):
    folder = bad("lm")
    edit(folder / "config.json", auto_map("AutoConfig"))
    (folder / "modeling_onescan.py").write_text("raise SystemExit")
    words = ("generate", folder, "--prompt", "the cat", "--max-new-tokens", 2, "--device", "cpu")
    command(*words, code=0)


def resume(tmp_path):
    folder = tmp_path / "bad" / "stopped"
    return ("train", "--config", folder / "seed-0", "--out", folder)


def state_of(folder):
    return next(path for path in (folder / "seed-0" / "state").iterdir() if path.is_dir())


def pickled(folder):
    """Write a `.metadata` of torch.distributed.checkpoint, a pickle that calls a function."""
    (state_of(folder) / ".metadata").write_bytes(b"cevil\nEvil\n(tR.")


PICKLES = {  # spelt out: nothing here may import pickle
    "a command": "cos\nsystem\n(S'touch {0}'\ntR.",
    "an attribute": "cpathlib\nPosixPath\n(S'x'\ntR(N(dS'_str'\nS'{0}'\nstb.",
}


def list_again(state):
    """Write a manifest that lists every file beside it, with checksums that match."""
    manifest = json.loads((state / "manifest.json").read_text())
    del manifest["checksum"]
    files = [path for path in state.iterdir() if path.name != "manifest.json"]
    manifest["files"] = {path.name: sha256(path.read_bytes()).hexdigest() for path in files}
    (state / "manifest.json").write_text(to_json(manifest, indent=2))


@pytest.mark.sampled
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("spelt", PICKLES.values(), ids=PICKLES)
def test_a_pickle_in_a_state_is_refused_and_never_read(bad, command, tmp_path, spelt, is_listed):
    outside = tmp_path / "outside"
    outside.mkdir()
    state = state_of(bad("stopped"))
    (state / ".metadata").write_text(spelt.format(outside / "marker"))
    if is_listed:
        list_again(state)
    assert ".metadata" in command(*resume(tmp_path))
    assert not (outside / "marker").exists()
    assert (state / "manifest.json").is_file()


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)


def linked(folder):
    state = folder / "seed-0" / "state"
    moved = folder.parent.parent / "outside" / "scratch"
    moved.parent.mkdir(exist_ok=True)
    state.rename(moved)
    state.symlink_to(moved)


STATES = {
    "a pickle": pickled,
    "a linked folder": linked,
    "a flipped bit": lambda folder: flip(next(state_of(folder).rglob("*.safetensors"))),
    "a stray file": lambda folder: save_file(
        {"stray": torch.ones(1)}, state_of(folder) / "stray.safetensors"
    ),
    "nested": lambda folder: next(state_of(folder).rglob("*.json")).write_text(DEEP),
}


@pytest.mark.sampled
@pytest.mark.parametrize("attack", STATES.values(), ids=STATES)
def test_a_damaged_state_of_a_run(attack, bad, command, tmp_path):
    attack(bad("stopped"))
    command(*resume(tmp_path))


HUGE = {"width": 10**6, "depth": 10**9, "image_size": [8, 10**18]}


@pytest.mark.parametrize("field", HUGE)
def test_a_config_of_a_huge_model(field, bad, command, tmp_path):
    folder = bad("denoiser")
    edit(folder / "config.json", lambda d: model_of(d).update({field: HUGE[field]}))
    command("sample", folder, "--num-images", 1, "--steps", 2, "--out", tmp_path / "x.png")
