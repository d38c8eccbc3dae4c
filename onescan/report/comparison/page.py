"""One self-contained HTML page that sets recipes side by side."""

from html import escape

from onescan.report.comparison.curves import over_epochs, over_time
from onescan.report.comparison.groups import Group
from onescan.report.comparison.settings import (
    caution,
    differing,
    differing_machines,
    machine,
    spell,
)
from onescan.report.comparison.table import badge, html_table
from onescan.report.section import Figure, Section
from onescan.report.template import fill
from onescan.report.words import plural

TITLE = "What is different"
LEAD = (
    "Finished runs side by side. Runs that differ in nothing but their seed, and in what they ran "
    "on, are one row; where a seed comes twice, each machine has its own."
)
NOTE = (
    "Seeds are counted, and named in brackets. Test metrics are the mean and standard deviation "
    "over seeds; the rest are means over seeds. Examples/s is the speed of the median update. "
    "Training is the time of updates, without evaluations and checkpoints; waiting the part of it "
    "that went by without data; memory the most in use, of a GPU where there is one. Speed and "
    "memory compare on equal machines only. Bold is the best of a column; of training, only where "
    "all runs made equally many updates."
)


def render_comparison(groups: list[Group]) -> str:
    """Spell the page in HTML."""
    runs = sum(len(group.runs) for group in groups)
    return fill(
        kind="comparison",
        title=f"{plural(runs, 'run')} in {plural(len(groups), 'row')}",
        lead=f"{LEAD} {caution([group.config for group in groups])}".strip(),
        summary=f'{html_table(groups)}\n<p class="note">{NOTE}</p>\n{_folders(groups)}',
        sections=[over_epochs(groups), over_time(groups), _settings(groups)],
    )


def _folders(groups: list[Group]) -> str:
    listed = "".join(
        f"<dt>{badge(group)}{escape(group.name)}</dt>"
        f"<dd>{escape(', '.join(str(run.result.folder) for run in group.runs))}</dd>"
        for group in groups
    )
    return f'<dl class="folders">{listed}</dl>'


def _settings(groups: list[Group]) -> Section:
    recipes, runs = [group.config for group in groups], [group.runs[0] for group in groups]
    found = {path: [spell(recipe, path) for recipe in recipes] for path in differing(recipes)}
    found |= {name: [machine(run)[name] for run in runs] for name in differing_machines(runs)}
    if not found:
        return Section(TITLE, lead="Nothing: no setting but the name.")
    heads = "".join(f"<th>{badge(group)}{escape(group.name)}</th>" for group in groups)
    rows = "".join(
        f"<tr><th><code>{escape(path)}</code></th>"
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for path, values in found.items()
    )
    body = f"<tr><th></th>{heads}</tr>{rows}"
    figure = Figure(
        "Settings",
        f'<div class="scroll"><table class="settings">{body}</table></div>',
        "Every setting in which any two of the recipes differ, by its path in the run's config; a "
        "dash where a recipe's parts have no such setting. All others are equal; of what the runs "
        "were carried out on, only what tells rows of one recipe apart is listed.",
        columns=3,
    )
    return Section(TITLE, (figure,))
