"""The site: `make docs` builds it into docs/_build/html.

Before Sphinx reads a page, `figures.py` draws what the handbook shows, and the gallery runs the labs. The tag `quick`
(`sphinx-build -t quick`) leaves both out: what is not drawn yet gets a placeholder, and labs are shown unrun.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
LABS = HERE.parent / "src" / "pellucid" / "labs" / "pages"
sys.path.insert(0, str(HERE))

from sphinx_gallery.sorting import FileNameSortKey  # noqa: E402

import figures  # noqa: E402

QUICK = tags.has("quick")  # type: ignore[name-defined]  # noqa: F821  (Sphinx puts `tags` here)

project = "Pellucid"
author = "the Pellucid authors"
version = release = version_of("pellucid")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery", "site_rules"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "handbook/made", "**/sg_execution_times.rst"]
suppress_warnings = ["config.cache"]  # a sort key is a class, which Sphinx cannot store

html_theme = "furo"
html_title = "Pellucid"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"

myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# Docstrings are plain text with `code` in single backticks.
default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch tells long stories about forward()
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries = False  # every page carries the tree: keep it to pages and headings

sphinx_gallery_conf = {
    "examples_dirs": [os.path.relpath(LABS, HERE)],
    "gallery_dirs": ["labs"],
    "filename_pattern": "lab_",
    "ignore_pattern": r"__init__\.py",
    "within_subsection_order": FileNameSortKey,
    "plot_gallery": not QUICK,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "capture_repr": (),  # what a line prints is shown, what it returns (a legend, ticks) is not
    "write_computation_times": False,
    "remove_config_comments": True,
    "min_reported_time": 1e9,  # no line about seconds: they are this machine's
}
figures.make(HERE / "handbook" / "made", placeholders=QUICK)
