"""Rules of the repository that no notebook cell can check."""
import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def tracked() -> list[Path]:
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / f for f in files.splitlines() if (ROOT / f).is_file()]


def numbers() -> dict[str, int]:
    "Module → the number of the notebook that it is exported from."
    found = {}
    for p in NOTEBOOKS:
        sources = "\n".join(c.source for c in nbformat.read(p, as_version=4).cells if c.cell_type == "code")
        if m := re.search(r"^#\| default_exp (\S+)", sources, re.M): found[f"dispatch.{m[1]}"] = int(p.name.split("_")[0])
    return found


def test_modules_import_only_lower_numbers() -> None:
    number = numbers()
    assert len(number) >= 12
    for module, mine in number.items():
        path = ROOT / (module.replace(".", "/") + ".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom): continue
            for name in [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]:
                if name and name.startswith("dispatch.") and name in number:
                    assert number[name] < mine, f"{module} ({mine}) imports {name} ({number[name]})"


def test_every_module_comes_from_a_notebook() -> None:
    exported = {ROOT / (m.replace(".", "/") + ".py") for m in numbers()}
    others = {p for p in (ROOT / "dispatch").rglob("*.py") if p.name not in ("__init__.py", "_modidx.py") and "pb" not in p.parts}
    assert others == exported
    assert not any("utils" in p.stem for p in others)


def test_notebooks_start_with_a_title_and_a_claim() -> None:
    for p in NOTEBOOKS:
        cells = nbformat.read(p, as_version=4).cells
        heads = [c.source for c in cells[:2] if c.cell_type == "markdown"]
        assert heads, p
        assert re.match(r"# .+\n\n> .+", heads[0]), f"{p}: an H1 and a one-line claim under it"


def test_phases_export_nothing_and_have_their_parts() -> None:
    for p in (ROOT / "nbs/phases").glob("phase*.ipynb"):
        nb = nbformat.read(p, as_version=4)
        text = "\n".join(c.source for c in nb.cells)
        assert "#| export" not in text
        for head in ("## Measure", "## Read", "## What we learned", "**The thesis.**"): assert head in text, (p.name, head)
        tags = [t for c in nb.cells for t in c.metadata.get("tags", [])]
        assert tags.count("parameters") == 1
        assert "finding" in tags


def test_notebooks_are_committed_with_their_outputs_and_without_errors() -> None:
    for p in NOTEBOOKS:
        cells = [c for c in nbformat.read(p, as_version=4).cells if c.cell_type == "code"]
        assert any(c.outputs for c in cells), p
        assert not [o for c in cells for o in c.outputs if o.output_type == "error"], p


def test_no_registry_host_and_no_path_of_a_machine() -> None:
    here = "|".join(re.escape(f"{p}/") for p in (ROOT, Path.home()))  # where this clone and its user live
    bad = re.compile(r"files\.pythonhosted|pypi\.org|registry\.npmjs|static\.crates|index\.crates|--(extra-)?index-url\s+http"
                     rf"|(?<![\w/])(/home/\w+/|/Users/\w+/|{here})")
    for p in tracked():
        if p == Path(__file__) or p.suffix in (".svg", ".png"): continue
        for n, line in enumerate(p.read_text(errors="replace").splitlines(), 1):
            assert not bad.search(line), f"{p.relative_to(ROOT)}:{n}: {line[:120]}"


def test_the_tracked_tree_stays_small() -> None:
    assert sum(p.stat().st_size for p in tracked()) < 24 * 2**20


def test_version_has_one_source() -> None:
    import dispatch
    assert f"version = {dispatch.__version__}\n" in (ROOT / "settings.ini").read_text()
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool")[0]
    assert f"## {dispatch.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_decision_is_listed() -> None:
    folder = ROOT / "nbs/decisions"
    listing = (folder / "index.md").read_text()
    for p in folder.glob("0*.md"): assert p.name in listing, f"{p.name} is not in decisions/index.md"


def test_links_between_pages_lead_somewhere() -> None:
    pages = [(p, "\n".join(c.source for c in nbformat.read(p, as_version=4).cells if c.cell_type == "markdown")) for p in NOTEBOOKS]
    pages += [(p, p.read_text()) for p in (*ROOT.glob("*.md"), *(ROOT / "nbs").rglob("*.md"))]
    for page, text in pages:
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            if not re.match(r"https?:|mailto:", link): assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} → {link}"


@pytest.mark.slow
def test_a_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    "Built, installed apart from this checkout, imported, called; with every data file of the package inside."
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as z: names = set(z.namelist())
    data = {p.relative_to(ROOT).as_posix() for p in (ROOT / "dispatch").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert data <= names, data - names
    assert not [n for n in names if n.startswith(("tests", "nbs", "results"))]
    assert {n.split("/")[-1] for n in names} >= {"LICENSE-MIT", "LICENSE-APACHE", "py.typed"}
    venv = tmp_path / "clean"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "-p", sys.executable, venv], check=True)
    python = venv / "bin/python"
    subprocess.run([*uv, "pip", "install", "-q", "-p", python, wheel, "-c", ROOT / "requirements.lock"], check=True, capture_output=True)
    code = ("import dispatch, json, torch\n"
            "from dispatch.kernels.fused_moe import fused_moe\nfrom dispatch.kernels.reference import example_inputs\n"
            "y = fused_moe(*example_inputs())\n"
            "print(json.dumps([dispatch.__file__, list(y.shape), dispatch.__version__]))")
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, shape, _ = json.loads(done.stdout)
    assert str(venv) in where
    assert shape == [4, 16]
    said = subprocess.run([venv / "bin/dispatch", "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "reference" in said.stdout
