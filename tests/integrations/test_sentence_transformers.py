"""sentence-transformers loads, trains and saves onescan's language models unchanged."""

import numpy as np
import pytest
import torch

try:
    import sentence_transformers
except ImportError as error:
    pytest.skip(f"sentence-transformers is not installed: {error}", allow_module_level=True)

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import PreTrainedTokenizerFast

import onescan
from onescan.integrations.transformers import to_transformers

pytestmark = pytest.mark.integrations

WORDS = ["the", "king", "queen", "is", "dead", "alive", "long", "live", "happy", "sad"]
TEXTS = ["the king is dead", "queen", "long live the queen", "the queen is happy is happy"]


@pytest.fixture(params=["lightnet_mlm_base", "lion_s_mlm_base"])
def encoder(request, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    ids = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[MASK]", *WORDS])}
    plain = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )
    native = onescan.build(
        request.param, vocab_size=len(ids), width=24, depth=2, **{"mixer.num_heads": 2}
    )
    to_transformers(native).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = Transformer(str(tmp_path / "model"), max_seq_length=64)
    return SentenceTransformer(modules=[words, Pooling(24)], device="cpu")


def test_padding_has_no_effect(encoder):
    together = encoder.encode(TEXTS)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_it_trains_saves_and_loads(encoder, tmp_path):
    pairs = [("the king is dead", "king dead"), ("long live the queen", "queen live"),
             ("the queen is happy", "happy queen"), ("the king is sad", "sad king")]  # fmt: skip

    def margins():
        """By how much each anchor is more similar to its own positive than to the others."""
        left, right = (encoder.encode([pair[i] for pair in pairs]) for i in (0, 1))
        left, right = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (left, right))
        scores = left @ right.T
        others = np.where(np.eye(len(pairs), dtype=bool), -1, scores).max(axis=1)
        return np.diag(scores) - others

    before = margins().mean()
    data = Dataset.from_dict({"anchor": [a for a, _ in pairs], "positive": [b for _, b in pairs]})
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"), num_train_epochs=20, learning_rate=3e-3, use_cpu=True,
        per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    loss = MultipleNegativesRankingLoss(encoder)
    trainer = SentenceTransformerTrainer(encoder, args=settings, train_dataset=data, loss=loss)
    trainer.train()
    assert (margins() > 0).all()
    assert margins().mean() > before + 0.1
    vectors = encoder.encode(TEXTS)
    encoder.save(str(tmp_path / "saved"))
    restored = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert np.array_equal(restored.encode(TEXTS), vectors)
    assert sentence_transformers.__version__
