"""Recipes for the baselines of the papers: trained like the papers' own models."""

import pytest

from onescan.configs import differences
from onescan.experiments.evaluation.config import COMMONSENSE
from onescan.experiments.evaluation.harness import commonsense_average
from onescan.experiments.recipes import find_recipe
from onescan.models.presets import preset
from onescan.models.size import model_size

# baseline -> the recipe that it is compared with, its preset, and other settings that differ
BASELINES = {
    **{
        f"imagenet_lion_vit_{size}": (f"imagenet_lion_s_{size}", f"deit_{size}", ())
        for size in ("tiny", "small", "base")
    },
    **{
        f"imagenet_vim_{size}": (f"imagenet_deit_{size}", f"vim_{size}", ("training.ema_decay",))
        for size in ("tiny", "small", "base")
    },
    **{
        f"imagenet_{kind}_{size}": (f"imagenet_deit_{size}", f"{kind}_{size}", ())
        for kind, size in (
            *(("vision_rwkv", size) for size in ("tiny", "small", "base")),
            *(("hydra", size) for size in ("small", "base")),
        )
    },
    **{
        f"wikitext103_{name}": ("wikitext103_lightnet", model, ())
        for name, model in (
            ("transformer", "transformer_lm_45m"),
            ("linear_attention", "linear_lm_45m"),
            ("hgrn", "hgrn_lm_46m"),
        )
    },
    **{
        f"pile_uncopyrighted_{name}": ("pile_uncopyrighted_lightnet_379m", model, ())
        for name, model in (
            ("llama_385m", "llama_385m"),
            ("tnl_379m", "tnl_lm_379m"),
            ("mamba_385m", "mamba_lm_385m"),
        )
    },
    "pile_uncopyrighted_mamba2_1300m": ("pile_uncopyrighted_lightnet_1b", "mamba2_lm_1300m", ()),
    "cramming_bert": ("cramming_lightnet", "crammed_bert", ()),
    "wikipedia_bert": ("wikipedia_ldn", "bert_base", ("task.supervised_blocks",)),
    "wikipedia_roberta": (
        "wikipedia_ldn",
        "roberta_base",
        ("data.tokenizer", "task.supervised_blocks"),
    ),
    **{
        f"imagenet_{kind}_dit_{size}_8": (
            f"imagenet_lightnet_dit_{size}_8",
            f"{kind}_dit_{size}_8",
            (),
        )
        for kind in ("retnet", "hgrn2")
        for size in ("s", "b")
    },
}


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_differs_from_its_rival_only_in_the_model(name):
    rival, model, others = BASELINES[name]
    run = find_recipe(name)()
    assert run.model == preset(model)
    changed = [path for path, *_ in differences(find_recipe(rival)(), run)]
    settings = [path for path in changed if not path.startswith("model.")]
    assert settings == ["name", *others]


@pytest.mark.parametrize(("size", "rows"), [("1b", 160), ("3b", 1728)])
def test_the_first_version_trains_the_same_models_on_a_third_of_the_tokens(size, rows):
    """LightNet's v1, Tables 7 and 10."""
    long, short = (
        find_recipe(f"pile_uncopyrighted_lightnet_{size}{version}")() for version in ("", "_v1")
    )
    assert {path for path, *_ in differences(long, short)} == {
        *("name", "data.train_rows", "training.steps")
    }
    assert short.training.batch_size == rows
    assert short.training.steps * rows * 2048 == pytest.approx(100e9, rel=1e-4)
    assert long.training.steps == pytest.approx(3 * short.training.steps, rel=1e-4)


def test_the_commonsense_average_is_that_of_lightnets_table():
    """Table 9, LightNet with 1.0B parameters."""
    printed = (71.06, 47.27, 51.30, 56.31, 27.56, 33.00)
    results = {
        task: {f"{metric},none": score / 100, "acc,stderr": 9.0}
        for (task, metric), score in zip(COMMONSENSE.items(), printed, strict=True)
    }
    results["arc_challenge"]["acc,none"] = 0.9  # another metric
    average = commonsense_average(results)
    assert round(100 * average, 2) == 47.75
    del results["piqa"]
    assert commonsense_average(results) is None


def test_two_scans_of_size_b_are_as_large_as_lightnet_b():
    """Table 10's FIDs fit this size: 131M, as in Table 14."""
    ours = model_size(preset("lightnet_dit_b_8")).parameters
    assert model_size(preset("retnet_dit_b_8")).parameters == pytest.approx(ours, rel=0.01)
