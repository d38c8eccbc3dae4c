"""The benchmarks: what the harness computes, what it does on failures, and each script."""

import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import axes
import benchmark_cases
import causal
import decay
import decode
import denoisers
import failing_cases
import forms
import harness
import linear_diffusion
import models
import one_scan
import pytest
import segmentation
import torch
import tyro
from harness import BACKWARD, FORWARD, INFERENCE, TRAINING, Case, Options, run_benchmark
from results import Benchmark, Row, exponent, quartiles

from onescan.experiments.recipes import find_recipe
from onescan.models.presets import preset
from onescan.models.size import attention_flops, model_size, recurrence_flops
from onescan.ops import decay_attention
from onescan.ops.cross_entropy import cross_entropy

ROOT = Path(__file__).parents[2]
MIB = 2**20
NAMES = ("first", "second", "third")
OPTIONS = Options(device="cpu", rounds=3, seconds=0.0)


# The harness, with processes replaced by times that are known


class FakeWorker:
    """A case in no process: `times` maps a candidate to the milliseconds of its steps."""

    def __init__(self, _prepare, name, mode, size, _options):
        self.name, self.mode, self.size, self.steps = name, mode, size, 0
        log.append(("start", name, mode, size))

    def step(self):
        log.append((self.name, self.mode, self.size))
        answer = times[self.name](self.size, self.steps)
        self.steps += 1
        if isinstance(answer, BaseException):
            raise answer
        if self.steps == 1:
            return float(self.size), Case(None, items=4, state_mib=0.5, flops=9000)
        return answer

    def close(self):
        log.append(("end", self.name, self.mode, self.size))


log, times = [], {}


@pytest.fixture(autouse=True)
def _all_take_a_millisecond():
    log.clear()
    times.clear()
    times.update(dict.fromkeys(NAMES, lambda size, step: 1.0))


def benchmark(**changes):
    return Benchmark(
        **{"name": "fake", "candidates": NAMES, "modes": (FORWARD,), "sizes": (1, 2), **changes}
    )


def run(tmp_path, options=OPTIONS, **changes):
    options = dataclasses.replace(options, out=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "Worker", FakeWorker)
        return run_benchmark(benchmark(**changes), None, options)


def written(tmp_path):
    return json.loads((tmp_path / "fake.json").read_text())


def test_statistics_of_known_times(tmp_path, capsys):
    times["first"] = lambda size, step: size * [0.0, 2.0, 4.0, 2.0][step]
    times["second"] = lambda size, step: size**2 * [0.0, 8.0, 8.0, 12.0][step]
    result = run(tmp_path, items="tokens")
    first, second = (result.rows_of(name, FORWARD)[1] for name in NAMES[:2])
    assert first.rounds_ms == (4.0, 8.0, 4.0)
    assert first.quartiles_ms == (4.0, 4.0, 6.0)
    assert (first.ratio, second.ratio) == (1.0, 8.0)
    assert (second.peak_mib, second.state_mib, second.items_per_s) == (2.0, 0.5, 125.0)
    assert second.flops == 9000
    powers = {each["candidate"]: (each["time"], each["memory"]) for each in result.growth()}
    assert powers["first"] == (pytest.approx(1), pytest.approx(1))
    assert powers["second"] == (pytest.approx(2), pytest.approx(1))
    shown = capsys.readouterr().out
    assert "second: time grows as T^2.00, memory as T^1.00" in shown
    assert re.search(r"second +2 +32 +32 - 40 +8 +2 +0\.5 +125 +9,000\n", shown)


def test_quartiles():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 3.0, 4.0)


def test_exponents():
    assert exponent([(x, 3 * x**1.5) for x in (1, 2, 4, 8)]) == pytest.approx(1.5)
    assert exponent([(2, 3.0)]) is None
    rows = [Row(candidate="a", mode="m", size=s, quartiles_ms=(1, s**2, 1)) for s in (2, 4)]
    pixels = Benchmark(
        name="b", candidates=("a",), modes=("m",), sizes=(2, 4), rows=rows, tokens=lambda s: s**2
    )
    assert pixels.growth() == [
        {"candidate": "a", "mode": "m", "time": pytest.approx(1), "memory": None}
    ]


def test_candidates_are_interleaved_and_every_other_round_is_reversed(tmp_path):
    run(tmp_path, sizes=(1,))
    assert log[:3] == [("start", name, FORWARD, 1) for name in NAMES]
    steps = [entry[0] for entry in log if len(entry) == 3]
    assert steps == [*NAMES, *NAMES, *reversed(NAMES), *NAMES]  # prepared first
    assert log[-3:] == [("end", name, FORWARD, 1) for name in NAMES]


def test_rounds_continue_for_the_minimum_time(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))
    result = run(tmp_path, dataclasses.replace(OPTIONS, rounds=1, seconds=4.0), sizes=(1,))
    assert len(result.rows[0].rounds_ms) == 4


@pytest.mark.parametrize("step", [0, 2])
def test_a_candidate_that_fails_is_reported_and_the_others_continue(step, tmp_path, capsys):
    failure = harness.CaseError("ValueError: no")
    times["second"] = lambda size, now: failure if (size, now) == (1, step) else 1.0
    result = run(tmp_path)
    assert [(r.candidate, r.size, len(r.rounds_ms), r.error) for r in result.rows] == [
        ("first", 1, 3, ""), ("second", 1, 0, "ValueError: no"), ("third", 1, 3, ""),
        ("first", 2, 3, ""), ("second", 2, 3, ""), ("third", 2, 3, ""),
    ]  # fmt: skip
    assert "second, tokens 1: ValueError: no" in capsys.readouterr().out
    ended = log.index(("end", "second", FORWARD, 1))
    assert ended < len(log) - 1 - log[::-1].index(("third", FORWARD, 1))  # it may still be busy


def test_without_the_first_candidate_there_are_no_ratios(tmp_path):
    times["first"] = lambda size, step: harness.CaseError("gone")
    assert {row.ratio for row in run(tmp_path).rows} == {None}


def test_larger_sizes_are_skipped_after_out_of_memory_and_after_slow_calls(tmp_path):
    times["second"] = lambda size, step: harness.CaseError("killed", skip_larger=True)
    times["third"] = lambda size, step: 600.0 * size
    result = run(tmp_path, dataclasses.replace(OPTIONS, time_limit_s=1.0), sizes=(1, 2, 3))
    errors = {(row.candidate, row.size): row.error for row in result.rows}
    assert [errors["second", size] for size in (1, 2)] == ["killed", "skipped: killed at 1"]
    assert errors["third", 2] == ""
    assert "1.2 s at 2" in errors["third", 3]
    assert ("start", "second", FORWARD, 2) not in log
    assert ("start", "third", FORWARD, 3) not in log


def test_an_interrupt_keeps_what_was_measured(tmp_path, capsys):
    times["third"] = lambda size, step: KeyboardInterrupt() if (size, step) == (2, 2) else 1.0
    with pytest.raises(SystemExit) as end:
        run(tmp_path)
    assert end.value.code == 130
    rounds = {(r["candidate"], r["size"]): len(r["rounds_ms"]) for r in written(tmp_path)["rows"]}
    assert rounds == {(name, 1): 3 for name in NAMES} | {(name, 2): 1 for name in NAMES}
    assert log[-1] == ("end", "third", FORWARD, 2)
    assert "first" in capsys.readouterr().out
    assert (tmp_path / "fake.png").read_bytes().startswith(b"\x89PNG")


def test_results_record_options_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    run(tmp_path, dataclasses.replace(OPTIONS, batch_size=3, threads=7))
    data = written(tmp_path)
    assert data["options"]["batch_size"] == 3
    assert data["environment"]["torch"] == torch.__version__
    assert data["environment"]["threads"] == 7
    assert data["environment"]["allocator"]["MALLOC_MMAP_MAX_"] == "0"
    assert {path.name for path in tmp_path.iterdir()} == {"fake.json", "fake.png"}


def test_a_benchmark_without_any_result_fails(tmp_path):
    times.update(dict.fromkeys(NAMES, lambda size, step: harness.CaseError("no")))
    with pytest.raises(SystemExit, match="error"):
        run(tmp_path)
    assert len(written(tmp_path)["rows"]) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"time_limit_s": float("inf")}, "time_limit_s is inf"),
        ({"threads": -2}, "threads is -2"),
        ({"candidates": ("first", "firs")}, "'firs' .*'first'"),
        ({"candidates": ("first", "first")}, "candidates"),
        ({"device": "gpu"}, "device is 'gpu'"),
    ],
)
def test_invalid_options(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", dataclasses.replace(OPTIONS, **changes))
    assert not log
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [((), "tokens is ()"), ((4, 4), "tokens contains duplicates"), ((4, 0), "tokens is (4, 0)")],
)
def test_invalid_sizes(sizes, reason, tmp_path):
    with pytest.raises(ValueError, match=re.escape(reason)):
        run(tmp_path, sizes=sizes)


# Processes


@pytest.mark.slow
def test_processes_report_memory_and_failures(tmp_path):
    names = ("fine", "raises", "out of memory", "killed")
    result = run_benchmark(
        benchmark(candidates=names, sizes=(1, 2)),
        failing_cases.prepare,
        dataclasses.replace(OPTIONS, rounds=1, out=tmp_path),
    )
    rows = {(row.candidate, row.size): row for row in result.rows}
    assert 0.9 * 48 < rows["fine", 1].peak_mib < 1.1 * 48
    assert rows["fine", 2].rounds_ms[0] > 0
    assert rows["raises", 2].error == "ValueError: no more"
    assert "can't allocate memory" in rows["out of memory", 1].error
    assert "killed" in rows["killed", 1].error
    assert rows["out of memory", 2].error.startswith("skipped")
    assert rows["killed", 2].error.startswith("skipped")


TINY = "--rounds 1 --seconds 0 --device cpu --out OUT"
SCRIPTS = {
    "stability": "--tokens 20 --out OUT",
    "one_scan": f"--tokens 16 32 --candidates one_scan softmax --no-gradients {TINY}",
    "decay": f"--tokens 16 --candidates chunk softmax {TINY}",
    "causal": f"--tokens 16 --level op --no-gradients {TINY}",
    "decode": f"--tokens 10 --model-size small {TINY}",
    "models": f"--image-size 32 --batch-size 1 --candidates lightnet_tiny deit_tiny {TINY}",
    "forms": f"lion_d_tiny --image-size 32 --chunk-sizes 8 {TINY}",
    "forms of masked models": "lion_s_mlm_base/chunk-4 bert_base --tokens 8 " + TINY,
    "denoisers": f"--sides 3 4 8 --depth 1 --mode inference {TINY}",
    "linear_diffusion": f"--tokens 32 64 --longest-square 32 --no-gradients {TINY}",
    "axes": "--axes 2 3 --encodings both none --seeds 0 1 --steps 2 --out OUT",
    "language": "FILE --orders 1 2 --out OUT",
    "training": "--candidates digits digits/without_tpe --steps 8 --rounds 2 --out OUT",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_end_to_end(name, tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 400)
    words = SCRIPTS[name].replace("OUT", str(tmp_path)).replace("FILE", str(tmp_path / "text"))
    name = name.split()[0]
    command = [sys.executable, f"benchmarks/{name}.py", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file = tmp_path / f"{'ngrams' if name == 'language' else name}.json"
    assert {"options", "environment"} < json.loads(file.read_text()).keys()
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def commands(page):
    """Return the arguments of each benchmark command of a page, after joining its lines."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / page).read_text())
    return re.findall(r"python\s+benchmarks/(\w+)\.py([^`#\n]*)", text)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/performance.md", "docs/gpu.md", "docs/results.md"]
)
def test_commands_of_pages_parse(page):
    others = ("gpu", "gpu_counts", "launch_overhead", "study")  # have parsers or tests of their own
    found = [command for command in commands(page) if command[0] not in others]
    assert found
    for name, arguments in found:
        script = importlib.import_module(name)
        tyro.cli(script.Options, args=shlex.split(arguments))


@pytest.mark.parametrize("shape", [(9,), (3, 5), (3, 4, 3)])
def test_axes_targets_describe_the_marks(shape):
    tokens, targets = axes.examples(shape, 200, torch.Generator().manual_seed(0))
    for row, target in zip(tokens.reshape(-1, *shape), targets, strict=True):
        first, second = ((row == axes.SYMBOLS + mark).nonzero() for mark in (0, 1))
        assert len(first) == len(second) == 1
        difference = (second - first)[0]
        assert torch.equal(target[:, 0].bool(), difference > 0)
        assert torch.equal(target[:, 1].bool(), difference.abs() == 1)
    assert (targets.mean(dim=0) - 0.5).abs().max() < 0.15  # chance


@pytest.mark.parametrize("name", ["canvas_segmentation", "solids"])
def test_unets_have_equal_size_and_the_outputs_of_the_model(name):
    config = find_recipe(name)().model
    unet = segmentation.unet_of_equal_size(config)
    sizes = [segmentation.count(each.build()) for each in (config, unet)]
    assert 0.8 * sizes[0] < sizes[1] <= sizes[0]
    x = torch.randn(2, 1, *(8,) * len(config.image_size))
    assert unet.build()(x).shape == config.build()(x).shape


@pytest.mark.slow
def test_segmentation_trains_both_models(tmp_path, capsys):
    options = segmentation.Options(recipes=("solids",), seeds=(0, 1), steps=2, out=tmp_path)
    rows = segmentation.main(options)
    assert [row[1] for row in rows] == ["model", "LightNet", "U-Net"]
    assert capsys.readouterr().out.count("solids") == 2


# Candidates

B, T, H, K = 2, 10, 3, 4
OP = {"batch_size": B, "num_heads": H, "head_dim": K, "tokens": (T,), "device": "cpu"}


def call(module, name, options, mode=FORWARD, size=T, prepare="prepare"):
    torch.manual_seed(0)
    return getattr(module, prepare)(name, mode, size, options).call()


@pytest.mark.parametrize("name", [name for name in one_scan.CANDIDATES if name != "copy"])
def test_ops_give_outputs_or_the_gradients_of_all_inputs(name):
    options = one_scan.Options(**OP)
    o = call(one_scan, name, options)
    assert o.shape == (B, T, H, K)
    assert not o.requires_grad
    gradients = call(one_scan, name, options, BACKWARD)
    assert [g.shape for g in gradients] == [(B, T, H, K)] * 3
    assert all(g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize("op", [one_scan.two_scans, one_scan.two_decay_scans])
def test_two_scans_treat_both_directions_alike(op):
    inputs = torch.randn(3, 1, T, H, K)
    torch.testing.assert_close(op(*inputs.flip(2)), op(*inputs).flip(1))


def test_two_decay_scans_are_bidirectional_attention_with_each_token_counted_twice():
    q, k, v = torch.randn(3, 1, T, H, K)
    log_decay = torch.log(1 - 2.0 ** -(5 + torch.arange(H)))
    once, _ = decay_attention(q, k, v, log_decay)
    own = (q * k).sum(-1, keepdim=True) * v
    torch.testing.assert_close(one_scan.two_decay_scans(q, k, v), once + own)


def test_models_have_the_loss_of_the_library():
    ids = torch.randint(8192, (2, 9))
    model = causal.our_config("lion_s", "small", 9).build()
    logits = torch.nn.Parameter(model(ids)[0].detach())
    model.forward = lambda _: (logits, None)
    loss = causal.next_token_loss(model, ids)
    assert causal.cross_entropy is cross_entropy
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:])
    )


def test_copy_moves_as_many_bytes_as_an_op_must():
    each = B * T * H * K * 4
    options = one_scan.Options(**OP)
    copies = {mode: call(one_scan, "copy", options, mode).numel() for mode in (FORWARD, BACKWARD)}
    assert 2 * copies[FORWARD] == 4 * each  # q, k, v; o
    assert 2 * copies[BACKWARD] == 11 * each  # and q, k, v, do; dq, dk, dv
    decays = B * T * H * 4
    assert 2 * call(decay, "copy", decay.Options(**OP)).numel() == 4 * each + decays


@pytest.mark.parametrize("kind", ["scalar", "diagonal"])
def test_forms_of_decay_give_the_same(kind):
    options = decay.Options(**OP, decay=kind, chunk_size=4)
    full, chunk, auto = (call(decay, name, options) for name in ("full", "chunk", "auto"))
    torch.testing.assert_close(chunk, full)
    torch.testing.assert_close(auto, full)
    plain = dataclasses.replace(options, normalize="none")
    assert not torch.allclose(call(decay, "full", plain), full)


def causal_kernel(q, k, v, log_decay, *, scale):
    """Stand in for a kernel of flash-linear-attention."""
    assert scale == 1.0
    return decay_attention(q, k, v, log_decay, causal=True)


@pytest.mark.parametrize(("kind", "module"), [("scalar", "simple_gla"), ("diagonal", "gla")])
def test_causal_kernels_attend_in_both_directions(kind, module, monkeypatch):
    kernels = SimpleNamespace(**{f"chunk_{module}": causal_kernel})
    monkeypatch.setattr(decay, "import_fla", lambda *_: kernels)
    options = decay.Options(**OP, decay=kind)
    two, doubled = (call(decay, name, options) for name in decay.FLA)
    torch.testing.assert_close(two, doubled)
    # The last token attends to all others in one direction, and to itself once more in the other.
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, K) for _ in range(3))
    q, k = q.sigmoid(), k.sigmoid()
    log_decay = torch.randn((B, T, H, K)[: 4 if kind == "diagonal" else 3]) + decay.LOGIT
    forth = causal_kernel(q, k, v, torch.nn.functional.logsigmoid(log_decay), scale=1.0)[0][:, -1]
    torch.testing.assert_close(two[:, -1], forth + (q * k).sum(-1, keepdim=True)[:, -1] * v[:, -1])


@pytest.mark.parametrize("name", causal.OUR_OPS)
def test_causal_ops_do_not_read_later_tokens(name):
    inputs = [torch.randn(1, T, 2, 4) for _ in range(3)]
    inputs += [-torch.rand(1, T, 2)] if name == "decay_attention" else []
    op = causal.our_op(name)
    torch.testing.assert_close(op(*inputs)[:, :6], op(*(x[:, :6] for x in inputs)))


def test_other_packages_are_refused_with_a_reason():
    with pytest.raises(ValueError, match="needs a GPU"):
        call(decay, "fla_two_calls", decay.Options(**OP))
    with pytest.raises(ValueError, match="pip install no-such"):
        benchmark_cases.import_package("no_such.part", "no-such")


LANGUAGE = {"model_size": "small", "device": "cpu"}


@pytest.mark.sampled
@pytest.mark.parametrize("name", causal.OURS)
def test_language_models_train_all_weights_or_predict(name):
    options = causal.Options(**LANGUAGE, batch_size=2)
    case = causal.prepare(name, TRAINING, T, options)
    assert sum(g.numel() for g in case.call()) == case.parameters
    assert case.items == 2 * T
    logits = call(causal, name, options, INFERENCE)
    assert logits[0].shape == (2, T, 8192)
    assert not logits[0].requires_grad


def test_language_models_of_a_size_have_about_as_many_parameters():
    for size in ("small", "150m"):
        sizes = [model_size(causal.our_config(name, size, 512)).parameters for name in causal.OURS]
        assert max(sizes) < 1.05 * min(sizes)
    largest = causal.our_config("lightnet", "1.45b", 1)
    assert model_size(largest).parameters == pytest.approx(1.452e9, rel=1e-3)
    assert largest == preset("lightnet_lm_1450m")  # LightNet, Table 4: 1.45B


@pytest.mark.slow
def test_a_cache_grows_with_the_context_and_a_state_does_not():
    options = decode.Options(**LANGUAGE, batch_size=2)
    for tokens in (10, 30):
        cache = decode.prepare("softmax", "", tokens, options)
        assert cache.call().shape == (2, 1, 8192)
        keys_and_values, flags, positions = 2 * 4 * 256 * 4 * tokens * 2, 2 * 4 * tokens, 2 * 8
        assert cache.state_mib * MIB == pytest.approx(keys_and_values + flags + positions)
    states = {decode.prepare("lightnet", "", tokens, options).state_mib for tokens in (10, 30)}
    assert len(states) == 1
    layer = SimpleNamespace(state={"a": torch.zeros(2**18), "b": (torch.zeros(2**18), None)})
    assert decode.state_mib(SimpleNamespace(layers=[layer, layer])) == 4.0


@pytest.mark.sampled
@pytest.mark.parametrize("name", decode.RECOMPUTED)
def test_recomputed_candidates_read_the_whole_context(name, monkeypatch):
    options = decode.Options(**LANGUAGE, batch_size=2)
    case, state = (decode.prepare(n, "", T, options) for n in (name, decode.RECOMPUTED[name]))
    read = []
    hook = lambda module, args: read.append(args[0].shape[1])
    handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
    logits = case.call()
    handle.remove()
    assert (logits.shape, read[0], case.state_mib) == ((2, 1, 8192), T + 1, 0)
    assert case.parameters == state.parameters


def test_image_classifiers_train_or_predict():
    options = models.Options(batch_size=2, device="cpu")
    training = models.prepare("deit_tiny", TRAINING, 32, options)
    assert sum(g.numel() for g in training.call() if g is not None) == training.parameters
    assert call(models, "lion_s_tiny", options, INFERENCE, 32).shape == (2, 1000)


TINY_MODEL = {"width": 24, "depth": 1, "mixer.num_heads": 3}


@pytest.mark.parametrize("name", ["lion_s_mlm_base", "bert_base"])
def test_masked_language_models_train_or_predict(name, monkeypatch):
    monkeypatch.setattr(benchmark_cases, "preset", partial(preset, vocab_size=99, **TINY_MODEL))
    options = models.Options(batch_size=2, device="cpu", candidates=(name,))
    training = models.prepare(name, TRAINING, 600, options)  # BERT has 512 positions
    gradients = training.call()
    assert sum(g.numel() for g in gradients if g is not None) == training.parameters
    assert training.items == 1200
    logits = call(models, name, options, INFERENCE, 600)
    assert logits.shape == (2 * 180, 99)  # of the masked tokens


def test_models_of_both_kinds_are_not_compared():
    options = models.Options(candidates=("deit_tiny", "bert_base"))
    with pytest.raises(ValueError, match=r"candidates are .*'bert_base'.* expected"):
        models.run(options)
    with pytest.raises(ValueError, match=r"presets are .*'bert_base'.* expected"):
        forms.run(forms.Options(presets=("deit_tiny", "bert_base")))


def test_weights_are_in_the_data_type_and_models_are_compiled_on_request(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model))
    options = Options(device="meta", dtype="bfloat16")
    weight = benchmark_cases.build_on_device(lambda: torch.nn.Linear(2, 3), options).weight
    assert (weight.device.type, weight.dtype, compiled) == ("meta", torch.bfloat16, [])
    benchmark_cases.build_on_device(
        lambda: torch.nn.Linear(2, 3), dataclasses.replace(options, compile=True)
    )
    assert len(compiled) == 1


@pytest.mark.parametrize("module", [one_scan, linear_diffusion])
def test_ops_are_compiled_on_request(module, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda op: compiled.append(op) or op)
    options = module.Options(device="cpu", compile=True)
    for mode in (FORWARD, BACKWARD):
        call(module, "softmax", options, mode)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        (causal, "lightnet", causal.Options(**LANGUAGE, backend="triton")),
        (decode, "lightnet", decode.Options(**LANGUAGE, backend="triton")),
        (models, "lion_s_tiny", models.Options(device="cpu", backend="triton")),
    ],
)
def test_models_do_not_run_on_torch_if_kernels_are_requested(module, name, options, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend is 'triton'"):
        module.prepare(name, INFERENCE, 32, options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("presets", "known"),
    [
        (["lion_d_tiny"], {"full", "recurrent", "chunk-4", "chunk-8"}),
        (["lightnet_tiny"], {"one_scan", "full"}),
        (["ldn_base"], {"dense", "banded", "fft"}),
        (["lion_s_mlm_base"], {"full", "recurrent", "chunk-4", "chunk-8"}),
        (["deit_tiny"], {"deit_tiny"}),
        (
            ["lion_d_tiny/recurrent", "lion_s_tiny/chunk-5", "deit_tiny", "lightnet_tiny"],
            {"lion_d_tiny/recurrent", "lion_s_tiny/chunk-5", "deit_tiny"}
            | {"lightnet_tiny/one_scan", "lightnet_tiny/full"},
        ),
    ],
)
def test_forms_are_those_that_models_support(presets, known, monkeypatch):
    monkeypatch.setattr(benchmark_cases, "preset", partial(preset, **TINY_MODEL))
    options = forms.Options(presets=tuple(presets), chunk_sizes=(4, 8))
    assert set(forms.supported(options)) == known


@pytest.mark.parametrize(
    ("presets", "name"), [(["lion_d_tiny"], "chunk-8"), (["bert_base"], "lion_d_tiny/chunk-8")]
)
def test_a_candidate_names_a_model_and_its_form(presets, name):
    config = forms.config_of(forms.Options(presets=tuple(presets)), name)
    assert config == preset("lion_d_tiny", **{"mixer.form": "chunk", "mixer.chunk_size": 8})
    assert forms.config_of(forms.Options(presets=("bert_base",)), "bert_base") == preset(
        "bert_base"
    )


@pytest.mark.parametrize("name", ["lion_d_tiny/recurrent", "deit_tiny", "bert_base"])
def test_models_in_a_form_predict(name, monkeypatch):
    monkeypatch.setattr(benchmark_cases, "preset", partial(preset, **TINY_MODEL))
    options = forms.Options(presets=(name,), device="cpu", batch_size=2)
    size, rows = (8, 6) if name == "bert_base" else (32, 2)
    assert call(forms, name, options, INFERENCE, size).shape[0] == rows


@pytest.mark.parametrize(
    ("name", "size", "flops"),
    [
        ("deit_tiny", 32, attention_flops(5, 64)),  # 2 x 2 patches and the class token
        ("bert_base", 7, attention_flops(7, 64)),
        ("lion_s_tiny/recurrent", 32, recurrence_flops(5, 64)),
        ("lion_s_mlm_base/recurrent", 7, recurrence_flops(7, 64)),
        ("lion_s_tiny/full", 32, 0),
        ("lion_d_tiny/recurrent", 32, 0),
        ("ldn_base/dense", 32, 0),
    ],
)
def test_flops_are_those_of_the_papers_formulas(name, size, flops):
    assert forms.head_flops(forms.config_of(forms.Options(presets=(name,)), name), size) == flops


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("presets", "message"),
    [
        ((), "presets is empty"),
        (("lion_d_tinny",), "lion_d_tiny"),
        (("lightnet_lm_45m",), "preset is 'lightnet_lm_45m'"),
        (("deit_tiny/full",), "preset is 'deit_tiny/full', but the mixer has no forms"),
        (
            ("lion_d_tiny/fast",),
            "form of lion_d_tiny 'fast' is unknown; available: full, chunk, recurrent",
        ),
        (
            ("deit_tiny", "lightnet_tiny/recurrent"),
            "form is 'recurrent' with direction='both', expected",
        ),
        (("lion_d_tiny/chunk-x",), "'lion_d_tiny/chunk-x', expected a number"),
    ],
)
def test_unknown_models_and_forms_are_refused(presets, message):
    with pytest.raises(ValueError, match=message):
        forms.supported(forms.Options(presets=presets))


def test_denoisers_have_about_as_many_parameters():
    options = denoisers.Options(device="cpu")
    sizes = [
        model_size(denoisers.config_of(name, 32, options)).parameters
        for name in ("DiT", "LightNet")
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_forms_of_diffusion_agree_with_the_convolution():
    linear_diffusion.check_agreement(
        linear_diffusion.Options(device="cpu", channels=4, num_heads=1)
    )
    implicit = linear_diffusion.Options(device="cpu", scheme="crank_nicolson", channels=4)
    linear_diffusion.check_agreement(implicit)
