"""What a benchmark's page calls what was measured, which options may change."""

import dataclasses

from onescan.bench.contest.outcome import Results
from onescan.bench.contest.trial import BOTH_WAYS, FORWARD, INFERENCE, TRAINING
from onescan.bench.contests import CausalOptions, Contest


def titled(results: Results, contest: Contest) -> Contest:
    """The benchmark, with a title and a lead that hold for these results."""
    if isinstance(results.options, CausalOptions) and results.options.level == "op":
        contest = dataclasses.replace(
            contest,
            title="Causal ops",
            lead="What mixes the tokens in causal language models, alone: noise through the ops, "
            "with the heads of such a model. No token reads later ones.",
        )
    kind = next((work for work in (FORWARD, INFERENCE) if results.works == [work]), None)
    if kind is None:
        return contest
    lead = f"{contest.lead} {kind.capitalize()} only, without gradients."
    return dataclasses.replace(contest, lead=lead)


def has_gradients(results: Results) -> bool:
    """Whether some were measured."""
    return any(work in (BOTH_WAYS, TRAINING) for work in results.works)
