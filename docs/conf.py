"""Sphinx configuration of the documentation; `make docs` builds it."""

import os
import re
from importlib.util import find_spec

from sphinx.ext.napoleon import GoogleDocstring

import onescan

project = "onescan"
author = "The onescan authors"
copyright = author
version = release = onescan.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # the site shows its equations without a network
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
if find_spec("onescan.nn") is None:
    exclude_patterns.append("api/nn.md")
default_role = "literal"  # single backticks in docstrings are code
nitpicky = False  # jaxtyping's shape aliases have no pages

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = os.environ.get("ONESCAN_DOCS_NOTEBOOKS", "cache")  # "off": do not run them
nb_execution_in_temp = True  # notebooks write files
nb_execution_timeout = 600
nb_output_stderr = "remove"  # progress bars and warnings with local paths
nb_merge_streams = True  # one box for the lines that a cell prints
os.environ.setdefault("OMP_NUM_THREADS", "1")  # notebooks run at the same time
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures show them
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # docstrings describe shapes better
napoleon_use_ivar = True  # otherwise attributes with docstrings would be listed twice

html_theme = "pydata_sphinx_theme"
html_title = "onescan"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 4,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
html_show_sourcelink = False
html_sidebars = {"*": []}  # pages outside of sections have nothing to list there

# Links to external pages are checked by `make links`, which needs a network.
linkcheck_timeout = 20
linkcheck_retries = 2


def link_inside_the_site(app, name, source):
    """Point links at files outside docs/ at the pages of the site that include them."""
    del app
    depth = name.count("/")
    pages = {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}
    up = "../" * depth
    for file, page in pages.items():
        source[0] = re.sub(rf"\]\({re.escape(up)}\.\./{file}", f"]({up}{page}.md", source[0])


def link_from_included_file(app, relative, parent, source):
    """Point an included file's links to docs/ at the pages of the site."""
    del app, relative, parent
    source[0] = source[0].replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")


def escape_unpacking(app, kind, name, thing, options, lines):
    """Escape the stars of shapes such as [B, C, *shape], which would start emphasis."""
    del app, kind, name, thing, options
    lines[:] = [re.sub(r"(?:^|(?<=[ \[(]))\*(?=\w+[\],)])", r"\\*", line) for line in lines]


def consume_attribute(docstring):
    """Read the docstring of an attribute as sentences: what is before a colon is not a type."""
    lines = docstring._dedent(docstring._consume_to_end())
    return "", GoogleDocstring(lines, docstring._config).lines()


def consume_returns(docstring, preprocess_types=False):
    """Read what a function returns in the same way."""
    del preprocess_types
    lines = docstring._dedent(docstring._consume_to_next_section())
    return [("", "", GoogleDocstring(lines, docstring._config).lines())] if lines else []


def setup(app):
    GoogleDocstring._consume_inline_attribute = consume_attribute
    GoogleDocstring._consume_returns_section = consume_returns
    # It only copies files after the build, but does not declare that this is safe.
    app.extensions["sphinx-mathjax-offline"].parallel_read_safe = True
    app.connect("autodoc-process-docstring", escape_unpacking)
    app.connect("source-read", link_inside_the_site)
    app.connect("include-read", link_from_included_file)
