"""Decoding tokens one by one and counting their bytes, for every kind of tokenizer."""

import math
import random
import re

import pytest
import torch
from tiny_language_models import BOTH, SMALL, writer
from tiny_tokenizers import ODD, byte_level_bpe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.report.texts import _filled_masks, _rows
from onescan.experiments.tasks import LanguageModellingConfig, MaskedLanguageModellingConfig
from onescan.inference.text_generation import generate_text
from onescan.inputs.tokenizer import ByteTokenizer, PretrainedTokenizer, load_tokenizer
from onescan.models.masked_lm import MaskedLMConfig

SPECIAL = ["<unk>", "</s>", "[MASK]"]
METASPACE = ["▁", "▁a", "▁bc", "d", ".", "▁▁", "▁d▁", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in (*"\n漢é😀".encode(), 0xFF, 0x41)]
PIECES = ["a", "##b", "the", ".", "'", "s", "n", "##t", "!", "n't", "do", "not", "'v", "##e", "r"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def tokenizer(words, decoder, model=models.WordLevel, **options):
    """A tokenizer with a few words after the special tokens."""
    ids = {word: i for i, word in enumerate([*SPECIAL, *words])}
    found = Tokenizer(model(ids, unk_token="<unk>"))
    found.pre_tokenizer, found.decoder = pre_tokenizers.WhitespaceSplit(), decoder
    special = {"unk_token": "<unk>", "eos_token": "</s>", "mask_token": "[MASK]"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=found, **special, **options)
    return PretrainedTokenizer("few words", wrapped)


CLEANED = {"clean_up_tokenization_spaces": True}
KINDS = {
    "bytes": ByteTokenizer,
    "byte-level": lambda: PretrainedTokenizer("pairs", byte_level_bpe()),
    "metaspace": lambda: tokenizer(METASPACE, decoders.Metaspace()),
    "metaspace, never": lambda: tokenizer(METASPACE, decoders.Metaspace(prepend_scheme="never")),
    "llama": lambda: tokenizer(
        METASPACE + BYTES, decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)])
    ),
    "byte fallback": lambda: tokenizer(
        METASPACE + BYTES, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "strip": lambda: tokenizer(
        METASPACE, decoders.Sequence([LLAMA[0], decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ),
    "wordpiece": lambda: tokenizer(PIECES, decoders.WordPiece(), models.WordPiece),
    "wordpiece, cleaned": lambda: tokenizer(
        PIECES, decoders.WordPiece(cleanup=False), models.WordPiece, **CLEANED
    ),
    "words, cleaned": lambda: tokenizer([*PIECES, "ve", "m", "?", ","], None, **CLEANED),
    "suffixes": lambda: tokenizer(["a</w>", "b", "c</w>", "</w>", "d"], decoders.BPEDecoder()),
    "ctc": lambda: tokenizer(["<pad>", "|", "a", "b", "c", "."], decoders.CTC()),
    "fuse": lambda: tokenizer(["a", " b", "c "], decoders.Fuse()),
}
over_kinds = pytest.mark.parametrize("kind", KINDS)


def random_texts(tokenizer, count=150):
    rng = random.Random(0)
    for _ in range(count):
        yield rng.choices(range(tokenizer.size), k=rng.choice([0, 1, 2, 5, 9, 30]))


@pytest.mark.sampled(5)
@over_kinds
def test_streamed_pieces_are_the_decoded_text(kind):
    tokenizer = KINDS[kind]()
    for ids in random_texts(tokenizer):
        *pieces, rest = tokenizer.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join([*pieces, rest]) == tokenizer.decode(ids)
        if kind != "bytes":
            assert tokenizer.decode(ids) == tokenizer.tokenizer.decode(
                ids, skip_special_tokens=True
            )


@pytest.mark.slow
@over_kinds
def test_a_context_and_streamed_pieces_are_the_decoded_text(kind):
    tokenizer, found = KINDS[kind](), 0
    for ids in random_texts(tokenizer):
        whole = tokenizer.decode(ids)
        for cut in range(len(ids)):
            before = tokenizer.decode(ids[:cut])
            if whole.startswith(before):  # not within a character
                found += cut > 0
                assert before + "".join(tokenizer.stream(ids[cut:], ids[:cut])) == whole
    assert found > 300


@pytest.mark.sampled(4)
@over_kinds
def test_long_streams_are_not_decoded_as_a_whole(kind, monkeypatch):
    tokenizer = KINDS[kind]()
    ids = random.Random(1).choices(range(tokenizer.size), k=2000)
    whole, longest, decode = tokenizer.decode(ids), [], tokenizer._decode

    def counted(part):
        longest.append(len(part))
        return decode(part)

    monkeypatch.setattr(tokenizer, "_decode", counted)
    assert "".join(tokenizer.stream(ids)) == whole
    assert max(longest) < 60


def fixed_writer(tokens):
    """A model that generates the same tokens after any prompt."""
    model = writer(vocab_size=300)
    model.stream = lambda *_, **__: iter([(torch.tensor(token), None) for token in tokens])
    return model


class Uniform(torch.nn.Module):
    """A model that predicts all tokens alike."""

    def __init__(self, size=258, *, is_causal=False):
        super().__init__()
        self.size, self.is_causal = size, is_causal

    def forward(self, tokens, **_):
        logits = torch.zeros(*tokens.shape, self.size)
        return (logits, None) if self.is_causal else logits


@pytest.mark.parametrize(
    ("kind", "prompt", "words", "text"),
    [
        ("metaspace", "▁a", ["▁bc", "d", "▁bc"], " bcd bc"),
        ("metaspace", "▁a", ["</s>", "▁bc"], " bc"),
        ("llama", "▁a", ["▁bc", *BYTES[1:4], "▁"], " bc漢 "),
        ("strip", "▁a", ["▁", "▁bc"], "  bc"),
        ("wordpiece", "the", ["##t", "a", "[MASK]", ".", "a"], "t a. a"),
        ("wordpiece", "the ", ["##t", "a"], "t a"),
        ("wordpiece", "the  ", ["a"], " a"),
        ("suffixes", "a</w>", ["d", "c</w>", "a</w>"], " dc a"),
        ("words, cleaned", "a", ["'", "s", ".", "n't"], "'s.n't"),
    ],
)
def test_generated_text_keeps_the_space_after_the_prompt(kind, prompt, words, text):
    tokenizer = KINDS[kind]()
    ids = tokenizer.tokenizer.convert_tokens_to_ids(words)
    assert "".join(generate_text(fixed_writer(ids), tokenizer, prompt, max_new_tokens=9)) == text


# Bytes

ZH = "漢字 and 😀, naïve café. "


@over_kinds
def test_bytes_do_not_depend_on_where_a_text_is_cut(kind):
    tokenizer = KINDS[kind]()
    for ids in random_texts(tokenizer, 20):
        assert tokenizer.count_bytes(ids) == sum(tokenizer.count_bytes([token]) for token in ids)
    assert tokenizer.count_bytes([i for i in range(tokenizer.size) if i in tokenizer.special]) == 0


def test_bytes_of_characters_of_several_tokens_are_exact():
    for tokenizer in (ByteTokenizer(), PretrainedTokenizer("pairs", byte_level_bpe())):
        for text in (ODD, 9 * ZH, "ก", "\0"):
            assert tokenizer.count_bytes(tokenizer.encode(text)) == len(text.encode())


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("metaspace", {"▁": 1, "▁a": 2, "▁bc": 3, "d": 1, "é": 2, "▁d▁": 3, "</s>": 0}),
        ("llama", {"▁": 1, "▁a": 2, "é": 2, "<0xFF>": 1, "<0x41>": 1, "[MASK]": 0}),
        ("wordpiece", {"the": 4, "##b": 1, ".": 1, "n't": 3, "<unk>": 0}),
        ("suffixes", {"b": 1, "c</w>": 2, "d": 1}),
    ],
)
def test_bytes_of_tokens(kind, lengths):
    tokenizer = KINDS[kind]()
    ids = tokenizer.tokenizer.convert_tokens_to_ids(list(lengths))
    assert tokenizer.byte_lengths[ids].tolist() == list(lengths.values())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["bytes", "byte-level"])
def test_bits_per_byte_do_not_depend_on_the_length_of_rows(tmp_path, kind):
    tokenizer = KINDS[kind]()
    name = "bytes"
    if kind != "bytes":
        name = str(tmp_path / "tokenizer")
        tokenizer.tokenizer.save_pretrained(name)
    path = tmp_path / "text.txt"
    path.write_text("漢字😀" * 400, encoding="utf-8")

    bits, model = [], Uniform(tokenizer.size, is_causal=True)
    for length in (8, 64, 10**5):
        options = {"tokenizer": name, "length": length, "test_path": str(path), "cache": False}
        splits = TextDatasetConfig(path=str(path), **options).build()
        task = LanguageModellingConfig().build(splits)
        examples = [example for example, _ in task.test.examples(seed=None)]
        rows = task.predict(model, task.test.read(examples).batch)
        ids = [i for example in examples for a, b in example.source for i in
               task.test.corpus.tokens[a + 1 : b].tolist()]  # fmt: skip
        assert rows["bytes"].sum() == sum(tokenizer.byte_lengths[i] for i in ids)
        bits.append(task.evaluate(rows).metrics["bits_per_byte"])
    assert bits == pytest.approx([bits[0]] * 3, rel=0.02)
    assert kind != "bytes" or bits[0] == pytest.approx(math.log2(258), rel=0.01)


def test_masked_models_count_only_bytes_of_predicted_tokens(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("漢字😀" * 100, encoding="utf-8")
    splits = TextDatasetConfig(path=str(path), length=50, cache=False).build()
    task = MaskedLanguageModellingConfig(mask_rate=0.3).build(splits)
    batch = task.test.read([example for example, _ in task.test.examples(seed=None)]).batch

    rows = task.predict(Uniform(), batch)
    assert rows["bytes"].tolist() == rows["tokens"].tolist()


def test_the_byte_tokenizer_of_transformers_has_the_same_ids(tmp_path):
    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs = load_tokenizer(str(tmp_path))
    every = "".join(map(chr, range(0x250))) + ODD + "<end> [MASK]"
    assert theirs.encode(every) == ours.encode(every)
    assert [theirs.decode([i]) for i in range(258)] == [ours.decode([i]) for i in range(258)]
    assert theirs.encode("a[MASK]b", framed=True) == ours.encode("a[MASK]b", framed=True)
    assert (theirs.size, theirs.end, theirs.mask, theirs.mask_text) == (258, 256, 257, "[MASK]")
    assert theirs.byte_lengths.tolist() == ours.byte_lengths.tolist()
    for text in ("", "a"):
        assert theirs.begin(text) == ours.begin(text)


def test_a_report_shows_predicted_tokens_with_their_spaces(tmp_path):
    tokenizer = KINDS["metaspace"]()
    tokenizer.tokenizer.save_pretrained(tmp_path / "words")
    (tmp_path / "text.txt").write_text("▁a ▁bc d ▁a " * 9, encoding="utf-8")
    data = TextDatasetConfig(
        path=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "words"), length=8, cache=False
    )
    task = MaskedLanguageModellingConfig(mask_rate=0.8).build(data.build())
    model = MaskedLMConfig(**{**SMALL, "vocab_size": 11, **BOTH["bert"]}).build().eval()
    model.forward = lambda tokens, **_: torch.eye(11)[torch.full_like(tokens, 5)]  # always "▁bc"
    (first, *_) = _filled_masks(task, model)
    (row,) = (batch for index, batch in _rows(task.test) if index == 0)
    tokens, _, labels = task.masked_for_evaluation(row)
    filled = torch.where(labels == -100, tokens, 5)[0].tolist()
    assert re.sub("<[^>]*>", "", str(first.body)).strip() == tokenizer.decode(filled).strip()
    assert " bc" in str(first.body)
