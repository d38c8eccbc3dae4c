"""Masked language models, which predict masked tokens from the tokens on both sides."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onescan.checks import check_shapes, check_token_ids
from onescan.layers.basic import build_norm
from onescan.models.pretrained import Pretrained
from onescan.models.token_network import TextEncoderConfig, TokenNetwork
from onescan.ops.packing import Packing
from onescan.shapes import Hidden, Keep, ReadOutLogits, TokenIndices, TokenLogits, TokenMask, Tokens


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(TextEncoderConfig):
    """Config of masked language models: LightNet by default; LION, LDN, BERT by changing fields."""

    head_transform: bool = True
    """Add a linear layer with GELU and a norm before the output layer, as in BERT."""
    tie_embeddings: bool = True
    """Share the weights of the token embedding and the output layer."""

    def build(self) -> "MaskedLM":
        """Build the network with new weights from torch's global generator.

        Raises:
            ValueError: If a size is not positive, the mixer is causal, or the mixer, the norm or
                the position rejects its config.
        """
        self.check()
        if self.mixer.is_causal:
            raise ValueError("mixer is causal: a masked token would not read the tokens after it")
        return MaskedLM(self)


class MaskedLM(Pretrained, nn.Module):
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
        if config.tie_embeddings:
            self.head.scores.weight = self.network.embedding.weight

    def forward(
        self,
        tokens: Tokens,
        keep: Keep | None = None,
        *,
        segments: Tokens | None = None,
        documents: Tokens | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        read_outs: int = 1,
        positions: TokenMask | TokenIndices | None = None,
    ) -> ReadOutLogits:
        """Compute the logits of the tokens at each position.

        Args:
            tokens: Token ids; masked positions hold the tokenizer's mask id.
            keep: True for real tokens, masked ones included; False for padding.
            segments: Segment of each token, for models with segment embeddings.
            documents: Number of the document that each token belongs to, for several documents in
                one row. Tokens read only their own document. Pass it on the CPU: a tensor on
                another device is copied to the CPU, which waits for that device once.
            cu_seqlens: Offsets of the documents instead of their numbers, as in flash-attention:
                int32, ``[S + 1]``, from 0 to T. With several rows, offsets count the tokens of all
                rows, up to B * T, and every row begins with a new document.
            read_outs: Number of last blocks to apply the head to. Their logits are concatenated
                along the batch, ``[read_outs * B, T, vocab_size]``, in the order of the blocks.
            positions: Positions whose logits to compute, which saves memory: a mask ``[B, T]``, or
                indices ``[P]`` into the flattened batch. The result has shape
                ``[1, read_outs * P, vocab_size]`` for P positions. ``None`` selects all. Unlike
                indices, a mask makes the host wait for its device.

        Raises:
            ValueError: If shapes or dtypes do not match, there are no tokens, `read_outs` exceeds
                the number of blocks, or, on a CPU, an id is outside the vocabulary or an index
                outside the batch.
        """
        is_mask = isinstance(positions, Tensor) and positions.dtype == torch.bool
        check_shapes(tokens=(tokens, "B T"), positions=(positions, "B T" if is_mask else "P"))
        if positions is not None and not is_mask:
            check_token_ids(positions, tokens.numel(), name="positions")
        x, _ = self.network(
            tokens,
            segments=segments,
            keep=keep,
            documents=documents,
            cu_seqlens=cu_seqlens,
            read_outs=read_outs,
        )
        if positions is not None:
            indices = positions.flatten().nonzero()[:, 0] if is_mask else positions
            indices = indices.to(x.device, non_blocking=True)
            x = (
                x.reshape(read_outs, -1, x.shape[-1])
                .index_select(1, indices)
                .view(1, -1, x.shape[-1])
            )
        return self.head(x)


class MaskedHead(nn.Module):
    """W' norm(gelu(W x)) + b, where W' may be the embedding matrix."""

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
