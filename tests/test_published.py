"""Each number on a published page still follows from the committed rows: pages are executed anew and compared."""
import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["nbs/index.ipynb", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "nbs/phases").glob("*.ipynb"))]


def outputs(nb: nbformat.NotebookNode) -> list[list[str]]:
    "What each code cell shows, without ids and execution counts."
    def shown(o: nbformat.NotebookNode) -> str:
        data = o.get("data", {})
        kinds = ("image/svg+xml", "text/markdown", "text/html", "text/plain")
        text = next((data[k] for k in kinds if k in data), o.get("text", o.get("evalue", "")))
        return re.sub(r"\s+", " ", "".join(text)).strip()
    return [[shown(o) for o in c.get("outputs", []) if o.get("name") != "stderr"] for c in nb.cells if c.cell_type == "code"]


def stale(page: Path) -> str | None:
    "None when executing the page gives the outputs it is committed with, else the first difference."
    committed = nbformat.read(page, as_version=4)
    fresh = nbformat.read(page, as_version=4)
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(page.parent)}}).execute()
    cells = [c.source for c in committed.cells if c.cell_type == "code"]
    for source, was, now in zip(cells, outputs(committed), outputs(fresh), strict=True):
        if was != now: return f"the cell\n{source[:300]}\nshows\n{str(was)[:500]}\nbut now gives\n{str(now)[:500]}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page_follows_from_rows(page: str) -> None:
    difference = stale(ROOT / page)
    assert difference is None, f"{page} is stale; execute it and commit it: {difference}"


@pytest.mark.slow
def test_a_changed_row_makes_the_page_stale(tmp_path: Path) -> None:
    "The check itself: one sample of one row is changed, with its checksum, and the page no longer follows."
    import hashlib
    for name in ("settings.ini", "_quarto.yml"): shutil.copy(ROOT / name, tmp_path)
    for name in ("nbs", "results"): shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    changed = 0
    for manifest in (tmp_path / "results").glob("phase-1/*/manifest.json"):
        rows = manifest.with_name("kernels.jsonl")
        if not rows.exists(): continue  # a later part without a race
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
        lines[1]["median_us"] *= 1.5
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        m = json.loads(manifest.read_text())
        m["files"]["kernels.jsonl"] = hashlib.sha256(rows.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(m))
        changed += 1
    assert changed
    assert stale(tmp_path / "nbs/phases/phase1_kernels.ipynb") is not None
    assert stale(tmp_path / "nbs/index.ipynb") is not None


def test_every_committed_run_is_whole() -> None:
    from dispatch.core.evidence import read_run
    runs = [p for p in (ROOT / "results").glob("*/*") if p.is_dir()]
    assert runs
    for run in runs:
        m = read_run(run).manifest
        if m["exit_status"] == "ok": assert m["dirty"] is False
        assert m["usd_per_gpu_hour"] is None or m["price_source"]


def test_phase_1_has_the_full_matrix() -> None:
    from dispatch.bench.headlines import DISTRIBUTIONS, ENTRANTS, TOKENS, published_race, race_rows
    run = published_race()
    assert run is not None
    frame = race_rows(run)
    for contestant, mode in ((c, m) for c in ENTRANTS for m in ("graph", "eager") if (c, m) != ("stock", "graph")):
        cells = frame[(frame.contestant == contestant) & (frame["mode"] == mode)]
        assert {(t, d) for t in TOKENS for d in DISTRIBUTIONS} == set(zip(cells.tokens, cells.distribution, strict=True))
    asked = run.manifest["parameters"]["repeats"] * run.manifest["parameters"]["samples"]
    assert (frame.us.map(len) == asked).all(), "every sample is kept"
    assert asked >= 20
    assert (frame.rel_err < 1e-2).all()
    assert frame.groupby(["tokens", "distribution"]).inputs.nunique().max() == 1, "everyone ran the same inputs"
