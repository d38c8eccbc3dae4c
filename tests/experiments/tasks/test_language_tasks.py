"""Language modelling: losses, masks, scores, and separate documents."""

import math
from inspect import unwrap
from types import SimpleNamespace

import pytest
import torch
from tiny_language_models import BOTH, CAUSAL, SMALL
from tiny_tokenizers import WORDS, byte_level_bpe, word_tokenizer, words
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from onescan.experiments.data.share import Share
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.tasks import LanguageModellingConfig, MaskedLanguageModellingConfig
from onescan.inputs.tokenizer import ByteTokenizer, PretrainedTokenizer, word_boundaries
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLM, MaskedLMConfig

TEXTS = ("a cat", "é!", "on the mat")
IGNORE_INDEX = -100


def packed():
    """All texts in one row, each with its end, and padding; and the same in a row of its own."""
    rows = [[*text.encode(), 256] for text in TEXTS]
    tokens = [token for row in rows for token in row] + [256] * 3
    documents = [i for i, row in enumerate(rows) for _ in row] + [-1] * 3
    return torch.tensor([tokens]), torch.tensor([documents])


def alone():
    for text in TEXTS:
        tokens = torch.tensor([[*text.encode(), 256]])
        yield tokens, torch.zeros_like(tokens)


@pytest.fixture
def build_task(tmp_path):
    """A function that builds a task on a text, by default of bytes."""

    def build(config, tokenizer="bytes"):
        (tmp_path / "text.txt").write_text("a cat sat on the mat " * 20)
        data = TextDatasetConfig(
            path=str(tmp_path / "text.txt"), tokenizer=tokenizer, length=8, cache=False
        )
        return config.build(data.build())

    return build


def causal_model():
    sizes = {**SMALL, "vocab_size": 258, **CAUSAL["lightnet"]}
    return CausalLMConfig(**sizes).build().double()


def masked_model():
    sizes = {**SMALL, "vocab_size": 258, **BOTH["lightnet"]}
    return MaskedLMConfig(**sizes).build().double()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_packed_and_unpacked_texts_have_the_same_loss_and_gradients(build_task):
    task, model = build_task(LanguageModellingConfig()), causal_model()
    loss, _ = task.loss(model, packed())
    got = gradients(model, loss)
    parts = [(task.loss(model, batch)[0], batch[0].shape[1] - 1) for batch in alone()]
    want = sum(part * count for part, count in parts) / sum(count for _, count in parts)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, gradients(model, want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_loss_is_of_each_next_token(build_task):
    task, model = build_task(LanguageModellingConfig()), causal_model()
    tokens = torch.tensor([list(b"a cat"), list(b"a dog")])
    logits, _ = model(tokens[:, :-1])
    loss, metrics = task.loss(model, (tokens, torch.zeros_like(tokens)))
    want = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, want)
    right = (logits.argmax(-1) == tokens[:, 1:]).float().mean()
    torch.testing.assert_close(metrics["accuracy"], right)


def test_masked_models_see_only_one_document(build_task):
    task, model = build_task(MaskedLanguageModellingConfig(mask_rate=0.5)), masked_model()
    masked, documents, labels = task.corrupt(packed(), seed=4)
    loss, _ = task.loss(model, (masked, documents, labels))
    total, count = 0.0, 0
    for i in range(len(TEXTS)):
        inside = documents == i
        logits = model(masked[inside][None])
        total += cross_entropy(logits[0], labels[inside], reduction="sum")
        count += (labels[inside] != IGNORE_INDEX).sum()
    assert count > 3
    torch.testing.assert_close(loss, total / count)


@pytest.mark.parametrize("read_outs", [1, 2, 3])
def test_the_loss_is_the_mean_over_supervised_blocks(build_task, read_outs):
    """The network cut short after each of them, under the same norm and head."""
    task = build_task(MaskedLanguageModellingConfig(mask_rate=0.5, supervised_blocks=read_outs))
    sizes = {**SMALL, "vocab_size": 258, **BOTH["lightnet"], "depth": 3}
    model = MaskedLMConfig(**sizes).build().double()
    batch = task.corrupt(packed(), seed=4)
    loss, metrics = task.loss(model, batch)
    blocks, losses = model.network.blocks, []
    for depth in range(3 - read_outs + 1, 4):
        model.network.blocks = blocks[:depth]
        logits = model(batch[0], documents=batch[1])
        losses.append(cross_entropy(logits.flatten(0, 1), batch[2].flatten()))
    torch.testing.assert_close(loss, sum(losses) / read_outs)
    right = (logits.argmax(-1) == batch[2]).sum() / (batch[2] != IGNORE_INDEX).sum()
    torch.testing.assert_close(metrics["accuracy"], right)


def test_invalid_supervised_blocks_are_rejected(build_task):
    task, model = build_task(MaskedLanguageModellingConfig(supervised_blocks=9)), masked_model()
    with pytest.raises(ValueError, match="read_outs is 9, expected 1 to 2 blocks"):
        task.loss(model, task.corrupt(packed(), seed=4))
    with pytest.raises(
        ValueError, match=r"task\.supervised_blocks is 0, expected a number above 0"
    ):
        build_task(MaskedLanguageModellingConfig(supervised_blocks=0))


class Uniform(torch.nn.Module):
    """A masked language model that predicts all tokens alike."""

    def __init__(self, vocab_size=258):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, tokens, cu_seqlens=None):
        return torch.zeros(*tokens.shape, self.vocab_size)


class Oracle(torch.nn.Module):
    """Predicts all tokens alike, or only the right one."""

    def __init__(self, answers=None):
        super().__init__()
        self.answers, self.config = answers, SimpleNamespace(vocab_size=258)

    def forward(self, tokens, cu_seqlens=None):
        logits = torch.zeros(*tokens.shape, 258)
        if self.answers is not None:
            logits.scatter_(2, self.answers[..., None], 50.0)
        return logits, None


def test_evaluation_is_per_token_and_per_byte(build_task):
    task = build_task(LanguageModellingConfig())
    metrics = task.evaluate(task.predict(Oracle(), packed())).metrics
    tokens = sum(len(text.encode()) for text in TEXTS)  # without the first, with the end
    assert metrics["loss"] == pytest.approx(math.log(258), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(258, rel=1e-4)
    # the first byte of each text is not predicted, and the end is not a byte
    bits = tokens * math.log2(258) / (tokens - len(TEXTS))
    assert metrics["bits_per_byte"] == pytest.approx(bits)
    tokens, documents = packed()
    answers = tokens[:, 1:]
    exact = task.evaluate(task.predict(Oracle(answers), (tokens, documents))).metrics
    assert exact["accuracy"] == 1
    assert exact["loss"] < 1e-6
    assert task.score(exact) > task.score(metrics)


def test_a_text_of_one_token_has_no_loss(build_task):
    task = build_task(LanguageModellingConfig())
    one = torch.tensor([[97, 98]]), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="no token to predict"):
        task.evaluate(task.predict(Oracle(), one))


def test_mask_rates(build_task):
    config = MaskedLanguageModellingConfig(
        mask_rate=0.3, mask_replace_prob=0.6, random_replace_prob=0.3
    )
    task = build_task(config)
    tokens = torch.randint(256, (40, 500))
    masked, _, labels = task.corrupt((tokens, torch.zeros_like(tokens)), seed=1)
    chosen = labels != IGNORE_INDEX
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(masked[~chosen], tokens[~chosen])
    assert chosen.float().mean() == pytest.approx(0.3, abs=0.01)
    assert (masked[chosen] == 257).float().mean() == pytest.approx(0.6, abs=0.02)
    assert (masked[chosen] == tokens[chosen]).float().mean() == pytest.approx(0.1, abs=0.02)


def test_masks_depend_on_the_seed_and_are_fixed_in_evaluation(build_task):
    task, model = build_task(MaskedLanguageModellingConfig(mask_rate=0.5)), masked_model().eval()
    masked = [task.corrupt(packed(), seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(masked[0], masked[1])
    assert not torch.equal(masked[0], masked[2])
    rows = [task.predict(model, packed()) for _ in range(2)]
    assert torch.equal(rows[0]["losses"], rows[1]["losses"])


@pytest.mark.parametrize("whole_word", [False, True])
def test_masks_do_not_depend_on_the_number_of_processes(build_task, whole_word):
    config = MaskedLanguageModellingConfig(mask_rate=0.5, whole_word_mask=whole_word)
    task, tokens = build_task(config), torch.randint(256, (6, 50))
    batch = tokens, torch.arange(50).expand(6, 50) // 20
    whole = task.corrupt(batch, seed=1)
    for rank in range(3):
        rows = Share(rank, 3)
        own = task.corrupt(tuple(rows.cut(x, axis=0) for x in batch), 1, rows)
        assert all(map(torch.equal, own, (rows.cut(x, axis=0) for x in whole)))


@pytest.mark.parametrize("whole_word", [False, True])
def test_masks_of_a_test_row_do_not_depend_on_other_rows(build_task, whole_word):
    config = MaskedLanguageModellingConfig(mask_rate=0.5, whole_word_mask=whole_word)
    task, tokens = build_task(config), torch.randint(256, (6, 50))
    batch = tokens, torch.arange(50).expand(6, 50) // 20
    whole = task.masked_for_evaluation(batch)
    parts = [task.masked_for_evaluation(tuple(x[i : i + 4] for x in batch)) for i in (0, 4)]
    assert all(map(torch.equal, whole, map(torch.cat, zip(*parts, strict=True))))
    assert not torch.equal(*(row == 257 for row in whole[0][:2]))


def test_neither_ends_nor_padding_are_masked(build_task):
    task = build_task(MaskedLanguageModellingConfig(mask_rate=1.0))
    tokens, documents = packed()
    _, _, labels = task.corrupt((tokens, documents), seed=0)
    assert torch.equal(labels != IGNORE_INDEX, (documents >= 0) & (tokens != 256))


def test_evaluation_has_its_own_mask_rate(build_task):
    task = build_task(MaskedLanguageModellingConfig(mask_rate=0.3, evaluation_mask_rate=0.15))
    tokens = torch.randint(256, (40, 500))
    batch = tokens, torch.zeros_like(tokens)
    assert (task.corrupt(batch, seed=1)[2] != IGNORE_INDEX).float().mean() == pytest.approx(
        0.3, abs=0.01
    )
    rows = task.predict(Uniform(), batch)
    assert rows["tokens"].sum() / tokens.numel() == pytest.approx(0.15, abs=0.01)


def test_cls_and_sep_are_neither_masked_nor_scored(tmp_path):
    word_tokenizer(framed=True).save_pretrained(tmp_path / "words")
    (tmp_path / "text.txt").write_text("the cat sat on a mat\na dog sat\n" * 9)
    data = TextDatasetConfig(
        path=str(tmp_path / "text.txt"), test_path=str(tmp_path / "text.txt"), sample_by="line",
        tokenizer=str(tmp_path / "words"), length=7, add_special_tokens=True,
    ).build()  # fmt: skip
    task = MaskedLanguageModellingConfig(mask_rate=1.0).build(data)
    batch = task.test.read([example for example, _ in task.test.examples(seed=None)]).batch
    _, documents, labels = task.corrupt(batch, seed=0)
    special = torch.tensor([WORDS.index("[CLS]"), WORDS.index("[SEP]")])
    assert torch.equal(labels != IGNORE_INDEX, (documents >= 0) & ~torch.isin(batch[0], special))
    rows = task.predict(Uniform(len(WORDS)), batch)
    assert rows["tokens"].sum() == 9 * 9  # words
    with pytest.raises(ValueError, match=r"data\.add_special_tokens is True, expected False"):
        LanguageModellingConfig().build(data)


def test_words_are_masked_whole(build_task):
    task = build_task(MaskedLanguageModellingConfig(mask_rate=0.5, whole_word_mask=True))
    text = b"the cat sat on the mat, and 42 dogs looked at it "
    tokens = torch.tensor([list(text) * 4] * 8)
    _, _, labels = task.corrupt((tokens, torch.zeros_like(tokens)), seed=2)
    chosen, words = labels != IGNORE_INDEX, word_boundaries(ByteTokenizer()).word_starts(tokens)
    inside = ~words[:, 1:]  # a word's second and further tokens
    assert inside.any()
    assert torch.equal(chosen[:, 1:][inside], chosen[:, :-1][inside])
    assert 0.4 < chosen[words].float().mean() < 0.6


def split_words(tokenizer, text):
    """Split a text into words."""
    ids = tokenizer.encode(text)
    begins = word_boundaries(tokenizer).word_starts(torch.tensor([ids]))[0].tolist()
    found = []
    for token, is_first in zip(ids, begins, strict=True):
        found += [[token]] if is_first else []
        found[-1] += [] if is_first else [token]
    return [tokenizer.decode(word).strip() for word in found]


def word_pieces():
    vocabulary = {piece: i for i, piece in enumerate(["[UNK]", "the", "ca", "##t", "##s", "sa"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def test_words_of_every_kind_of_tokenizer():
    assert split_words(ByteTokenizer(), "né, 42 b") == ["né", ",", "", "42", "", "b"]
    pairs = PretrainedTokenizer("pairs", byte_level_bpe())
    assert [word for word in split_words(pairs, "the mats, a qat") if word] == [
        *("the", "mats", ",", "a", "qat")
    ]
    pieces = PretrainedTokenizer("pieces", word_pieces())
    ids = pieces.encode("the cats sat")
    begins = word_boundaries(pieces).word_starts(torch.tensor([ids]))[0].tolist()
    assert begins == [True, True, False, False, True, False]
    assert word_boundaries(words()).word_starts(torch.tensor([[5, 6, 7]])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_rate": 0.0}, r"task\.mask_rate is 0\.0, expected above 0 and at most 1"),
        ({"evaluation_mask_rate": 2.0}, r"task\.evaluation_mask_rate is 2\.0, expected above 0"),
        (
            {"mask_replace_prob": 0.9, "random_replace_prob": 0.2},
            r"task\.mask_replace_prob is 0\.9 and task\.random_replace_prob is 0\.2",
        ),
        ({"evaluation_batch_size": 0}, r"task\.evaluation_batch_size is 0"),
    ],
)
def test_invalid_settings_are_rejected(change, message, build_task, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_task(MaskedLanguageModellingConfig(**change))
    byte_level_bpe().save_pretrained(tmp_path / "pairs")
    with pytest.raises(ValueError, match=r"data\.tokenizer '.*pairs' has no mask"):
        build_task(MaskedLanguageModellingConfig(), str(tmp_path / "pairs"))
    small = CausalLMConfig(**{**SMALL, "vocab_size": 99, **CAUSAL["lightnet"]}).build()
    letters = torch.full((1, 5), 97), torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="tokenizer 'bytes' has 258 tokens, but the model's"):
        build_task(LanguageModellingConfig()).loss(small, letters)


@pytest.mark.parametrize("read_outs", [1, 2])
def test_logits_at_chosen_positions(read_outs):
    model = masked_model()
    tokens = torch.randint(256, (3, 7))
    positions = torch.rand(3, 7) < 0.5
    all_logits = model(tokens, read_outs=read_outs)
    some = model(tokens, read_outs=read_outs, positions=positions)
    torch.testing.assert_close(some, all_logits[positions.repeat(read_outs, 1)][None])
    assert model(tokens, positions=torch.zeros(3, 7, dtype=torch.bool)).shape == (1, 0, 258)
    with pytest.raises(ValueError, match=r"positions has shape \(3, 6\)"):
        unwrap(MaskedLM.forward)(model, tokens, positions=positions[:, 1:])
