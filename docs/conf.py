"""How Sphinx makes the site of these pages: `make docs` (docs/decisions/site.md has the reasons)."""

import tomllib
from pathlib import Path

project = "Roundtable"
version = release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser"]
exclude_patterns = ["_build"]

# A heading is linked by its text, as on GitHub: [limits](config.md#limits).
myst_heading_anchors = 6
nitpicky = True

# A page opens from the disk as from a server: no script or font of another host, sources not copied beside it.
html_theme = "furo"
html_title = f"Roundtable {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
html_use_index = False
html_show_search_summary = False  # a page read from the disk may fetch no other
