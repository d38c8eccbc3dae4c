"""Tokenizers, text generation, and prediction of masked tokens."""

import re
import socket

import pytest
import torch
from tiny_language_models import BOTH, SMALL, writer
from tiny_tokenizers import ODD, WORDS, byte_level_bpe, word_tokenizer, words

import onescan
from onescan.cli import main
from onescan.inference.text_generation import Guess, fill_masks, generate_text
from onescan.inputs.tokenizer import ByteTokenizer, PretrainedTokenizer, load_tokenizer
from onescan.integrations.transformers import to_transformers
from onescan.models.causal_lm import Sampling
from onescan.models.masked_lm import MaskedLMConfig


def filler(name="bert"):
    sizes = {**SMALL, "vocab_size": len(WORDS), **BOTH[name]}
    return MaskedLMConfig(**sizes).build().eval()


def test_bytes_are_utf8_without_special_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(ODD) == list(ODD.encode())
    assert tokenizer.decode([*ODD.encode(), tokenizer.end, tokenizer.mask]) == ODD
    assert tokenizer.encode("a[MASK]b", framed=True) == [97, 257, 98]
    assert tokenizer.encode("a[MASK]b") == list(b"a[MASK]b")


def test_a_tokenizer_is_loaded_from_a_folder_or_file(tmp_path):
    byte_level_bpe().save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(str(name))
        assert tokenizer.decode(tokenizer.encode(ODD)) == ODD
        assert (tokenizer.end, tokenizer.mask) == (0, None)
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


def test_special_tokens_frame_a_whole_text():
    tokenizer = words(framed=True)
    assert tokenizer.encode("the cat") == [5, 6]
    assert tokenizer.encode("the cat", framed=True) == [2, 5, 6, 3]
    assert (tokenizer.end, tokenizer.mask, tokenizer.mask_text) == (3, 4, "[MASK]")


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
def test_a_stream_yields_whole_characters(kind):
    pairs = PretrainedTokenizer("pairs", byte_level_bpe())
    tokenizer = ByteTokenizer() if kind == "bytes" else pairs
    pieces = list(tokenizer.stream(tokenizer.encode(ODD)))
    assert "".join(pieces) == ODD
    assert len(pieces) > 10
    assert not any("\ufffd" in piece for piece in pieces)
    cut = list(tokenizer.stream("é".encode()[:1] if kind == "bytes" else []))
    assert cut == (["\ufffd"] if kind == "bytes" else [])


def test_a_stream_of_invalid_bytes_yields_replacements():
    pieces = list(ByteTokenizer().stream([0x80] * 40))
    assert "".join(pieces) == "\ufffd" * 40
    assert len(pieces) > 3


def test_a_prompt_begins_with_the_tokenizers_special_tokens():
    framed, plain = words(framed=True), words()
    assert framed.begin("the cat") == [2, 5, 6]  # [CLS], and no [SEP]
    assert framed.begin("") == [2]
    assert plain.begin("the cat") == [5, 6]
    assert plain.begin("") == [plain.end]
    assert ByteTokenizer().begin("a") == [97]


def test_tokens_are_formatted():
    assert [ByteTokenizer().format_token(i) for i in (97, 32, 10)] == ["a", "' '", r"'\n'"]
    assert words().format_token(4) == "[MASK]"
    pairs = PretrainedTokenizer("pairs", byte_level_bpe())
    space, line_break = pairs.tokenizer.convert_tokens_to_ids(["\u0120", "\u010a"])
    assert pairs.format_token(space) == "' '"
    assert pairs.format_token(line_break) == r"'\n'"


@pytest.mark.slow
def test_ids_beyond_the_tokenizer_are_not_generated():
    model = writer(vocab_size=700)  # the tokenizer has 258
    sampling = Sampling(temperature=3.0)
    tokens = model.stream(torch.tensor([[97]]), sampling, max_new_tokens=60, vocab_size=258)
    assert max(int(token) for token, _ in tokens) < 258
    assert len("".join(generate_text(model, ByteTokenizer(), "a", sampling, max_new_tokens=60))) > 0


def test_a_stream_of_words_has_spaces_between_them():
    assert "".join(words().stream([5, 6, 7])) == "the cat sat"


def test_invalid_tokenizers_are_rejected(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="cannot load a tokenizer from"):
            load_tokenizer(str(place))
    with pytest.raises(ValueError, match="token 300 is unknown to tokenizer 'bytes', which"):
        ByteTokenizer().decode([3, 300])
    with pytest.raises(ValueError, match="tokenizer 'bytes' has 258 tokens, but the model's voc"):
        next(generate_text(writer(vocab_size=200), ByteTokenizer(), "a", max_new_tokens=3))


def test_a_missing_folder_of_a_tokenizer_is_named_at_once(monkeypatch):
    def unknown(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("onescan.checkpoint.hub.getproxies", dict)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waits for another try"))
    message = "tokenizer from 'nowhere' on disk or on the Hugging Face Hub: "
    with pytest.raises(ValueError, match=message):
        load_tokenizer("nowhere")


def test_generated_text_is_that_of_generate():
    model, prompt = writer(), "the cat"
    got = "".join(generate_text(model, ByteTokenizer(), prompt, max_new_tokens=20))
    ids = model.generate(torch.tensor([list(prompt.encode())]), max_new_tokens=20, end=256)[0]
    assert got == ByteTokenizer().decode(ids.tolist())


def test_generation_stops_at_the_end_token():
    def next_letter(tokens, state=None, **_):
        logits = torch.zeros(1, 1, 258)
        logits[..., 256 if tokens[0, -1] == 98 else tokens[0, -1] + 1] = 1
        return logits, state

    model = writer()
    model.forward = next_letter
    assert "".join(generate_text(model, ByteTokenizer(), "X", max_new_tokens=90)) == "YZ[\\]^_`ab"


def test_an_empty_prompt_starts_from_the_end_token():
    model = writer()
    got = "".join(generate_text(model, ByteTokenizer(), "", max_new_tokens=5))
    want = model.generate(torch.tensor([[256]]), max_new_tokens=5, end=256)[0]
    assert got == ByteTokenizer().decode(want.tolist())
    tokenizer = words()
    tokenizer.end = None
    with pytest.raises(ValueError, match="the tokenizer has no beginning-of-text token"):
        tokenizer.begin("")


def test_the_seed_determines_the_text():
    model = writer()

    def generate(seed):
        generator = torch.Generator().manual_seed(seed)
        sampling = Sampling(temperature=1.0)
        options = {"max_new_tokens": 12, "generator": generator}
        return "".join(generate_text(model, ByteTokenizer(), "the", sampling, **options))

    assert generate(1) == generate(1)
    assert len({generate(seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("name", ["bert", "lightnet"])
def test_masks_are_filled_with_the_most_likely_tokens(name):
    model, tokenizer = filler(name), words(framed=True)
    (first, second) = fill_masks(model, tokenizer, "the [MASK] sat [MASK]", top_k=3)
    scores = model(torch.tensor([[2, 5, 4, 7, 4, 3]]))[0].softmax(-1)
    for guesses, place in ((first, 2), (second, 4)):
        best = scores[place].topk(3)
        assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist())
        assert [guess.text for guess in guesses] == [
            tokenizer.format_token(i) for i in best.indices.tolist()
        ]


def test_invalid_texts_to_fill_are_rejected():
    with pytest.raises(ValueError, match=r"text has no \[MASK\] to be filled in: 'the cat'"):
        fill_masks(filler(), words(framed=True), "the cat")
    with pytest.raises(ValueError, match="top_k is 0"):
        fill_masks(filler(), words(framed=True), "the [MASK]", top_k=0)
    big = MaskedLMConfig(**{**SMALL, "vocab_size": 300, **BOTH["lion"]}).build()
    with pytest.raises(ValueError, match="tokenizer 'pairs' has no mask token"):
        fill_masks(big, PretrainedTokenizer("pairs", byte_level_bpe()), "the [MASK]")


@pytest.fixture
def saved(tmp_path):
    """Folders of a causal and of a masked language model."""
    for name, model, framed in (("writer", word_writer(), False), ("filler", filler(), True)):
        to_transformers(model).save_pretrained(tmp_path / name)
        word_tokenizer(framed=framed).save_pretrained(tmp_path / name)
    return tmp_path


def word_writer():
    return writer(vocab_size=len(WORDS))


def test_generate_streams_to_the_terminal(saved, capsys):
    words = ["generate", str(saved / "writer"), "--prompt", "the cat", "--max-new-tokens", "6"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert main([*words, "--seed", "1", "--temperature", "5"]) == 0
    assert capsys.readouterr().out != first


def test_generate_reads_its_prompt_from_standard_input(saved, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.read", lambda: "a dog", raising=False)
    assert main(["generate", str(saved / "writer"), "--prompt", "-", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("a dog")


def test_fill_prints_one_line_per_mask(saved, capsys):
    text = "the [MASK] sat on [MASK]"
    assert main(["fill", str(saved / "filler"), text, "--top-k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"\S* ?\d+\.\d%, \S* ?\d+\.\d%", line) for line in lines), lines


def test_models_for_other_commands_are_refused(saved, capsys):
    for argv, message in [
        (("generate", saved / "filler"), "is a MaskedLM, expected a CausalLM; use `onescan fill`"),
        (("fill", saved / "writer", "a"), "expected a MaskedLM; use `onescan generate`"),
        (("predict", "zoo/shakespeare_lightnet", "To be"), "a CausalLM, which predicts no classes"),
        (("predict", "zoo/shakespeare_lightnet", "To be"), "use `onescan generate`"),
        (("predict", "zoo/digits_denoiser", "a.png"), "use `onescan sample`"),
    ]:
        assert main(list(map(str, argv))) == 2
        assert message in capsys.readouterr().err


def test_filled_punctuation_is_quoted(saved, capsys, monkeypatch):
    guesses = [Guess("cat", 0.5), Guess(",", 0.25), Guess(repr(" "), 0.125)]
    monkeypatch.setattr("onescan.inference.text_generation.fill_masks", lambda *_, **__: [guesses])
    assert main(["fill", str(saved / "filler"), "a [MASK]"]) == 0
    assert capsys.readouterr().out == "cat 50.0%, ',' 25.0%, ' ' 12.5%\n"


@pytest.mark.slow
def test_mistakes_are_reported_in_one_line(saved, capsys):
    def error(*argv):
        assert main(list(argv)) == 2
        return capsys.readouterr().err

    assert "text has no [MASK]" in error("fill", str(saved / "filler"), "the cat")
    assert "--max-new-tokens is 0" in error(
        "generate", str(saved / "writer"), "--prompt", "a", "--max-new-tokens", "0"
    )
    assert "--temperature is -1.0" in error(
        "generate", str(saved / "writer"), "--prompt", "a", "--temperature", "-1"
    )
    writer_words = ["generate", str(saved / "writer"), "--prompt"]
    assert "--seed is -1, expected" in error(*writer_words, "a", "--seed", "-1")
    assert "prompt is 'a\\udcff', expected Unicode text" in error(*writer_words, "a\udcff")
    weights = saved / "writer" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:200])
    assert "holds no model that can be loaded" in error(*writer_words, "a")
    weights.write_bytes(whole)
    config = saved / "writer" / "config.json"
    right = config.read_text()
    config.write_text(right.replace('"width": 24', '"width": 36'))
    assert "holds no model that can be loaded" in error(*writer_words, "a")
    config.write_text(right)
    byte_level_bpe().save_pretrained(saved / "writer")
    assert "they do not match" in error("generate", str(saved / "writer"))
    to_transformers(
        onescan.build("lightnet_tiny", depth=1, width=24, **{"mixer.num_heads": 2})
    ).save_pretrained(saved / "filler")
    assert "holds OnescanForImageClassification, expected one of" in error(
        "fill", str(saved / "filler"), "[MASK]"
    )
