"""Evaluation with lm-eval: likelihoods, generated texts, and both commands on local tasks."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_language_models import BOTH, CAUSAL, SMALL, causal, over_causal
from tiny_tokenizers import WORDS, byte_level_bpe, word_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from onescan.cli import main
from onescan.experiments.evaluation.config import TasksConfig
from onescan.experiments.evaluation.harness import register, task_manager
from onescan.inference.text_generation import generate_text
from onescan.inputs.tokenizer import ByteTokenizer, PretrainedTokenizer
from onescan.integrations.lm_eval import OnescanLM
from onescan.integrations.transformers import OnescanForCausalLM, OnescanTextConfig, to_transformers
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

QUESTIONS = [
    {"question": "the cat sat on", "choices": ["the mat", "a dog on a mat", "a"], "gold": 2},
    {"question": "a dog", "choices": ["sat", "the", "on a mat"], "gold": 0},
    {"question": "the mat", "choices": ["sat on the cat", "a", "dog"], "gold": 1},
    {"question": "on the dog sat", "choices": ["the cat", "the mat", "a"], "gold": 2},
]
TASK = """task: cats
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
PAIRS = [
    ("the cat sat on", " the mat"),
    ("the cat sat on", " a"),
    ("a dog", " sat on the mat"),
    ("the cat sat on", " a dog on a mat"),
    ("the", " cat"),
    ("", "the dog sat"),
    ("a dog ", "sat"),
]


def requests(*arguments):
    return [SimpleNamespace(args=given) for given in arguments]


def words():
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "[SEP]"})
    return tokenizer


def wrapped(model, **options):
    return OnescanLM(model, PretrainedTokenizer("words", words()), **options)


def direct(model, context, text):
    """Return the log-likelihood of ids after a context, and whether each is the most likely."""
    logits, _ = model(torch.tensor([[*context, *text[:-1]]]))
    scores = logits[0, -len(text) :].log_softmax(-1)
    is_greedy = (scores.argmax(-1) == torch.tensor(text)).all()
    return sum(row[token].item() for row, token in zip(scores, text, strict=True)), is_greedy


def assert_scores(found, expected, rel=1e-9):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], rel=rel)


@pytest.mark.sampled(4)
@over_causal
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_likelihoods_equal_those_of_the_whole_text(change, batch_size):
    model, encode = causal(change), PretrainedTokenizer("words", words()).encode
    lm = wrapped(model, batch_size=batch_size)
    pairs = [(encode(context) or [3], encode(text)) for context, text in PAIRS]
    found = lm.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    assert_scores(found, [direct(model, *pair) for pair in pairs])


def test_greedy_continuations_are_recognized():
    model = causal(CAUSAL["lightnet"])
    a, b, c = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)[0].tolist()
    texts = [(("", ""), [5, 6], text) for text in ([a, b, c], [a, b, (c + 1) % 12])]
    assert [greedy for _, greedy in wrapped(model)._loglikelihood_tokens(texts)] == [True, False]


def test_a_context_of_several_texts_is_read_once():
    model = causal(CAUSAL["lion"])
    shapes, forward = [], model.network.forward

    def counted(tokens, *rest, **options):
        shapes.append(tuple(tokens.shape))
        return forward(tokens, *rest, **options)

    model.network.forward = counted
    wrapped(model)._loglikelihood_tokens([(("", ""), [5] * 30, [6, 7, i]) for i in range(8)])
    assert shapes == [(1, 30), (8, 2)]


@pytest.mark.parametrize("name", ["gpt2", "ldn"])
def test_long_contexts_are_truncated_for_learned_positions(name):
    model, g = causal(CAUSAL[name]), torch.Generator().manual_seed(1)
    context, texts = torch.randint(12, (70,), generator=g).tolist(), ([5, 6, 7], [8])
    found = wrapped(model)._loglikelihood_tokens([(("", ""), context, text) for text in texts])
    expected = [direct(model, context[-38:], texts[0]), direct(model, context[-40:], texts[1])]
    assert_scores(found, expected)
    with pytest.raises(ValueError, match=r"41 tokens.* 40 tokens"):
        wrapped(model)._loglikelihood_tokens([(("", ""), [1], [5] * 41)])


@pytest.mark.parametrize("name", CAUSAL)
def test_rolling_likelihoods_predict_each_token_once(name):
    model, g = causal(CAUSAL[name]), torch.Generator().manual_seed(2)
    texts = [torch.randint(5, 12, (n,), generator=g).tolist() for n in (60, 7, 1)]
    strings = [" ".join(WORDS[token] for token in text) for text in texts]
    found = wrapped(model).loglikelihood_rolling(requests(*[(string,) for string in strings]))
    expected = [direct(model, [3], text)[0] for text in texts if len(text) < 40]
    if wrapped(model).most_tokens is None:
        long = direct(model, [3], texts[0])[0]
    else:  # windows of 40 tokens, the limit of the model
        long = direct(model, [3], texts[0][:40])[0]
        long += direct(model, texts[0][19:40], texts[0][40:])[0]
    assert found == pytest.approx([long, *expected], rel=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["lightnet", "gpt2"])
def test_generated_texts_end_at_stop_strings(name):
    model = CausalLMConfig(**{**SMALL, "vocab_size": 300, **CAUSAL[name]}).build().eval()
    lm, contexts = OnescanLM(model, ByteTokenizer(), batch_size=2), ["The cat", "a", "the dog sat"]
    whole = [
        "".join(generate_text(model, ByteTokenizer(), context, max_new_tokens=12))
        for context in contexts
    ]
    options = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    given = requests(*[(context, {**options, "until": []}) for context in contexts])
    assert lm.generate_until(given) == whole
    stops = [text[4] for text in whole]
    given = [(c, {**options, "until": [stop]}) for c, stop in zip(contexts, stops, strict=True)]
    expected = [text[: text.index(stop)] for text, stop in zip(whole, stops, strict=True)]
    assert lm.generate_until(requests(*given)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"until": ["."], "penalty": 2}, "penalty"),
        ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 40}, "40 tokens"),
        ({"do_sample": True, "temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_unsupported_options_of_tasks_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        wrapped(causal(CAUSAL["gpt2"])).generate_until(requests(("the", options)))


def test_wrong_arguments_are_rejected():
    lm = wrapped(causal(CAUSAL["lion"]))
    with pytest.raises(ValueError, match="which has no tokens"):
        lm._loglikelihood_tokens([(("", ""), [1], [])])
    with pytest.raises(ValueError, match="MaskedLM, expected a CausalLM"):
        wrapped(MaskedLMConfig(**SMALL, **BOTH["bert"]).build())
    with pytest.raises(ValueError, match="batch_size is 0"):
        wrapped(lm.model, batch_size=0)


def joined():
    """A tokenizer whose tokens may extend over the join of two texts, with spaces as a token."""
    pieces = ["</s>", "▁", "a", "n", "s", "w", "e", "r", "an", "er", "wer", "sw", "swer", "answer"]
    merges = [("a", "n"), ("e", "r"), ("w", "er"), ("s", "wer"), ("an", "swer")]
    found = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    found.normalizer = normalizers.Replace(" ", "▁")
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    found.decoder = decoders.Sequence([space, decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>")


@pytest.mark.parametrize(
    ("context", "text", "ids"),
    [
        ("an", "er", ([8], [9])),  # two tokens
        ("an", "swer", ([8], [12])),  # "answer" is one token
        ("ans", "wer", ([8, 4], [10])),
        ("answer ", "an", ([13], [1, 8])),  # the space belongs to the continuation
        ("answer an ", "swer", ([13, 1, 8], [1, 12])),
        (" ", "an", ([0], [1, 8])),
        ("", "an", ([0], [8])),
    ],
)
def test_a_token_over_the_join_does_not_end_the_evaluation(context, text, ids):
    model = CausalLMConfig(**{**SMALL, "vocab_size": 14, **CAUSAL["lightnet"]}).build().eval()
    lm = OnescanLM(model, PretrainedTokenizer("joined", joined()))
    found = lm.loglikelihood(requests((context, text)), disable_tqdm=True)
    assert_scores(found, [direct(model, *ids)], rel=1e-4)


def test_texts_without_tokens_are_named():
    lm = wrapped(causal(CAUSAL["lion"]))
    for context in ("the cat", "", " "):
        with pytest.raises(ValueError, match="requests the likelihood of '', which has no tokens"):
            lm.loglikelihood(requests((context, "")))
    assert lm.loglikelihood_rolling(requests(("",), ("the",)))[0] == 0.0
    lm.texts.end = None
    with pytest.raises(ValueError, match="the tokenizer has no beginning-of-text token"):
        lm.loglikelihood_rolling(requests(("the",)))


def test_generated_texts_keep_the_space_after_the_context():
    model = CausalLMConfig(**{**SMALL, "vocab_size": 14, **CAUSAL["lightnet"]}).build().eval()
    lm = OnescanLM(model, PretrainedTokenizer("joined", joined()))
    steps = [1, 8, 5, 1, 4, 0]  # " anw s", then the end
    model.stream = lambda tokens, *_, **__: (
        (torch.tensor([step] * len(tokens)), None) for step in steps
    )
    given = [("answer", {"until": until}) for until in ([], ["w s"], ["r a"], [" "], "n")]
    assert lm.generate_until(requests(*given)) == [" anw s", " an", " anw s", "", " a"]


def test_generated_texts_after_a_long_prompt_of_bytes():
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    found = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>")
    model = CausalLMConfig(**{**SMALL, "vocab_size": 258, **CAUSAL["lightnet"]}).build().eval()
    lm = OnescanLM(model, PretrainedTokenizer("bytes", tokenizer))
    model.stream = lambda *_, **__: ((torch.tensor([2 + byte]), None) for byte in "語、と".encode())
    for context in ("日本" * 20, "本" * 21 + "é"):
        for until, text in (([], "語、と"), (["、"], "語")):
            assert lm.generate_until(requests((context, {"until": until}))) == [text]


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save a model as transformers does, and a task."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    torch.manual_seed(4)
    model = CausalLMConfig(**{**SMALL, "vocab_size": 12, **CAUSAL["lightnet"]}).build()
    to_transformers(model.eval()).save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "cats.json").write_text(json.dumps(QUESTIONS))
    task = TASK.format(file=tmp_path / "tasks" / "cats.json")
    (tmp_path / "tasks" / "cats.yaml").write_text(task)
    return SimpleNamespace(folder=tmp_path, model=str(tmp_path / "model"), lm=model)


def accuracy(saved, questions=QUESTIONS):
    """Return the fraction of questions whose most likely choice is correct."""
    encode = PretrainedTokenizer("words", words()).encode
    correct = []
    for each in questions:
        context = encode(each["question"])
        scores = [direct(saved.lm, context, encode(choice))[0] for choice in each["choices"]]
        correct.append(scores.index(max(scores)) == each["gold"])
    return sum(correct) / len(correct)


def evaluate(saved, *more):
    tasks = ["--tasks", "cats", "--include-path", str(saved.folder / "tasks")]
    return main(["evaluate", saved.model, *tasks, *more])


def test_the_command_evaluates_a_local_task(saved, capsys):
    file = saved.folder / "results.json"
    assert evaluate(saved, "--out", str(file), "--batch-size", "5", "--limit", "3") == 0
    expected = accuracy(saved, QUESTIONS[:3])
    assert 0 < expected < 1
    assert re.search(rf"\|cats .*\|acc +\|.*\| *{expected:.4f}\|", capsys.readouterr().out)
    results = json.loads(file.read_text())
    assert results["results"]["cats"]["acc,none"] == expected
    assert str(saved.folder.parent) not in file.read_text()
    assert results["n-samples"]["cats"] == {"original": 4, "effective": 3}


@pytest.mark.slow  # test_the_model_can_be_registered_with_lm_eval calls lm-eval in this process
def test_lm_evals_command_evaluates_a_saved_model(saved):
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={saved.model},trust_remote_code=True"]
    command += ["--tasks", "cats", "--include_path", str(saved.folder / "tasks")]
    command += ["--output_path", str(saved.folder / "results.json")]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=saved.folder)
    assert run.returncode == 0, run.stderr
    (file,) = saved.folder.glob("results*.json")
    assert json.loads(file.read_text())["results"]["cats"]["acc,none"] == accuracy(saved)


def test_the_model_can_be_registered_with_lm_eval(saved):
    import lm_eval
    from lm_eval.tasks import TaskManager

    register()
    register()
    found = lm_eval.simple_evaluate(
        model="onescan",
        model_args={"checkpoint": saved.model},
        tasks=["cats"],
        task_manager=TaskManager(include_path=str(saved.folder / "tasks"), include_defaults=False),
    )
    assert found["results"]["cats"]["acc,none"] == accuracy(saved)


def test_likelihoods_equal_those_of_lm_evals_own_model(tmp_path):
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    model = CausalLMConfig(**{**SMALL, "vocab_size": 300, **CAUSAL["lightnet"]}).build()
    to_transformers(model.eval()).save_pretrained(tmp_path)
    byte_level_bpe().save_pretrained(tmp_path)
    pairs = [("the cat", " sat on the mat"), ("the cat", " naïve"), ("a", "b"), ("", "the mat")]
    ours = OnescanLM(model, PretrainedTokenizer("pairs", byte_level_bpe()))
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    assert_scores(*(lm.loglikelihood(requests(*pairs)) for lm in (ours, theirs)), rel=1e-4)
    texts = requests(("the cat sat on the mat",), ("a naïve café",))
    rolled = [lm.loglikelihood_rolling(texts) for lm in (ours, theirs)]
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-4)


def test_a_saved_config_brings_no_source_along(saved):
    OnescanTextConfig.register_for_auto_class()
    OnescanForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    again = saved.folder / "again"
    to_transformers(saved.lm).save_pretrained(again)
    assert {path.name for path in again.glob("*.py")} == {"modeling_onescan.py"}
    config = json.loads((again / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "modeling_onescan.OnescanTextConfig"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_onescan.OnescanForCausalLM"


def test_sets_of_tasks_are_expanded():
    six = ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"]
    assert TasksConfig(tasks="boolq, commonsense,piqa").names == ["boolq", *six]


def test_lm_evals_own_tasks_are_indexed_only_if_needed(saved, monkeypatch):
    from lm_eval.tasks import TaskManager

    indexed = []

    def manager(include_path=None, include_defaults=True):
        indexed.append(include_defaults)
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    (saved.folder / "tasks/pets.yaml").write_text("group: pets\ntask: [cats, piqa]")
    for tasks in ("cats", "pets", "cats,piqa"):
        found = task_manager(TasksConfig(tasks=tasks, include_path=saved.folder / "tasks"))
        assert {"cats", "pets"} <= set(found.all_tasks)
    assert indexed == [False, False, True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks", "cats,piqa,caats", "--include-path", "TASKS"], "'caats'"),
        (["--tasks", "cats", "--include-path", "nowhere"], "--include-path is 'nowhere'"),
        (["--tasks", "cats", "--limit", "0"], "limit is 0"),
        (["--tasks", "cats", "--num-fewshot", "-1"], "--num-fewshot is -1"),
        (["--tasks", "cats", "--out", "x.txt"], "x.txt"),
        (["--tasks", "cats", "--out", f"{__file__}/x.json"], "test_lm_eval.py is not a folder"),
        (["--limit", "3"], "--tasks"),
        (["--tasks", "cats", "--workers", "2"], "--tasks"),
        (["--tasks", "dogs", "--include-path", "BROKEN"], "dogs.yaml"),
    ],
)
def test_the_command_rejects_wrong_options(saved, capsys, argv, message):
    (saved.folder / "broken").mkdir()
    (saved.folder / "broken/dogs.yaml").write_text("task: [dogs")
    folders = {"TASKS": str(saved.folder / "tasks"), "BROKEN": str(saved.folder / "broken")}
    assert main(["evaluate", saved.model, *(folders.get(each, each) for each in argv)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_rejects_masked_models(saved, capsys):
    masked = MaskedLMConfig(**{**SMALL, "vocab_size": 12}, **BOTH["bert"]).build()
    to_transformers(masked).save_pretrained(saved.model)
    assert evaluate(saved) == 2
    assert "MaskedLM, expected a CausalLM" in capsys.readouterr().err


def test_the_command_names_the_missing_extra(saved, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(saved) == 1
    assert "onescan[eval]" in capsys.readouterr().err
