"""The site: `make site` builds it into build/site. It opens from the disk, and asks no network."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import penstock  # noqa: E402  the one of this checkout

project, author, copyright = "Penstock", "The Penstock developers", "The Penstock developers"
version = release = penstock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = "Penstock"
html_static_path = ["_static"]
html_css_files = ["penstock.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_show_search_summary = False  # it is fetched, which a browser refuses to pages of a disk
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_theme_options = {
    "navbar_align": "left",
    "navigation_with_keys": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def setup(app: Sphinx) -> None:
    """Have the pages of the reference written before Sphinx looks for pages."""
    import make_reference

    app.connect("config-inited", lambda app, config: make_reference.write(HERE / "reference"))
    app.connect("source-read", make_reference.relink)
    app.connect("autodoc-process-docstring", make_reference.show_blocks, 400)  # before napoleon
