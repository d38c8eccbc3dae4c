"""Train a small BERT of transformers on a text file, as a model to linearize.

python benchmarks/train_bert.py --data FILE --out FOLDER --seed 0

The tokenizer has one token per byte. 15% of the tokens are masked, independently of each other. A
tenth of the text is held out.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from onescan.experiments.data import derive_seed
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.tasks import MaskedLanguageModellingConfig
from onescan.experiments.training.config import TrainingConfig
from onescan.experiments.training.data import Loader
from onescan.experiments.training.evaluation import evaluate
from onescan.experiments.training.linearize_folder import MaskedAdapter, WholeRows
from onescan.experiments.training.optim import build_optimizer, learning_rate

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[MASK]")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the training."""

    data: str
    """Text file."""
    out: Path
    """Folder of the model."""
    seed: int = 0
    """Random seed."""
    steps: int = 1500
    """Number of steps."""
    batch_size: int = 32
    """Sequences per step."""
    length: int = 128
    """Tokens per sequence."""
    width: int = 128
    """Width of the model."""
    depth: int = 4
    """Number of layers."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    log_every: int = 100
    """Steps between printed lines."""


def main(options: Options) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(options.out)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        num_hidden_layers=options.depth,
        num_attention_heads=4,
        intermediate_size=4 * options.width,
        max_position_embeddings=options.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    adapter = MaskedAdapter(model)
    text = TextDatasetConfig(
        path=options.data, tokenizer=str(options.out), length=options.length
    ).build()
    task = WholeRows(MaskedLanguageModellingConfig(), text)
    settings = TrainingConfig(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=0.01,
        warmup=0.1,
    )
    optimizer = build_optimizer(model, settings)
    plan = task.batches(step=0, batch_size=options.batch_size, seed=options.seed)
    with closing(Loader(task.train, plan, workers=0)) as loader:
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps, settings)
            batch = task.corrupt(next(loader), derive_seed(options.seed, "step", step))
            loss, metrics = task.loss(adapter, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if (step + 1) % options.log_every == 0:
                print(f"step {step + 1}: loss {loss:.3f}, accuracy {metrics['accuracy']:.1%}")
    print(evaluate(adapter, task).metrics)
    model.save_pretrained(options.out)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    plain = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
