"""The models in transformers: registered by an import, in pipelines, trained by Trainer."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from tiny_language_models import BOTH, CAUSAL, SMALL
from tiny_tokenizers import WORDS, word_tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
    default_data_collator,
    pipeline,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import onescan
from onescan.integrations.transformers import (
    OnescanForCausalLM,
    OnescanForMaskedLM,
    OnescanForSequenceClassification,
    OnescanImageProcessor,
    to_transformers,
)
from onescan.layers.mixers import HGRNMixerConfig
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig

TEXT = ["the cat sat on the mat", "a dog", "the dog sat on a cat", "on the mat"]
HGRN = {"mixer": HGRNMixerConfig(num_heads=3, direction="forward"), "position": None}
WORD_SIZES = {**SMALL, "vocab_size": len(WORDS)}


def causal_lm(name="lightnet"):
    return CausalLMConfig(**{**WORD_SIZES, **CAUSAL[name]}).build()


def masked_lm(name="lion"):
    return MaskedLMConfig(**{**WORD_SIZES, **BOTH[name]}).build()


def classifier(name="lion", **more):
    return SequenceClassifierConfig(**{**WORD_SIZES, **BOTH[name], **more}).build()


def run_python(code, **environment):
    """Run code in a new process that has not imported onescan, offline."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )


def test_importing_the_package_imports_and_registers_nothing():
    code = "import sys; hooks = len(sys.meta_path); import onescan"
    done = run_python(f"{code}; print(len(sys.meta_path) - hooks, *sys.modules)")
    new_hooks, *modules = done.stdout.split()
    assert int(new_hooks) == 0
    assert not {"transformers", "diffusers", "timm", "torch"} & set(modules)


@pytest.mark.slow
def test_the_auto_classes_know_the_models_after_an_explicit_import():
    done = run_python("""
from transformers import AutoConfig, AutoModelForCausalLM
try:
    AutoConfig.for_model("onescan_text")
except ValueError:
    import onescan.integrations.transformers
config = AutoConfig.for_model("onescan_text", vocab_size=9, width=16, depth=1)
config.mixer["num_heads"] = 2
print(type(AutoModelForCausalLM.from_config(config)).__name__)
""")
    assert done.stdout.split() == ["OnescanForCausalLM"], done.stderr


LOAD = """
import sys
import torch
import transformers
root, trust = {!r}, {!r}
assert "onescan" not in sys.modules
if not trust:
    import onescan.integrations.transformers
for auto_class in {!r}:
    kind = getattr(transformers, auto_class)
    model = kind.from_pretrained(root + "/" + auto_class, trust_remote_code=trust)
    assert type(model).__module__.startswith("onescan.integrations.transformers.")
    inputs = torch.load(root + "/inputs.pt")[model.main_input_name]
    print(model(inputs)[0].double().sum().item())
folder = root + "/AutoModelForImageClassification"
processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust)
assert type(processor).__module__ == "onescan.integrations.transformers.image_processing"
assert trust == any("modeling_onescan" in name for name in sys.modules)
"""
AUTO_CLASSES = {
    "AutoModelForCausalLM": lambda: causal_lm(),
    "AutoModelForMaskedLM": lambda: masked_lm(),
    "AutoModelForSequenceClassification": lambda: classifier(num_classes=3),
    "AutoModelForImageClassification": lambda: onescan.build(
        "lightnet_tiny", num_classes=3, image_size=4, patch_size=2, depth=1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("trust", [True, False])
def test_a_new_process_loads_saved_folders(trust, tmp_path):
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "pixel_values": torch.rand(1, 3, 4, 4)}
    torch.save(inputs, tmp_path / "inputs.pt")
    want = []
    for auto_class, build in AUTO_CLASSES.items():
        model = to_transformers(build().eval())
        model.save_pretrained(tmp_path / auto_class)
        assert [path.name for path in (tmp_path / auto_class).glob("*.py")] == [
            "modeling_onescan.py"
        ]
        want.append(model(inputs[model.main_input_name]).logits.double().sum().item())
    OnescanImageProcessor().save_pretrained(tmp_path / "AutoModelForImageClassification")
    code = LOAD.format(str(tmp_path), trust, list(AUTO_CLASSES))
    done = run_python(code, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx(want, abs=1e-4)


def test_untrusted_folders_are_refused_without_an_import(tmp_path):
    to_transformers(causal_lm()).save_pretrained(tmp_path)
    done = run_python(f"""
from transformers import AutoModel
AutoModel.from_pretrained({str(tmp_path)!r}, trust_remote_code=False)
""")
    assert "trust_remote_code=True" in done.stderr


CARDS = {
    "causal": (causal_lm, OnescanForCausalLM, "text-generation"),
    "masked": (lambda: masked_lm("bert"), OnescanForMaskedLM, "fill-mask"),
    "classes": (classifier, OnescanForSequenceClassification, "text-classification"),
}


def test_native_folders_are_not_read_as_those_of_transformers(tmp_path):
    causal_lm().save_pretrained(tmp_path / "run")
    advice = "onescan's own format.*: onescan convert .*run.* --to transformers --out FOLDER"
    for path in (tmp_path / "run", str(tmp_path / "run" / "model.safetensors")):
        with pytest.raises(ValueError, match=advice):
            OnescanForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(("build", "kind", "tag"), CARDS.values(), ids=CARDS)
def test_saved_folders_have_a_model_card(build, kind, tag, tmp_path, monkeypatch):
    model = to_transformers(build())
    model.save_pretrained(tmp_path / "path/to/folder")
    readme = tmp_path / "path/to/folder/README.md"
    card = ModelCard.load(readme)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": tag,
        "tags": ["onescan"],
    }
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"| parameters | {count:,} |\n" in card.text
    assert f"| mixer | {type(model.to_onescan().config.mixer).__name__[:-6]} |\n" in card.text
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], names)  # noqa: S102
    assert type(names["model"]) is kind
    readme.write_text("mine")
    model.save_pretrained(readme.parent)
    assert readme.read_text() == "mine"


@pytest.fixture
def folder(tmp_path):
    """A function that saves a model with a tokenizer."""

    def save(native, tokenizer, **fields):
        to_transformers(native.eval(), **fields).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.slow
def test_a_pipeline_writes_text(folder):
    native, tokenizer = causal_lm(), word_tokenizer()
    write = pipeline("text-generation", folder(native, tokenizer, pad_token_id=0))
    write.tokenizer.padding_side = "left"  # later versions of transformers set it themselves
    texts = ["the cat", "the dog sat on a"]
    options = {"max_new_tokens": 4, "do_sample": False}
    for (written,), text in zip(write(texts, batch_size=2, **options), texts, strict=True):
        ids = torch.tensor([tokenizer(text).input_ids])
        want = tokenizer.decode(native.generate(ids, max_new_tokens=4)[0], skip_special_tokens=True)
        joined = (text + want).replace(" ", "")  # a tokenizer of words does not tell where they end
        assert written["generated_text"].replace(" ", "") == joined


def test_a_pipeline_fills_masks(folder):
    native, tokenizer = masked_lm("bert"), word_tokenizer(framed=True)
    fill = pipeline("fill-mask", folder(native, tokenizer))
    text = "the [MASK] sat"
    best = native(torch.tensor([tokenizer(text).input_ids]))[0, 2].softmax(-1)
    guesses = fill(text, top_k=3)
    assert [guess["token"] for guess in guesses] == best.topk(3).indices.tolist()
    assert guesses[0]["score"] == pytest.approx(best.max().item(), rel=1e-4)


def test_a_pipeline_judges_texts_and_pairs(folder):
    native, tokenizer = classifier("bert", num_classes=3), word_tokenizer(framed=True)
    judge = pipeline("text-classification", folder(native, tokenizer))
    judge.model.config.id2label = names = {0: "no", 1: "perhaps", 2: "yes"}
    both = tokenizer("the cat", "a dog", return_tensors="pt", return_token_type_ids=True)
    scores = native(both["input_ids"], segments=both["token_type_ids"])[0].softmax(-1)
    pair = judge({"text": "the cat", "text_pair": "a dog"})
    pair = pair[0] if isinstance(pair, list) else pair
    assert pair["label"] == names[int(scores.argmax())]
    assert pair["score"] == pytest.approx(scores.max().item(), rel=1e-4)
    together, alone = judge(TEXT, batch_size=4), [judge(text) for text in TEXT]
    for a, (b,) in zip(together, alone, strict=True):
        assert a["score"] == pytest.approx(b["score"], rel=1e-4)


def test_a_pipeline_names_images(tmp_path):
    native = onescan.build("lightnet_tiny", num_classes=3, image_size=16, patch_size=4, depth=1)
    names = {0: "cat", 1: "dog", 2: "mat"}
    to_transformers(native.eval(), id2label=names).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    guesses = pipeline("image-classification", str(tmp_path))(Image.fromarray(pixels))
    shares = native(torch.tensor(pixels / 127.5 - 1).float().permute(2, 0, 1)[None])[0].softmax(0)
    for guess in guesses:
        assert guess["score"] == pytest.approx(shares[native_id(names, guess)].item(), abs=1e-4)


def native_id(names, guess):
    return next(i for i, name in names.items() if name == guess["label"])


def texts_of(tokenizer, labels=None):
    rows = [dict(tokenizer(text)) for text in TEXT * 4]
    for i, row in enumerate(rows if labels else ()):
        row["labels"] = labels[i % len(labels)]
    return rows


def masked_texts(tokenizer):
    """Every second word to be told, the same ones each time."""
    rows = [tokenizer(TEXT[i % 2 * 2]).input_ids[:7] for i in range(16)]
    told = [[word if i % 2 else -100 for i, word in enumerate(row)] for row in rows]
    mask = tokenizer.mask_token_id
    read = [[mask if i % 2 else word for i, word in enumerate(row)] for row in rows]
    return [{"input_ids": a, "labels": b} for a, b in zip(read, told, strict=True)]


TASKS = {
    "causal": lambda t: (
        causal_lm(),
        texts_of(t),
        DataCollatorForLanguageModeling(t, mlm=False),
    ),
    "masked": lambda t: (masked_lm("lightnet"), masked_texts(t), default_data_collator),
    "classes": lambda t: (
        classifier("bert", num_classes=2),
        texts_of(t, [0, 1, 1, 0]),
        DataCollatorWithPadding(t),
    ),
    "numbers": lambda t: (
        classifier("ldn", num_classes=1),
        texts_of(t, [0.5, 1.5, 0.0, 2.0]),
        DataCollatorWithPadding(t),
    ),
}


def trainer(task, folder, **more):
    tokenizer = word_tokenizer(framed=task != "causal")
    torch.manual_seed(3)
    native, data, collate = TASKS[task](tokenizer)
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=to_transformers(native),
        args=TrainingArguments(**{**settings, **more}),
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
    )


def losses(trained):
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("task", TASKS)
def test_trainer_trains_and_goes_on_where_it_stopped(task, tmp_path):
    whole = trainer(task, tmp_path / "whole")
    whole.train()
    assert len(losses(whole)) == 6
    assert losses(whole)[-1] < losses(whole)[0]
    again = trainer(task, tmp_path / "whole")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], weight, msg=name)
    assert np.isfinite(again.evaluate()["eval_loss"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_trainer_counts_tokens_alike_however_a_batch_is_cut(tmp_path):
    whole = trainer("causal", tmp_path / "whole", max_steps=2)
    parts = trainer(
        "causal",
        tmp_path / "parts",
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    for each in (whole, parts):
        each.train()
    for name, weight in whole.model.state_dict().items():
        got = parts.model.state_dict()[name]
        torch.testing.assert_close(got, weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_smoothed_labels_are_shifted_as_others_are(tmp_path):
    smooth = trainer("causal", tmp_path, label_smoothing_factor=0.1)
    model = smooth.model.eval()
    tokens = torch.tensor([[5, 6, 7, 8, 5, 10]])
    got = smooth.compute_loss(model, {"input_ids": tokens, "labels": tokens})
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], label_smoothing=0.1)
    torch.testing.assert_close(got, want)


def checkpointing(model, *, enable, **options):
    stem = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    given = {f"{stem}_checkpointing_kwargs": options} if options else {}
    getattr(model, f"{stem}_checkpointing_{'enable' if enable else 'disable'}")(**given)


def test_checkpointing_is_switched_on_and_off():
    model = to_transformers(causal_lm())

    def flags():
        blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        assert blocks == list(model.network.blocks)
        return [block.gradient_checkpointing for block in blocks]

    assert flags() == [False] * 2
    checkpointing(model, enable=True)
    assert flags() == [True] * 2
    checkpointing(model, enable=False)
    assert flags() == [False] * 2
    model.config.gradient_checkpointing = True
    model = OnescanForCausalLM(model.config)
    assert flags() == [True] * 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("change", [*CAUSAL.values(), HGRN], ids=[*CAUSAL, "hgrn"])
def test_checkpointing_changes_no_gradient(change, use_reentrant):
    tokens = torch.tensor([[5, 6, 7, 8, 5, 10]])
    gradients = []
    for enable in (False, True):
        torch.manual_seed(0)
        model = to_transformers(CausalLMConfig(**{**WORD_SIZES, **change}).build()).train()
        if enable:
            checkpointing(model, enable=True, use_reentrant=use_reentrant)
        calls = []
        model.network.blocks[0].mixer.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        model(tokens, labels=tokens).loss.backward()
        assert len(calls) == 1 + enable
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is gradients[1][name] is None or torch.equal(gradient, gradients[1][name])
