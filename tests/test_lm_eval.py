"""Language models judged by lm-eval: likelihoods, texts, its command and ours, on local tasks."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from test_writing import byte_level_bpe
from tiny_language_models import BOTH, CAUSAL, SMALL, causal, over_causal
from tiny_tokenizers import WORDS, word_tokenizer

from onescan.cli import main
from onescan.data.text import ByteTokenizer, PretrainedTokenizer
from onescan.evaluation.config import TasksConfig
from onescan.evaluation.harness import _manager_of, register
from onescan.integrations.lm_eval import OnescanLM
from onescan.integrations.transformers import OnescanForCausalLM, OnescanTextConfig, to_transformers
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.tasks.writing import generate_text

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


def judged(model, **options):
    return OnescanLM(model, PretrainedTokenizer("words", words()), **options)


def direct(model, context, text):
    """The log-likelihood of ids after others, and whether each is the likeliest."""
    logits, _ = model(torch.tensor([[*context, *text[:-1]]]))
    scores = logits[0, -len(text) :].log_softmax(-1)
    right = scores.argmax(-1) == torch.tensor(text)
    return sum(row[token].item() for row, token in zip(scores, text, strict=True)), right.all()


def assert_scores(got, want):
    assert [score for score, _ in got] == pytest.approx([score for score, _ in want], rel=1e-9)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]


@over_causal
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_likelihoods_are_those_of_the_whole_text(change, batch_size):
    model, encode = causal(change), PretrainedTokenizer("words", words()).encode
    got = judged(model, batch_size=batch_size).loglikelihood(requests(*PAIRS), disable_tqdm=True)
    pairs = [(encode(context) or [3], encode(text)) for context, text in PAIRS]
    assert_scores(got, [direct(model, *pair) for pair in pairs])


def test_what_greedy_decoding_writes_is_told_so():
    model = causal(CAUSAL["lightnet"])
    written = model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)[0].tolist()
    told = [("", ""), [5, 6], written], [("", ""), [5, 6], [*written[:2], (written[2] + 1) % 12]]
    assert [greedy for _, greedy in judged(model)._loglikelihood_tokens(told)] == [True, False]


def test_a_context_of_several_texts_is_read_once():
    model = causal(CAUSAL["lion"])
    read, forward = [], model.forward

    def counted(tokens, *rest, **options):
        read.append(tuple(tokens.shape))
        return forward(tokens, *rest, **options)

    model.forward = counted
    told = [(("", ""), [5] * 30, [6, 7, token]) for token in range(8)]
    judged(model)._loglikelihood_tokens(told)
    assert read == [(1, 30), (8, 2)]


@pytest.mark.parametrize("name", ["gpt2", "ldn"])
def test_a_model_with_places_reads_the_end_of_a_long_context(name):
    model, g = causal(CAUSAL[name]), torch.Generator().manual_seed(1)
    context = torch.randint(12, (70,), generator=g).tolist()
    told = [(("", ""), context, text) for text in ([5, 6, 7], [8])]
    got = judged(model)._loglikelihood_tokens(told)
    assert_scores(got, [direct(model, context[-38:], [5, 6, 7]), direct(model, context[-40:], [8])])
    with pytest.raises(ValueError, match="likelihood of 41 tokens, but the model is limited to 40"):
        judged(model)._loglikelihood_tokens([(("", ""), [1], [5] * 41)])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_whole_text_is_read_behind_the_token_before_any(name):
    model, g = causal(CAUSAL[name]), torch.Generator().manual_seed(2)
    texts = [torch.randint(5, 12, (n,), generator=g).tolist() for n in (60, 7, 1)]
    spoken = [" ".join(WORDS[token] for token in text) for text in texts]
    got = judged(model).loglikelihood_rolling(requests(*[(text,) for text in spoken]))
    if judged(model).most_tokens is None:
        long = direct(model, [3], texts[0])[0]
    else:  # each token is told once, with as much before it as there are places for
        long = (
            direct(model, [3], texts[0][:40])[0] + direct(model, texts[0][19:40], texts[0][40:])[0]
        )
    want = [long, *(direct(model, [3], text)[0] for text in texts[1:])]
    assert got == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("name", ["lightnet", "gpt2"])
def test_texts_are_written_up_to_what_ends_them(name):
    model = CausalLMConfig(**{**SMALL, "vocab_size": 300, **CAUSAL[name]}).build().eval()
    tokenizer = ByteTokenizer()
    contexts = ["The cat", "a", "the dog sat"]
    whole = [
        "".join(generate_text(model, tokenizer, context, max_new_tokens=12)) for context in contexts
    ]
    options = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    lm = OnescanLM(model, tokenizer, batch_size=2)
    asked = [(context, {**options, "until": []}) for context in contexts]
    assert lm.generate_until(requests(*asked)) == whole
    ends = [text[4] for text in whole]
    asked = [(c, {**options, "until": [e]}) for c, e in zip(contexts, ends, strict=True)]
    want = [text[: text.index(end)] for text, end in zip(whole, ends, strict=True)]
    assert lm.generate_until(requests(*asked)) == want


def test_a_task_that_asks_for_what_is_not_known_is_refused():
    lm = judged(causal(CAUSAL["gpt2"]))
    for options, message in [
        ({"until": ["."], "penalty": 2}, r"generation_kwargs set \['penalty'\]"),
        ({"num_beams": 4}, r"generation_kwargs set \['num_beams'\]"),
        ({"max_gen_toks": 40}, "40 tokens were requested, but the model is limited to 40 tokens"),
        ({"do_sample": True, "temperature": -1.0}, "temperature is -1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            lm.generate_until(requests(("the", options)))
    with pytest.raises(ValueError, match="the likelihood of an empty text"):
        lm._loglikelihood_tokens([(("", ""), [1], [])])


def test_only_causal_models_are_taken():
    model = MaskedLMConfig(**SMALL, **BOTH["bert"]).build()
    with pytest.raises(ValueError, match="the model is a MaskedLM, expected a CausalLM"):
        judged(model)
    with pytest.raises(ValueError, match="batch_size is 0"):
        judged(causal(CAUSAL["lion"]), batch_size=0)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder of transformers', and one with a task."""
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
    """The share of questions whose likeliest choice is right."""
    encode = PretrainedTokenizer("words", words()).encode
    right = []
    for each in questions:
        context = encode(each["question"])
        scores = [direct(saved.lm, context, encode(choice))[0] for choice in each["choices"]]
        right.append(scores.index(max(scores)) == each["gold"])
    return sum(right) / len(right)


def evaluate(saved, *more):
    tasks = ["--tasks", "cats", "--include-path", str(saved.folder / "tasks")]
    return main(["evaluate", saved.model, *tasks, *more])


def test_our_command_on_a_local_task(saved, capsys):
    file = saved.folder / "results.json"
    assert evaluate(saved, "--out", str(file), "--batch-size", "5", "--limit", "3") == 0
    want = accuracy(saved, QUESTIONS[:3])
    assert 0 < want < 1
    assert re.search(rf"\|cats .*\|acc +\|.*\| *{want:.4f}\|", capsys.readouterr().out)
    results = json.loads(file.read_text())
    assert results["results"]["cats"]["acc,none"] == want
    assert str(saved.folder.parent) not in file.read_text()
    assert results["n-samples"]["cats"] == {"original": 4, "effective": 3}


def test_the_stock_command_on_a_saved_checkpoint(saved):
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={saved.model},trust_remote_code=True"]
    command += ["--tasks", "cats", "--include_path", str(saved.folder / "tasks")]
    command += ["--output_path", str(saved.folder / "results.json")]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, cwd=saved.folder)
    assert run.returncode == 0, run.stderr
    (file,) = saved.folder.glob("results*.json")
    assert json.loads(file.read_text())["results"]["cats"]["acc,none"] == accuracy(saved)


def test_the_name_in_lm_evals_registry(saved):
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


def test_likelihoods_are_those_of_lm_evals_own_model(tmp_path):
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    model = CausalLMConfig(**{**SMALL, "vocab_size": 300, **CAUSAL["lightnet"]}).build()
    to_transformers(model.eval()).save_pretrained(tmp_path)
    byte_level_bpe().save_pretrained(tmp_path)
    pairs = [("the cat", " sat on the mat"), ("the cat", " naïve"), ("a", "b"), ("", "the mat")]
    ours = OnescanLM(model, PretrainedTokenizer("pairs", byte_level_bpe()))
    theirs = HFLM(pretrained=str(tmp_path), device="cpu", batch_size=2)
    got, want = (lm.loglikelihood(requests(*pairs)) for lm in (ours, theirs))
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert [s for s, _ in got] == pytest.approx([s for s, _ in want], rel=1e-4)
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


def test_sets_of_tasks_are_spelt_out():
    asked = TasksConfig(tasks="boolq, commonsense,piqa")
    six = ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa"]
    assert asked.names == ["boolq", *six]


def test_lm_evals_own_tasks_are_indexed_only_where_one_may_be_asked(saved, monkeypatch):
    from lm_eval.tasks import TaskManager

    indexed = []

    def manager(include_path=None, include_defaults=True):
        indexed.append(include_defaults)
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    (saved.folder / "tasks/pets.yaml").write_text("group: pets\ntask: [cats, piqa]")
    for tasks in ("cats", "pets", "cats,piqa"):
        found = _manager_of(TasksConfig(tasks=tasks, include_path=saved.folder / "tasks"))
        assert {"cats", "pets"} <= set(found.all_tasks)
    assert indexed == [False, False, True, False, True]


def test_mistakes_are_told_in_a_sentence(saved, capsys, monkeypatch):
    def told(*words):
        assert main(["evaluate", saved.model, *words]) == 2
        return capsys.readouterr().err

    local = ["--include-path", str(saved.folder / "tasks")]
    names = "cats,piqa,caats"  # of the folder, of lm-eval, of neither
    assert "tasks has 'caats', which lm-eval does not know" in told("--tasks", names, *local)
    assert "include_path is 'nowhere', which is no folder" in told(
        "--tasks", "cats", "--include-path", "nowhere"
    )
    assert "limit is 0" in told("--tasks", "cats", "--limit", "0")
    assert "num_fewshot is -1" in told("--tasks", "cats", "--num-fewshot", "-1")
    assert "out is 'x.txt', expected a file name ending in .json" in told(
        "--tasks", "cats", "--out", "x.txt"
    )
    assert "limit is '3', but requires --tasks" in told("--limit", "3")
    assert "workers is 2, but is not supported with --tasks" in told(
        "--tasks", "cats", "--workers", "2"
    )
    masked = MaskedLMConfig(**{**SMALL, "vocab_size": 12}, **BOTH["bert"]).build()
    to_transformers(masked).save_pretrained(saved.model)
    assert "the model is a MaskedLM, expected a CausalLM" in told("--tasks", "cats", *local)
    (saved.folder / "broken").mkdir()
    (saved.folder / "broken/dogs.yaml").write_text("task: [dogs")
    yaml = told("--tasks", "dogs", "--include-path", str(saved.folder / "broken"))
    assert "dogs.yaml, which is no YAML: while parsing" in yaml
    assert "line 1" in yaml
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", saved.model, "--tasks", "cats"]) == 1
    assert "tasks need lm-eval: pip install 'onescan[eval]'" in capsys.readouterr().err
