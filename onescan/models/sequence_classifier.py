"""Text classifiers and regressors, for single texts and pairs."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from onescan.checks import check_choice, check_positive
from onescan.layers.tokens import AttentionPool, first_token, max_pool, mean_pool
from onescan.models.pretrained import Pretrained
from onescan.models.token_network import TextEncoderConfig, TokenNetwork
from onescan.shapes import Hidden, Keep, Logits, Pooled, Tokens

Pool = Literal["first", "mean", "max", "attention"]


@dataclass(frozen=True, kw_only=True)
class SequenceClassifierConfig(TextEncoderConfig):
    """Config of text classifiers: the network of a masked language model with a pooling head."""

    num_classes: int = 2
    """Number of classes; 1 for regression."""
    pool: Pool = "mean"
    """Input of the head: the first real token, as in BERT; the mean or the maximum over real
    tokens; or their mean weighted by learned attention."""
    head_transform: bool = True
    """Add a linear layer with tanh before the output layer, as in BERT."""

    def build(self) -> "SequenceClassifier":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If a size is not positive, `pool` is "first" with a causal mixer, or the
                mixer, the norm or the position rejects its config.
        """
        self.check()
        check_positive(num_classes=self.num_classes)
        check_choice("pool", self.pool, get_args(Pool))
        if self.pool == "first" and self.mixer.state_block is not None:
            raise ValueError(
                "pool is 'first', but with a causal mixer the first token does not read all "
                "tokens; expected 'mean', 'max' or 'attention'"
            )
        return SequenceClassifier(self)


class SequenceClassifier(Pretrained, nn.Module):
    """TokenNetwork -> head.

    >>> model = SequenceClassifierConfig(vocab_size=11, width=24, depth=1).build()
    >>> model(torch.randint(11, (2, 9))).shape
    torch.Size([2, 2])
    """

    def __init__(self, config: SequenceClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.network = TokenNetwork(config)
        self.head = TextHead(config)
        self.head.apply(self.network.init_weights)

    def forward(
        self, tokens: Tokens, keep: Keep | None = None, *, segments: Tokens | None = None
    ) -> Logits:
        """Compute the class logits of each text.

        Args:
            tokens: Token ids; a pair of texts is one sequence with a separator token.
            keep: True for real tokens, False for padding on either side.
            segments: 0 for the first text and 1 for the second, for models with segment
                embeddings.

        Raises:
            ValueError: If shapes do not match, there are no tokens, or, on a CPU, an id is outside
                the vocabulary.
        """
        x, _ = self.network(tokens, segments=segments, keep=keep)
        return self.head(x, keep)


class TextHead(nn.Module):
    """Pool -> tanh(W x) -> linear output layer."""

    def __init__(self, config: SequenceClassifierConfig) -> None:
        super().__init__()
        self.pool = config.pool
        self.attention_pool = AttentionPool(config.width) if config.pool == "attention" else None
        self.transform = nn.Linear(config.width, config.width) if config.head_transform else None
        self.dropout = nn.Dropout(config.dropout)
        self.scores = nn.Linear(config.width, config.num_classes)

    def forward(self, x: Hidden, keep: Keep | None = None) -> Logits:
        x = self.pooled(x, keep)
        if self.transform is not None:
            x = torch.tanh(self.transform(x))
        return self.scores(self.dropout(x))

    def pooled(self, x: Hidden, keep: Keep | None = None) -> Pooled:
        """Pool real tokens into the input of the other layers."""
        if self.pool == "first":
            return first_token(x, keep)
        if self.attention_pool is not None:
            return self.attention_pool(x, keep)
        return max_pool(x, keep) if self.pool == "max" else mean_pool(x, keep)
