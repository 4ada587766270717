"""`dispatch tune`: the climb, points that survive a kill, tables that fused_moe and vLLM take, errors before any work."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dispatch.bench import tune as tuning
from dispatch.bench.race import Problem
from dispatch.bench.tune import TUNABLE, Points, Tunable, climb, flat, neighbours, nested, tune
from dispatch.cli import main
from dispatch.core.roofline import SHAPES, MoEShape
from dispatch.kernels.fused_moe import _choose, _table, as_config, choose_backend, fused_moe
from dispatch.kernels.swap_ab import SwapConfig, swap_config

SMALL = MoEShape("small", 4, 2, 16, 16)
WHERE = dict(gpu="GPU X", versions={"torch": "1"}, shape=[4, 2, 16, 16], dtype="float32")


def test_neighbours_are_one_step_away() -> None:
    steps = {"a": (1, 2, 4), "b": (8, 16)}
    assert list(neighbours({"a": 2, "b": 8}, steps)) == [{"a": 1, "b": 8}, {"a": 4, "b": 8}, {"a": 2, "b": 16}]
    assert list(neighbours({"a": 3, "b": 16}, steps)) == [{"a": 2, "b": 16}, {"a": 4, "b": 16}, {"a": 3, "b": 8}], "between two steps"
    deep = {"x": 1, "gate_up": {"n": 2, "k": 3}}
    assert nested(flat(deep)) == deep


def test_the_climb_measures_nothing_twice_and_survives_what_fails() -> None:
    asked: list[dict[str, int]] = []
    def measure(configs: list[dict[str, Any]]) -> list[float]:
        asked.extend(configs)
        return [float("inf") if c["a"] == 8 else 10.0 + abs(c["a"] - 4) + abs(c["b"] - 16) for c in configs]
    assert climb([{"a": 1, "b": 8}, {"a": 8, "b": 8}], {"a": (1, 2, 4, 8), "b": (8, 16, 32)}, measure) == ({"a": 4, "b": 16}, 10.0)
    assert len({json.dumps(c, sort_keys=True) for c in asked}) == len(asked)


def test_a_line_that_was_cut_off_is_dropped_and_other_searches_are_left_alone(tmp_path: Path) -> None:
    points = Points(tmp_path, WHERE)
    point = dict(kernel="swap_ab", version="1", tokens=8, distribution="uniform", config={"a": 1})
    points.add(**point, us=5.0)
    Points(tmp_path, WHERE | dict(gpu="GPU Y")).add(**point, us=3.0)
    with points.file.open("a") as f: f.write('{"kernel": "swap')
    again = Points(tmp_path, WHERE)
    assert again.find(**point)["us"] == 5.0
    assert again.find(**point | dict(config={"a": 2})) is None
    assert again.best("swap_ab", 8, "uniform")["us"] == 5.0
    assert len(again.file.read_text().splitlines()) == 2
    assert Points(tmp_path, WHERE | dict(versions={"torch": "2"})).find(**point) is None, "other versions, other times"


def fake(speed: dict[int, float], calls: list[int]) -> Tunable:
    "A kernel right for every configuration, slow by its parameter, wrong at 4."
    def run(experts: Any, config: dict[str, Any], p: Problem) -> torch.Tensor:
        calls.append(config["n"])
        if config["n"] == 16: raise RuntimeError("out of resource")
        time.sleep(speed[config["n"]])
        y = fused_moe(p.hidden_states, *experts, p.top_k_weights, p.top_k_index)
        return y + 1 if config["n"] == 4 else y
    return Tunable("swap_ab", "1", run, lambda shape, t: [{"n": 1}], {"n": (1, 2, 4, 8, 16)}, lambda c: 0)


def test_a_search_goes_on_where_it_was_and_keeps_why_a_point_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setitem(TUNABLE, "swap_ab", lambda: fake({1: 0.02, 2: 0.001, 4: 0.0, 8: 0.0}, calls))
    class Stop(Exception): pass
    def stop(line: str) -> None: raise Stop
    with pytest.raises(Stop): tune(SMALL, [3], "uniform", ["swap_ab"], tmp_path, torch.float32, stop)
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 1
    calls.clear()
    files = tune(SMALL, [3], "uniform", ["swap_ab"], tmp_path, torch.float32)
    assert 1 not in calls, "measured before"
    rows = {r["config"]["n"]: r for r in map(json.loads, (tmp_path / "points.jsonl").read_text().splitlines())}
    assert "disagrees with the reference" in rows[4]["why"]
    assert set(rows) == {1, 2, 4}, "a step beyond one that is wrong is not taken"
    assert [f.name for f in files] == ["kernels.json"]
    [table] = json.loads(files[0].read_text())
    assert table["up_to"] == [[1 << 30, "swap_ab", {"n": 2}]]
    assert (table["gpu"], table["distribution"], table["shape"]) == ("cpu", "uniform", [4, 2, 16, 16])
    calls.clear()
    tune(SMALL, [3], "uniform", ["swap_ab"], tmp_path, torch.float32)
    assert not calls, "nothing is left to measure"


def test_killed_and_started_again_the_command_continues(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from dispatch.cli import main; main()", "tune", "--shape", "4,2,16,16", "--tokens", "1,2,3,4", "--kernels", "gemv",
               "--expert-load-distribution", "zipf:1.2", "--out", str(tmp_path)]
    env, file = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, tmp_path / "points.jsonl"
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (file.exists() and file.read_text().count("\n") >= 2):
        assert first.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = file.read_text().splitlines()[:2]
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    rows = file.read_text().splitlines()
    assert rows[:2] == before
    assert [json.loads(r)["tokens"] for r in rows] == [1, 2, 3, 4]
    assert "set DISPATCH_TUNED_FOLDER" in " ".join(second.stdout.split())


def test_vllm_gets_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fused_moe")
    module.get_config_file_name = lambda E, N, dtype: f"E={E},N={N},device_name=GPU_X.json"  # type: ignore[attr-defined]
    monkeypatch.setattr(tuning, "import_module", lambda name: module)
    points = Points(tmp_path, WHERE)
    for t, m in ((8, 16), (64, 32)):
        points.add(kernel="vllm", version="1", tokens=t, distribution="uniform", config={"BLOCK_SIZE_M": m}, us=5.0)
        points.add(kernel="vllm", version="1", tokens=t, distribution="uniform", config={"BLOCK_SIZE_M": 128}, us=6.0)
    [file] = tuning.write_tables(points, tmp_path, SMALL, torch.bfloat16, "uniform", [8, 64])
    assert file.name == "E=4,N=16,device_name=GPU_X.json"
    written = json.loads(file.read_text())
    assert {k: v for k, v in written.items() if k != "triton_version"} == {"8": {"BLOCK_SIZE_M": 16}, "64": {"BLOCK_SIZE_M": 32}}


def test_fused_moe_takes_a_tuned_table_before_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import asdict, replace
    shape = SHAPES["deepseek-moe-16b"]
    own = replace(swap_config(64, 6, 64), small=32)
    row = dict(gpu="NVIDIA H200", shape=[64, 6, 2048, 1408], up_to=[[90, "swap_ab", asdict(own)], [1 << 30, "hopper"]])
    (tmp_path / "kernels.json").write_text(json.dumps([row]))
    def chosen(T: int) -> Any:
        _table.cache_clear(); _choose.cache_clear()
        return choose_backend(shape, T, torch.bfloat16, "cuda", (9, 0), "NVIDIA H200")
    try:
        assert chosen(1).backend == "gemv"
        monkeypatch.setenv("DISPATCH_TUNED_FOLDER", str(tmp_path))
        assert (chosen(1).backend, chosen(1).config) == ("swap_ab", own)
        assert (chosen(91).backend, chosen(91).config) == ("hopper", None)
        monkeypatch.setenv("DISPATCH_TUNED_FOLDER", str(tmp_path / "nowhere"))
        with pytest.raises(ValueError, match=r"nowhere', without a table: .* `dispatch tune` writes one"): chosen(1)
    finally: _table.cache_clear(); _choose.cache_clear()
    assert as_config("swap_ab", asdict(own)) == own
    assert isinstance(as_config("swap_ab", asdict(own)), SwapConfig)
    with pytest.raises(ValueError, match="'gemv' takes no configuration; accepted are grouped, swap_ab"): as_config("gemv", {})
    with pytest.raises(ValueError, match="is no SwapConfig"): as_config("swap_ab", {"small": 16})


@pytest.mark.parametrize(("args", "says"), [
    (["--expert-load-distribution", "zipf:x"], "zipf takes a number"),
    (["--expert-load-distribution", "skewed"], "accepted are uniform, zipf:S"),
    (["--expert-load-distribution", "trace:WRONG"], "the trace has 8 experts a layer, the shape 4"),
    (["--expert-load-distribution", "trace:nowhere.json"], "nowhere.json"),
    (["--tokens", "0"], "accepted are 1 and more"),
    (["--kernels", "fast"], "accepted are gemv, swap_ab, grouped, hopper, vllm"),
    (["--out", "FILE"], "is a file"),
    (["--out", "/proc/tuned"], "can't write to /proc/tuned"),
])
def test_what_is_wrong_is_said_before_any_work(args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatch.kernels.routing import ExpertLoads, write_loads
    monkeypatch.setattr(tuning, "weight_sets", lambda *a: pytest.fail("it began to work"))
    write_loads(ExpertLoads([[5] * 8], 2, "made up"), tmp_path / "wrong.json")
    (tmp_path / "file").touch()
    args = [a.replace("WRONG", str(tmp_path / "wrong.json")).replace("FILE", str(tmp_path / "file")) for a in args]
    where = [] if "--out" in args else ["--out", str(tmp_path / "tuned")]
    found = CliRunner().invoke(main, ["tune", "--shape", "4,2,16,16", *args, *where])
    assert found.exit_code not in (0, -1)
    assert says in " ".join(found.output.split())
    assert not (tmp_path / "tuned").exists()
