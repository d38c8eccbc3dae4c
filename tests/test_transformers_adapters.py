"""PEFT, bitsandbytes and torchao on models of transformers; skipped where they are missing."""

import pytest
import torch
from tiny_language_models import CAUSAL, VOCABULARY, causal, ids, over_causal
from transformers import AutoModelForCausalLM

from onescan.integrations.transformers import to_transformers
from onescan.layers.mixers import LightNetMixerConfig

pytestmark = pytest.mark.integrations
WIDE = LightNetMixerConfig(num_heads=2, causal=True)


@over_causal
def test_lora_on_all_linear_layers_trains_every_map(change):
    peft = pytest.importorskip("peft")
    model = to_transformers(causal(change))
    maps = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    options = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options)).double()
    adapted(input_ids=ids(2, 6), labels=ids(2, 6)).loss.backward()
    gradients = {
        name.split(".lora_B")[0].removeprefix("base_model.model."): parameter.grad
        for name, parameter in adapted.named_parameters()
        if "lora_B" in name
    }
    assert set(gradients) == set(maps)
    assert all(grad is not None and grad.any() for grad in gradients.values())


@pytest.mark.parametrize("kind", ["bitsandbytes 8", "bitsandbytes 4", "torchao"])
def test_a_quantized_model_computes_almost_the_same(kind, tmp_path):
    pytest.importorskip(kind.split()[0])
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    elif kind == "bitsandbytes 8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = to_transformers(causal(CAUSAL["lightnet"], width=64, mixer=WIDE).float())
    model.save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu"
    )
    if kind == "bitsandbytes 4":  # too coarse: compare with the same rounded weights
        from bitsandbytes.functional import dequantize_4bit

        for name, module in quantized.named_modules():
            if type(module).__name__ == "Linear4bit":
                weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
                model.get_submodule(name).weight.data = weight.float()
    want, got = model(ids(2, 6)).logits, quantized(ids(2, 6)).logits
    assert got.shape == (2, 6, VOCABULARY)
    error = (got - want).norm() / want.norm()
    assert error < (1e-4 if kind == "bitsandbytes 4" else 0.1)
