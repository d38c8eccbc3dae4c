"""Language modelling tasks: what is told, what is scored, and that texts stay apart."""

import math
from inspect import unwrap
from types import SimpleNamespace

import pytest
import torch
from test_writing import byte_level_bpe, words
from tiny_language_models import BOTH, CAUSAL, SMALL
from tiny_tokenizers import WORDS, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from onescan.data.text import ByteTokenizer, PretrainedTokenizer, TextDatasetConfig
from onescan.data.text.tokenizer import word_boundaries
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLM, MaskedLMConfig
from onescan.tasks import LanguageModellingConfig, MaskedLanguageModellingConfig

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
def posed(tmp_path):
    """A function that poses a task on a text, of bytes if nothing else is said."""

    def pose(config, tokenizer="bytes"):
        (tmp_path / "text.txt").write_text("a cat sat on the mat " * 20)
        data = TextDatasetConfig(
            path=str(tmp_path / "text.txt"), tokenizer=tokenizer, length=8, cache=False
        )
        return config.build(data.build())

    return pose


def writer():
    sizes = {**SMALL, "vocab_size": 258, **CAUSAL["lightnet"]}
    return CausalLMConfig(**sizes).build().double()


def filler():
    sizes = {**SMALL, "vocab_size": 258, **BOTH["lightnet"]}
    return MaskedLMConfig(**sizes).build().double()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_packed_and_unpacked_texts_have_the_same_loss_and_gradients(posed):
    task, model = posed(LanguageModellingConfig()), writer()
    loss, _ = task.loss(model, packed())
    got = gradients(model, loss)
    parts = [(task.loss(model, batch)[0], batch[0].shape[1] - 1) for batch in alone()]
    want = sum(part * told for part, told in parts) / sum(told for _, told in parts)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, gradients(model, want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_loss_is_of_each_next_token(posed):
    task, model = posed(LanguageModellingConfig()), writer()
    tokens = torch.tensor([list(b"a cat"), list(b"a dog")])
    logits, _ = model(tokens[:, :-1])
    loss, metrics = task.loss(model, (tokens, torch.zeros_like(tokens)))
    want = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, want)
    right = (logits.argmax(-1) == tokens[:, 1:]).float().mean()
    torch.testing.assert_close(metrics["accuracy"], right)


def test_a_masked_model_is_shown_no_neighbouring_text(posed):
    task, model = posed(MaskedLanguageModellingConfig(mask_rate=0.5)), filler()
    shown, documents, labels = task.augment(packed(), seed=4)
    loss, _ = task.loss(model, (shown, documents, labels))
    total, count = 0.0, 0
    for i in range(len(TEXTS)):
        inside = documents == i
        logits = model(shown[inside][None])
        total += cross_entropy(logits.float()[0], labels[inside], reduction="sum")
        count += (labels[inside] != IGNORE_INDEX).sum()
    assert count > 3
    torch.testing.assert_close(loss, total / count)


@pytest.mark.parametrize("read_outs", [1, 2, 3])
def test_the_refined_loss_is_the_mean_over_the_last_blocks(posed, read_outs):
    """The network cut short after each of them, under the same norm and head."""
    task = posed(MaskedLanguageModellingConfig(mask_rate=0.5, supervised_blocks=read_outs))
    sizes = {**SMALL, "vocab_size": 258, **BOTH["lightnet"], "depth": 3}
    model = MaskedLMConfig(**sizes).build().double()
    batch = task.augment(packed(), seed=4)
    loss, metrics = task.loss(model, batch)
    blocks, losses = model.network.blocks, []
    for depth in range(3 - read_outs + 1, 4):
        model.network.blocks = blocks[:depth]
        logits = model(batch[0], documents=batch[1])
        losses.append(cross_entropy(logits.float().flatten(0, 1), batch[2].flatten()))
    torch.testing.assert_close(loss, sum(losses) / read_outs)
    right = (logits.argmax(-1) == batch[2]).sum() / (batch[2] != IGNORE_INDEX).sum()
    torch.testing.assert_close(metrics["accuracy"], right)


def test_more_read_outs_than_blocks_are_refused(posed):
    task, model = posed(MaskedLanguageModellingConfig(supervised_blocks=9)), filler()
    with pytest.raises(ValueError, match="read_outs is 9, expected 1 to 2 blocks"):
        task.loss(model, task.augment(packed(), seed=4))
    with pytest.raises(
        ValueError, match=r"task\.supervised_blocks is 0, expected a number above 0"
    ):
        posed(MaskedLanguageModellingConfig(supervised_blocks=0))


class Scoring(torch.nn.Module):
    """A masked language model that gives all tokens the same score."""

    def __init__(self, vocab_size=258):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, tokens, documents=None):
        return torch.zeros(*tokens.shape, self.vocab_size)


class Knowing(torch.nn.Module):
    """Scores every token alike, or the right one alone."""

    def __init__(self, answers=None):
        super().__init__()
        self.answers, self.config = answers, SimpleNamespace(vocab_size=258)

    def forward(self, tokens, documents=None):
        logits = torch.zeros(*tokens.shape, 258)
        if self.answers is not None:
            logits.scatter_(2, self.answers[..., None], 50.0)
        return logits, None


def test_held_out_text_is_judged_by_token_and_by_byte(posed):
    task = posed(LanguageModellingConfig())
    metrics = task.judge(task.predict(Knowing(), packed())).metrics
    told = sum(len(text.encode()) for text in TEXTS)  # the first is told by none, the end is told
    assert metrics["loss"] == pytest.approx(math.log(258), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(258, rel=1e-4)
    # the bytes that are told: all but each text's first; an end is none
    bits = told * math.log2(258) / (told - len(TEXTS))
    assert metrics["bits_per_byte"] == pytest.approx(bits)
    tokens, documents = packed()
    answers = tokens[:, 1:]
    knowing = task.judge(task.predict(Knowing(answers), (tokens, documents))).metrics
    assert knowing["accuracy"] == 1
    assert knowing["loss"] < 1e-6
    assert task.score(knowing) > task.score(metrics)


def test_a_text_of_one_token_has_nothing_to_tell(posed):
    task = posed(LanguageModellingConfig())
    one = torch.tensor([[97, 98]]), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="the held-out text has no token to tell"):
        task.judge(task.predict(Knowing(), one))


def test_the_shares_of_masks_are_as_asked_for(posed):
    config = MaskedLanguageModellingConfig(
        mask_rate=0.3, mask_replace_prob=0.6, random_replace_prob=0.3
    )
    task = posed(config)
    tokens = torch.randint(256, (40, 500))
    shown, _, labels = task.augment((tokens, torch.zeros_like(tokens)), seed=1)
    told = labels != IGNORE_INDEX
    assert torch.equal(labels[told], tokens[told])
    assert torch.equal(shown[~told], tokens[~told])
    assert told.float().mean() == pytest.approx(0.3, abs=0.01)
    assert (shown[told] == 257).float().mean() == pytest.approx(0.6, abs=0.02)
    assert (shown[told] == tokens[told]).float().mean() == pytest.approx(0.1, abs=0.02)


def test_masks_are_as_the_seed_says_and_fixed_for_held_out_text(posed):
    task, model = posed(MaskedLanguageModellingConfig(mask_rate=0.5)), filler().eval()
    shown = [task.augment(packed(), seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(shown[0], shown[1])
    assert not torch.equal(shown[0], shown[2])
    rows = [task.predict(model, packed()) for _ in range(2)]
    assert torch.equal(rows[0]["losses"], rows[1]["losses"])


def test_neither_ends_nor_padding_are_masked(posed):
    task = posed(MaskedLanguageModellingConfig(mask_rate=1.0))
    tokens, documents = packed()
    _, _, labels = task.augment((tokens, documents), seed=0)
    assert torch.equal(labels != IGNORE_INDEX, (documents >= 0) & (tokens != 256))


def test_evaluation_has_its_own_mask_rate(posed):
    task = posed(MaskedLanguageModellingConfig(mask_rate=0.3, evaluation_mask_rate=0.15))
    tokens = torch.randint(256, (40, 500))
    batch = tokens, torch.zeros_like(tokens)
    assert (task.augment(batch, seed=1)[2] != IGNORE_INDEX).float().mean() == pytest.approx(
        0.3, abs=0.01
    )
    rows = task.predict(Scoring(), batch)
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
    _, documents, labels = task.augment(batch, seed=0)
    special = torch.tensor([WORDS.index("[CLS]"), WORDS.index("[SEP]")])
    assert torch.equal(labels != IGNORE_INDEX, (documents >= 0) & ~torch.isin(batch[0], special))
    told = task.predict(Scoring(len(WORDS)), batch)
    assert told["tokens"].sum() == 9 * 9  # words
    with pytest.raises(ValueError, match=r"data\.add_special_tokens is True, expected False"):
        LanguageModellingConfig().build(data)


def test_words_are_masked_whole(posed):
    task = posed(MaskedLanguageModellingConfig(mask_rate=0.5, whole_word_mask=True))
    text = b"the cat sat on the mat, and 42 dogs looked at it "
    tokens = torch.tensor([list(text) * 4] * 8)
    _, _, labels = task.augment((tokens, torch.zeros_like(tokens)), seed=2)
    told, words = labels != IGNORE_INDEX, word_boundaries(ByteTokenizer()).word_starts(tokens)
    inside = ~words[:, 1:]  # a word's second and further tokens
    assert inside.any()
    assert torch.equal(told[:, 1:][inside], told[:, :-1][inside])
    assert 0.4 < told[words].float().mean() < 0.6


def spelt(tokenizer, text):
    """The words of a text, by the table of beginnings."""
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
    assert spelt(ByteTokenizer(), "né, 42 b") == ["né", ",", "", "42", "", "b"]
    pairs = PretrainedTokenizer("pairs", byte_level_bpe())
    assert [word for word in spelt(pairs, "the mats, a qat") if word] == [
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
def test_what_no_task_can_be_is_refused(change, message, posed, tmp_path):
    with pytest.raises(ValueError, match=message):
        posed(MaskedLanguageModellingConfig(**change))
    byte_level_bpe().save_pretrained(tmp_path / "pairs")
    with pytest.raises(ValueError, match=r"data\.tokenizer '.*pairs' has no mask"):
        posed(MaskedLanguageModellingConfig(), str(tmp_path / "pairs"))
    small = CausalLMConfig(**{**SMALL, "vocab_size": 99, **CAUSAL["lightnet"]}).build()
    letters = torch.full((1, 5), 97), torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="tokenizer 'bytes' has 258 tokens, but the model's"):
        posed(LanguageModellingConfig()).loss(small, letters)


@pytest.mark.parametrize("read_outs", [1, 2])
def test_scores_of_chosen_places_are_those_of_all(read_outs):
    model = filler()
    tokens = torch.randint(256, (3, 7))
    places = torch.rand(3, 7) < 0.5
    every = model(tokens, read_outs=read_outs)
    some = model(tokens, read_outs=read_outs, positions=places)
    torch.testing.assert_close(some, every[places.repeat(read_outs, 1)][None])
    assert model(tokens, positions=torch.zeros(3, 7, dtype=torch.bool)).shape == (1, 0, 258)
    with pytest.raises(ValueError, match=r"positions has shape \(3, 6\)"):
        unwrap(MaskedLM.forward)(model, tokens, positions=places[:, 1:])
