"""The page: how much there is to choose between, pictures, and all numbers."""

from html import escape

from onescan.bench.form_costs import FormCosts, Variant
from onescan.report.cards import big_numbers, fact_list
from onescan.report.forms.measures import (
    Measure,
    colors,
    memory_held,
    most_measured,
    time_per_image,
)
from onescan.report.forms.pictures import pictures
from onescan.report.section import Figure, Section
from onescan.report.template import fill
from onescan.report.words import TIMES, plural

LEAD = (
    "The same weights give the same scores in every form of their mixer. This is what a forward "
    "without gradients costs in each, over sizes of square images."
)


def render_forms(costs: FormCosts) -> str:
    """Spell the page in HTML.

    Raises:
        ValueError: nothing was measured.
    """
    if not costs.costs:
        raise ValueError(f"nothing was measured of {costs.name}.{_left_out(costs)}")
    return fill(
        kind="forms",
        title=costs.name,
        lead=LEAD,
        summary=f"{_cards(costs)}\n{_facts(costs)}",
        sections=(pictures(costs), _numbers(costs)),
    )


def _cards(costs: FormCosts) -> str:
    """The least and the most that large images cost."""
    size = most_measured(costs)
    there, cards = [cost for cost in costs.costs if cost.size == size], []
    for measure, least, most in (
        (time_per_image(costs), "fastest, per image", "as long in the slowest"),
        (memory_held(), "least memory", "as much in the largest"),
    ):
        best, worst = min(there, key=measure.of), max(there, key=measure.of)
        ratio = f"{measure.of(worst) / measure.of(best):.3g} {TIMES}"
        where = f"{best.variant.name}, at {size} {TIMES} {size}"
        cards.append((measure.spell(best), least, where))
        cards.append((ratio, most, f"{worst.variant.name}, {measure.spell(worst)}"))
    return big_numbers(cards)


def _facts(costs: FormCosts) -> str:
    machine, at_once = costs.machine, plural(costs.batch_size, "image")
    threads = f", {plural(machine.threads, 'thread')}" * (machine.device == "cpu")
    facts = [
        ("Device", f"{machine.device}{threads}, {machine.platform}"),
        ("Versions", f"onescan {machine.onescan}, torch {machine.torch}"),
        ("Forward", f"of {at_once} at once, in float32, each cost in a process of its own"),
    ]
    return fact_list(facts)


def _numbers(costs: FormCosts) -> Section:
    time = Figure(
        "Time per image",
        _table(costs, time_per_image(costs)),
        "The median of forwards after one to warm up; one that takes over a second is timed once. "
        "Bold is the best of a column.",
        columns=3,
    )
    held = Figure(
        "Memory",
        _table(costs, memory_held()),
        "The most that a forward holds at once, beyond the model and the images.",
        columns=3,
    )
    return Section("Numbers", (time, held), _left_out(costs).strip())


def _table(costs: FormCosts, measure: Measure) -> str:
    sizes = sorted({cost.size for cost in costs.costs})
    rows = ["<th></th>" + "".join(f"<th>{size} {TIMES} {size}</th>" for size in sizes)]
    for variant in colors(costs):
        cells = "".join(_cell(costs, variant, size, measure) for size in sizes)
        rows.append(f"<th>{escape(variant.name)}</th>{cells}")
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table class="groups">{body}</table></div>'


def _cell(costs: FormCosts, variant: Variant, size: int, measure: Measure) -> str:
    column = {cost.variant: cost for cost in costs.costs if cost.size == size}
    if variant not in column:
        return "<td>not measured</td>"
    text = measure.spell(column[variant])
    if measure.of(column[variant]) == min(map(measure.of, column.values())):
        return f'<td class="best"><b>{text}</b></td>'
    return f"<td>{text}</td>"


def _left_out(costs: FormCosts) -> str:
    return "".join(
        f" Not measured: {left.variant.name} from {left.size} pixels on, as {left.why}."
        for left in costs.left_out
    )
