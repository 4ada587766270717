"""The `dispatch` command as a user meets it."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dispatch.cli import main

ROOT = Path(__file__).resolve().parent.parent


def dispatch(*args: str):
    return CliRunner().invoke(main, args)


@pytest.fixture(autouse=True)
def _inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.parametrize("args", [("--help",), ("run", "--help"), ("doctor", "-h")])
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
])
def test_errors_say_what_is_accepted(args: tuple[str, ...], says: str) -> None:
    done = dispatch(*args)
    assert done.exit_code != 0
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


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
def test_a_phase_that_fails_says_so_and_keeps_its_rows() -> None:
    before = set((ROOT / "out/phase-1").glob("*"))
    done = subprocess.run([sys.executable, "-c", "from dispatch.cli import main; main()", "run", "phase1", "-p", "tokens", "[1]",
                           "-p", "distributions", "[poisson]"], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 1
    assert "distribution is 'poisson'" in done.stdout
    assert "Traceback" not in done.stderr
    [run] = set((ROOT / "out/phase-1").glob("*")) - before
    assert json.loads((run / "manifest.json").read_text())["exit_status"].startswith("failed: ValueError")
