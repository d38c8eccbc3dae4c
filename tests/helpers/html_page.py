"""Parse the HTML pages that onescan writes, for tests."""

import re
from base64 import b64decode
from html.parser import HTMLParser

INLINE = ("span", "i", "b", "code")


class Page(HTMLParser):
    """The elements, text, tables and images of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.cells, self.in_cell = [], [], [], False
        self.feed(html.replace("<wbr>", ""))  # optional line breaks

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.cells.append([])
        if tag == "tr":
            self.cells[-1].append([])
        self.in_cell = tag in ("td", "th") or (tag in INLINE and self.in_cell)
        if tag in ("td", "th"):
            self.cells[-1][-1].append("")

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag in INLINE

    def handle_data(self, text):
        if self.tags and self.tags[-1][0] != "style":
            self.texts.append(text)
        if self.in_cell:
            self.cells[-1][-1][-1] += text

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def pictures(self, kind):
        start = f"data:image/{kind};base64,"
        sources = [attributes["src"] for tag, attributes in self.tags if tag == "img"]
        return [b64decode(s.removeprefix(start)) for s in sources if s.startswith(start)]


def charts(page):
    """Descriptions of the charts, in order."""
    return [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]


def table(page, corner):
    return next(rows for rows in page.cells if rows[0][0] == corner)


def assert_loads_nothing(html):
    page = Page(html)
    links = ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background")
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "foreignobject")
        assert not any(name.startswith("on") for name in attributes)
        for name in links:
            assert (attributes.get(name) or "#").startswith(("#", "data:image/")), (tag, attributes)
    assert not re.search(r"https?://|url\((?!#)|@import", html)
