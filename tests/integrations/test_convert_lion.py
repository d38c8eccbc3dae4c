"""LION's models, converted: the same scores as the paper's equations."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, silu

from onescan.integrations.weights import Foreign, Tensors, convert_model
from onescan.models.image_classifier import ImageClassifier
from onescan.models.masked_lm import MaskedLM

WIDTH, HEADS, DEPTH, PATCH, SIDE, CLASSES = 128, 2, 2, 16, 4, 7
VOCABULARY, TOKENS = 31, 9
KINDS = {
    "lit": {"decay": "lit"},
    "d": {"decay": "d"},
    "d, natural": {"decay": "d", "natural": True},
    "s": {"decay": "s"},
    "s, natural": {"decay": "s", "natural": True},
    "s, class token": {"decay": "s", "pool": "token"},
}
over_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def random(*shape, scale=1.0):
    return torch.randn(*shape, dtype=torch.float64) * scale / shape[-1] ** 0.5


def stored(decay, *, natural=False, pool="avg"):
    """Return a config and random weights with the names of the published models."""
    weights = {
        "cls_token": random(1, 1, WIDTH),
        "patch_embed.proj.weight": random(WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": random(WIDTH),
        "head.weight": random(CLASSES, WIDTH),
        "head.bias": random(CLASSES),
        "norm.weight": 1 + random(WIDTH),
        "norm.bias": random(WIDTH),
    }
    fields = {"global_pool": pool}
    if decay == "lit":
        weights["pos_embed"] = random(1, 1 + SIDE**2, WIDTH)
        fields["architecture"] = "lion_lit"
    for i in range(DEPTH):
        for name, shape in (
            ("attn.qkv", (3 * WIDTH, WIDTH)),
            ("attn.proj", (WIDTH, WIDTH)),
            ("mlp.fc1", (4 * WIDTH, WIDTH)),
            ("mlp.fc2", (WIDTH, 4 * WIDTH)),
        ):
            weights[f"blocks.{i}.{name}.weight"] = random(*shape, scale=2)
            weights[f"blocks.{i}.{name}.bias"] = random(shape[0])
        for name in ("norm1", "norm2"):
            weights[f"blocks.{i}.{name}.weight"] = 1 + random(WIDTH)
            weights[f"blocks.{i}.{name}.bias"] = random(WIDTH)
        for gate in ("a_i", "a2_i")[: 1 + natural]:
            if decay == "d":
                weights[f"blocks.{i}.attn.{gate}"] = random(HEADS) + 1
            if decay == "s":
                weights[f"blocks.{i}.attn.{gate}.weight"] = random(HEADS, WIDTH, scale=5)
                weights[f"blocks.{i}.attn.{gate}.bias"] = random(HEADS)
    return fields, weights


def snakes():
    """Return the order of tokens of each scan: rows, then columns, back and forth."""
    grid = torch.arange(1, 1 + SIDE**2).view(SIDE, SIDE)
    orders = []
    for lines in (grid, grid.T):
        walk = [line.flip(0) if i % 2 else line for i, line in enumerate(lines)]
        orders.append(torch.cat([torch.zeros(1, dtype=torch.long), *walk]))
    return orders


def mask(decays):
    """Eq. 14: the product of the decays between two tokens, with that of the source token."""
    tokens = len(decays)
    m = torch.ones(tokens, tokens, dtype=decays.dtype)
    for i in range(tokens):
        for j in range(tokens):
            m[i, j] = decays[j:i].prod() if i > j else decays[i + 1 : j + 1].prod()
    return m


def attention(x, part, decay, *, natural):
    q, k, v = (
        y.unflatten(-1, (HEADS, -1))
        for y in (x @ part("attn.qkv.weight").T + part("attn.qkv.bias")).chunk(3, dim=-1)
    )
    if decay == "lit":
        q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    else:
        q, k = ((silu(y) + 0.5) / (silu(y) + 0.5).norm(dim=-1, keepdim=True) for y in (q, k))
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    orders = snakes() if natural else [torch.arange(x.shape[1])]
    masks = torch.zeros_like(scores)
    for order, gate in zip(orders, ("a_i", "a2_i"), strict=False):
        for b in range(len(x)):
            for h in range(HEADS):
                decays = torch.ones(x.shape[1], dtype=x.dtype)
                if decay == "d":
                    decays = torch.sigmoid(part(f"attn.{gate}")[h]).expand(len(decays))
                if decay == "s":
                    z = x[b] @ part(f"attn.{gate}.weight")[h] + part(f"attn.{gate}.bias")[h]
                    decays = (1 - torch.sigmoid(z)).index_fill(0, torch.tensor([0]), 1.0)
                place = order.argsort()
                masks[b, h] += mask(decays[order])[place][:, place] / len(orders)
    scores = scores * masks
    o = torch.einsum("bhij,bjhv->bihv", scores / scores.sum(dim=-1, keepdim=True), v).flatten(2)
    return o @ part("attn.proj.weight").T + part("attn.proj.bias")


def logits(images, weights, decay, *, natural=False, pool="avg"):
    def norm(x, name):
        return layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    kernel, bias = weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"]
    x = torch.nn.functional.conv2d(images, kernel, bias, stride=PATCH).flatten(2).mT
    x = torch.cat([weights["cls_token"].expand(len(x), -1, -1), x], dim=1)
    x = x + weights.get("pos_embed", 0)
    for i in range(DEPTH):

        def part(name, i=i):
            return weights[f"blocks.{i}.{name}"]

        x = x + attention(norm(x, f"blocks.{i}.norm1"), part, decay, natural=natural)
        y = norm(x, f"blocks.{i}.norm2") @ part("mlp.fc1.weight").T + part("mlp.fc1.bias")
        x = x + gelu(y) @ part("mlp.fc2.weight").T + part("mlp.fc2.bias")
    x = norm(x, "norm")
    x = x[:, 0] if pool == "token" else x.mean(dim=1)
    return x @ weights["head.weight"].T + weights["head.bias"]


def converted(fields, weights):
    model = convert_model(Foreign(fields=fields, tensors=Tensors(weights)))
    assert isinstance(model, ImageClassifier)
    return model


@pytest.mark.sampled(3)
@over_kinds
def test_scores_are_equal(kind):
    fields, weights = stored(**kind)
    images = torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH, dtype=torch.float64)
    expected = logits(images, weights, **kind)
    model = converted(fields, weights)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(images), expected, atol=1e-10, rtol=0)
    model = converted(fields, {name: tensor.float() for name, tensor in weights.items()})
    torch.testing.assert_close(model(images.float()), expected.float(), atol=1e-5, rtol=1e-5)


def test_tensors_without_a_counterpart_are_refused():
    fields, weights = stored("d")
    with pytest.raises(
        ValueError, match=r"classifiers of LION, but has .* tensors: blocks\.0\.extra"
    ):
        converted(fields, weights | {"blocks.0.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"no tensor blocks\.1\.attn\.a_i"):
        converted(fields, {n: x for n, x in weights.items() if n != "blocks.1.attn.a_i"})
    with pytest.raises(ValueError, match="global_pool 'max' is unknown"):
        converted({"global_pool": "max"}, weights)


def stored_bert(kind, *, positions=False, norm=False):
    """Return a config and random weights with the names of LION's masked language models."""
    sizes = {
        "bert.embeddings.word_embeddings": (VOCABULARY, WIDTH),
        "bert.embeddings.position_embeddings": (TOKENS, WIDTH),
        "bert.embeddings.token_type_embeddings": (2, WIDTH),
        "cls.predictions.transform.dense": (WIDTH, WIDTH),
    }
    norms = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    for i in range(DEPTH):
        layer = f"bert.encoder.layer.{i}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value"):
            sizes[f"{layer}.{name}"] = (WIDTH, WIDTH)
        sizes |= {
            f"{layer}.attention.output.dense": (WIDTH, WIDTH),
            f"{layer}.intermediate.dense": (4 * WIDTH, WIDTH),
            f"{layer}.output.dense": (WIDTH, 4 * WIDTH),
        }
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        norms += [f"{layer}.attention.self.layer_norm"] * norm
        if kind == "lion-s":
            sizes[f"{layer}.attention.self.Wa_i"] = (HEADS, WIDTH)
    weights = {f"{name}.weight": random(*shape, scale=2) for name, shape in sizes.items()}
    for name, (rows, _) in sizes.items():
        if "_embeddings" not in name:
            weights[f"{name}.bias"] = random(rows)
    for name in norms:
        weights |= {f"{name}.weight": 1 + random(WIDTH), f"{name}.bias": random(WIDTH)}
    if kind == "lion-d":
        for i in range(DEPTH):
            weights[f"bert.encoder.layer.{i}.attention.self.ai"] = random(HEADS) + 1
    weights["cls.predictions.bias"] = random(VOCABULARY)
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
    fields = {
        "model_type": "bert", "arch_type": kind, "layer_norm_after": norm, "hidden_size": WIDTH,
        "vocab_size": VOCABULARY, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH, "max_position_embeddings": TOKENS, "hidden_act": "gelu",
        "position_embedding_type": "absolute" if positions else "none",
    }  # fmt: skip
    return fields, weights


def bert_logits(tokens, keep, fields, weights):
    """App. C.5 of the paper: BERT, with (Q K^T / sqrt(K) * M) V as its attention."""
    kind, embeddings = fields["arch_type"], "bert.embeddings"

    def norm(x, name, eps=1e-12):
        return layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    words = weights[f"{embeddings}.word_embeddings.weight"]
    x = words[tokens] + weights[f"{embeddings}.token_type_embeddings.weight"][0]
    if fields["position_embedding_type"] == "absolute":
        x = x + weights[f"{embeddings}.position_embeddings.weight"][: tokens.shape[1]]
    x = norm(x, f"{embeddings}.LayerNorm")
    for i in range(DEPTH):
        layer = f"bert.encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{layer}.attention.self.{name}").unflatten(-1, (HEADS, -1))
            for name in ("query", "key", "value")
        )
        scores = torch.einsum("bihk,bjhk->bhij", q, k) / (WIDTH // HEADS) ** 0.5
        scores = scores * keep[:, None, None, :]
        for b in range(len(x)):
            for h in range(HEADS):
                decays = torch.ones(x.shape[1], dtype=x.dtype)
                if kind == "lion-d":
                    decays = torch.sigmoid(weights[f"{layer}.attention.self.ai"][h]) * decays
                if kind == "lion-s":
                    decays = 1 - torch.sigmoid(linear(x[b], f"{layer}.attention.self.Wa_i")[:, h])
                scores[b, h] *= mask(decays)
        o = torch.einsum("bhij,bjhv->bihv", scores, v).flatten(2)
        if fields["layer_norm_after"]:
            o = norm(o, f"{layer}.attention.self.layer_norm", eps=1e-5)
        x = norm(
            x + linear(o, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm"
        )
        y = linear(gelu(linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = norm(x + y, f"{layer}.output.LayerNorm")
    head = "cls.predictions"
    x = norm(gelu(linear(x, f"{head}.transform.dense")), f"{head}.transform.LayerNorm")
    return x @ words.T + weights[f"{head}.bias"]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "lion-lit", "positions": True, "norm": True},
        {"kind": "lion-d"},
        {"kind": "lion-s"},
        {"kind": "lion-s", "norm": True},
    ],
    ids=str,
)
def test_masked_language_models_have_equal_scores_with_padding(options):
    fields, weights = stored_bert(**options)
    saved = {f"model.{name}": tensor for name, tensor in weights.items()}  # by Composer
    model = convert_model(Foreign(fields=fields, tensors=Tensors(saved)))
    assert isinstance(model, MaskedLM)
    tokens = torch.randint(VOCABULARY, (2, TOKENS))
    keep = torch.arange(TOKENS) < torch.tensor([[TOKENS], [5]])
    expected = bert_logits(tokens, keep, fields, weights)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens, keep)[keep], expected[keep], atol=1e-10, rtol=1e-10)


def test_masked_language_models_without_a_counterpart_are_refused():
    fields, weights = stored_bert("lion-d")
    with pytest.raises(ValueError, match="arch_type 'lion-x' is unknown"):
        convert_model(Foreign(fields=fields | {"arch_type": "lion-x"}, tensors=Tensors(weights)))
    with pytest.raises(
        ValueError, match=r"unexpected tensors: bert.encoder.layer.0.attention.self.ai"
    ):
        convert_model(Foreign(fields=fields | {"arch_type": "lion-lit"}, tensors=Tensors(weights)))
