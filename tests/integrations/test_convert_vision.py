"""ViT and DeiT of transformers and timm, converted: equal scores, and errors for the rest."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from onescan.integrations.weights import SOURCES, Foreign, Tensors, convert_model, read

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "image_size": 24, "patch_size": 8, "num_labels": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomized(model):
    """Give every parameter a random value, so that no zero hides a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.double().eval()


def of_transformers(kind, **changes):
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    suffix = "WithTeacher" if kind == "DeiT" else ""
    return randomized(getattr(transformers, f"{kind}ForImageClassification{suffix}")(config))


def assert_equal_scores(model, native, images):
    with torch.no_grad():
        torch.testing.assert_close(native(images), model(images).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}]
)
def test_models_of_transformers_have_equal_scores(kind, changes):
    model = of_transformers(kind, **changes)
    native = convert_model(read(model))
    assert_equal_scores(model, native, torch.randn(2, 3, 24, 24, dtype=torch.double))
    assert native.config.distillation_token == (kind == "DeiT")


def test_a_deit_with_one_head_has_equal_scores():
    model = randomized(transformers.DeiTForImageClassification(transformers.DeiTConfig(**SIZES)))
    native = convert_model(read(model))
    assert_equal_scores(model, native, torch.randn(2, 3, 24, 24, dtype=torch.double))


@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
def test_folders_of_transformers_are_read(kind, tmp_path):
    model = of_transformers(kind)
    model.save_pretrained(tmp_path)
    native = convert_model(read(tmp_path))
    assert_equal_scores(model, native, torch.randn(2, 3, 24, 24, dtype=torch.double))


def test_settings_that_are_not_supported_are_named():
    with pytest.raises(ValueError, match=r"hidden_act 'tanh' is unknown.*gelu"):
        convert_model(read(of_transformers("ViT", hidden_act="tanh")))
    with pytest.raises(ValueError, match=r"hidden_dropout_prob is 0.1 in the source's config"):
        convert_model(read(of_transformers("ViT", hidden_dropout_prob=0.1)))
    for kind in ("ViT", "DeiT"):
        encoder = getattr(transformers, f"{kind}Model")(
            getattr(transformers, f"{kind}Config")(**SIZES)
        )
        with pytest.raises(ValueError, match="no classification head, expected a ViTForImageClass"):
            convert_model(read(encoder))


def timm_weights(*, distilled=False, deit3=False, width=24, depth=2):
    """Return a state dict with the names of timm's vision_transformer.py and deit.py."""
    sizes = {
        "patch_embed.proj.weight": (width, 3, 8, 8), "patch_embed.proj.bias": (width,),
        "cls_token": (1, 1, width), "norm.weight": (width,), "norm.bias": (width,),
        "pos_embed": (1, 9 + (not deit3) * (1 + distilled), width),
        "head.weight": (5, width), "head.bias": (5,),
    }  # fmt: skip
    if distilled:
        sizes |= {"dist_token": (1, 1, width), "head_dist.weight": (5, width)}
        sizes |= {"head_dist.bias": (5,)}
    for i in range(depth):
        maps = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        maps |= {"mlp.fc1": (40, width), "mlp.fc2": (width, 40)}
        for name, shape in maps.items():
            sizes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        for name in ("norm1", "norm2"):
            sizes |= {f"blocks.{i}.{name}.{part}": (width,) for part in ("weight", "bias")}
        if deit3:
            sizes |= {f"blocks.{i}.{name}.gamma": (width,) for name in ("ls1", "ls2")}
    return {name: torch.randn(size, dtype=torch.double) * 0.3 for name, size in sizes.items()}


def timm_scores(w, images, *, heads):
    """Compute timm's forward pass from its weights, independently of the package."""

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    patches = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=8)
    x = patches.flatten(2).transpose(1, 2)
    if w["pos_embed"].shape[1] == x.shape[1]:
        x = x + w["pos_embed"]
    prefix = [w[name] for name in ("cls_token", "dist_token") if name in w]
    x = torch.cat([token.expand(len(x), -1, -1) for token in prefix] + [x], dim=1)
    if w["pos_embed"].shape[1] == x.shape[1]:
        x = x + w["pos_embed"]
    for i in range(2):
        block = f"blocks.{i}"
        q, k, v = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        y = linear(f"{block}.attn.proj", (weights @ v).transpose(1, 2).flatten(2))
        x = x + y * w.get(f"{block}.ls1.gamma", 1)
        y = linear(
            f"{block}.mlp.fc2", F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x)))
        )
        x = x + y * w.get(f"{block}.ls2.gamma", 1)
    x = norm("norm", x)
    scores = linear("head", x[:, 0])
    return (scores + linear("head_dist", x[:, 1])) / 2 if "head_dist.weight" in w else scores


@pytest.mark.parametrize("options", [{}, {"distilled": True}, {"deit3": True}])
def test_weights_of_timm_have_equal_scores(options, tmp_path):
    weights = timm_weights(**options)
    save_file(weights, tmp_path / "model.safetensors")
    native = convert_model(read(tmp_path / "model.safetensors", num_heads=3))
    images = torch.randn(2, 3, 24, 24, dtype=torch.double)
    expected = timm_scores(weights, images, heads=3)
    with torch.no_grad():
        torch.testing.assert_close(native(images), expected, rtol=1e-10, atol=1e-10)


class Live(nn.Module):
    """A module with the attributes of timm's that no tensor shows."""

    def __init__(self):
        super().__init__()
        self.num_heads = 3
        self.norm = nn.LayerNorm(24, eps=1e-6)
        self.weights = timm_weights()

    def state_dict(self):
        return self.weights


def test_models_in_memory_state_their_settings():
    native = convert_model(read(Live()))
    assert native.config.mixer.num_heads == 3
    model = Live()
    model.blocks = nn.ModuleDict({"mlp": nn.ModuleDict({"act": nn.GELU()})})
    convert_model(read(model))
    model.blocks["mlp"]["act"] = nn.ReLU()
    with pytest.raises(ValueError, match=r"mlp.act is 'ReLU\(\)' in the source's config, expected"):
        convert_model(read(model))
    model = Live()
    model.global_pool = "avg"
    with pytest.raises(ValueError, match="global_pool is 'avg' in the source's config"):
        convert_model(read(model))


def test_each_tensor_is_used_once():
    foreign = read(Live())
    foreign.tensors._all["blocks.0.attn.q_norm.weight"] = torch.ones(8)
    with pytest.raises(ValueError, match=r"has unexpected tensors: blocks.0.attn.q_norm.weight"):
        convert_model(type(foreign)(fields=foreign.fields, tensors=foreign.tensors))
    model = Live()
    del model.weights["blocks.1.norm1.bias"]
    with pytest.raises(ValueError, match=r"the source has no tensor blocks.1.norm1.bias"):
        convert_model(read(model))
    model = Live()
    model.weights["blocks.1.norm1.bias"] = torch.ones(8)
    with pytest.raises(ValueError, match=r"blocks.1.mixer_norm.bias is \(8,\) in the source and"):
        convert_model(read(model))
    model = Live()
    model.num_heads = None
    with pytest.raises(ValueError, match="width 24 has no config; num_heads is required"):
        convert_model(read(model))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"architecture": "vit_base_patch16_clip_224"}', "architecture is 'vit_base_patch16_clip"),
        ('{"model_args": {"act_layer": "quick_gelu"}}', "has act_layer, which is unsupported"),
        ('{"global_pool": "avg"}', "global_pool is 'avg' in the source's config"),
        ("[]", "is not a JSON object"),
        ("{", "is not valid JSON"),
    ],
)
def test_configs_of_timm_that_are_not_supported_are_named(config, message, tmp_path):
    save_file(timm_weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        convert_model(read(tmp_path, num_heads=3))


def test_only_safetensors_are_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no safetensors file; pickled weights are not"):
        read(tmp_path)
    with pytest.raises(ValueError, match="holds no safetensors file"):
        read(tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    for content, message in (
        ("[]", "is not a JSON object"),
        ('{"weight_map": [1]}', "holds no safetensors file"),
        ('{"weight_map": {"a": "model-1-of-2.safetensors"}}', "names model-1-of-2.*no such file"),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file or folder /no/such/folder"):
        read("/no/such/folder")


def test_shards_are_read_together(tmp_path):
    model = of_transformers("ViT")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    first, *others = sorted(tmp_path.glob("*.safetensors"))
    assert others
    images = torch.randn(2, 3, 24, 24, dtype=torch.double)
    assert_equal_scores(model, convert_model(read(tmp_path)), images)
    with pytest.raises(ValueError, match="is one of several shards, expected the folder"):
        read(first)


def test_other_architectures_are_refused():
    with pytest.raises(
        ValueError,
        match=r"no config.json that names a model, and tensors such as weight, .*BertFor",
    ):
        convert_model(read(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="the source is a 'swin', expected one of"):
        convert_model(Foreign(fields={"model_type": "swin"}, tensors=Tensors({})))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "24"}, "width is '24', expected int"),
        ({"intermediate_size": "40"}, "intermediate_size is '40', expected a whole number"),
        ({"num_hidden_layers": 10**12}, "the source has no tensor vit.layers.2.attention.q_proj"),
        (
            {"image_size": [1, 2, 3]},
            r"image_size is \[1, 2, 3\] in the source's config, expected one",
        ),
        ({"patch_size": None}, "the source's config has no patch_size"),
    ],
)
def test_wrong_configs_are_named(fields, message):
    foreign = read(of_transformers("ViT"))
    with pytest.raises(ValueError, match=message):
        convert_model(foreign.changed(fields=fields))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "vit.embeddings.cls_token",
            (24,),
            r"cls_token is \(24,\) in the source, which does not f",
        ),
        ("classifier.weight", (), r"classifier.weight is \(\) in the source, expected 2 axes"),
        (
            "vit.layers.0.attention.q_proj.weight",
            (24, 2),
            "is .24, 2. and .24, 24. and .24, 24. in",
        ),
    ],
)
def test_wrong_shapes_are_named(name, shape, message):
    foreign = read(of_transformers("ViT"))
    with pytest.raises(ValueError, match=message):
        convert_model(foreign.changed(tensors={name: torch.zeros(shape)}))


def test_configs_may_omit_defaults():
    theirs = transformers.ViTConfig().to_dict()
    for source in SOURCES:
        if "ViT" in source.name:
            assert {name: theirs[name] for name in source.defaults} == source.defaults
