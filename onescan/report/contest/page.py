"""The page: how far contestants lie apart, pictures, and all numbers."""

from html import escape

from onescan.bench.contest.outcome import Outcome, Results
from onescan.bench.contests import Contest
from onescan.report.cards import Card, big_numbers, fact_list
from onescan.report.contest.figures import (
    Column,
    absent,
    columns,
    largest,
    machine_facts,
    milliseconds,
    times,
)
from onescan.report.contest.pictures import pictures
from onescan.report.contest.titles import titled
from onescan.report.section import Figure, Section
from onescan.report.template import fill

MOST_CARDS = 4
CAPTION = (
    "Time is the median of rounds, memory the most that a call held beyond what was there before. "
    "Ratios are to the first contestant; their quartiles are of ratios round by round, so that "
    "what else the machine did is in both times. Bold is the fastest of a size."
)
SHARES = {
    "of copying": " Of copying: the bytes that a call must read and write at least, over its time, "
    "as a share of the bandwidth of a large copy, which took turns with the contestants.",
    "of matmul": " Of matmul: operations of the model's matrix products, two for each "
    "multiply-accumulate, over the time, as a share of the rate of one large product, which took "
    "turns with the contestants. Causal softmax attention's products are counted up to each token.",
}


def render_contest(results: Results, contest: Contest) -> str:
    """Spell the page in HTML."""
    contest = titled(results, contest)
    return fill(
        kind=f"benchmark {results.benchmark}",
        title=contest.title,
        lead=contest.lead,
        summary=f"{_cards(results, contest)}\n{fact_list(machine_facts(results))}",
        sections=(
            *pictures(results, contest),
            _numbers(results, contest),
            _absent(results, contest),
        ),
    )


def _cards(results: Results, contest: Contest) -> str:
    """As many as fit in a row, equally many of each work."""
    each = MOST_CARDS // max(1, len(results.works))
    of_works = [_cards_of(results, contest, work)[:each] for work in results.works]
    return big_numbers(card for cards in of_works for card in cards)


def _cards_of(results: Results, contest: Contest, work: str) -> list[Card]:
    """The first contestant's time, and how many times as long others take, the slowest first."""
    heat = largest(results, work)
    where = f"{work}, {contest.at.format(f'{heat.size:,}')}"
    first = [outcome for outcome in heat.outcomes if outcome.name == results.names[0]]
    others = sorted((o for o in heat.outcomes if o not in first), key=_ratio, reverse=True)
    if not first:
        return []
    return [
        (milliseconds(first[0].time_ms.median), first[0].name, where),
        *((times(_ratio(other)), f"as long: {other.name}", where) for other in others),
    ]


def _ratio(outcome: Outcome) -> float:
    return outcome.ratio.median if outcome.ratio else 0.0


def _numbers(results: Results, contest: Contest) -> Section:
    shown = columns(results, contest)
    caption = CAPTION + "".join(SHARES.get(column.name, "") for column in shown)
    if results.growth:
        caption += f" {contest.letter} is {contest.power_of}; time grows as its power."
    figures = tuple(
        Figure(
            f"{work[0].upper()}{work[1:]}",
            _table(results, contest, work, shown),
            caption,
            columns=3,
        )
        for work in results.works
    )
    return Section("Numbers", figures)


def _table(results: Results, contest: Contest, work: str, shown: list[Column]) -> str:
    grows = ["time grows as"] * bool(results.growth)
    heads = ["", contest.axis, *(column.name for column in shown), *grows]
    rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    fastest = {
        heat.size: min((o.time_ms.median for o in heat.outcomes), default=0.0)
        for heat in results.heats
        if heat.work == work
    }
    for name in results.names:
        outcomes = results.of(name, work)
        for i, (size, outcome) in enumerate(outcomes.items()):
            is_best = outcome.time_ms.median == fastest[size]
            cells = [column.spell(outcome) for column in shown]
            cells = [f"<td>{escape(cell)}</td>" for cell in cells]
            if is_best:
                cells[0] = f'<td class="best"><b>{escape(shown[0].spell(outcome))}</b></td>'
            last = _power(results, contest, name, work) if i + 1 == len(outcomes) else ""
            cells += [f"<td>{last}</td>"] * bool(grows)
            label = escape(name) if i == 0 else ""
            rows.append(f"<th>{label}</th><td>{size:,}</td>{''.join(cells)}")
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table class="groups">{body}</table></div>'


def _power(results: Results, contest: Contest, name: str, work: str) -> str:
    for growth in results.growth:
        if (growth.name, growth.work) == (name, work):
            return f"{contest.letter}^{growth.time_exponent:.2f}"
    return ""


def _absent(results: Results, contest: Contest) -> Section:
    lines = absent(results, contest)
    if not lines:
        return Section("Not measured", lead="Nothing was left out.")
    listed = "".join(f"<tr><td>{escape(line)}</td></tr>" for line in lines)
    table = f'<div class="scroll"><table class="groups settings">{listed}</table></div>'
    caption = "Who could not run is listed with what it said; the others went on without it."
    return Section("Not measured", (Figure("Who is missing, and why", table, caption, columns=3),))
