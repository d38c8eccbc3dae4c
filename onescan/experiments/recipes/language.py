"""Language models: the papers' pre-training, and small versions that train on two CPU cores."""

from dataclasses import replace
from functools import partial
from typing import Any

from onescan.configs import ModelConfig
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.recipes import row, table
from onescan.experiments.recipes.small_text import (
    SMALL_DEPTH,
    SMALL_LM,
    SMALL_MASKS,
    SMALL_MLM,
    SMALL_TRAINING,
    SMALL_WIDTH,
)
from onescan.experiments.tasks import (
    LanguageModellingConfig,
    MaskedLanguageModellingConfig,
    TaskConfig,
)
from onescan.experiments.training import RunConfig, TrainingConfig
from onescan.layers.basic import MLPConfig
from onescan.layers.decays import KDADecayConfig
from onescan.layers.mixers import (
    GatedDeltaNetMixerConfig,
    KDAMixerConfig,
    LinearDiffusionMixerConfig,
    LionMixerConfig,
    SoftmaxMixerConfig,
)
from onescan.layers.position import TokenPositionConfig
from onescan.models.presets import preset

GPT2, BERT = "openai-community/gpt2", "google-bert/bert-base-uncased"
ROBERTA = "FacebookAI/roberta-base"  # 50,265 pieces, byte by byte
CRAMMING = "JonasGeiping/crammed-bert"  # 32,768 lower-case word pieces
# The Pile without Books3, BookCorpus2, OpenSubtitles, YTSubtitles and OpenWebText2
PILE_UNCOPYRIGHTED = "monology/pile-uncopyrighted"
NOT_RUN = "It has not been run yet."
NO_SHARE = (
    'With /independent_decay and --model.mixer.decay-rank 128, it is the row "no share". '
    "The batch size\nis that of v1's Table 10. "
)


def wikitext103_lightnet() -> RunConfig:
    """LightNet, 45 million parameters, on WikiText-103, as in LightNet's Tables 5 and 12.

    onescan train wikitext103_lightnet
    onescan evaluate runs/wikitext103_lightnet/seed-0
    onescan evaluate runs/wikitext103_lightnet/seed-0 --split test

    Training evaluates on the validation split. Table 12 prints Adam with a weight decay of 0.1: in
    fairseq, whose configuration of HGRN the paper follows, adam decouples the weight decay, as
    AdamW does here. The dropout of 0.1 is HGRN's. The tokenizer is GPT-2's BPE, of 50,257 tokens;
    the paper states a BPE of 50,265. It has not been run yet.
    """
    return _wikitext103("lightnet", "lightnet_lm_45m")


def _wikitext103(name: str, model: str) -> RunConfig:
    """Return a run of LightNet's Tables 5 and 12; see `wikitext103_lightnet`."""
    return RunConfig(
        name=f"wikitext103_{name}",
        model=preset(model, dropout=0.1),
        data=TextDatasetConfig(
            path="Salesforce/wikitext",
            name="wikitext-103-raw-v1",
            tokenizer=GPT2,
            length=512,
        ),
        task=LanguageModellingConfig(),
        training=TrainingConfig(
            steps=50_000,
            batch_size=128,
            learning_rate=5e-4,
            weight_decay=0.1,
            warmup=4000.0,
            schedule="inverse_sqrt",
            max_grad_norm=None,
        ),
    )


def _pile(name: str, model: str, rows: int, billion_tokens: int) -> RunConfig:
    """Return a run with the paper's total batch size and number of tokens."""
    length = 2048
    steps = round(billion_tokens * 1e9 / (rows * length))
    return RunConfig(
        name=f"pile_uncopyrighted_{name}",
        model=preset(model),
        data=TextDatasetConfig(
            path=PILE_UNCOPYRIGHTED,
            tokenizer=GPT2,
            length=length,
            streaming=True,
            train_rows=rows * steps,
            test_rows=2048,
        ),
        task=LanguageModellingConfig(evaluation_batch_size=8),
        training=TrainingConfig(
            steps=steps,
            batch_size=rows,
            learning_rate=3e-4,
            weight_decay=0.1,
            warmup=0.01,
            final_lr_ratio=0.1,
            evaluate_every=0.05,
            checkpoint_every=0.01,
            precision="auto",
        ),
    )


def _openwebtext(name: str, model: str) -> RunConfig:
    """Return a run with nanoGPT's defaults: 600,000 steps of half a million tokens."""
    return RunConfig(
        name=f"openwebtext_{name}",
        model=preset(model),
        data=TextDatasetConfig(
            path="Skylion007/openwebtext",  # in one split
            test_fraction=0.0005,
            tokenizer=GPT2,
            length=1024,
        ),
        task=LanguageModellingConfig(evaluation_batch_size=8),
        training=TrainingConfig(
            steps=600_000,
            batch_size=480,
            learning_rate=6e-4,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            warmup=2000.0,
            final_lr_ratio=0.1,
            evaluate_every=0.01,
            checkpoint_every=0.01,
            precision="auto",
        ),
    )


def cramming_lightnet() -> RunConfig:
    """LightNet as a masked language model on pile-uncopyrighted, in the Cramming setting.

    onescan train cramming_lightnet
    onescan glue runs/cramming_lightnet/seed-0 --recipe lightnet

    The settings of Cramming, arXiv:2212.14034, whose pipeline LightNet's Sec. 6.1 uses, are those
    in the files of the published crammed-bert: its tokenizer of 32,768 word pieces, sequences of
    128 tokens, 25% masked tokens, no dropout in pre-training, and AdamW. Over the budget, the
    learning rate rises from a quarter of the peak 1e-3 to the peak at 75%, and falls to 0. The
    batch size grows from 128 to 8192 at 60%.

    Cramming's budget is one day on one GPU. As results should not depend on the speed of a machine,
    it is counted in sequences here: 900,000 micro-batches of 128, the number in crammed-bert's
    file, which are 115.2 million. How many LightNet saw in its day on an A100 is not stated.

    Other differences: Cramming filters its Pile and sorts it by sentence length. Its documents end
    with the separator, but do not start with [CLS], and tokens attend to other documents of their
    row. It trains in float16. It reads the full Pile, which is no longer available. This recipe has
    not been run yet.
    """
    return _cramming("lightnet", "lightnet_mlm_base")


def cramming_bert() -> RunConfig:
    """Crammed BERT on pile-uncopyrighted, the baseline of LightNet's Table 2.

    onescan train cramming_bert
    onescan glue runs/cramming_bert/seed-0 --recipe lightnet

    It is trained like cramming_lightnet. The model is the published crammed-bert: 16 blocks, gated
    units with GELU, and no biases in attention. Its positions are sines and cosines, here without
    Cramming's learned factor. Fine-tuning has no dropout of attention weights. It has not been run
    yet.
    """
    return _cramming("bert", "crammed_bert")


def _cramming(name: str, model: str) -> RunConfig:
    """Return a run of LightNet's Table 2; see `cramming_lightnet`."""
    micro_batch, micro_batches = 128, 900_000
    return RunConfig(
        name=f"cramming_{name}",
        model=preset(model),
        data=TextDatasetConfig(
            path=PILE_UNCOPYRIGHTED,
            tokenizer=CRAMMING,
            length=128,
            add_special_tokens=True,
            streaming=True,
            train_rows=micro_batch * micro_batches,
            test_rows=8192,
        ),
        task=MaskedLanguageModellingConfig(mask_rate=0.25, evaluation_batch_size=256),
        training=TrainingConfig(
            epochs=1,
            batch_size=8192,
            initial_batch_size=micro_batch,
            batch_size_ramp=0.6,
            learning_rate=1e-3,
            weight_decay=0.01,
            betas=(0.9, 0.98),
            eps=1e-12,
            warmup=0.75,
            initial_lr_ratio=0.25,
            schedule="linear",
            final_lr_ratio=0.0,
            max_grad_norm=0.5,
            evaluate_every=0.05,
            checkpoint_every=0.02,
            precision="auto",
        ),
    )


def _c4(kind: str, size: str) -> RunConfig:
    """Return a run of LION's App. C.5: 70,000 steps of 4096 sequences of 128 tokens.

    As in the M2 repository, on which LION's code is based, a sequence is the first 128 tokens of a
    document, padded. The paper states only the length.
    """
    rows, steps = 4096, 70_000
    return RunConfig(
        name=f"c4_{kind}_{size}",
        model=preset(f"{kind}_{size}"),
        data=TextDatasetConfig(
            path="allenai/c4",
            name="en",
            tokenizer=BERT,
            length=128,
            add_special_tokens=True,
            packing=False,
            streaming=True,
            train_rows=rows * steps,
            test_rows=8192,
        ),
        task=MaskedLanguageModellingConfig(
            mask_rate=0.3, evaluation_mask_rate=0.15, evaluation_batch_size=256
        ),
        training=TrainingConfig(
            steps=steps,
            batch_size=rows,
            learning_rate=8e-4 if size == "base" else 2e-4,
            weight_decay=1e-5,
            decoupled_weight_decay=True,
            betas=(0.9, 0.98),
            eps=1e-6,
            warmup=0.06,
            schedule="linear",
            final_lr_ratio=0.02,
            evaluate_every=0.05,
            checkpoint_every=0.02,
            precision="auto",
        ),
    )


def wikipedia_ldn() -> RunConfig:
    """LDN, 124 million parameters, on Wikipedia, with masked tokens refined from block to block.

    onescan train wikipedia_ldn

    One million steps of 256 sequences and a cosine schedule, as in LDN's Sec. 5.1, but without
    BookCorpus, which is no longer available. The loss on the last 4 blocks and the other settings
    are our choice, because the paper does not state them. It has not been run yet.
    """
    return _wikipedia("ldn", "ldn_mlm_base", BERT, supervised_blocks=4)


def _wikipedia(name: str, model: str, tokenizer: str, *, supervised_blocks: int = 1) -> RunConfig:
    """Return a run of LDN's Table 3; see `wikipedia_ldn`."""
    return RunConfig(
        name=f"wikipedia_{name}",
        model=preset(model),
        data=TextDatasetConfig(
            path="wikimedia/wikipedia",
            name="20231101.en",
            test_fraction=0.001,
            tokenizer=tokenizer,
            length=128,
            add_special_tokens=True,
        ),
        task=MaskedLanguageModellingConfig(
            supervised_blocks=supervised_blocks, evaluation_batch_size=256
        ),
        training=TrainingConfig(
            steps=1_000_000,
            batch_size=256,
            learning_rate=1e-4,
            weight_decay=0.01,
            warmup=10_000.0,
            schedule="cosine",
            evaluate_every=0.05,
            checkpoint_every=0.02,
            precision="auto",
        ),
    )


# The small versions: bytes, one to two million parameters each.
SOFTMAX: dict[str, Any] = {"mlp": MLPConfig(), "position": TokenPositionConfig(max_tokens=1024)}


def shakespeare_lightnet() -> RunConfig:
    """LightNet, 0.9 million parameters, on Shakespeare, byte by byte.

    onescan train shakespeare_lightnet --data.path FILE
    """
    return _small("shakespeare_lightnet", SMALL_LM, LanguageModellingConfig())


def shakespeare_lion_s() -> RunConfig:
    """Causal LION-s of the same size on Shakespeare.

    onescan train shakespeare_lion_s --data.path FILE
    """
    mixer = LionMixerConfig(num_heads=4, direction="forward")
    model = replace(SMALL_LM, mixer=mixer, mlp=MLPConfig(), position=None)
    return _small("shakespeare_lion_s", model, LanguageModellingConfig())


def shakespeare_gated_deltanet() -> RunConfig:
    """Causal Gated DeltaNet of the same size on Shakespeare.

    onescan train shakespeare_gated_deltanet --data.path FILE

    It has not been run yet.
    """
    mixer = GatedDeltaNetMixerConfig(num_heads=4, direction="forward")
    model = replace(SMALL_LM, mixer=mixer, mlp=MLPConfig(ratio=2.0), position=None)
    return _small("shakespeare_gated_deltanet", model, LanguageModellingConfig())


def shakespeare_kda() -> RunConfig:
    """Causal Kimi Delta Attention (KDA) of the same size on Shakespeare.

    onescan train shakespeare_kda --data.path FILE

    Ranks are the width of a head, as in the original. It has not been run yet.
    """
    rank = SMALL_WIDTH // 4
    mixer = KDAMixerConfig(
        num_heads=4, direction="forward", decay=KDADecayConfig(rank=rank), gate_rank=rank
    )
    model = replace(SMALL_LM, mixer=mixer, mlp=MLPConfig(ratio=3.5), position=None)
    return _small("shakespeare_kda", model, LanguageModellingConfig())


def shakespeare_gpt2() -> RunConfig:
    """GPT-2 of the same size on Shakespeare: softmax attention.

    onescan train shakespeare_gpt2 --data.path FILE
    """
    mixer = SoftmaxMixerConfig(num_heads=4, direction="forward")
    model = replace(SMALL_LM, mixer=mixer, **SOFTMAX)
    return _small("shakespeare_gpt2", model, LanguageModellingConfig())


def wikitext2_mlm_lightnet() -> RunConfig:
    """LightNet, 0.9 million parameters, predicts masked words of WikiText-2, byte by byte.

    onescan train wikitext2_mlm_lightnet --data.path FILE
    """
    return _small("wikitext2_mlm_lightnet", SMALL_MLM, SMALL_MASKS)


def wikitext2_mlm_lion_s() -> RunConfig:
    """Bidirectional LION-s of the same size on masked WikiText-2.

    onescan train wikitext2_mlm_lion_s --data.path FILE
    """
    mixer = LionMixerConfig(num_heads=4)
    model = replace(SMALL_MLM, mixer=mixer, mlp=MLPConfig(), position=None)
    return _small("wikitext2_mlm_lion_s", model, SMALL_MASKS)


def wikitext2_mlm_ldn() -> RunConfig:
    """LDN of the same size on masked WikiText-2, refined from block to block.

    onescan train wikitext2_mlm_ldn --data.path FILE
    """
    mixer = LinearDiffusionMixerConfig(num_heads=4)
    changes: dict[str, Any] = {"mixer": mixer, "mlp": None, "depth": 2 * SMALL_DEPTH}
    model = replace(SMALL_MLM, **{**SOFTMAX, **changes})
    return _small("wikitext2_mlm_ldn", model, replace(SMALL_MASKS, supervised_blocks=SMALL_DEPTH))


def wikitext2_mlm_bert() -> RunConfig:
    """BERT of the same size on masked WikiText-2: softmax attention.

    onescan train wikitext2_mlm_bert --data.path FILE
    """
    model = replace(SMALL_MLM, mixer=SoftmaxMixerConfig(num_heads=4), **SOFTMAX)
    return _small("wikitext2_mlm_bert", model, SMALL_MASKS)


def _small(name: str, model: ModelConfig, task: TaskConfig) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        data=TextDatasetConfig(path="text.txt", length=128),
        task=task,
        training=SMALL_TRAINING,
    )


RECIPES = table(
    wikitext103_lightnet,
    *(
        row(
            f"wikitext103_{name}",
            partial(_wikitext103, name, model),
            f"{title}, {millions} million parameters, on WikiText-103, as in LightNet's Table 5.",
            f"onescan train wikitext103_{name}",
            f"Trained like wikitext103_lightnet. {NOT_RUN}",
        )
        for name, model, title, millions in (
            ("transformer", "transformer_lm_45m", "Transformer", 44.7),
            ("linear_attention", "linear_lm_45m", "Linear attention with ELU + 1", 44.7),
            ("hgrn", "hgrn_lm_46m", "HGRN", 46.2),
        )
    ),
    *(
        row(
            f"pile_uncopyrighted_{name}",
            partial(_pile, name, f"lightnet_lm_{size}", rows, billion_tokens),
            f"LightNet, {title}, on {billion_tokens} billion tokens of pile-uncopyrighted, as in "
            f"the paper's {table}.",
            f"onescan train pile_uncopyrighted_{name}",
            f"{note}The paper uses the full Pile, which is no longer available. It does not\n"
            f"state schedule, warm-up, weight decay or tokenizer; they are our choice. {NOT_RUN}",
        )
        for size, title, rows, billion_tokens, table, note, name in (
            # rows are "batch size per GPU" times GPUs
            ("150m", "0.15B", 26 * 8, 100, "v1, Table 10", "", "lightnet_150m"),
            ("379m", "379M", 15 * 8, 10, "Table 6", NO_SHARE, "lightnet_379m"),
            ("380m", "0.385B", 15 * 8, 100, "v1, Table 10", "", "lightnet_380m"),
            ("1b", "1.0B", 10 * 16, 100, "v1, Tables 7 and 10", "", "lightnet_1b_v1"),
            ("3b", "2.9B", 36 * 48, 100, "v1, Tables 7 and 10", "", "lightnet_3b_v1"),
            ("1b", "1B", 10 * 16, 300, "Table 13", "", "lightnet_1b"),
            ("3b", "3B", 36 * 48, 300, "Table 13", "", "lightnet_3b"),
        )
    ),
    *(
        row(
            f"pile_uncopyrighted_{name}",
            partial(_pile, name, model, 15 * 8, 10),
            f"{title}, {millions}M, on 10 billion tokens of pile-uncopyrighted, as in LightNet's "
            "Table 6.",
            f"onescan train pile_uncopyrighted_{name}",
            f"Trained like pile_uncopyrighted_lightnet_379m. {NOT_RUN}",
        )
        for name, model, title, millions in (
            ("llama_385m", "llama_385m", "LLaMA", 385),
            ("tnl_379m", "tnl_lm_379m", "TransNormerLLM", 379),
            ("mamba_385m", "mamba_lm_385m", "Mamba", 385),
        )
    ),
    row(
        "pile_uncopyrighted_mamba2_1300m",
        partial(_pile, "mamba2_1300m", "mamba2_lm_1300m", 10 * 16, 300),
        "Mamba-2, 1.3B, on 300 billion tokens of pile-uncopyrighted, for LightNet's Figure 5.",
        "onescan train pile_uncopyrighted_mamba2_1300m",
        "Trained like pile_uncopyrighted_lightnet_1b, as the paper does not state how Mamba-2 was\n"
        f"trained. {NOT_RUN}",
    ),
    *(
        row(
            f"openwebtext_{name}",
            partial(_openwebtext, name, model),
            f"{title}, 124 million parameters, on OpenWebText, as in LION's App. A.",
            f"onescan train openwebtext_{name}",
            NOT_RUN,
        )
        for name, model, title in (
            ("lion_s", "lion_s_lm_124m", "Causal LION-s"),
            ("linear_attention", "linear_attention_lm_124m", "Causal linear attention"),
            ("gpt2", "gpt2_small", "GPT-2"),
        )
    ),
    cramming_lightnet,
    cramming_bert,
    wikipedia_ldn,
    *(
        row(
            f"wikipedia_{name}",
            partial(_wikipedia, name, model, tokenizer),
            f"{title}, {millions} million parameters, on Wikipedia: a baseline of LDN's Table 3.",
            f"onescan train wikipedia_{name}",
            "Trained like wikipedia_ldn, not as in its own paper. Only the last block is "
            f"supervised. {NOT_RUN}",
        )
        for name, model, title, millions, tokenizer in (
            ("bert", "bert_base", "BERT", 110, BERT),
            ("roberta", "roberta_base", "RoBERTa", 125, ROBERTA),
        )
    ),
    *(
        row(
            f"c4_{kind}_{size}",
            partial(_c4, kind, size),
            f"{title}, {size}, masked language modeling on C4, as in LION's App. C.",
            f"onescan train c4_{kind}_{size}",
            "30% of the tokens are masked in training and 15% in evaluation. The learning rate "
            "decays to 2%\nof its maximum, as in the authors' configuration files; the paper "
            "states 20%. Each sequence is the\nfirst 128 tokens of a document, padded, as in the "
            f"authors' pipeline; --data.packing packs documents.\n{NOT_RUN}",
        )
        for kind, title in (
            ("lion_lit_mlm", "LION-lit"),
            ("lion_d_mlm", "LION-d"),
            ("lion_s_mlm", "LION-s"),
            ("bert", "BERT"),
            ("hydra_mlm", "Hydra"),
        )
        for size in ("base", "large")
    ),
    shakespeare_lightnet,
    shakespeare_lion_s,
    shakespeare_gated_deltanet,
    shakespeare_kda,
    shakespeare_gpt2,
    wikitext2_mlm_lightnet,
    wikitext2_mlm_lion_s,
    wikitext2_mlm_ldn,
    wikitext2_mlm_bert,
)
