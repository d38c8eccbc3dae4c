"""Linear layers are called as modules, so that LoRA, offloading and quantization work."""

import copy

import pytest
import torch
from torch import nn

from onescan.configs import replace
from onescan.layers.decays import DECAYS
from onescan.layers.mixers import (
    LINEAR_TRANSFORMERS,
    MIXERS,
    DeltaRuleMixerConfig,
    LionMixerConfig,
)
from onescan.models.presets import PRESETS, build, preset
from onescan.shapes import Grid

WIDTH, HEADS = 24, 3
GRID = Grid((3, 4), prefix=1)
IMAGES = {"image_size": (8, 8), "patch_size": (2, 2), "num_classes": 5}
SMALL = {"width": WIDTH, "depth": 2, "mixer.num_heads": HEADS}
MIXER_CONFIGS = {
    **{name: config() for name, config in MIXERS.items()},
    **{f"decay {name}": LionMixerConfig(decay=config()) for name, config in DECAYS.items()},
    **{f"row {name}": config for name, config in LINEAR_TRANSFORMERS.items()},
    "delta rule, convolution": DeltaRuleMixerConfig(conv_size=3, gate="silu"),
    "lion, convolution": LionMixerConfig(conv_size=3, gate="silu", scan="natural"),
}


class Wrapped(nn.Module):
    """Wrapper without a `weight` attribute."""

    def __init__(self, linear):
        super().__init__()
        self.base = linear
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.base(x)


class LoRA(nn.Module):
    """LoRA adapter as in peft, with the frozen weight as attribute."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def wrapped(module):
    module = copy.deepcopy(module)
    linears = [name for name, x in module.named_modules() if isinstance(x, nn.Linear)]
    for name in linears:
        module.set_submodule(name, Wrapped(module.get_submodule(name)))
    return module


def small_models():
    """Small versions of all presets, without duplicates."""
    configs = {}
    for name, known in PRESETS.items():
        changes = dict(SMALL)
        changes |= IMAGES if "image_size" in vars(known.config) else {"vocab_size": 11}
        if "channels" in vars(known.config):
            changes["channels"] = 1
        mixer = vars(known.config.mixer)
        if "gate_rank" in mixer and mixer["gate"] != "none":
            changes["mixer.gate_rank"] = 4
        configs.setdefault(replace(known.config, changes), name)
    return {name: config for config, name in configs.items()}


MODELS = small_models()


def outcome(module, run):
    """Return the output of a module and the gradients of its parameters."""
    y = run(module)
    y.square().sum().backward()
    return y.detach(), [parameter.grad for parameter in module.parameters()]


def check_wrapped(module, run):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    other = wrapped(module)
    y, gradients = outcome(module, run)
    y_wrapped, gradients_wrapped = outcome(other, run)
    assert torch.equal(y_wrapped, y)
    for one, two in zip(gradients_wrapped, gradients, strict=True):
        assert one is two is None or torch.equal(one, two)
    layers = [x for x in other.modules() if isinstance(x, Wrapped)]
    assert layers
    assert all(layer.calls for layer in layers)


@pytest.mark.sampled(21)
@pytest.mark.parametrize("config", MIXER_CONFIGS.values(), ids=MIXER_CONFIGS)
def test_mixers_call_every_linear_layer(config):
    mixer = replace(config, {"num_heads": HEADS}).build(width=WIDTH, axes=2).double()
    x = torch.randn(2, GRID.tokens, WIDTH, dtype=torch.float64)
    check_wrapped(mixer, lambda m: m(x, GRID)[0])


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", MODELS)
def test_models_call_every_linear_layer(name):
    model, inputs = MODELS[name].build().double().eval(), MODELS[name].example_inputs()
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]

    def run(model):
        y = model(*inputs)
        return y[0] if isinstance(y, tuple) else y

    check_wrapped(model, run)


@pytest.mark.parametrize("autocast", [False, True])
def test_lora_on_a_decay_gets_gradients(autocast):
    mixer = LionMixerConfig(num_heads=HEADS).build(width=WIDTH, axes=1)
    mixer.decays[0].proj = adapter = LoRA(mixer.decays[0].proj)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, _ = mixer(torch.randn(2, 12, WIDTH), Grid((12,)))
    y.float().square().sum().backward()
    assert adapter.up.weight.grad is not None
    assert adapter.up.weight.grad.abs().sum() > 0


def small_lion():
    return build("lion_s_tiny", **IMAGES, **SMALL).eval(), torch.randn(2, 3, 8, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per:UserWarning")
@pytest.mark.parametrize("name", ["lion_s_tiny", "lightnet_tiny"])
def test_models_can_be_quantized(name):
    model = preset(name, **IMAGES, **SMALL).build().eval()
    images = torch.randn(2, 3, 8, 8)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        want = model(images)
        error = quantized(images) - want
    assert type(quantized.blocks[0].mixer.out_proj) is not nn.Linear
    assert error.norm() < 0.05 * want.norm()


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_models_can_be_offloaded(to, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, images = small_lion()
    want = model(images)
    device = torch.device("cpu")
    if to == "cpu":
        accelerate.cpu_offload(model, device)
    else:
        accelerate.disk_offload(model, tmp_path, device)
    assert model.blocks[0].mixer.out_proj.weight.is_meta
    torch.testing.assert_close(model(images), want, rtol=0, atol=0)
