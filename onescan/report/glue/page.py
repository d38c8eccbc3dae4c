"""One self-contained HTML page about a model that was fine-tuned on tasks of GLUE."""

import statistics
from html import escape

from onescan.data.glue import PROBLEMS, GlueTask
from onescan.recipes.glue import GLUE
from onescan.report.cards import big_numbers
from onescan.report.glue.outcome import GlueOutcome
from onescan.report.glue.pictures import section
from onescan.report.glue.table import html_table
from onescan.report.section import Figure, Section
from onescan.report.template import fill
from onescan.report.words import duration, plural

NOTE = (
    "Judged on the published dev sets, after the last update. A score is the mean of a task's "
    "measures, times 100, and the average is that of the scores; behind \u00b1 stands the standard "
    "deviation over seeds."
)
HEADS = (
    *("task", "begins with", "examples", "learning rate", "weight decay", "decay", "epochs"),
    *("batch", "tokens"),
)


def render_glue(outcome: GlueOutcome) -> str:
    """Spell the page in HTML."""
    tasks = plural(len(outcome.runs), "task")
    return fill(
        kind="GLUE",
        title=f"{outcome.checkpoint} on {tasks}",
        lead=(
            f"A model that learnt to fill in masked tokens, fine-tuned on {tasks} of GLUE by the "
            f"recipe {GLUE[outcome.recipe].title} of LION's Table 8, "
            f"with {plural(len(outcome.seeds), 'seed')}."
        ),
        summary=f'{_cards(outcome)}\n{html_table(outcome)}\n<p class="note">{NOTE}</p>',
        sections=[section(outcome), _settings(outcome)],
    )


def _cards(outcome: GlueOutcome) -> str:
    average, seeds = outcome.average(), outcome.seeds
    about = "" if average.spread is None else f" <small>&plusmn; {100 * average.spread:.2f}</small>"
    several = len(seeds) > 1
    over = f"mean and standard deviation of {len(seeds)} seeds" if several else "one seed"
    seconds = sum(statistics.mean(run.seconds for run in runs) for runs in outcome.runs.values())
    cards = [
        (f"{100 * average.mean:.2f}{about}", "average score", over),
        (str(len(outcome.runs)), "tasks", ", ".join(PROBLEMS[task].title for task in outcome.runs)),
        (str(len(seeds)), "seeds", ", ".join(map(str, seeds))),
        (duration(seconds), "training", "of all tasks, per seed, without evaluation"),
    ]
    return big_numbers(cards)


def _settings(outcome: GlueOutcome) -> Section:
    rows = ["".join(f"<th>{head}</th>" for head in HEADS)]
    for task in outcome.runs:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _setting(outcome, task))
        rows.append(f"<th>{PROBLEMS[task].title}</th>{cells}")
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    figure = Figure(
        "How each task was learnt",
        f'<div class="scroll"><table class="groups">{body}</table></div>',
        "Of the first seed; everything else is in each run's config.json, and a page about each "
        "task is beside its runs. A decoupled decay is not multiplied by the learning rate.",
        columns=3,
    )
    return Section("Settings", (figure,))


def _setting(outcome: GlueOutcome, task: GlueTask) -> list[str]:
    manifest = outcome.runs[task][0].manifest
    training = manifest.run.training
    return [
        str(manifest.run.init_from),
        f"{manifest.examples:,}",
        f"{training.learning_rate:g}",
        f"{training.weight_decay:g}",
        "decoupled" if training.decoupled_weight_decay else "AdamW's",
        str(training.epochs),
        str(training.batch_size),
        str(getattr(manifest.format, "length", "")),
    ]
