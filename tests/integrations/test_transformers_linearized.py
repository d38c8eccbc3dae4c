"""Saving and loading models of transformers whose attention was replaced."""

import copy
import json
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from other_encoders import CASES, TEXT, build, first_output, inputs, replace
from safetensors.torch import load_file, save_file

from onescan.integrations.export import decompose_for_onnx
from onescan.integrations.transformers import load_linearized, save_linearized
from onescan.nn import replace_attention
from onescan.nn.replace import describe_replacements

SAVED = [name for name, case in CASES.items() if case.inputs and not case.part]
BERT = CASES["BERT for masked LM"]
IDS = inputs("text")


def linear_bert(**options):
    model = build(BERT)
    replace_attention(model, **options)
    return model


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def change_config(folder, **changes):
    fields = config_of(folder) | changes
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SAVED)
def test_saved_models_are_the_same(name, tmp_path):
    case = CASES[name]
    model = build(case)
    replace(case, model)
    data = inputs(case.inputs)
    expected = first_output(model(**data))
    save_linearized(model, tmp_path / "a")
    restored = load_linearized(tmp_path / "a")
    assert not restored.training
    assert torch.equal(first_output(restored(**data)), expected)
    restored.save_pretrained(tmp_path / "b")
    assert config_of(tmp_path / "a") == config_of(tmp_path / "b")
    again = load_linearized(tmp_path / "b")
    assert torch.equal(first_output(again(**data)), expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lightnet", {"norm": "rms"}), ("lion", {"decay": "fixed"}), ("delta", {})],
)
def test_options_are_saved(kind, options, tmp_path):
    model = linear_bert(kind=kind, exclude=["bert.encoder.layer.1"], **options)
    save_linearized(model, tmp_path)
    restored = load_linearized(tmp_path)
    assert describe_replacements(restored) == describe_replacements(model)
    (described,) = describe_replacements(model)
    assert described["options"] == options
    assert described["modules"] == ["bert.encoder.layer.0.attention.self"]
    assert torch.equal(restored(**IDS).logits, model(**IDS).logits)


def test_two_towers_may_differ(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
             "intermediate_size": 16}  # fmt: skip
    text = sizes | {"vocab_size": 11, "max_position_embeddings": 20, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=sizes | {"image_size": 16, "patch_size": 4}
    )
    model = transformers.CLIPModel(config).eval()
    replace_attention(model.text_model, causal=True)
    replace_attention(model.vision_model, "lion", shape=(4, 4), prefix=1)
    save_linearized(model, tmp_path)
    restored = load_linearized(tmp_path)
    data = inputs("text") | inputs("image")
    assert torch.equal(restored(**data).logits_per_text, model(**data).logits_per_text)
    shapes = [each["shape"] for each in describe_replacements(restored)]
    assert shapes == [None, [4, 4]]


def test_auto_classes_choose_the_head(tmp_path):
    model = linear_bert()
    save_linearized(model, tmp_path)
    expected = model.bert(**IDS).last_hidden_state
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base).__name__ == "BertModel"
    assert torch.equal(base(**IDS).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    masked = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(masked(**IDS).logits, model(**IDS).logits)
    for folder in (tmp_path, tmp_path / "base"):
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=3
        )
        assert classifier(**IDS).logits.shape == (2, 3)
        assert torch.equal(classifier.bert(**IDS).last_hidden_state, expected)
        assert describe_replacements(classifier)
    with pytest.raises(ValueError, match="AutoModelForCTC does not support bert models"):
        transformers.AutoModelForCTC.from_pretrained(tmp_path)


def test_save_pretrained_keeps_the_new_attention(tmp_path):
    model = build(BERT)
    assert "save_pretrained" not in vars(model)
    replace_attention(model, "lion")
    copied = copy.deepcopy(model)
    expected = model(**IDS).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # of the original, not of its copy
    copied.save_pretrained(tmp_path / "a")
    assert torch.equal(load_linearized(tmp_path / "a")(**IDS).logits, expected)
    copied.bert.save_pretrained(tmp_path / "b")
    assert config_of(tmp_path / "b")["model_type"] == "onescan_linearized"


def test_other_dtypes_are_loaded(tmp_path):
    model = linear_bert()
    save_linearized(model.to(torch.bfloat16), tmp_path)
    assert load_linearized(tmp_path).dtype == torch.bfloat16
    assert load_linearized(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_models_without_replaced_attention_are_refused(tmp_path):
    with pytest.raises(ValueError, match="model has no replaced attention"):
        save_linearized(build(BERT), tmp_path)
    with pytest.raises(ValueError, match="model is a Linear, expected a transformers model"):
        save_linearized(torch.nn.Linear(1, 1), tmp_path)
    build(BERT).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type is 'bert'.*not written by save_linearized"):
        load_linearized(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_linearized(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"base_model_type": "brt"}, "base_model_type is 'brt'"),
        ({"base_model_type": "onescan_linearized"}, "base_model_type is 'onescan_linearized'"),
        ({"architectures": ["os"]}, "architectures names os"),
        ({"architectures": None}, "architectures names nothing"),
        ({"onescan_attention": [{"kind": "lightnet"}]}, "description .* is damaged"),
        ({"onescan_attention": 5}, "cannot be loaded"),
        (
            {"onescan_attention": [{"kind": "lightnet", "shape": None, "prefix": 0, "options": {},
                                    "modules": ["bert.pooler"]}]},
            "is damaged|no softmax attention",
        ),
    ],
)  # fmt: skip
def test_damaged_configs_are_named(changes, reason, tmp_path):
    save_linearized(linear_bert(), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=reason):
        load_linearized(tmp_path)


def test_missing_and_truncated_weights_are_noticed(tmp_path):
    save_linearized(linear_bert(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["bert.encoder.layer.0.attention.self.attention.mixer.in_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights, such as .*layer\.0.*in_proj\.weight"):
        load_linearized(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_linearized(tmp_path)


@pytest.mark.parametrize("auto_class", [None, "AutoModel", "AutoModelForTokenClassification"])
def test_missing_weights_outside_of_attention_are_noticed(auto_class, tmp_path):
    save_linearized(linear_bert(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {k: x for k, x in load_file(path).items() if "layer.1.output.dense" not in k}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights, such as .*layer\.1\.output\.dense"):
        load_linearized(tmp_path, auto_class=auto_class)


@pytest.mark.filterwarnings("ignore:the linear attention that replaces")
@pytest.mark.parametrize(("name", "kind"), [("Whisper's encoder", "mel"), ("T5", "text")])
def test_encoders_of_larger_models_are_saved_by_themselves(name, kind, tmp_path):
    encoder = build(CASES[name])
    replace_attention(encoder)
    save_linearized(encoder, tmp_path)
    restored, data = load_linearized(tmp_path), inputs(kind)
    assert torch.equal(first_output(restored(**data)), first_output(encoder(**data)))


def test_a_failed_save_leaves_no_folder_with_the_original_config(tmp_path):
    model = linear_bert()

    class Broken:
        def save_pretrained(self, _):
            raise OSError("disk full")

    for processor, error in ((Broken(), OSError), ("bert", ValueError)):
        with pytest.raises(error):
            save_linearized(model, tmp_path / "a", processor=processor)
        assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="push_to_hub is True, which is not supported here"):
        save_linearized(model, tmp_path / "a", push_to_hub=True, repo_id="user/a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file', which is a file"):
        save_linearized(model, tmp_path / "file")
    save_linearized(model, tmp_path / "a", max_shard_size="20KB")
    assert (tmp_path / "a" / "model.safetensors.index.json").exists()
    (tmp_path / "a" / "optimizer.pt").write_text("kept")
    save_linearized(model, tmp_path / "a")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"config.json", "model.safetensors", "modeling_onescan.py", "optimizer.pt"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert torch.equal(load_linearized(tmp_path / "a")(**IDS).logits, model(**IDS).logits)


def test_a_gpt2_names_the_recipe():
    config = transformers.GPT2Config(n_layer=1, n_embd=12, n_head=2, vocab_size=11)
    with pytest.raises(ValueError, match=r"for GPT-2, use onescan\.convert and the recipe linear"):
        replace_attention(transformers.GPT2LMHeadModel(config))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export uses it itself
def test_operators_that_onnx_lacks_are_replaced():
    model = linear_bert(kind="delta").requires_grad_(False)
    program = torch.export.export(model, (IDS["input_ids"],))

    def operators(program):
        parts = [part for part in program.graph_module.modules() if hasattr(part, "graph")]
        return {str(node.target) for part in parts for node in part.graph.nodes}

    assert "aten.linalg_solve_triangular.default" in operators(program)
    assert "aten.linalg_solve_triangular.default" not in operators(decompose_for_onnx(program))


def test_weights_that_transformers_renames_are_not_saved(tmp_path):
    config = transformers.JinaEmbeddingsV3Config(**TEXT)
    model = transformers.JinaEmbeddingsV3Model(config)
    with pytest.warns(UserWarning, match="rotary"):
        replace_attention(model)
    with pytest.raises(
        ValueError, match="transformers renames weights of jina_embeddings_v3 models"
    ):
        save_linearized(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_options_of_the_model_are_passed_on(tmp_path):
    model = linear_bert(exclude=["bert.encoder.layer.1"])
    save_linearized(model.bfloat16(), tmp_path)
    restored = load_linearized(tmp_path, dtype="auto", attn_implementation="eager")
    assert restored.dtype == torch.bfloat16
    assert restored.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="name is a NoneType, expected a folder"):
        load_linearized(None)


@pytest.mark.slow
def test_a_program_without_onescan_needs_an_import_or_trust(tmp_path):
    save_linearized(linear_bert(), tmp_path)
    load = "import transformers; m = transformers.AutoModelForMaskedLM.from_pretrained({!r}{}); "
    show = "print(type(m.bert.encoder.layer[0].attention.self).__name__)"

    def run(before="", options=""):
        code = before + load.format(str(tmp_path), options) + show
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        return done.stdout.strip() or done.stderr

    assert "trust_remote_code=True" in run()
    assert run("import onescan.integrations.transformers; ") == "SelfAttention"
    assert run(options=", trust_remote_code=True") == "SelfAttention"


def test_loading_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(CASES["BERT"])
        replace_attention(model)
        save_linearized(model, tmp_path)
        load_linearized(tmp_path)
    assert TEXT["hidden_size"] == model.config.hidden_size
