"""PEFT, TRL, bitsandbytes and torchao on models of transformers; skipped where they are missing."""

import math
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from test_transformers import TEXT, WORD_SIZES
from tiny_language_models import CAUSAL, VOCABULARY, causal, ids, over_causal
from tiny_tokenizers import word_tokenizer
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from onescan.integrations.transformers import to_transformers
from onescan.layers.mixers import LightNetMixerConfig
from onescan.models.causal_lm import CausalLMConfig

pytestmark = [
    pytest.mark.integrations,
    # PEFT and TRL use older names of transformers
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]
WIDE = LightNetMixerConfig(num_heads=2, direction="forward")
LORA = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
PAGE = Path(__file__).parents[2] / "docs/howto/fine_tune.md"
PAIRS = {"prompt": ["the cat"] * 4, "chosen": [" sat"] * 4, "rejected": [" dog"] * 4}


@over_causal
def test_lora_on_all_linear_layers_trains_every_map(change):
    peft = pytest.importorskip("peft")
    model = to_transformers(causal(change))
    maps = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA)).double()
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


def test_lora_trains_on_4_bit_weights(tmp_path):
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    to_transformers(causal(CAUSAL["lightnet"], width=64, mixer=WIDE).float()).save_pretrained(
        tmp_path
    )
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu"
    )
    model = peft.prepare_model_for_kbit_training(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA)).train()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    optimizer, losses = torch.optim.Adam(trained.values(), lr=0.01), []
    for _ in range(5):
        loss = adapted(input_ids=ids(2, 6), labels=ids(2, 6)).loss
        loss.backward()
        assert all(p.grad.isfinite().all() for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.fixture
def folder(tmp_path):
    """A model and its tokenizer, saved."""
    native = CausalLMConfig(**{**WORD_SIZES, **CAUSAL["lightnet"]}).build()
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "[SEP]"
    to_transformers(native).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trl_trainer(kind, folder, data, *, lora, **more):
    """A trainer of TRL for one step on all data."""
    trl = pytest.importorskip("trl")
    config = getattr(trl, f"{kind}Config")(
        str(folder.parent / "run"),
        max_steps=1,
        logging_steps=1,
        learning_rate=0.01,
        per_device_train_batch_size=8,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **more,
    )
    adapters = None if lora is None else pytest.importorskip("peft").LoraConfig(**lora)
    return getattr(trl, f"{kind}Trainer")(
        AutoModelForCausalLM.from_pretrained(folder),
        args=config,
        train_dataset=Dataset.from_dict(data),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapters,
    )


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def first_loss(trainer):
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "all weights"])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trainers_of_trl_train(kind, lora, folder):
    trainer = trl_trainer(kind, folder, {"text": TEXT} if kind == "SFT" else PAIRS, lora=lora)
    before = weights(trainer.model)
    loss = first_loss(trainer)
    if kind == "DPO":  # the policy is equal to the reference model
        assert loss == pytest.approx(math.log(2))
    changed = {
        name for name, x in trainer.model.state_dict().items() if not torch.equal(x, before[name])
    }
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    if lora is None:
        assert changed >= trainable
    else:  # B is initially 0, so A changes after B
        assert changed == {name for name in trainable if "lora_B" in name}


def test_packed_texts_of_trl_do_not_attend_to_each_other(folder):
    trainer = trl_trainer("SFT", folder, {"text": TEXT}, lora=None, packing=True, max_length=32)
    (batch,) = trainer.get_train_dataloader()
    texts = batch["input_ids"].split(batch["cu_seq_lens_q"].diff().tolist(), dim=1)
    assert len(texts) == len(TEXT)
    model = trainer.model.eval()
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        alone = [model(input_ids=text).logits for text in texts]
        losses = [model(input_ids=text, labels=text).loss * (text.shape[1] - 1) for text in texts]
    assert_close(together, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)
    want = sum(losses) / sum(text.shape[1] - 1 for text in texts)
    assert first_loss(trainer) == pytest.approx(want.item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
def test_the_page_on_fine_tuning_runs(folder, tmp_path, monkeypatch):
    for name in ("peft", "trl", "bitsandbytes"):
        pytest.importorskip(name)
    wide = CausalLMConfig(
        **{**WORD_SIZES, **CAUSAL["lightnet"], "width": 64, "mixer": WIDE}
    ).build()
    to_transformers(wide).save_pretrained(folder)
    folder.rename(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(block, names)  # noqa: S102
    trained = [name for name, p in names["model"].named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
