"""The `dispatch` command as a user meets it."""
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dispatch.cli import main, standings
from dispatch.kernels.routing import read_loads, synthetic_routing

ROOT = Path(__file__).resolve().parent.parent


def dispatch(*args: str):
    return CliRunner().invoke(main, args)


@pytest.fixture(autouse=True)
def _inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.parametrize("args", [("--help",), ("run", "--help"), ("doctor", "-h"), ("bench", "--help")])
def test_help(args: tuple[str, ...]) -> None:
    done = dispatch(*args)
    assert done.exit_code == 0
    assert "Usage" in done.output


def test_list_runs_nothing() -> None:
    done = dispatch("run", "--list")
    assert done.exit_code == 0
    for text in ("phase1_kernels", "-p tokens", "routings"): assert text in done.output


@pytest.mark.parametrize(("args", "says"), [
    (("run", "phase99"), "no phase 'phase99'; there are phase0_baseline, phase1_kernels"),
    (("run", "1x"), "no phase '1x'"),
    (("run", "-p", "token", "1"), "no parameter 'token' in"),
    (("run", "-p", "tokens", "[1, 2"), "not YAML"),
    (("run", "-p", "tokens", "1"), "accepted is a list"),
    (("run", "-p", "samples", "many"), "accepted is a int"),
    (("run", "-p", "root", "elsewhere"), "--keep"),
    (("doctor", "--shape", "gpt"), "deepseek-moe-16b"),
    (("doctor", "--shape", "8,9,64,64"), "K at most E"),
    (("doctor", "--tokens", "four"), "whole numbers"),
    (("bench", "--tokens", "1;2"), "whole numbers"),
    (("bench", "--tokens", "0"), "1 and more"),
    (("bench", "--shape", "gpt"), "deepseek-moe-16b"),
    (("bench", "--distribution", "poisson"), "--distribution"),
    (("bench", "--distribution", "trace:nowhere.json"), "can't be read"),
    (("generate", "x", "--record-loads", "/nowhere/loads.json"), "no folder that can be written to"),
    (("bench", "--contestants", "fastest"), "torch-grouped-mm"),
    (("bench", "--python", "vllm"), "NAME=PATH"),
    (("bench", "--python", "vllm=/nowhere/python"), "no interpreter"),
    (("bench", "--json", "/nowhere/rows.jsonl"), "can't write to"),
])
def test_errors_say_what_is_accepted(args: tuple[str, ...], says: str) -> None:
    done = dispatch(*args)
    assert done.exit_code != 0
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_recorded_loads_are_a_routing_for_the_race(tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    assert dispatch("generate", "And the king", "--max-tokens", "3", "--record-loads", str(file)).exit_code == 0
    loads = read_loads(file)
    assert len({sum(row) for row in loads.counts}) == 1, "every layer saw every token"
    assert "continuing a prompt of 12 characters" in loads.source
    _, index = synthetic_routing(100, len(loads.counts[0]), loads.top_k, f"trace:{file}")
    assert index.shape == (100, loads.top_k)
    done = dispatch("bench", "--distribution", f"trace:{file}", "--shape", "6,2,64,64")
    assert done.exit_code != 0
    assert f"the trace has {len(loads.counts[0])} experts a layer, the shape 6" in " ".join(done.output.split())


@pytest.mark.parametrize("name", ["1", "phase1", "phase-1", "phase1_kernels"])
def test_names_of_a_phase(name: str) -> None:
    assert "phase1_kernels" in dispatch("run", name, "--list").output


def test_outside_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = dispatch("run")
    assert done.exit_code == 1
    assert "inside a clone" in done.output


def test_doctor() -> None:
    done = dispatch("doctor", "--tokens", "1,64", "--shape", "8,2,512,256")
    assert done.exit_code == 0
    for text in ("torch", "triton", "E=8 K=2 H=512 I=256", "reference"): assert text in done.output


@pytest.mark.slow
def test_run_on_this_machine() -> None:
    "Executes phase 1 for real, on few cells: rows in out/, a page, plots, and the finding."
    before = set((ROOT / "out/phase-1").glob("*"))
    env = os.environ | {"COLUMNS": "160"}
    done = subprocess.run([sys.executable, "-c", "from dispatch.cli import main; main()", "run", "phase1", "-p", "tokens", "[1, 4]",
                           "-p", "distributions", "[uniform]", "-p", "samples", "3"], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = set((ROOT / "out/phase-1").glob("*")) - before
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["exit_status"] == "ok"
    assert manifest["parameters"]["tokens"] == [1, 4]
    assert manifest["notebook"] == "nbs/phases/phase1_kernels.ipynb"
    assert "Measured here" in done.stdout
    assert "raw rows: out/" in done.stdout
    assert "Published" in done.stdout
    assert (ROOT / "out/notebooks/phase1_kernels.html").exists()
    assert list((ROOT / "out/notebooks").glob("phase1_kernels-plot-*.svg"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes what fails here")
def test_a_phase_that_fails_says_so_and_keeps_its_rows() -> None:
    before = set((ROOT / "out/phase-1").glob("*"))
    done = subprocess.run([sys.executable, "-c", "from dispatch.cli import main; main()", "run", "phase1", "-p", "tokens", "[512]"],
                          capture_output=True, text=True, cwd=ROOT, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 1
    assert "on a CPU only those up to 256 are timed" in " ".join(done.stdout.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    [run] = set((ROOT / "out/phase-1").glob("*")) - before
    assert json.loads((run / "manifest.json").read_text())["exit_status"].startswith("failed: ValueError")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "says"), [
    ("tokens", "[]", "tokens is empty"), ("tokens", "[0]", "tokens are 0; accepted are whole numbers from 1"), ("repeats", "0", "repeats is 0"),
    ("distributions", "[poisson]", "distribution is 'poisson'"), ("sections", "[nothing]", "sections are ['nothing']"),
])
def test_wrong_parameters_of_a_phase_are_said_before_a_run_begins(name: str, value: str, says: str) -> None:
    before = set((ROOT / "out/phase-1").glob("*"))
    done = subprocess.run([sys.executable, "-c", "from dispatch.cli import main; main()", "run", "phase1_kernels", "-p", name, value],
                          capture_output=True, text=True, cwd=ROOT, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 1
    assert says in " ".join(done.stdout.replace("│", " ").split())
    assert set((ROOT / "out/phase-1").glob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU is told")
def test_bench_without_a_gpu() -> None:
    for mode in ("graph", "both"):
        done = dispatch("bench", "--mode", mode)
        assert done.exit_code == 2
        assert "need a GPU" in " ".join(done.output.split())


def test_bench_names_the_way_to_a_missing_engine() -> None:
    for name in ("vllm", "sglang"):
        if importlib.util.find_spec(name) is None:
            done = dispatch("bench", "--contestants", f"stock,{name}")
            assert done.exit_code == 1
            assert f"--python {name}=/path/to/python" in " ".join(done.output.split())


def test_bench_on_this_machine(tmp_path: Path) -> None:
    args = ("bench", "--shape", "8,2,64,48", "--tokens", "1,3", "--contestants", "reference,dispatch", "--mode", "eager", "--repeats", "2")
    done = dispatch(*args, "--json", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, done.output
    for text in ("8,2,64,48, 1 token, uniform", "3 tokens", "dispatch", "median µs", "over floor"): assert text in done.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["tokens"], r["contestant"]) for r in rows] == [(1, "reference"), (1, "dispatch"), (3, "reference"), (3, "dispatch")]
    assert {len(r["us"]) for r in rows} == {12}


def test_bench_where_nobody_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done = dispatch("bench", "--shape", "8,2,64,48", "--tokens", "1", "--contestants", "nowhere:made", "--mode", "eager")
    assert done.exit_code == 1
    assert "nowhere:made left: No module named 'nowhere'" in done.output
    assert "nothing was timed" in done.output


def hand_made(contestant: str, us: list[float], floor: float | None = 5.0) -> dict:
    return dict(contestant=contestant, backend="naive" if contestant == "dispatch" else "triton", us=us, repeat_medians=us, median_us=sorted(us)[1],
                floor_us=floor, spread=0.01, weight_bytes=10**6, rel_err=0.003)


@pytest.mark.parametrize(("rows", "line"), [
    ([hand_made("vllm", [12, 13, 14]), hand_made("dispatch", [9, 10, 11])],
     "dispatch (naive) is first with 10.0 µs, 2.00× the floor; vllm takes 1.30 times as long."),
    ([hand_made("vllm", [11, 13, 14]), hand_made("dispatch", [9, 10, 11])],
     "A tie: the repeats of dispatch (naive), vllm overlap; the fastest median is 10.0 µs, 2.00× the floor."),
    ([hand_made("stock", [9, 10, 11], None)], "Only stock ran: 10.0 µs."),
])
def test_standings(rows: list[dict], line: str) -> None:
    assert standings(rows, "a cell")[1] == line
