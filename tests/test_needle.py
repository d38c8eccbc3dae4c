"""The needle in a haystack: who has it in sight finds it, and what is measured is what is read."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from html_page import Page, assert_loads_nothing
from matplotlib.figure import Figure
from test_language_runs import text as text  # a fixture
from test_language_runs import train
from tiny_language_models import BOTH, CAUSAL, SMALL, built
from tiny_tokenizers import WORDS, word_tokenizer
from torch import nn

from onescan.cli import main
from onescan.data.text import ByteTokenizer, PretrainedTokenizer
from onescan.evaluation import needle
from onescan.evaluation.asked import NeedleConfig
from onescan.evaluation.haystack import Haystack, read_haystack
from onescan.evaluation.hidden import hide
from onescan.evaluation.needle import measure_needles
from onescan.integrations.transformers import to_transformers
from onescan.models.causal_lm import CausalLM, CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig
from onescan.models.token_network import NetworkState
from onescan.report import heat_map, needle_table, write_needles

TOKENIZER = ByteTokenizer()
LINES = "".join(f"Line {i}: all the hay that there is, and more of it.\n" for i in range(80))
HAY = Haystack("lines", TOKENIZER.encode_many([LINES])[0])
ASKED = NeedleConfig(lengths=(200, 400), depths=(1.0, 0.0, 0.5), trials=3, prefill_chunk_size=64)
BYTES = {**SMALL, "vocab_size": TOKENIZER.size}


class Copier(CausalLM):
    """Says what followed the last few tokens when they came before, among the last `sight`."""

    def __init__(self, sight=10_000, suffix=9):
        nn.Module.__init__(self)
        self.config = CausalLMConfig(**BYTES, **CAUSAL["lion"])
        self.sight, self.suffix, self.longest = sight, suffix, 0
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens, state=None, *, last_only=False):
        read = tokens if state is None else torch.cat([state.position, tokens], dim=1)
        self.longest = max(self.longest, tokens.shape[1])
        ends = range(read.shape[1] - (1 if last_only else tokens.shape[1]) + 1, read.shape[1] + 1)
        logits = torch.zeros(1, len(ends), TOKENIZER.size)
        for row, end in zip(logits[0], ends, strict=True):
            seen = bytes(token % 256 for token in read[0, max(0, end - self.sight) : end].tolist())
            before = seen.rfind(seen[-self.suffix :], 0, len(seen) - 1)
            if before >= 0:
                row[seen[before + self.suffix]] = 30.0
        return logits, NetworkState(read[:, -self.sight :], ())


def measured(folder, model=None, tokenizer=TOKENIZER, haystack=HAY, **changes):
    model = Copier() if model is None else model
    return measure_needles("mine", model, tokenizer, haystack, replace(ASKED, **changes), folder)


def whole(hidden, hay, depth):
    """All tokens but the answer's; without the needle where depth is None."""
    place = round((depth or 0) * len(hay))
    middle = hidden.needle if depth is not None else []
    return [*hidden.opening, *hay[:place], *middle, *hay[place:], *hidden.question]


def test_who_copies_finds_every_needle(tmp_path):
    model = Copier()
    grid = measured(tmp_path, model)
    assert grid.lengths == [200, 400]
    assert grid.accuracy().tolist() == [[1, 1]] * 3
    assert grid.gain() == pytest.approx(np.full((3, 2), 5 * np.log(TOKENIZER.size)))  # " 1234"
    assert model.longest == 64
    assert len(grid.outcomes) == 2 * 3 * 3


def test_who_sees_little_finds_what_is_near(tmp_path):
    found = measured(tmp_path / "near", Copier(sight=100))
    assert found.accuracy().tolist() == [[0, 0], [0, 0], [1, 1]]  # depths 0, 0.5 and 1
    assert found.gain()[:2] == pytest.approx(np.zeros((2, 2)))
    further = measured(tmp_path / "further", Copier(sight=250))
    assert further.accuracy()[0].tolist() == [1, 0]  # lengths 200 and 400
    nothing = measured(tmp_path / "blind", Copier(sight=20))
    assert nothing.accuracy().max() == 0
    assert np.abs(nothing.gain()).max() == 0


@pytest.mark.parametrize("kind", CAUSAL)
def test_pieces_and_shared_states_are_one_call_over_the_whole_text(kind, tmp_path):
    position = CAUSAL[kind]["position"]
    if hasattr(position, "max_tokens"):
        position = replace(position, max_tokens=200)
    model = built(CausalLMConfig(**{**BYTES, **CAUSAL[kind], "position": position}))
    grid = measured(tmp_path, model, lengths=(150,), trials=2, prefill_chunk_size=17)
    for outcome in grid.outcomes:
        asked = grid.asked
        hidden, hay = hide(TOKENIZER, HAY, asked, length=150, trial=outcome.trial)
        for depth, value in ((outcome.depth, outcome.log_probability), (None, outcome.without)):
            before = whole(hidden, hay, depth)
            with torch.no_grad():
                logits, _ = model(torch.tensor([before + hidden.answer]))
            shares = logits[0, len(before) - 1 : -1].log_softmax(-1)
            told = sum(row[token] for row, token in zip(shares, hidden.answer, strict=True))
            assert value == pytest.approx(told.item(), rel=1e-5)
            if depth is not None:
                assert outcome.right == (shares.argmax(-1).tolist() == hidden.answer)


def test_what_is_hidden_is_what_was_asked_for():
    asked = replace(ASKED, needle="{name} has {number} hens.", question="{name} has", digits=3)
    seen = set()
    for trial in range(8):
        hidden, hay = hide(TOKENIZER, HAY, asked, length=300, trial=trial)
        fact, question, answer = (TOKENIZER.decode(part) for part in hidden[1:])
        name = question.strip().removesuffix(" has")
        assert fact == f"\n{name} has{answer} hens.\n"
        assert len(answer.strip()) == 3
        assert 100 <= int(answer) <= 999
        assert len(whole(hidden, hay, 0.0)) + len(hidden.answer) == 300
        assert TOKENIZER.decode(hay) in LINES
        assert hide(TOKENIZER, HAY, asked, length=200, trial=trial)[0] == hidden
        seen.add((fact, bytes(hay)))
    assert len(seen) == 8


def test_what_a_tokenizer_puts_before_a_text_is_read_first():
    digits = [str(number) for number in range(10)]
    framed = PretrainedTokenizer("words", word_tokenizer(framed=True, words=[*WORDS, *digits]))
    asked = replace(ASKED, needle="the cat {number}", question="the cat", digits=1)
    hay = Haystack("mats", framed.encode_many(["mat on the " * 40])[0])
    hidden, _ = hide(framed, hay, asked, length=50, trial=0)
    assert hidden.opening == [framed.encode("[CLS]", framed=True)[0]] == [2]
    assert (hidden.question, hidden.needle[:-1]) == ([5, 6], [5, 6])
    assert hidden.answer == hidden.needle[-1:]


def test_json_and_page_hold_the_grid(tmp_path):
    grid = measured(tmp_path, Copier(sight=100))
    held = json.loads((tmp_path / "needle.json").read_text())
    assert len(held["outcomes"]) == 18
    near = [each for each in held["outcomes"] if each["depth"] == 1]
    assert all(each["right"] and each["log_probability"] > each["without"] for each in near)
    html = write_needles(grid, tmp_path / "report.html").read_text()
    assert_loads_nothing(html)
    page = Page(html)
    assert "The magic number of {name} is {number}." in page.text
    found, gained = (svg.decode() for svg in page.pictures("svg+xml"))
    for svg in (found, gained):
        assert all(f">{name}<" in svg for name in ("0%", "50%", "100%", "200", "400"))
    assert found.index(">0%<") < found.index(">50%<") < found.index(">100%<")
    assert found.count(">0%<") == 5  # four cells, and a depth
    assert gained.count(f">{5 * np.log(258):.2f}<") == 2
    assert needle_table(grid).splitlines() == [
        "depth               200               400",
        "   0%         0%, +0.00         0%, +0.00",
        "  50%         0%, +0.00         0%, +0.00",
        " 100%      100%, +27.76      100%, +27.76",
    ]


def test_a_number_stands_in_its_cell_and_nan_in_none(monkeypatch):
    figure = Figure()
    monkeypatch.setattr(heat_map, "chart", lambda draw, **_: str(draw(figure)))
    cells = np.array([[0.0, 0.5, 0.25], [1.0, np.nan, 0.75]])
    down, along = heat_map.Axis("y", ["a", "b"]), heat_map.Axis("x", ["c", "d", "e"])
    heat_map.heat_map(cells, down=down, along=along, shades=heat_map.SHARES, spell=str, alt="")
    (axes,) = figure.axes
    assert {text.get_text(): text.get_position() for text in axes.texts} == {
        "0.0": (0.5, 0.5), "0.5": (1.5, 0.5), "0.25": (2.5, 0.5), "1.0": (0.5, 1.5),
        "0.75": (2.5, 1.5),
    }  # fmt: skip
    low, high = axes.get_ylim()
    assert low > high  # the first row is on top
    colors = {text.get_text(): text.get_color() for text in axes.texts}
    assert colors["1.0"] == "white" != colors["0.0"]


def test_what_is_known_is_not_measured_again(tmp_path, monkeypatch):
    first, lengths = measured(tmp_path), []
    outcomes = needle._outcomes

    def watched(reader, hidden, hay, asked, **where):
        lengths.append(where["length"])
        return outcomes(reader, hidden, hay, asked, **where)

    monkeypatch.setattr(needle, "_outcomes", watched)
    assert measured(tmp_path) == first
    assert not lengths
    more = measured(tmp_path, lengths=(400, 300), trials=4)
    assert lengths == [300] * 4 + [400]
    assert more.lengths == [200, 300, 400]
    with pytest.raises(ValueError, match=r"needle\.json holds what was measured with weights '"):
        measured(tmp_path, Copier().requires_grad_(False).double())
    with pytest.raises(ValueError, match=r"with asked\.digits 4, and not 5: choose another fol"):
        measured(tmp_path, digits=5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": ()}, r"lengths is \(\), expected at least one, and each once"),
        ({"depths": (0.5, 0.5)}, r"depths is \(0.5, 0.5\), expected at least one, and each once"),
        ({"depths": (0.5, 1.5)}, "depths has 1.5, expected 0, before the haystack, to 1, after it"),
        ({"lengths": (20,)}, r"lengths has 20, expected more than the \d+ tokens of a needle"),
        ({"lengths": (9999,)}, r"lengths has 9999, but lines has \d+ tokens, expected 99\d\d at l"),
        ({"needle": "no number"}, r"needle is 'no number', expected \{number\} in it"),
        ({"question": "is it {number}"}, r"question is 'is it \{number\}', expected a text with"),
        ({"question": " "}, "question is ' ', expected a text without"),
        ({"needle": "{nmae} {number}"}, r"needle is '\{nmae\} \{number\}', expected no braces but"),
        ({"question": "{name"}, r"question is '\{name', expected no braces but those of"),
        ({"trials": 0}, "trials is 0, expected a number above 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        measured(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_model_is_not_asked_beyond_its_places(tmp_path):
    model = built(CausalLMConfig(**{**BYTES, **CAUSAL["gpt2"]}))
    with pytest.raises(ValueError, match="lengths has 200, but the model has places for 40 tokens"):
        measured(tmp_path, model)


def test_a_run_is_asked_from_the_command_line(text, tmp_path, capsys):
    run = train("shakespeare_lion_s", text)
    words = ["needle", str(run), "--lengths", "150", "200", "--trials", "2"]
    out = tmp_path / "found"
    capsys.readouterr()
    assert main([*words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert word_boundaries(shown)[0] == ["depth", "150", "200"]
    assert f"report: {out / 'report.html'}" in shown
    held = json.loads((out / "needle.json").read_text())
    assert (held["name"], held["haystack"]) == ("run/seed-0", "the held-out text of run/seed-0")
    weights = str(run / "best.safetensors")  # the same model by another name
    assert main(["needle", weights, *words[2:], "--out", str(out)]) == 0
    elsewhere = tmp_path / "hay.txt"
    elsewhere.write_text(LINES)
    assert main([*words, "--out", str(tmp_path / "own"), "--haystack", str(elsewhere)]) == 0
    assert main([*words, "--out", str(out), "--lengths", "90000"]) == 2
    assert "expected 899" in capsys.readouterr().err


def word_boundaries(shown):
    return [line.split() for line in shown.splitlines()]


def test_what_is_no_language_model_or_no_text_is_told(tmp_path, capsys):
    masked = MaskedLMConfig(**{**SMALL, "vocab_size": len(WORDS), **BOTH["bert"]}).build()
    causal = CausalLMConfig(**{**SMALL, "vocab_size": len(WORDS), **CAUSAL["lion"]}).build()
    for name, model in (("masked", masked), ("causal", causal)):
        to_transformers(model).save_pretrained(tmp_path / name)
        word_tokenizer().save_pretrained(tmp_path / name)
    assert main(["needle", str(tmp_path / "masked")]) == 2
    assert "is a MaskedLM, expected a CausalLM" in capsys.readouterr().err
    assert main(["needle", str(tmp_path / "causal")]) == 2
    assert "haystack is to be given, as there is no other text" in capsys.readouterr().err
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"bytes\.txt', which is no text in UTF-8"):
        read_haystack(tmp_path / "bytes.txt", TOKENIZER)
    with pytest.raises(ValueError, match=r"haystack is '.*nowhere.txt', which is no file"):
        read_haystack(tmp_path / "nowhere.txt", TOKENIZER)
