"""Runs on disk: complete or passed over, never overwritten, never half-read."""
import json
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dispatch.core.evidence import EvidenceError, Run, find_runs, load_rows, newest_run, read_run, source_state, with_parts


@pytest.fixture
def run(tmp_path: Path) -> Run:
    with Run("phase-9", root=tmp_path, parameters={"tokens": [1, 2]}) as run:
        for tokens in (1, 2): run.log("kernels", tokens=tokens, us=[1.0, 2.0], median_us=1.5)
    return run


def test_manifest_names_all_that_the_design_asks(tmp_path: Path) -> None:
    notebook = tmp_path / "n.ipynb"
    notebook.write_text("{}")
    with Run("phase-9", root=tmp_path, notebook=notebook, usd_per_gpu_hour=3.0, price_source="a list, 2026-11-30") as run:
        run.log("kernels", tokens=1)
    m = json.loads((run.folder / "manifest.json").read_text())
    wanted = {"run", "phase", "part_of", "commit", "dirty", "notebook", "notebook_sha256", "parameters", "gpu", "gpu_count", "cuda",
              "versions", "start", "end", "usd_per_gpu_hour", "price_source", "cost_usd", "cost_basis", "exit_status", "files"}
    assert wanted <= m.keys()
    assert m["notebook_sha256"]
    assert m["cost_basis"] == "listed"
    assert str(tmp_path) not in json.dumps(m), "a path of this machine"


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: (f / "manifest.json").unlink(), "did not finish"),
    (lambda f: (f / "manifest.json").write_text("{"), "not JSON"),
    (lambda f: (f / "manifest.json").write_text("[]"), "lacks"),
    (lambda f: (f / "manifest.json").write_text('{"run": 1}'), "lacks"),
    (lambda f: (f / "kernels.jsonl").unlink(), "missing"),
    (lambda f: (f / "kernels.jsonl").write_text('{"tokens": 1}\n{"tok'), "changed since the run"),
    (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest"),
    (lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace('"files": {', '"files": 3, "x": {')), "manifest"),
], ids=["no manifest", "half a manifest", "a list", "too little", "no rows", "half a row", "binary", "wrong type"])
def test_damaged_runs_are_reported_and_passed_over(run: Run, tmp_path: Path, damage, message: str) -> None:
    damage(run.folder)
    with pytest.raises(EvidenceError, match=message): read_run(run.folder)
    with pytest.warns(UserWarning, match="passed over: .*" + message): assert find_runs(tmp_path, "phase-9") == []
    with pytest.warns(UserWarning, match="passed over"): assert load_rows(tmp_path, "phase-9", "kernels").empty


def _measure_forever(root: Path) -> None:
    with Run("phase-9", root=root) as run:
        for i in range(10**9):
            run.log("kernels", tokens=i)
            time.sleep(0.01)


def test_a_killed_run_leaves_no_manifest(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_measure_forever, args=(tmp_path,))
    child.start()
    deadline = time.time() + 60
    while not list(tmp_path.glob("*/*/kernels.jsonl")) and time.time() < deadline: time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert list(tmp_path.glob("*/*/kernels.jsonl")), "the child never logged"
    with pytest.warns(UserWarning, match="did not finish"): assert find_runs(tmp_path, "phase-9") == []


def test_failed_runs_stay_but_give_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with Run("phase-9", root=tmp_path) as run:
            run.log("kernels", tokens=1)
            raise ZeroDivisionError("by hand")
    [found] = find_runs(tmp_path, "phase-9")
    assert found.manifest["exit_status"] == "failed: ZeroDivisionError: by hand"
    assert not found.ok
    assert load_rows(tmp_path, "phase-9", "kernels").empty
    assert newest_run(tmp_path, "phase-9") is None


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    before = (run.folder / "kernels.jsonl").read_text()
    with Run("phase-9", root=tmp_path) as second: second.log("kernels", tokens=99)
    assert second.folder != run.folder
    assert (run.folder / "kernels.jsonl").read_text() == before
    with pytest.raises(EvidenceError, match="takes no more rows"): run.log("kernels", tokens=4)


@pytest.mark.parametrize("row", [dict(us=float("nan")), dict(us=float("inf")), dict(us={1, 2})], ids=str)
def test_a_row_that_is_no_json_is_refused(tmp_path: Path, row: dict) -> None:
    with pytest.raises(EvidenceError, match="no JSON"), Run("phase-9", root=tmp_path) as run: run.log("kernels", **row)


def test_uncommitted_code_leaves_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCH_COMMIT", "abcdef0123")
    monkeypatch.setenv("DISPATCH_DIRTY", "1")
    with pytest.raises(EvidenceError, match="commit first"): Run("phase-9", root=tmp_path / "results")
    with Run("phase-9", root=tmp_path / "out") as run: pass
    assert run.id.endswith("-abcdef0")
    monkeypatch.setenv("DISPATCH_DIRTY", "0")
    with Run("phase-9", root=tmp_path / "results"): pass


def test_source_state_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPATCH_COMMIT", raising=False)
    for name in ("settings.ini", "a.py"): (tmp_path / name).write_text("x")
    (tmp_path / "nbs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert source_state(tmp_path) == {"commit": "unknown", "dirty": None}
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]): subprocess.run([*git, *args], check=True)
    assert source_state(tmp_path)["dirty"] is False
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "rows.jsonl").write_text("{}")
    assert source_state(tmp_path)["dirty"] is False, "results are what runs write"
    (tmp_path / "a.py").write_text("y")
    assert source_state(tmp_path)["dirty"] is True


def test_prices_need_a_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="price_source"): Run("phase-9", root=tmp_path, usd_per_gpu_hour=3.0)
    with pytest.raises(ValueError, match="'listed' and 'billed'"): Run("phase-9", root=tmp_path, cost_basis="guessed")


@pytest.mark.parametrize("bad", [dict(usd_per_gpu_hour="3.50", price_source="x"), dict(usd_per_gpu_hour=float("nan"), price_source="x"),
                                 dict(usd_per_gpu_hour=-1.0, price_source="x"), dict(usd_per_gpu_hour=1.0, price_source=3),
                                 dict(parameters={"a": {1, 2}}), dict(parameters={"a": float("inf")})], ids=str)
def test_what_a_manifest_could_not_hold_is_refused_before_measuring(tmp_path: Path, bad: dict) -> None:
    with pytest.raises(ValueError, match=r"usd_per_gpu_hour|price_source|parameters"): Run("phase-9", root=tmp_path, **bad)
    assert not list(tmp_path.iterdir())


def test_rows_that_no_manifest_names_are_no_evidence(run: Run, tmp_path: Path) -> None:
    import shutil
    shutil.copytree(run.folder, run.folder.with_name("copied"))
    with pytest.warns(UserWarning, match="a copy of the run"): assert len(find_runs(tmp_path, "phase-9")) == 1
    shutil.rmtree(run.folder.with_name("copied"))
    (run.folder / "extra.jsonl").write_text('{"tokens": 3}\n')
    with pytest.warns(UserWarning, match="not named by the manifest"): assert find_runs(tmp_path, "phase-9") == []


@pytest.mark.parametrize("value", [0, None, "fast", True, -1.0])
def test_an_odd_control_joins_nothing_and_breaks_nothing(tmp_path: Path, value) -> None:
    first = part(tmp_path, 100.0, tokens=1)
    with Run("phase-8", root=tmp_path, part_of=first.id) as run: run.log("control", name="stock, 64 tokens", value=value)
    with pytest.warns(UserWarning, match=r"no positive number|differs"): assert len(load_rows(tmp_path, "phase-8", "kernels")) == 1


def test_a_part_names_a_first_run(tmp_path: Path) -> None:
    first = part(tmp_path, 100.0, tokens=1)
    second = part(tmp_path, 100.0, first.id, tokens=2)
    with pytest.raises(EvidenceError, match="a successful first run"): Run("phase-8", root=tmp_path, part_of=second.id)


def test_log_needs_an_open_run_and_a_plain_name(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="inside `with"): Run("phase-9", root=tmp_path).log("kernels", tokens=1)
    with pytest.raises(EvidenceError, match="table is"), Run("phase-9", root=tmp_path) as run: run.log("../kernels", tokens=1)
    with Run("phase-9", root=tmp_path) as run: run.log("kernels", table=1, self=2)


def part(root: Path, control: float | None, part_of: str | None = None, **row) -> Run:
    with Run("phase-8", root=root, part_of=part_of) as run:
        if control: run.log("control", name="stock, 64 tokens", value=control)
        run.log("kernels", **row)
    return run


def test_parts_join_only_when_their_controls_agree(tmp_path: Path) -> None:
    first = part(tmp_path, 100.0, tokens=1)
    for control, tokens in ((102.9, 2), (103.2, 3), (96.9, 4), (None, 5)): part(tmp_path, control, first.id, tokens=tokens)
    with pytest.warns(UserWarning) as seen: frame = load_rows(tmp_path, "phase-8", "kernels")
    assert frame.tokens.tolist() == [1, 2]
    assert set(frame.run) == {first.id}
    assert frame.part.nunique() == 2
    assert sum("differs by 3.2%" in str(w.message) for w in seen) == 1
    assert sum("differs by 3.1%" in str(w.message) for w in seen) == 1
    assert sum("repeats no control" in str(w.message) for w in seen) == 1
    with pytest.warns(UserWarning): assert len(with_parts(find_runs(tmp_path, "phase-8")[0], find_runs(tmp_path, "phase-8"))) == 2
    with pytest.warns(UserWarning): assert newest_run(tmp_path, "phase-8", cells=[{"tokens": 1}, {"tokens": 2}]).id == first.id
    with pytest.raises(EvidenceError, match="which is no complete run"): Run("phase-8", root=tmp_path, part_of="2020")


def test_newest_run_wants_the_whole_matrix(tmp_path: Path) -> None:
    with Run("phase-7", root=tmp_path) as whole:
        for t in (1, 2): whole.log("kernels", tokens=t, distribution="uniform")
    with Run("phase-7", root=tmp_path) as half: half.log("kernels", tokens=1, distribution="uniform")
    cells = [{"tokens": t, "distribution": "uniform"} for t in (1, 2)]
    assert newest_run(tmp_path, "phase-7").id == half.id
    assert newest_run(tmp_path, "phase-7", cells=cells).id == whole.id
    assert newest_run(tmp_path, "phase-7", "cpu", cells=cells).id == whole.id
    assert newest_run(tmp_path, "phase-7", "NVIDIA H200", cells=cells) is None
    assert newest_run(tmp_path / "nowhere", "phase-7") is None


def test_caption_says_where_it_ran(run: Run) -> None:
    text = read_run(run.folder).caption()
    assert run.id in text
    assert "torch 2" in text
