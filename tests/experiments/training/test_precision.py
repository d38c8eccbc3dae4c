"""The precision "auto": bfloat16 where the device has instructions for it, otherwise float32."""

import json

import pytest
import torch
from tiny_run import assert_same, crash, tiny_run, untimed

from onescan import configs
from onescan.experiments.training import train
from onescan.experiments.training.folder import read_manifest
from onescan.experiments.training.precision import choose_precision, has_instructions

CPU = torch.device("cpu")
EMULATES = "bfloat16 is slow on this CPU, which has no instructions for it"


@pytest.fixture
def cpu_with(monkeypatch):
    """Replaces the instructions of the CPU."""

    def replace(*names):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True))

    return replace


@pytest.mark.parametrize(
    ("names", "has_bfloat16", "has_float16"),
    [
        ((), False, False),
        (("avx2", "avx512_f", "avx512_vnni"), False, False),
        (("avx512_bf16",), True, False),
        (("amx_bf16", "amx_fp16"), True, True),
        (("neon", "fp16_arith"), False, True),
        (("neon", "bf16"), True, False),
    ],
)
def test_instructions_of_cpus(cpu_with, names, has_bfloat16, has_float16):
    cpu_with(*names)
    assert has_instructions("float32", CPU)
    assert has_instructions("bfloat16", CPU) == has_bfloat16
    assert has_instructions("float16", CPU) == has_float16
    assert choose_precision("auto", CPU) == ("bfloat16" if has_bfloat16 else "float32")
    assert choose_precision("float16", CPU) == "float16"


def test_nothing_uses_the_instructions_without_onednn(cpu_with, monkeypatch):
    cpu_with("avx512_bf16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose_precision("auto", CPU) == "float32"


@pytest.mark.parametrize("is_supported", [True, False])
def test_gpus(monkeypatch, is_supported):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_supported)
    gpu = torch.device("cuda")
    assert choose_precision("auto", gpu) == ("bfloat16" if is_supported else "float32")
    assert has_instructions("float16", gpu)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("names", "precision", "note"),
    [
        (["avx2"], "float32", "note: float32 instead of bfloat16, because this CPU has no"),
        (["avx512_bf16"], "bfloat16", None),
    ],
)
def test_a_run_chooses_once(tmp_path, cpu_with, capsys, names, precision, note):
    cpu_with(*names)
    result = train(tiny_run(precision="auto"), tmp_path / "auto", progress=True)
    shown = capsys.readouterr().err
    assert f"device: cpu, {precision}\n" in shown
    assert note is None or note in shown
    assert (note is None) == ("instructions" not in shown)
    assert json.loads((result.folder / "config.json").read_text())["precision"] == precision
    assert read_manifest(result.folder).run.training.precision == "auto"
    assert_same(result, train(tiny_run(precision=precision), tmp_path / "given"))


def test_a_given_precision_is_used_and_called_slow(tmp_path, cpu_with, capsys):
    cpu_with("avx2")
    train(tiny_run(precision="bfloat16"), tmp_path, progress=True)
    assert f"device: cpu, bfloat16\nnote: {EMULATES}\n" in capsys.readouterr().err
    assert read_manifest(tmp_path).precision == "bfloat16"


@pytest.mark.parametrize(
    ("first", "then", "note"),
    [
        (["bf16"], [], f"note: {EMULATES}"),
        ([], ["bf16"], "note: the run began in float32, on a device without"),
    ],
)
def test_a_run_resumed_on_another_device_keeps_its_precision(
    tmp_path, cpu_with, capsys, first, then, note
):
    cpu_with(*first)
    run = tiny_run(precision="auto")
    whole = train(run, tmp_path / "whole")
    crash(run, tmp_path / "resumed", step=7)
    cpu_with(*then)
    assert_same(train(run, tmp_path / "resumed", progress=True), whole)
    assert note in capsys.readouterr().err
    replaced = train(run, tmp_path / "resumed", overwrite=True)
    assert read_manifest(replaced.folder).precision == ("bfloat16" if then else "float32")
    assert untimed(replaced.folder) != untimed(whole.folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("began", "goes_on", "fits"),
    [
        ("auto", "float32", True),
        ("bfloat16", "auto", True),
        ("auto", "bfloat16", False),
        ("bfloat16", "float32", False),
    ],
)
def test_equal_precisions_are_one_run(tmp_path, cpu_with, began, goes_on, fits):
    cpu_with()
    crash(tiny_run(precision=began), tmp_path, step=7)
    run = tiny_run(precision=goes_on)
    if fits:
        assert train(run, tmp_path).steps > 7
        return
    with pytest.raises(ValueError, match=r"holds another run: training\.precision is "):
        train(run, tmp_path)


def test_config_files_of_older_versions(tmp_path, cpu_with):
    cpu_with()
    crash(tiny_run(precision="bfloat16"), tmp_path, step=7)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    del written["precision"]
    file.write_text(json.dumps(written))
    assert read_manifest(tmp_path).used_precision == "bfloat16"
    train(configs.replace(tiny_run(), {"training.precision": "auto"}), tmp_path)
    assert read_manifest(tmp_path).precision == "bfloat16"
