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

import dispatch
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
    point = dict(kernel="swap_ab", version=dispatch.__version__, tokens=8, distribution="uniform", config={"a": 1})
    for where, us in ((WHERE, 5.0), (WHERE | dict(gpu="GPU Y"), 3.0)):
        points = Points(tmp_path, where)
        points.add(**point, us=us)
        with pytest.raises(OSError, match="another search writes to this folder"): Points(tmp_path, where)
        points.out.close()
    with points.file.open("a") as f: f.write('{"kernel": "swap')
    again = Points(tmp_path, WHERE)
    assert again.find(**point)["us"] == 5.0
    assert again.find(**point | dict(config={"a": 2})) is None
    assert again.best("swap_ab", 8, "uniform")["us"] == 5.0
    assert len(again.file.read_text().splitlines()) == 2
    again.out.close()
    assert Points(tmp_path, WHERE | dict(versions={"torch": "2"}), write=False).find(**point) is None, "other versions, other times"


def test_damaged_lines_are_said_and_passed_over(tmp_path: Path) -> None:
    point = dict(kernel="gemv", version=dispatch.__version__, tokens=8, distribution="uniform", config={})
    good = json.dumps(WHERE | point | dict(us=5.0)).encode()
    bad = [b"garbage", good[:40], b"", b"[1]", b"null", b"\xff\x00", json.dumps(WHERE | point | dict(us=-1)).encode(), json.dumps(WHERE | point).encode(),
           b"[" * 100_000]
    (tmp_path / "points.jsonl").write_bytes(b"\n".join([*bad, good, b""]))
    with pytest.warns(UserWarning, match="line .* is no point") as said: points = Points(tmp_path, WHERE, write=False)
    assert len(said) == len(bad)
    assert points.best("gemv", 8, "uniform")["us"] == 5.0
    (tmp_path / "points.jsonl").write_text(json.dumps(WHERE | point | dict(us=0.1, version="0.0.0")) + "\n")
    assert Points(tmp_path, WHERE, write=False).best("gemv", 8, "uniform") is None, "another version's"


def test_out_of_memory_is_nobodys_fault_and_a_full_disk_stops_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    def run(experts: Any, config: dict[str, Any], p: Problem) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1: raise torch.OutOfMemoryError("CUDA out of memory")
        return fused_moe(p.hidden_states, *experts, p.top_k_weights, p.top_k_index)
    monkeypatch.setitem(TUNABLE, "gemv", lambda: Tunable("gemv", dispatch.__version__, run, lambda shape, t: [{}], {}, lambda c: 0))
    said: list[str] = []
    def done(kernel: str, t: int, best: Any, why: str) -> None: said.append(why)
    assert tune(SMALL, [2], "uniform", ["gemv"], tmp_path, torch.float32, done=done) == []
    assert said == ["nothing ran: out of memory"]
    assert tune(SMALL, [2], "uniform", ["gemv"], tmp_path, torch.float32) != []
    def full(fd: int) -> None: raise OSError(28, "No space left on device")
    monkeypatch.setattr(tuning.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"): tune(SMALL, [3], "uniform", ["gemv"], tmp_path, torch.float32)


def test_a_trace_is_known_by_its_content(tmp_path: Path) -> None:
    from dispatch.bench.tune import load_name
    (tmp_path / "loads.json").write_text("1")
    first = load_name(f"trace:{tmp_path}/loads.json")
    (tmp_path / "loads.json").write_text("2")
    assert first.startswith("trace:loads.json@")
    assert first != load_name(f"trace:{tmp_path}/loads.json")
    assert load_name("zipf:1.2") == "zipf:1.2"


def fake(speed: dict[int, float], calls: list[int]) -> Tunable:
    "A kernel right for every configuration, slow by its parameter, wrong at 4."
    def run(experts: Any, config: dict[str, Any], p: Problem) -> torch.Tensor:
        calls.append(config["n"])
        if config["n"] == 16: raise RuntimeError("out of resource")
        time.sleep(speed[config["n"]])
        y = fused_moe(p.hidden_states, *experts, p.top_k_weights, p.top_k_index)
        return y + 1 if config["n"] == 4 else y
    return Tunable("swap_ab", dispatch.__version__, run, lambda shape, t: [{"n": 1}], {"n": (1, 2, 4, 8, 16)}, lambda c: 0)


def test_a_search_goes_on_where_it_was_and_keeps_why_a_point_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setitem(TUNABLE, "swap_ab", lambda: fake({1: 0.06, 2: 0.0, 4: 0.0, 8: 0.0}, calls))
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
    assert table["up_to"] == [[1, None], [6, "swap_ab", {"n": 2}]], "from half to twice the tokens it was measured at"
    assert (table["gpu"], table["distribution"], table["shape"]) == ("cpu", "uniform", [4, 2, 16, 16])
    calls.clear()
    tune(SMALL, [3], "uniform", ["swap_ab"], tmp_path, torch.float32)
    assert not calls, "nothing is left to measure"


def test_killed_and_started_again_the_command_continues(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from dispatch.cli import main; main()", "tune", "--shape", "4,2,16,16", "--tokens", "1,2,3,4", "--kernels", "gemv",
               "--expert-load-distribution", "zipf:1.2", "--dtype", "float16", "--out", str(tmp_path)]
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
    monkeypatch.setattr(tuning, "_version", lambda kernel: "1")
    points = Points(tmp_path, WHERE)
    for t, m in ((8, 16), (64, 32)):
        points.add(kernel="vllm", version="1", tokens=t, distribution="uniform", config={"BLOCK_SIZE_M": m}, us=5.0)
        points.add(kernel="vllm", version="1", tokens=t, distribution="uniform", config={"BLOCK_SIZE_M": 128}, us=6.0)
    [file] = tuning.write_tables(points, tmp_path, SMALL, torch.bfloat16, "uniform")
    assert file.name == "E=4,N=16,device_name=GPU_X.json"
    written = json.loads(file.read_text())
    assert {k: v for k, v in written.items() if k != "triton_version"} == {"8": {"BLOCK_SIZE_M": 16}, "64": {"BLOCK_SIZE_M": 32}}


def test_fused_moe_takes_a_tuned_table_before_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import asdict, replace
    shape = SHAPES["deepseek-moe-16b"]
    own = replace(swap_config(64, 6, 64), small=32)
    row = dict(gpu="NVIDIA H200", shape=[64, 6, 2048, 1408], up_to=[[1, None], [90, "swap_ab", asdict(own)], [300, "hopper"]])
    (tmp_path / "kernels.json").write_text(json.dumps([row]))
    def chosen(T: int) -> Any:
        _table.cache_clear(); _choose.cache_clear()
        return choose_backend(shape, T, torch.bfloat16, "cuda", (9, 0), "NVIDIA H200")
    try:
        assert chosen(1).backend == "gemv"
        monkeypatch.setenv("DISPATCH_TUNED_FOLDER", str(tmp_path))
        assert (chosen(2).backend, chosen(2).config) == ("swap_ab", own)
        assert (chosen(91).backend, chosen(91).config) == ("hopper", None)
        shipped = [chosen(t).backend for t in (1, 301)]
        assert shipped == ["gemv", "hopper"], "where nothing was measured, as without it"
        for wrong, says in ((3, "TypeError"), ([3], "AttributeError"), ([row | dict(up_to=[[8, "fast"]])], "KeyError"), ([row | dict(shape=[1])], "ValueError"),
                            ([row | dict(up_to=[[8, "hopper_bytes"]])], "reads no floats"), ([row | dict(up_to=[[8, "gemv"], [4, "gemv"]])], "don't rise")):
            (tmp_path / "kernels.json").write_text(json.dumps(wrong))
            with pytest.raises(ValueError, match=f"kernels.json is no table of choices .*{says}"): chosen(1)
        (tmp_path / "kernels.json").write_text(json.dumps([row | dict(dtype="float32")]))
        assert chosen(2).config is None, "of another dtype"
        monkeypatch.setenv("DISPATCH_TUNED_FOLDER", str(tmp_path / "nowhere"))
        with pytest.raises(ValueError, match=r"nowhere/kernels.json is no table of choices .* `dispatch tune` writes one"): chosen(1)
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
    (["--expert-load-distribution", "trace:HALF"], "fewer than 2 experts of a layer"),
    (["--tokens", "0"], "accepted are 1 and more"),
    (["--tokens", "256", "--kernels", "gemv"], "tuned at 1 to 8 tokens"),
    (["--kernels", "fast"], "accepted are gemv, swap_ab, grouped, hopper, vllm"),
    (["--out", "FILE"], "is a file"),
    (["--out", "/proc/tuned"], "can't write to /proc/tuned"),
])
def test_what_is_wrong_is_said_before_any_work(args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatch.kernels.routing import ExpertLoads, write_loads
    monkeypatch.setattr(tuning, "weight_sets", lambda *a: pytest.fail("it began to work"))
    write_loads(ExpertLoads([[5] * 8], 2, "made up"), tmp_path / "wrong.json")
    write_loads(ExpertLoads([[5] * 4, [9, 0, 0, 0], [5] * 4], 2, "made up"), tmp_path / "half.json")
    (tmp_path / "file").touch()
    args = [a.replace("HALF", str(tmp_path / "half.json")).replace("WRONG", str(tmp_path / "wrong.json")).replace("FILE", str(tmp_path / "file")) for a in args]
    where = [] if "--out" in args else ["--out", str(tmp_path / "tuned")]
    found = CliRunner().invoke(main, ["tune", "--shape", "4,2,16,16", *args, *where])
    assert found.exit_code not in (0, -1)
    assert says in " ".join(found.output.split())
    assert not (tmp_path / "tuned").exists()
