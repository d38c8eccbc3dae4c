"""The delta rule one token at a time: constant memory beside the outputs, for decoding.

(I - beta k k^T) S + beta k v^T = S + k (beta (v^T - k^T S)): a token writes what is still missing.
"""

import torch

from onescan.shapes import Betas, Keys, KeyValue, Queries, Values


def forward(
    q: Queries, k: Keys, v: Values, beta: Betas, kv: KeyValue, *, chunk_size: int
) -> tuple[Values, KeyValue]:
    outputs = []
    # unbind: the gradient of a slice would be as large as the sequence, at every token
    rows = (q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2), beta[..., None, None])  # B T H 1 .
    for q_t, k_t, v_t, beta_t in zip(*(x.unbind(1) for x in rows), strict=True):
        kv = torch.addcmul(kv, k_t.mT, beta_t * (v_t - k_t @ kv))
        outputs.append(q_t @ kv)
    return torch.cat(outputs, dim=-2).transpose(1, 2), kv
