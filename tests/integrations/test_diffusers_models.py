"""What the tests of diffusers demand of every model, for a denoiser with LightNet and for DiT."""

import json

import pytest
import torch
from test_diffusers import inputs, native
from torch.testing import assert_close

from onescan.integrations.diffusers import DenoiserModel


@pytest.fixture(params=["lightnet", "dit"])
def model(request):
    return DenoiserModel.from_onescan(native(request.param)).eval()


def predicted(model, dtype=torch.float32):
    torch.manual_seed(0)
    noisy, times, labels = inputs(model.network)
    return model(noisy.to(dtype), times, labels).sample


def test_forward_is_deterministic_and_equal_in_both_forms(model):
    noisy, times, labels = inputs(model.network)
    outputs = model(noisy, times, labels)
    assert torch.equal(outputs.sample, model(noisy, times, labels).sample)
    assert torch.equal(outputs[0], model(noisy, times, labels, return_dict=False)[0])
    channels = noisy.shape[1] * (2 if model.network.config.learn_sigma else 1)
    assert outputs.sample.shape == (2, channels, *noisy.shape[2:])


def test_the_config_is_plain_data(model):
    config = json.loads(model.to_json_string())
    again = DenoiserModel.from_config({"denoiser": config["denoiser"]})
    assert again.network.config == model.network.config
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = model.nothing


def test_shards_of_a_variant_load_on_a_device_map(model, tmp_path):
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size=4000)
    assert len(list(tmp_path.glob("*.fp16-*.safetensors"))) > 1
    with pytest.raises(OSError, match="no file named"):
        DenoiserModel.from_pretrained(tmp_path)
    loaded = DenoiserModel.from_pretrained(tmp_path, variant="fp16", device_map={"": "cpu"})
    assert torch.equal(predicted(loaded), predicted(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saved_precisions_load(model, dtype, tmp_path):
    expected = predicted(model)
    model.to(dtype).save_pretrained(tmp_path)
    loaded = DenoiserModel.from_pretrained(tmp_path, torch_dtype=dtype)
    assert loaded.dtype == dtype
    assert torch.equal(predicted(loaded, dtype), predicted(model, dtype))
    error = (predicted(loaded, dtype) - expected).abs().max()
    assert error <= 30 * torch.finfo(dtype).eps * expected.abs().max()


def test_layerwise_casting_stores_linear_weights_in_eight_bits(model):
    expected = predicted(model).detach()
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    stored = {name for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn}
    assert "network.blocks.0.mixer.in_proj.weight" in stored
    assert not [name for name in stored if "norm" in name or "theta" in name]
    assert_close(predicted(model), expected, atol=0.3, rtol=0.1)
    predicted(model.train()).square().mean().backward()


@pytest.mark.parametrize("place", ["cpu", "disk", "group"])
def test_offloaded_weights_give_the_same_output(model, place, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected, cpu = predicted(model), torch.device("cpu")
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device=cpu)
    elif place == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device=cpu)
    else:
        model.enable_group_offload(cpu, cpu, offload_type="leaf_level")
    assert torch.equal(predicted(model), expected)


@pytest.mark.integrations
def test_a_lora_adapter_is_trained_saved_and_loaded(model, tmp_path):
    peft = pytest.importorskip("peft")
    weights = {name: p.detach().clone() for name, p in model.network.state_dict().items()}
    before = predicted(model).detach()
    model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted = predicted(model).detach()
    assert not torch.allclose(adapted, before)
    predicted(model.train()).square().mean().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.grad is not None for name, p in trained.items())
    model.eval().save_lora_adapter(tmp_path)
    other = DenoiserModel(**model.config).eval()
    other.network.load_state_dict(weights)
    assert_close(predicted(other), before)
    other.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True)
    assert_close(predicted(other), adapted)
    model.disable_adapters()
    assert_close(predicted(model), before)
