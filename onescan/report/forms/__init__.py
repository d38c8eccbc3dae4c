"""What each form of a model costs, as a page: time and memory over image sizes."""

from pathlib import Path

from onescan.bench.form_costs import FormCosts
from onescan.report.forms.page import render_forms
from onescan.report.template import save


def write_forms(costs: FormCosts, path: Path) -> Path:
    """Write a page that needs no other file: time and memory over image sizes, form by form.

    Args:
        costs: as `measure_forms` returned them.
        path: where to write; a page of onescan's that is there is replaced.

    Returns:
        The path.

    Raises:
        ValueError: nothing was measured, or at the path is something else.
        OSError: the page cannot be written; one that was there is intact.
    """
    return save(render_forms(costs), path)
