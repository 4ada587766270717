"""README.md from nbs/index.ipynb, without Quarto: python tools/readme.py [--check]."""
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("IN_TEST", "1")  # nbdev then leaves its documentation links alone

import nbformat
from nbconvert import MarkdownExporter
from nbdev.processors import FilterDefaults
from nbdev.serve_drv import main as process

ROOT = Path(__file__).resolve().parent.parent


def readme() -> str:
    "The processed index as Markdown, with links that start at nbs/ made to start at the repository's root."
    with tempfile.TemporaryDirectory() as scratch:
        processed = Path(scratch, "index.ipynb")
        process((ROOT / "nbs/index.ipynb", processed, FilterDefaults))
        nb = nbformat.read(processed, as_version=4)
    title = nbformat.read(ROOT / "nbs/index.ipynb", as_version=4).cells[0]  # which processing turned into front matter
    nb.cells = [title, *(c for c in nb.cells if c.cell_type != "raw" and not c.source.startswith("<!-- WARNING"))]
    for cell in nb.cells:  # an index shows results, not the cells that compute them
        if cell.cell_type == "code": cell.metadata["transient"] = {"remove_source": True}
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r"\]\((?!https?:|#)(\.\./)?", lambda m: "](" if m[1] else "](nbs/", text)
    note = "<!-- Made from nbs/index.ipynb by `make export`; edit that. -->\n\n"
    return note + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


if __name__ == "__main__":
    text, path = readme(), ROOT / "README.md"
    if "--check" not in sys.argv: path.write_text(text)
    elif path.read_text() != text: sys.exit("README.md is not what nbs/index.ipynb gives; run `make export` and commit both")
