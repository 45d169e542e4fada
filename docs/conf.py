"""Sphinx configuration of the documentation: `make docs` builds it into build/docs."""

from sphinx.application import Sphinx

import castor

project = "castor"
author = "the castor maintainers"
copyright = "the castor maintainers, Apache License 2.0"  # noqa: A001  Sphinx calls it so
release = version = castor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
# A fence that names no language is a drawing, not Python.
highlight_language = "text"
# Docstrings write code in single backticks.
default_role = "code"
# They quote strings as Python writes them: dashes only.
smartquotes_action = "D"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"castor {release}"
html_copy_source = False
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Keeps napoleon from docstrings of attributes: what precedes a colon it takes for a type."""
    as_written: list[str] = []

    def keep(
        app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
    ) -> None:
        as_written[:] = lines

    def restore(
        app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
    ) -> None:
        if what == "attribute":
            lines[:] = as_written

    # napoleon listens at 500.
    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
