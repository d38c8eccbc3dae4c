"""What stands on top of a page: big numbers, and facts in two columns."""

from collections.abc import Iterable
from html import escape

Card = tuple[str, str, str]  # a number in HTML, what it is, and of what


def big_numbers(cards: Iterable[Card]) -> str:
    """Spell them in HTML.

    >>> big_numbers([("7 <small>&plusmn; 1</small>", "seconds", "a < b")])
    '<ul class="numbers"><li><strong>7 <small>&plusmn; 1</small></strong><b>seconds</b><span>a \
&lt; b</span></li></ul>'
    """
    listed = "".join(
        f"<li><strong>{number}</strong><b>{escape(what)}</b><span>{escape(how)}</span></li>"
        for number, what, how in cards
    )
    return f'<ul class="numbers">{listed}</ul>'


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Spell names and what they stand for in HTML.

    >>> fact_list([("Text", "a & b")])
    '<div class="facts"><dl><dt>Text</dt><dd>a &amp; b</dd></dl></div>'
    """
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts)
    return f'<div class="facts"><dl>{listed}</dl></div>'
