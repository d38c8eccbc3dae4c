"""What stands where a token is masked, from those on both sides."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from onescan.checks import check_shapes
from onescan.layers.basic import build_norm
from onescan.models.token_network import TextEncoderConfig, TokenNetwork
from onescan.shapes import Chosen, Hidden, Keep, ReadOutLogits, TokenLogits, Tokens


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(TextEncoderConfig):
    """LightNet's masked language model by default; LION's, LDN's, BERT's by changing fields."""

    head_transform: bool = True
    """A layer with GELU and a norm before the scores, as in BERT."""

    def build(self) -> "MaskedLM":
        """Build the network, with fresh weights from torch's global generator.

        Raises:
            ValueError: a size that is not positive, a mixer that looks back only, or what the
                mixer, the norm and the position refuse.
        """
        self.check()
        if self.mixer.is_causal:
            raise ValueError("mixer is causal: a masked token would not be told by those after it")
        return MaskedLM(self)


class MaskedLM(nn.Module):
    """TokenNetwork -> head.

    >>> import torch
    >>> from onescan.models.masked_lm import MaskedLMConfig
    >>> model = MaskedLMConfig(vocab_size=11, width=24, depth=1).build()
    >>> model(torch.randint(11, (2, 9))).shape
    torch.Size([2, 9, 11])
    """

    def __init__(self, config: MaskedLMConfig) -> None:
        super().__init__()
        self.config = config
        self.network = TokenNetwork(config)
        self.head = MaskedHead(config)
        self.head.apply(self.network.init_weights)
        self.head.scores.weight = self.network.embedding.weight

    def forward(
        self,
        tokens: Tokens,
        keep: Keep | None = None,
        *,
        segments: Tokens | None = None,
        documents: Tokens | None = None,
        read_outs: int = 1,
        places: Chosen | None = None,
    ) -> ReadOutLogits:
        """Score what may stand at each place.

        Args:
            tokens: ids, masked ones by the id that the tokenizer has for them.
            keep: True for real tokens, among them masked ones; padding is False.
            segments: which segment each token is of, for models that tell them apart.
            documents: numbers that tell apart the texts of a row, which read nothing of each other.
            read_outs: of how many of the last blocks to return the scores, one batch after the
                other, [read_outs * B, T, vocabulary], the last block's last.
            places: True where to score, which spares memory: [1, read_outs * P, vocabulary] of P
                places; None scores all.

        Raises:
            ValueError: shapes disagree, no tokens, more read-outs than blocks, or, on a CPU, an id
                that is not in the vocabulary.
        """
        check_shapes(tokens=(tokens, "B T"), places=(places, "B T"))
        options = {"segments": segments, "keep": keep, "documents": documents}
        x, _ = self.network(tokens, **options, read_outs=read_outs)
        if places is not None:
            x = x[places.repeat(read_outs, 1)].unsqueeze(0)
        return self.head(x)


class MaskedHead(nn.Module):
    """The scores are W' norm(gelu(W x)) + b; W' is the embedding's matrix."""

    def __init__(self, config: MaskedLMConfig) -> None:
        super().__init__()
        self.transform = self.norm = None
        if config.head_transform:
            self.transform = nn.Linear(config.width, config.width)
            self.norm = build_norm(config.norm, config.width, eps=config.norm_eps)
        self.scores = nn.Linear(config.width, config.vocab_size)

    def forward(self, x: Hidden) -> TokenLogits:
        if self.transform is not None and self.norm is not None:
            x = self.norm(F.gelu(self.transform(x)))
        return self.scores(x)
