"""Linear attention in timm's models, each with random weights."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from onescan.nn import replace_attention
from onescan.nn.softmax_parts import projects_queries_keys_and_values

try:  # timm needs torchvision, which fails in many ways if it was built for another torch
    import timm
except Exception as error:
    pytest.skip(f"timm is not installed: {error}", allow_module_level=True)

pytestmark = pytest.mark.integrations

WIDTH, HEADS, DEPTH = 48, 3, 2
SIZES = {"embed_dim": WIDTH, "num_heads": HEADS, "depth": DEPTH, "num_classes": 5, "img_size": 32}
# model -> tokens before the grid, whether positions are rotary
MODELS = {
    "vit_tiny_patch16_224": (1, False),
    "deit3_small_patch16_224": (1, False),
    "vit_small_patch14_reg4_dinov2": (5, False),
    "vit_base_patch32_clip_224": (1, False),
    "eva_giant_patch14_224": (1, True),
    "eva02_tiny_patch14_224": (1, True),
    "vit_small_patch16_dinov3": (5, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_timm_are_replaced(name):
    prefix, rotary = MODELS[name]
    torch.manual_seed(0)
    original, model = (timm.create_model(name, patch_size=8, **SIZES).eval().double() for _ in "ab")
    model.load_state_dict(original.state_dict())
    with pytest.warns(UserWarning, match="rotary") if rotary else nullcontext():
        names = replace_attention(model, shape=(4, 4), prefix=prefix)
    assert names == [f"blocks.{i}.attn" for i in range(DEPTH)]
    assert not any(projects_queries_keys_and_values(m) for m in model.modules())
    x = torch.randn(2, 16 + prefix, WIDTH, dtype=torch.float64)
    for each in names:  # softmax attention with these projections is the original attention
        source, mixer = original.get_submodule(each), model.get_submodule(each).attention.mixer
        q, k, v = mixer.in_proj(x).split(mixer.in_widths, dim=-1)[:3]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        torch.testing.assert_close(mixer.out_proj(o), source(x), rtol=1e-9, atol=1e-9)
    logits = model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
    logits.square().sum().backward()
    grads = [p.grad for each in names for p in model.get_submodule(each).parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    restored = timm.create_model(name, patch_size=8, **SIZES).eval().double()
    with pytest.warns(UserWarning, match="rotary") if rotary else nullcontext():
        replace_attention(restored, shape=(4, 4), prefix=prefix)
    restored.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(restored(images), model(images))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", r"WindowAttention"),
        ("vit_base_patch16_siglip_224", r"attn_pool \(AttentionPoolLatent\).*cross-attention"),
        ("xcit_nano_12_p16_224", "unknown parameter temperature"),
        ("convit_tiny", r"GPSA\) projects queries and keys together"),
        ("samvit_base_patch16", "within windows"),
    ],
)
def test_other_attention_of_timm_is_refused(name, reason):
    model = timm.create_model(name)
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=reason):
        replace_attention(model)
    assert list(model.state_dict()) == before


def test_the_pooling_of_siglip_can_stay():
    model = timm.create_model("vit_base_patch16_siglip_224", **SIZES | {"num_classes": 0})
    assert len(replace_attention(model, exclude=["attn_pool"])) == DEPTH
    assert model(torch.randn(2, 3, 32, 32)).isfinite().all()
