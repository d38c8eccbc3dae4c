"""One scan of all tokens, two causal scans, softmax: each token reads all others."""

from functools import partial

from torch import Tensor

from onescan.bench.contest.trial import Field, Trial
from onescan.bench.contestants.ops import flipped, noise, softmax, trial, works
from onescan.bench.contests import OneScanOptions
from onescan.ops.additive_decay import additive_decay
from onescan.ops.backend import Backend
from onescan.ops.lrpe import lrpe_angles, lrpe_frequencies
from onescan.shapes import Angles


def one_scan(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend) -> Tensor:
    """LightNet, Eq. 14."""
    return additive_decay(q, k, v, backend=backend)[0]


def one_scan_lrpe(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend) -> Tensor:
    """LightNet, Eq. 14, with LRPE inside; the angles are part of the work."""
    return additive_decay(q, k, v, angles=angles_of(q), backend=backend)[0]


def two_scans(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend) -> Tensor:
    """What a causal op offers: there and back, in chunks."""
    there = additive_decay(q, k, v, causal=True, backend=backend)[0]
    turned = (flipped(x) for x in (q, k, v))
    return there + flipped(additive_decay(*turned, causal=True, backend=backend)[0])


def angles_of(q: Tensor) -> Angles:
    """LRPE's angles for q, at the frequencies that it begins with."""
    theta = lrpe_frequencies(q.shape[-1], axes=1).repeat(q.shape[2], 1).to(q.device)
    return lrpe_angles((q.shape[1],), theta)


OURS = {"one_scan": one_scan, "one_scan_lrpe": one_scan_lrpe, "two_scans": two_scans}
SOFTMAX = "softmax"


def contestants(options: OneScanOptions) -> Field:
    """Name them."""
    return Field((*OURS, SOFTMAX), works(options), prepare)


def prepare(name: str, work: str, size: int, options: OneScanOptions) -> Trial:
    """Noise through an op."""
    shape = (options.batch_size, size, options.num_heads, options.head_dim)
    inputs = [noise(options, *shape) for _ in range(3)]
    op = softmax if name == SOFTMAX else partial(OURS[name], backend=options.backend)
    return trial(op, inputs, work, options)
