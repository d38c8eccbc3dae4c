"""What contestants do: the same work as each other, counted as it is documented."""

import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch

from onescan.bench.contest.machine import COPY, MATMUL, prepare_yardstick
from onescan.bench.contest.trial import BOTH_WAYS, FORWARD, INFERENCE, TRAINING, RefusalError
from onescan.bench.contestants import (
    causal,
    decay,
    decode,
    images,
    language_models,
    one_scan,
    ops,
)
from onescan.bench.contestants.language_models import our_config, state_mib
from onescan.bench.contests import (
    CONTESTS,
    CausalOptions,
    DecayOptions,
    DecodeOptions,
    ModelsOptions,
    OneScanOptions,
)
from onescan.models.presets import preset
from onescan.models.size import model_size
from onescan.ops.decay_attention import decay_attention

B, T, H, K = 2, 10, 3, 4
FLOAT = 4  # bytes
OPS = {"batch_size": B, "num_heads": H, "head_dim": K, "tokens": (T,)}


def called(module, name, options, work=FORWARD, size=T, prepare="prepare"):
    torch.manual_seed(0)
    return getattr(module, prepare)(name, work, size, options).call()


@pytest.mark.parametrize("name", ["one_scan", "one_scan_lrpe", "two_scans", "softmax"])
def test_ops_give_outputs_and_with_gradients_those_of_all_inputs(name):
    options = OneScanOptions(**OPS)
    o = called(one_scan, name, options)
    assert o.shape == (B, T, H, K)
    assert not o.requires_grad
    gradients = called(one_scan, name, options, BOTH_WAYS)
    assert [g.shape for g in gradients] == [(B, T, H, K)] * 3
    assert all(g.abs().sum() > 0 for g in gradients)


@pytest.mark.parametrize(
    ("module", "name", "options", "prepare"),
    [
        (one_scan, "one_scan", OneScanOptions, "prepare"),
        (one_scan, "softmax", OneScanOptions, "prepare"),
        (decay, "chunk", DecayOptions, "prepare"),
        (decay, "softmax", DecayOptions, "prepare"),
        (causal, "decay_attention", CausalOptions, "prepare_op"),
    ],
)
def test_ops_are_compiled_if_so_asked(module, name, options, prepare, monkeypatch):
    compiled = []

    def watched(op):
        compiled.append(op)
        return op

    monkeypatch.setattr(torch, "compile", watched)
    asked = options(batch_size=B, tokens=(T,))
    for work in (FORWARD, BOTH_WAYS):
        called(module, name, asked, work, prepare=prepare)
    assert not compiled
    for work in (FORWARD, BOTH_WAYS):
        called(module, name, dataclasses.replace(asked, compile=True), work, prepare=prepare)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("module", "name", "options", "work"),
    [
        (causal, "lightnet", CausalOptions(model_size="small"), TRAINING),
        (causal, "softmax", CausalOptions(model_size="small"), INFERENCE),
        (decode, "softmax", DecodeOptions(model_size="small"), decode.STEP),
        (images, "lion_s_tiny", ModelsOptions(batch_size=1, image_size=(32,)), INFERENCE),
    ],
)
def test_models_are_compiled_if_so_asked(module, name, options, work, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model))
    module.prepare(name, work, 32, options)
    assert not compiled
    trial = module.prepare(name, work, 32, dataclasses.replace(options, compile=True))
    (model,) = compiled
    assert sum(p.numel() for p in model.parameters()) == trial.parameters


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")  # inductor's own
@pytest.mark.parametrize("work", [FORWARD, BOTH_WAYS])
def test_a_compiled_contestant_does_the_same(work):
    options = DecayOptions(**OPS, chunk_size=4)
    plain, compiled = (
        called(decay, "chunk", dataclasses.replace(options, compile=asked), work)
        for asked in (False, True)
    )
    torch.testing.assert_close(compiled, plain)


def test_what_must_be_read_and_written_is_counted():
    each = B * T * H * K * FLOAT
    options = OneScanOptions(**OPS)
    forward = one_scan.prepare("one_scan", FORWARD, T, options)
    assert forward.floor_bytes == 4 * each  # q, k, v; o
    assert forward.items == B * T
    both = one_scan.prepare("one_scan", BOTH_WAYS, T, options)
    assert both.floor_bytes == 11 * each  # and q, k, v, do; dq, dk, dv
    decays = B * T * H * FLOAT
    scalar = DecayOptions(**OPS)
    assert decay.prepare("chunk", FORWARD, T, scalar).floor_bytes == 4 * each + decays
    assert decay.prepare("chunk", BOTH_WAYS, T, scalar).floor_bytes == 11 * each + 3 * decays
    diagonal = dataclasses.replace(scalar, decay="diagonal")
    assert decay.prepare("chunk", FORWARD, T, diagonal).floor_bytes == 5 * each
    half = dataclasses.replace(options, dtype="bfloat16")
    assert one_scan.prepare("one_scan", FORWARD, T, half).floor_bytes == 2 * each


@pytest.mark.parametrize("kind", ["scalar", "diagonal"])
def test_our_forms_of_decay_give_the_same(kind):
    options = DecayOptions(**OPS, decay=kind, chunk_size=4)
    full, chunk, auto = (called(decay, name, options) for name in ("full", "chunk", "auto"))
    torch.testing.assert_close(chunk, full)
    torch.testing.assert_close(auto, full)
    plain = dataclasses.replace(options, normalize="none")
    assert not torch.allclose(called(decay, "full", plain), full)


def test_form_and_chunk_size_are_those_that_are_asked_for(monkeypatch):
    asked = []
    real = decay.decay_attention

    def watched(*tensors, **options):
        asked.append((options["form"], options["chunk_size"], options["backend"]))
        return real(*tensors, **options)

    monkeypatch.setattr(decay, "decay_attention", watched)
    called(decay, "full", DecayOptions(**OPS, chunk_size=5, backend="torch"))
    assert asked == [("full", 5, "torch")]


def stand_in(q, k, v, log_decay, *, scale):
    """A causal kernel of ours with flash-linear-attention's arguments."""
    assert scale == 1.0
    return decay_attention(q, k, v, log_decay, causal=True)


@pytest.mark.parametrize("kind", ["scalar", "diagonal"])
def test_two_calls_and_a_doubled_batch_of_a_causal_kernel_give_the_same(kind, monkeypatch):
    kernels = {"fla.ops.gla": "chunk_gla", "fla.ops.simple_gla": "chunk_simple_gla"}
    monkeypatch.setattr(
        decay, "theirs", lambda module, _: SimpleNamespace(**{kernels[module]: stand_in})
    )
    options = DecayOptions(**OPS, decay=kind)
    two, doubled = (called(decay, name, options) for name in decay.FLA)
    torch.testing.assert_close(two, doubled)
    # the last token reads all others there, and itself once more back
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, K) for _ in range(3))
    q, k = q.sigmoid(), k.sigmoid()
    decays = (B, T, H, K) if kind == "diagonal" else (B, T, H)
    log_decay = torch.nn.functional.logsigmoid(torch.randn(decays) + decay.LOGIT)
    there = decay_attention(q, k, v, log_decay, causal=True)[0][:, -1]
    itself = (q * k).sum(-1, keepdim=True)[:, -1] * v[:, -1]
    torch.testing.assert_close(two[:, -1], there + itself)


@pytest.mark.parametrize("name", ["fla_two_calls", "fla_doubled_batch"])
def test_without_flash_linear_attention_it_says_so(name):
    with pytest.raises((ImportError, ValueError), match=r"fla|needs a GPU"):
        decay.prepare(name, FORWARD, T, DecayOptions(**OPS, device="cpu"))


def test_what_is_not_installed_is_named_as_it_is_installed():
    with pytest.raises(RefusalError, match="no-such is not installed: pip install no-such"):
        ops.imported("no_such.part", "no-such")


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        (causal, "lightnet", CausalOptions(device="cpu", backend="triton")),
        (decode, "lightnet", DecodeOptions(device="cpu", backend="triton", model_size="small")),
        (images, "lion_s_tiny", ModelsOptions(device="cpu", backend="triton", image_size=(32,))),
    ],
)
def test_models_are_not_run_on_torch_where_kernels_are_asked_for(
    module, name, options, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RefusalError, match="backend is 'triton', but "):
        module.prepare(name, INFERENCE, 32, options)


def test_products_with_later_tokens_are_not_counted():
    options = CausalOptions(model_size="small", tokens=(T,))
    one, all_ = (causal.prepare("softmax", INFERENCE, size, options).macs for size in (1, T))
    pairs, width, depth = T * (T + 1) // 2, 256, 4
    each = 2 * width * depth
    assert all_ == T * (one - each) + pairs * each


def test_what_a_model_learns_does_not_depend_on_the_other_sizes():
    alone, among = (CausalOptions(model_size="small", tokens=tokens) for tokens in ((T,), (T, 512)))
    counts = [causal.prepare("softmax", INFERENCE, T, o).parameters for o in (alone, among)]
    assert counts[0] == counts[1]


def test_their_kernels_are_not_asked_to_run_on_a_cpu():
    with pytest.raises(ValueError, match="flash-linear-attention needs a GPU"):
        ops.theirs("no_such", OneScanOptions(device="cpu"))


@pytest.mark.parametrize("name", [*causal.OUR_OPS, "softmax"])
def test_causal_ops_do_not_read_ahead(name):
    options = CausalOptions(level="op", model_size="small", batch_size=1)
    trial = causal.prepare_op(name, FORWARD, T, options)
    assert trial.call().shape == (1, T, 4, 64)
    longer = called(causal, name, options, size=T, prepare="prepare_op")
    assert torch.isfinite(longer).all()
    q, k, v = (torch.randn(1, T, 2, 4) for _ in range(3))
    log_decay = [-torch.rand(1, T, 2)] if name == "decay_attention" else []
    op = causal._our_op(name, options)
    whole = op(q, k, v, *log_decay)
    part = op(*(x[:, :6] for x in (q, k, v, *log_decay)))
    torch.testing.assert_close(whole[:, :6], part)


def test_models_of_a_size_have_about_as_many_parameters():
    for size in ("small", "150m"):
        counts = [
            model_size(our_config(name, size, max_tokens=512)).parameters
            for name in ("lightnet", "lion_s", "softmax")
        ]
        assert max(counts) < 1.05 * min(counts)


def test_the_largest_is_of_the_papers_size():
    largest = model_size(our_config("lightnet", "1.45b", max_tokens=1))
    assert largest.parameters == pytest.approx(1.452e9, rel=1e-3)  # LightNet, Table 4: 1.45B


@pytest.mark.parametrize("name", ["lightnet", "lion_s", "softmax"])
def test_training_a_language_model_takes_the_gradient_of_each_weight(name):
    options = CausalOptions(model_size="small", tokens=(T,), batch_size=2)
    trial = causal.prepare(name, TRAINING, T, options)
    gradients = trial.call()
    assert sum(g.numel() for g in gradients) == trial.parameters
    assert trial.items == 2 * T
    inference = causal.prepare(name, INFERENCE, T, options)
    assert trial.macs == 3 * inference.macs > 2 * 3 * T * 4 * 256**2
    logits = inference.call()
    assert logits.shape == (2, T, 8192)
    assert not logits.requires_grad


@pytest.mark.parametrize("gradients", [True, False])
def test_whole_models_are_trained_or_not_and_ops_have_gradients_or_not(gradients):
    options = CausalOptions(gradients=gradients)
    assert causal.contestants(options).works == ((TRAINING,) if gradients else (INFERENCE,))
    ops_alone = causal.contestants(dataclasses.replace(options, level="op"))
    assert ops_alone.works == ((FORWARD, BOTH_WAYS) if gradients else (FORWARD,))
    assert ops_alone.names[0] == "additive_decay"


def test_weights_are_drawn_on_the_device_and_are_of_the_type(monkeypatch):
    drawn_on = []

    def build():
        model = torch.nn.Linear(2, 3)
        drawn_on.append(model.weight.device.type)
        return model

    monkeypatch.setattr(language_models, "device_of", lambda options: torch.device("meta"))
    model = language_models.placed(build, CausalOptions(dtype="bfloat16"))
    assert drawn_on == ["meta"]
    assert model.weight.dtype == torch.bfloat16


def test_a_cache_is_as_long_as_what_was_read_and_a_state_is_not():
    options = DecodeOptions(model_size="small", batch_size=2)
    width, depth = 256, 4
    for tokens in (10, 30):
        cache = decode.prepare("softmax", decode.STEP, tokens, options)
        assert cache.call().shape == (2, 1, 8192)
        keys_and_values = 2 * FLOAT * width * depth * tokens * 2
        flags = 2 * depth * tokens
        places = 2 * 8
        assert cache.state_mib * 2**20 == pytest.approx(keys_and_values + flags + places)
    linear = [
        decode.prepare("lightnet", decode.STEP, tokens, options).state_mib for tokens in (10, 30)
    ]
    assert linear[0] == linear[1] > 0


def test_states_of_any_make_are_weighed():
    layer = SimpleNamespace(state={"a": torch.zeros(2**18), "b": (torch.zeros(2**18), None)})
    assert state_mib(SimpleNamespace(layers=[layer, layer])) == 4.0
    assert state_mib([torch.zeros(2**18), torch.tensor(3)]) == 1.0


@pytest.mark.parametrize("name", ["lightnet_tiny", "deit_tiny", "lion_s_tiny"])
def test_image_models_take_their_batch(name):
    options = ModelsOptions(batch_size=2, presets=(name,), image_size=(32,))
    trial = images.prepare(name, INFERENCE, 32, options)
    assert trial.call().shape == (2, 1000)
    assert trial.macs == 2 * model_size(preset(name, image_size=32)).macs
    training = images.prepare(name, TRAINING, 32, options)
    assert training.macs == 3 * trial.macs
    assert sum(g.numel() for g in training.call() if g is not None) == training.parameters


def test_yardsticks_say_what_they_do():
    copy = prepare_yardstick("yardsticks", COPY, 1, OneScanOptions())
    assert copy.floor_bytes == 2 * copy.call().numel()
    matmul = prepare_yardstick("yardsticks", MATMUL, 1, OneScanOptions())
    assert matmul.macs == matmul.call().numel() * 1024


def test_every_benchmark_names_its_contestants_and_they_differ():
    for contest in CONTESTS.values():
        field = importlib.import_module(contest.module).contestants(contest.options())
        assert len(set(field.names)) == len(field.names) > 1
        assert field.works
