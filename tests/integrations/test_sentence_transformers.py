"""Models in sentence-transformers: encode, train on pairs, save and load; skipped without it."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from test_transformers import WORD_SIZES
from tiny_language_models import BOTH, CAUSAL
from tiny_tokenizers import word_tokenizer
from torch.testing import assert_close

import onescan
from onescan.inference.embedding import embed
from onescan.integrations.transformers import to_transformers
from onescan.models.causal_lm import CausalLMConfig
from onescan.models.masked_lm import MaskedLMConfig

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),
]
TEXTS = ["the cat sat on the mat", "a dog", "on the mat", "the dog sat on a cat"]
PAIRS = {
    "anchor": ["the cat sat", "a dog", "on the mat", "the mat"],
    "positive": ["a cat sat", "the dog", "on a mat", "a mat"],
}
PAGE = Path(__file__).parents[2] / "docs/howto/embeddings.md"


def save(folder, config):
    to_transformers(config.build().eval()).save_pretrained(folder)
    word_tokenizer(framed=True).save_pretrained(folder)
    return folder


@pytest.fixture(params=["lightnet", "lion", "bert"])
def folder(request, tmp_path):
    """A masked language model and its tokenizer, saved."""
    return save(tmp_path / "model", MaskedLMConfig(**{**WORD_SIZES, **BOTH[request.param]}))


def sentence_model(folder, pooling="mean"):
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    network = Transformer(str(folder))
    pool = Pooling(network.get_embedding_dimension(), pooling)
    return st.SentenceTransformer(modules=[network, pool], device="cpu")


def encode(model, texts=TEXTS, **options):
    return model.encode(texts, convert_to_tensor=True, **options)


def test_vectors_are_those_of_onescan_whatever_the_padding(folder):
    vectors = encode(sentence_model(folder))
    assert vectors.shape == (len(TEXTS), 24)
    alone = torch.cat([encode(sentence_model(folder), [text]) for text in TEXTS])
    assert_close(vectors, alone, rtol=1e-5, atol=1e-5)
    assert_close(vectors, embed(onescan.load_language_model(str(folder)), TEXTS))


def test_the_last_token_of_a_causal_model(tmp_path):
    folder = save(tmp_path / "model", CausalLMConfig(**{**WORD_SIZES, **CAUSAL["lightnet"]}))
    source = onescan.load_language_model(str(folder))
    vectors = encode(sentence_model(folder, "lasttoken"), batch_size=3)
    assert_close(vectors, embed(source, TEXTS, pooling="last"), rtol=1e-5, atol=1e-5)


def test_training_on_pairs_decreases_the_loss_and_saving_keeps_the_vectors(folder, tmp_path):
    model = sentence_model(folder)
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    before = encode(model)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            str(tmp_path / "run"),
            max_steps=12,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict(PAIRS),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    vectors = encode(model.eval())
    assert not torch.allclose(vectors, before)
    model.save(str(tmp_path / "trained"))
    again = SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    assert torch.equal(encode(again), vectors)
    weights = again[0].model.state_dict()
    for name, weight in model[0].model.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    save(tmp_path / "my-model", MaskedLMConfig(**{**WORD_SIZES, **BOTH["lion"]}))
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    section = text[text.index("## sentence-transformers") :]
    blocks = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block, names)  # noqa: S102
    assert torch.equal(names["again"].encode(["a dog"], convert_to_tensor=True), names["vector"])
