"""Compare MaskedLM with transformers' BertForMaskedLM, with the same weights."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from onescan.layers.basic import MLPConfig
from onescan.layers.mixers import SoftmaxMixerConfig
from onescan.layers.position import TokenPositionConfig
from onescan.models.masked_lm import MaskedLM, MaskedLMConfig

VOCABULARY, WIDTH, DEPTH, HEADS, MAX_TOKENS, DROPOUT = 100, 64, 3, 4, 32, 0.1
OF_A_BLOCK = {
    "mixer.out_proj": "attention.output.dense",
    "mixer_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def random_bert():
    """A BERT with all parameters perturbed, so that norms and biases matter as well."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    bert = BertForMaskedLM(config).eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=g))
    return bert


def converted(bert):
    """Convert to a MaskedLM; strict loading checks that every weight is used."""
    theirs = bert.state_dict()
    weights = {
        "network.embedding.weight": theirs["bert.embeddings.word_embeddings.weight"],
        "network.segment_embedding.weight": theirs["bert.embeddings.token_type_embeddings.weight"],
        "network.position.table": theirs["bert.embeddings.position_embeddings.weight"],
        "head.scores.weight": theirs["cls.predictions.decoder.weight"],
        "head.scores.bias": theirs["cls.predictions.bias"],
    }
    pairs = {
        "network.embedding_norm": "bert.embeddings.LayerNorm",
        "head.transform": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
    }
    for i in range(DEPTH):
        layer = f"bert.encoder.layer.{i}"
        pairs |= {f"network.blocks.{i}.{a}": f"{layer}.{b}" for a, b in OF_A_BLOCK.items()}
        for part in ("weight", "bias"):
            names = (f"{layer}.attention.self.{x}.{part}" for x in ("query", "key", "value"))
            weights[f"network.blocks.{i}.mixer.in_proj.{part}"] = torch.cat(
                [theirs[name] for name in names]
            )
    for ours, name in pairs.items():
        weights |= {f"{ours}.{part}": theirs[f"{name}.{part}"] for part in ("weight", "bias")}
    model = MaskedLMConfig(
        vocab_size=VOCABULARY,
        width=WIDTH,
        depth=DEPTH,
        mixer=SoftmaxMixerConfig(num_heads=HEADS, dropout=DROPOUT),
        mlp=MLPConfig(),
        position=TokenPositionConfig(max_tokens=MAX_TOKENS),
        segment_types=2,
        embedding_norm=True,
        norm_position="post",
        norm_eps=1e-12,
        dropout=DROPOUT,
    ).build()
    model.load_state_dict(weights)
    return model.eval()


def batch():
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 20), generator=g)
    segments = torch.randint(2, (3, 20), generator=g)
    keep = torch.arange(20) < torch.tensor([[20], [13], [1]])
    return tokens, segments, keep


def test_a_converted_bert_gives_the_same_scores():
    bert = random_bert()
    model = converted(bert)
    assert isinstance(model, MaskedLM)
    tokens, segments, keep = batch()
    with torch.no_grad():
        want = bert(tokens, attention_mask=keep.long(), token_type_ids=segments).logits
        got = model(tokens, keep, segments=segments)
        torch.testing.assert_close(got[keep], want[keep], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(tokens), bert(tokens).logits, atol=1e-5, rtol=1e-5)


def test_dropout_is_active_only_in_training():
    model = converted(random_bert())
    tokens, _, keep = batch()
    assert torch.equal(model(tokens, keep), model(tokens, keep))
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert not torch.equal(model(tokens, keep), model(tokens, keep))  # attention dropout


@pytest.mark.compile
def test_a_post_norm_model_with_attention_dropout_compiles():
    model, (tokens, segments, keep) = converted(random_bert()), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = model(tokens, keep, segments=segments)
        torch.testing.assert_close(compiled(tokens, keep, segments=segments), want)
        model.train()
        assert not torch.equal(compiled(tokens, keep), compiled(tokens, keep))
