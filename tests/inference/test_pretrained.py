"""from_pretrained, save_pretrained, push_to_hub and the Hugging Face Hub, without a network."""

import copy
import json
import os
import shutil
import time
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from tiny_tokenizers import word_tokenizer

import onescan
from onescan.checkpoint.hub import DOWNLOADED
from onescan.cli import main
from onescan.inference.loading import load_language_model, load_pretrained_model
from onescan.inputs import ArrayFormat, ByteTokenizer, ImageFormat, TextFormat
from onescan.inputs.targets import Target
from onescan.inputs.tokenizer import PretrainedTokenizer
from onescan.models.causal_lm import CausalLMConfig

FORMAT = ImageFormat(channels=3, height=8, width=8, mean=(0.5,) * 3, std=(0.5,) * 3)
GRAY = ImageFormat(channels=1, height=8, width=8, mean=(0.5,), std=(0.5,))
SIGNALS = ArrayFormat(channels=3, shape=(8,), mean=(0.5,) * 3, std=(0.5,) * 3)
BYTES = TextFormat.of(ByteTokenizer())


def models():
    image = {"image_size": (8, 8), "patch_size": (4, 4), "width": 12, "depth": 1}
    heads = {"mixer.num_heads": 2}
    text = {"vocab_size": 11, "width": 12, "depth": 1} | heads
    mixer = onescan.preset("lightnet_tiny", **heads).mixer
    return {
        "ImageClassifier": onescan.build("lightnet_tiny", num_classes=3, **image, **heads),
        "CausalLM": onescan.build("lightnet_lm_45m", **text),
        "MaskedLM": onescan.build("lightnet_mlm_base", **text),
        "SequenceClassifier": onescan.SequenceClassifierConfig(
            vocab_size=11, width=12, depth=1, mixer=mixer
        ).build(),
        "DensePredictor": onescan.DensePredictorConfig(**image, mixer=mixer).build(),
        "Denoiser": onescan.DenoiserConfig(**image, mixer=mixer).build(),
    }


MODELS = models()


def classifier():
    return MODELS["ImageClassifier"]


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose repositories are folders, which notes what is downloaded and created."""
    root, calls = tmp_path / "hub", []
    root.mkdir()

    def snapshot_download(name, *, revision, token, cache_dir, allow_patterns):
        calls.append((name, revision, token, cache_dir))
        source = root / name
        if not source.is_dir():
            import httpx2 as httpx  # the client of huggingface_hub

            response = httpx.Response(404, request=httpx.Request("GET", "https://hub/x"))
            raise RepositoryNotFoundError("404 Client Error", response=response)
        folder = tmp_path / "cache" / name
        assert not {"*.py", "*.bin", "*"} & set(allow_patterns)

        def ignored(place, names):
            files = [name for name in names if not (Path(place) / name).is_dir()]
            return [name for name in files if not any(fnmatch(name, p) for p in allow_patterns)]

        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder, ignore=ignored, copy_function=os.symlink)  # as hubs do
        return str(folder)

    class Api:
        def __init__(self, token=None):
            calls.append(("token", token))

        def create_repo(self, name, *, private, exist_ok):
            calls.append(("create", name, private, exist_ok))
            (root / name).mkdir(parents=True, exist_ok=True)
            return type("Url", (), {"repo_id": name})()

        def create_branch(self, name, *, branch, exist_ok):
            calls.append(("branch", name, branch))

        def upload_folder(self, *, repo_id, folder_path, commit_message, revision):
            calls.append(("upload", repo_id, commit_message, revision))
            shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True)
            return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return root, calls


@pytest.mark.parametrize("name", MODELS)
def test_models_are_saved_and_loaded(name, tmp_path):
    model = MODELS[name]
    model.save_pretrained(tmp_path / "m")
    restored = type(model).from_pretrained(tmp_path / "m")
    assert type(restored).__name__ == name
    assert not restored.training
    assert same(restored, model)
    assert restored.config == model.config
    card = (tmp_path / "m" / "README.md").read_text()
    assert f"onescan.{name}.from_pretrained" in card
    assert "library_name: onescan" in card
    assert same(onescan.load(tmp_path / "m").model, model)


def test_formats_and_class_names_are_saved(tmp_path):
    names = ("cat", "dog", "owl")
    classifier().save_pretrained(tmp_path / "m", format=FORMAT, class_names=names)
    loaded = onescan.load(tmp_path / "m")
    assert loaded.class_names == names
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(loaded.format.model_input(images), FORMAT.model_input(images))
    assert loaded.metrics == {}


def test_a_trained_model_is_saved_again(tmp_path):
    loaded = onescan.load("zoo/shakespeare_lightnet")
    loaded.model.save_pretrained(tmp_path / "m", format=loaded.format)
    again = onescan.load(tmp_path / "m")
    assert same(again.model, loaded.model)
    tokens, _ = again.format.model_input(["To be"])
    assert torch.equal(tokens, loaded.format.model_input(["To be"])[0])
    model, tokenizer = load_language_model(str(tmp_path / "m"))
    assert same(model, loaded.model)
    assert tokenizer.decode(tokens[0].tolist()) == "To be"


def test_without_a_format_inputs_are_not_converted(tmp_path):
    classifier().save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="saved without its input format"):
        onescan.load(tmp_path / "m").format.model_input(torch.rand(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"format": "image"}, "format is a str, expected a Format"),
        ({"target": 3}, "target is an int, expected a Target"),
        ({"class_names": "cat"}, "class_names"),
        ({"class_names": [1]}, "class_names"),
        ({"class_names": ("a", "b")}, "class_names has 2 names, but the model's num_classes is 3"),
        (
            {"target": Target(kind="value", mean=(0.0,), std=(1.0,))},
            "target.mean has 1 number, but the model's num_classes is 3",
        ),
        ({"format": GRAY}, "format has 1 channel, but the model has 3"),
        ({"format": SIGNALS}, "format has 1 axis, but the model has 2"),
        ({"format": BYTES}, "format is a TextFormat, which an ImageClassifier cannot read"),
    ],
)
def test_wrong_details_are_named(details, reason, tmp_path, hub):
    with pytest.raises(ValueError, match=reason):
        classifier().save_pretrained(tmp_path / "m", **details)
    assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match=reason):
        classifier().push_to_hub("user/model", **details)
    assert hub[1] == []


def test_formats_of_other_models_are_named(tmp_path):
    for format, reason in [
        (FORMAT, "format is an ImageFormat, which a CausalLM cannot read"),
        (BYTES, "format has 258 tokens, but the model has 11"),
    ]:
        with pytest.raises(ValueError, match=reason):
            MODELS["CausalLM"].save_pretrained(tmp_path / "m", format=format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_loaded_in_float32(dtype, tmp_path):
    model = copy.deepcopy(classifier()).to(dtype)
    model.save_pretrained(tmp_path / "m")
    assert same(onescan.load(tmp_path / "m").model, model.float())


def test_weights_that_would_be_rounded_are_not_saved(tmp_path):
    with pytest.raises(
        ValueError, match=r"the weights are float64.*model\.float\(\) converts them"
    ):
        copy.deepcopy(classifier()).double().save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_folders_are_not_overwritten(tmp_path):
    (tmp_path / "empty").mkdir()
    classifier().save_pretrained(tmp_path / "empty")
    with pytest.raises(ValueError, match="exists and is not empty"):
        classifier().save_pretrained(tmp_path / "empty")


def test_another_class_is_named(tmp_path):
    classifier().save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="holds an ImageClassifier, expected CausalLM"):
        onescan.CausalLM.from_pretrained(tmp_path / "m")
    with pytest.raises(FileNotFoundError, match="there is no run"):
        onescan.CausalLM.from_pretrained(tmp_path / "nothing")


def test_models_go_to_the_hub_and_back(hub):
    root, calls = hub
    address = classifier().push_to_hub(
        "user/model", private=True, token="secret", commit_message="First", format=FORMAT
    )
    assert address == "https://hub/user/model/commit/1"
    assert ("create", "user/model", True, True) in calls
    assert ("upload", "user/model", "First", None) in calls
    assert ("token", "secret") in calls
    (root / "user" / "model" / "evil.py").write_text("raise SystemExit")
    options = {"revision": "v1", "token": "t", "cache_dir": "c"}
    restored = onescan.ImageClassifier.from_pretrained("user/model", **options)
    assert calls[-1] == ("user/model", "v1", "t", "c")
    assert same(restored, classifier())
    loaded = onescan.load("user/model")
    assert same(loaded.model, classifier())
    assert loaded.format.model_input(torch.rand(1, 3, 8, 8)).shape == (1, 3, 8, 8)


def test_a_revision_is_a_branch_that_is_created(hub):
    _, calls = hub
    classifier().push_to_hub("user/model", revision="v2")
    assert ("branch", "user/model", "v2") in calls
    assert ("upload", "user/model", "Upload model", "v2") in calls


def test_language_models_of_the_hub_may_be_runs_or_of_transformers(hub):
    from onescan.integrations.transformers import to_transformers

    root, _ = hub
    loaded = onescan.load("zoo/shakespeare_lightnet")
    loaded.model.push_to_hub("user/run", format=loaded.format)
    to_transformers(loaded.model).save_pretrained(root / "user" / "hf")
    assert same(load_language_model("user/run")[0], loaded.model)
    for name in ("user/run", "user/hf"):
        assert same(load_pretrained_model(name).model, loaded.model)


def test_damage_on_the_hub_is_noticed(hub):
    root, _ = hub
    classifier().push_to_hub("user/model")
    file = root / "user" / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors.*checksum"):
        onescan.load("user/model")


def test_local_paths_win(hub, tmp_path, monkeypatch):
    _, calls = hub
    monkeypatch.chdir(tmp_path)
    classifier().save_pretrained("user/model")
    assert same(onescan.load("user/model").model, classifier())
    assert calls == []


def test_a_model_that_is_not_on_the_hub_is_named(hub):
    with pytest.raises(FileNotFoundError, match=r"no folder 'user/none'.*no such model on the hub"):
        onescan.load("user/none")
    with pytest.raises(ValueError, match="repo_id is 'a/b/c'"):
        classifier().push_to_hub("a/b/c")


def test_without_a_network_loading_fails_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    begin = time.perf_counter()
    with pytest.raises(FileNotFoundError, match="there is no folder 'user/none'") as caught:
        onescan.load("user/none")
    assert time.perf_counter() - begin < 5
    assert "\n" not in str(caught.value)


def test_without_a_network_uploading_fails_in_one_sentence(monkeypatch):
    def fail(*_arguments, **_options):
        import httpx2 as httpx  # the client of huggingface_hub

        raise httpx.ConnectError("[Errno -2] Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    with pytest.raises(OSError, match=r"cannot be uploaded to .* 'user/model'.*Name or") as caught:
        classifier().push_to_hub("user/model")
    assert "\n" not in str(caught.value)


def test_a_revision_of_a_local_folder_is_refused(tmp_path):
    classifier().save_pretrained(tmp_path / "m")
    for name in (tmp_path / "m", "zoo/digits_lightnet"):
        with pytest.raises(ValueError, match=r"revision is 'v1', but .* is a local path"):
            onescan.load(name, revision="v1")


def test_names_in_errors_are_those_of_the_user(hub):
    classifier().push_to_hub("user/model")
    with pytest.raises(
        ValueError, match="'user/model' holds an ImageClassifier, expected a Causal"
    ):
        load_language_model("user/model")


def test_models_of_the_hub_are_converted_and_sampled(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = ("cat", "dog", "owl")
    classifier().push_to_hub("user/model", format=FORMAT, class_names=names)
    converted = onescan.convert("user/model", tmp_path / "out", to="transformers")
    assert tuple(converted.config.id2label.values()) == names
    MODELS["Denoiser"].push_to_hub("user/denoiser")
    reason = "was saved without its noise and sampler"
    assert main(["sample", "user/denoiser"]) == 2
    assert reason in capsys.readouterr().err
    MODELS["Denoiser"].save_pretrained("folder")
    assert main(["sample", "folder"]) == 2
    assert reason in capsys.readouterr().err


def test_a_model_without_data_and_task_is_not_evaluated(tmp_path, monkeypatch, capsys, hub):
    monkeypatch.chdir(tmp_path)
    classifier().save_pretrained("m", format=FORMAT)
    classifier().push_to_hub("user/model", format=FORMAT)
    for name in ("m", "user/model"):
        assert main(["evaluate", name]) == 2
        message = capsys.readouterr().err
        assert "holds a model without the data and the task of a run" in message
        assert "run.name" not in message


def test_a_language_model_without_a_run_is_evaluated_on_a_given_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaded = onescan.load("zoo/shakespeare_lightnet")
    loaded.model.save_pretrained("m", format=loaded.format)
    assert main(["evaluate", "m", "--lengths", "8"]) == 2
    assert "text is None, but 'm' has no test text" in capsys.readouterr().err
    Path("text.txt").write_text("To be, or not to be, that is the question.")
    assert main(["evaluate", "m", "--lengths", "8", "--text", "text.txt"]) == 0


@pytest.mark.parametrize(
    "command",
    [
        "predict {} a",
        "evaluate {}",
        "embed a --model {} --out v.npz",
        "fill {} a",
        "generate {} --prompt a",
        "convert {} --out v",
        "convert {} --out v --to transformers",
    ],
)
def test_linearized_models_name_what_loads_them(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("linearized")
    folder.mkdir()
    config = {"model_type": "onescan_linearized", "base_model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(command.format(folder).split()) == 2
    message = capsys.readouterr().err
    assert "linearized holds a linearized transformers model" in message
    assert "load_linearized" in message
    assert "after `import onescan.integrations.transformers`" in message


def test_a_folder_without_tokenizer_says_what_to_copy(tmp_path, capsys):
    onescan.convert(MODELS["CausalLM"], tmp_path / "a", to="transformers")
    assert main(["generate", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert f"error: {str(tmp_path / 'a')!r} has no tokenizer: its folder must contain" in error


def test_code_and_pickles_are_not_downloaded():
    from fnmatch import fnmatch

    for name in ("model.py", "x/model.py", "pytorch_model.bin", "a.pt", "a.pkl", "a.ckpt", "a.npz"):
        assert not any(fnmatch(name, pattern) for pattern in DOWNLOADED)


def test_a_tokenizer_is_read_from_a_hub_whose_files_are_links(hub, tmp_path):
    words = word_tokenizer(framed=True)
    words.chat_template = "{{ messages }}"
    words.save_pretrained(tmp_path / "words")
    tokenizer = PretrainedTokenizer(str(tmp_path / "words"), words)
    model = CausalLMConfig(vocab_size=tokenizer.size, width=8, depth=1).build()
    root, _ = hub
    model.save_pretrained(root / "user" / "lm", format=TextFormat.of(tokenizer))
    loaded = onescan.load("user/lm")
    assert same(loaded.model, model)
    assert loaded.format.model_input(["the cat"])[0].shape[0] == 1


def test_negative_ids_are_refused():
    with pytest.raises(ValueError, match="token is -100, expected 0 to"):
        ByteTokenizer().decode([5, -100])
