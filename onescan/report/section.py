"""What a page is made of: sections, each with figures that explain themselves."""

from html import escape
from typing import NamedTuple


class Figure(NamedTuple):
    """Something to look at, and how to read it.

    Attributes:
        title: a few words.
        html: the picture or table; who makes it escapes what users named.
        caption: one or two sentences that tell a stranger what is seen, as plain text.
        columns: how many of the page's three columns it takes.
    """

    title: str
    html: str
    caption: str
    columns: int = 1


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        title: a few words.
        figures: none where the section does not apply.
        lead: what the figures have in common, or why there are none; plain text.
    """

    title: str
    figures: tuple[Figure, ...] = ()
    lead: str = ""


def render(section: Section) -> str:
    """Spell a section in HTML; one that does not apply is a single line.

    >>> render(Section("Kernels", lead="This model has none."))
    '<p class="absent"><b>Kernels.</b> This model has none.</p>'
    """
    title, lead = escape(section.title), escape(section.lead)
    if not section.figures:
        return f'<p class="absent"><b>{title}.</b> {lead}</p>'
    figures = "\n".join(_render_figure(figure) for figure in section.figures)
    lead = f'<p class="lead">{lead}</p>\n' if lead else ""
    opening = f'<section id="{anchor(section)}">\n<h2>{title}</h2>\n{lead}'
    return f'{opening}<div class="figures">\n{figures}\n</div>\n</section>'


def anchor(section: Section) -> str:
    """The section's id, for links within the page."""
    return "".join(c if c.isalnum() else "-" for c in section.title.lower())


def _render_figure(figure: Figure) -> str:
    return (
        f'<figure class="columns-{figure.columns}">\n<h3>{escape(figure.title)}</h3>\n'
        f"{figure.html}\n<figcaption>{escape(figure.caption)}</figcaption>\n</figure>"
    )
