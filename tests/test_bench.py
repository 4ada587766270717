"""The race and its tables, on a CPU at small sizes."""
import importlib.util
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dispatch.bench import race as bench_race
from dispatch.bench.contestants import (
    CONTESTANTS,
    PACKAGES,
    Contestant,
    MissingPackage,
    dispatch_contestant,
    find_contestant,
    stock_contestant,
    vllm_candidates,
)
from dispatch.bench.headlines import as_markdown, published_race, race_rows, race_table, results_root, verdicts
from dispatch.bench.race import (
    checksum,
    has_package,
    inputs_checksum,
    problems,
    python_for,
    python_of,
    race,
    race_cell,
    verdict,
    weight_sets,
)
from dispatch.core.evidence import Run, read_run
from dispatch.core.quantization import NAMES
from dispatch.core.roofline import H200, Ceilings, MoEShape
from dispatch.core.timing import Disagreement

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = MoEShape("tiny", 8, 2, 32, 24)


@pytest.fixture(scope="module")
def sets() -> list:
    return weight_sets(TINY, 2, torch.float32, DEVICE)


def test_inputs_are_the_same_for_everyone(sets: list) -> None:
    a, b = (problems(TINY, 5, "zipf:1.2", sets) for _ in range(2))
    assert inputs_checksum(a) == inputs_checksum(b)
    assert inputs_checksum(a) != inputs_checksum(problems(TINY, 5, "zipf:1.2", sets, seed=1))
    assert [p.weight_set for p in a] == [0, 1, 0, 1, 0, 1]
    assert torch.equal(weight_sets(TINY, 1, torch.float32, DEVICE)[0][0], sets[0][0])
    assert not torch.equal(sets[0][0], sets[1][0])


@pytest.mark.parametrize("who", [stock_contestant(), dispatch_contestant("reference"), dispatch_contestant("naive")], ids=lambda w: w.backend)
def test_a_row_has_all_that_the_format_asks(who, sets: list) -> None:
    row = race_cell(who, TINY, "uniform", problems(TINY, 3, "uniform", sets), sets, "eager", Ceilings(1e11, 1e12), samples=2)
    wanted = {"contestant", "backend", "version", "shape", "precision", "tokens", "distribution", "mode", "us", "median_us", "floor_us",
              "rel_err", "config", "experts_hit", "repeat_medians", "inputs"}
    assert wanted <= row.keys()
    assert len(row["us"]) == 2
    assert row["precision"] == "fp32"


def test_the_liar_gets_no_row(sets: list) -> None:
    liar = replace(stock_contestant(), name="liar", build=lambda shape, gate_up, down: lambda x, weights, index: x)
    with pytest.raises(Disagreement, match=r"liar .* not timed"):
        race_cell(liar, TINY, "uniform", problems(TINY, 3, "uniform", sets), sets, "eager")


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="accepted are 'reference', 'naive', 'grouped', 'gemv', 'swap_ab'"): dispatch_contestant("fastest")


def logged(run: Run, who: str, mode: str, medians: list[float], rel_err: float = 0.003, **more) -> None:
    run.log("kernels", **(dict(contestant=who, backend=who, shape="deepseek-moe-16b", tokens=1, distribution="uniform", mode=mode, us=medians,
                               repeat_medians=medians, median_us=sorted(medians)[len(medians) // 2], floor_us=25.0, weight_bytes=10**8,
                               experts_hit=6.0, rel_err=rel_err) | more))


def test_table_and_verdicts_by_hand(tmp_path: Path) -> None:
    with Run("phase-1", root=tmp_path) as run:
        logged(run, "dispatch", "graph", [49.0, 50.0, 51.0])
        logged(run, "vllm", "graph", [60.0, 62.0, 64.0], rel_err=0.006)
        logged(run, "sglang", "graph", [59.0, 61.0, 70.0])
        logged(run, "dispatch", "eager", [100.0, 101.0, 120.0])
        logged(run, "stock", "eager", [110.0, 115.0, 118.0])
        logged(run, "dispatch", "graph", [1.0], shape="another")
    frame = race_rows(read_run(run.folder))
    assert set(frame["shape"]) == {"deepseek-moe-16b"}
    assert len(race_rows(read_run(run.folder), every_shape=True)) == len(frame) + 1
    [row] = race_table(frame).to_dict("records")
    assert (row["dispatch µs"], row["vllm µs"], row["over floor"], row["dispatch is"]) == (50.0, 62.0, 2.0, "first")
    assert row["GB/s"] == pytest.approx(2000)
    assert "2.00×" in as_markdown(race_table(frame))
    assert frame.tflop_s.iloc[0] == pytest.approx(6 * 6 * 2048 * 1408 / 50e-6 / 1e12)
    graph, eager = verdicts(frame).to_dict("records")
    assert (graph["best_other"], graph["lead"], graph["over_vllm_error"]) == ("sglang", pytest.approx(61 / 50), pytest.approx(0.5))
    assert (eager["won"], eager["tied"], eager["verdict"]) == (False, True, "tie")


def test_a_table_without_a_gpu_has_no_empty_columns(tmp_path: Path) -> None:
    with Run("phase-1", root=tmp_path) as run:
        for who in ("stock", "reference"): logged(run, who, "eager", [10.0], floor_us=None, shape="cpu-small")
    frame = race_rows(read_run(run.folder))
    assert list(race_table(frame, mode="eager")) == ["tokens", "experts hit", "stock µs", "reference µs"]
    assert not len(verdicts(frame))


def test_results_lie_in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="clone"): results_root()
    with pytest.raises(FileNotFoundError): published_race()


# Contestants of a real race, in processes of their own: a worker finds them as test_bench:NAME.

def light() -> Contestant:
    "Right, and quick to start."
    return replace(dispatch_contestant("reference"), name="light", backend="light")


def liar() -> Contestant:
    return replace(light(), name="liar", build=lambda shape, gate_up, down: lambda x, weights, index: x)


def chatterbox() -> Contestant:
    "Prints to whatever is standard output, from Python and below it."
    print("hello", end="")
    os.write(1, b'{"answer": 1}\n{"answer": {"us": [0.1]}}\ngarbage')
    def build(shape, gate_up, down):
        layer = light().build(shape, gate_up, down)
        def call(x, weights, index):
            os.write(1, b"chatter"); print("chatter")
            return layer(x, weights, index)
        return call
    return replace(light(), name="chatterbox", build=build)


def other_seed() -> Contestant:
    "Its process makes other weights than everyone else's."
    made = bench_race.weight_sets
    bench_race.weight_sets = lambda *args: made(*args[:-1], args[-1] + 1)
    return replace(light(), name="other seed")


def _until(tokens: int, last) -> Contestant:
    "A contestant that does something else from so many tokens on."
    def build(shape, gate_up, down):
        layer = light().build(shape, gate_up, down)
        return lambda x, weights, index: last() if x.shape[0] >= tokens else layer(x, weights, index)
    return replace(light(), name="until", build=build)


def mortal() -> Contestant: return _until(3, lambda: os._exit(7))
def sleeper() -> Contestant: return _until(3, lambda: time.sleep(600))
def clumsy() -> Contestant: return _until(3, lambda: 1 / 0)


def turncoat() -> Contestant:
    "Right while it is checked, wrong once it is timed."
    calls = []
    def build(shape, gate_up, down):
        layer = light().build(shape, gate_up, down)
        return lambda x, weights, index: calls.append(1) or (layer(x, weights, index) if len(calls) < 10 else x)
    return replace(light(), name="turncoat", build=build)


def tuned() -> Contestant:
    "Sweeps three configurations: one breaks, one is slow, one is wrong; its default is none of these."
    chosen = []
    def build(shape, gate_up, down):
        layer = light().build(shape, gate_up, down)
        def call(x, weights, index):
            kind = chosen[-1]["kind"] if chosen[-1] else "default"
            if kind == "broken": raise RuntimeError("out of shared memory")
            if kind == "slow": time.sleep(0.05)
            if kind == "default": time.sleep(0.02)
            return x if kind == "wrong" else layer(x, weights, index)
        return call
    return replace(light(), name="tuned", build=build, configure=chosen.append, config=lambda *_: dict(chosen[-1] or {}),
                   candidates=lambda tokens: [{"kind": k} for k in ("broken", "slow", "wrong", "good")])


def run_race(names: list[str], cells: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, **more):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return list(race(names, [(TINY, *c) for c in cells], ["eager"], "float32", repeats=3, samples=2, warmup_s=0.01, device="cpu", progress=False, **more))


@pytest.mark.slow
def test_a_race_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    "Everyone ran the same inputs; whoever is wrong, foreign or absent has no time; noise on a pipe harms nobody."
    names = ["reference", "stock", "naive", *(f"test_bench:{n}" for n in ("chatterbox", "liar", "other_seed", "clumsy", "turncoat", "tuned", "absent"))]
    if DEVICE == "cuda": names.remove("naive")  # the interpreter is off there
    first, second = run_race(names, [(2, "uniform"), (3, "zipf:1.2")], monkeypatch)
    good = {"reference", "stock", "dispatch", "chatterbox", "until", "tuned"} - ({"dispatch"} if DEVICE == "cuda" else set())
    assert {r["contestant"] for r in first.rows} == good
    assert {r["contestant"] for r in second.rows} == good - {"until"}
    sets = weight_sets(TINY, 3, torch.float32, "cpu")
    for result, tokens, distribution in ((first, 2, "uniform"), (second, 3, "zipf:1.2")):
        assert {r["inputs"] for r in result.rows} == {inputs_checksum(problems(TINY, tokens, distribution, sets))}
        for r in result.rows:
            assert len(r["us"]) == 6
            assert len(r["repeat_medians"]) == 3
            assert min(r["us"]) <= r["median_us"] <= max(r["us"])
            assert r["rel_err"] < 1e-5
    assert next(r for r in first.rows if r["contestant"] == "tuned")["config"] == {"kind": "good"}
    out = {o["contestant"].removeprefix("test_bench:"): o for o in first.out}
    assert (out["liar"]["kind"], out["other_seed"]["kind"], out["turncoat"]["kind"], out["absent"]["kind"]) == ("refused", "refused", "refused", "left")
    assert "disagrees with the reference" in out["liar"]["why"]
    assert "timed in eager mode, disagrees" in out["turncoat"]["why"]
    assert "its weights are not this race's" in out["other_seed"]["why"]
    assert "absent" in out["absent"]["why"]
    assert "ZeroDivisionError" in next(o for o in second.out if o["contestant"] == "test_bench:clumsy")["why"]
    assert not [o for o in second.out if o["contestant"] == "test_bench:absent"]


@pytest.mark.slow
def test_one_that_dies_and_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [(2, "uniform"), (4, "uniform"), (5, "uniform")]
    first, second, third = run_race(["reference", "test_bench:mortal", "test_bench:sleeper"], cells, monkeypatch, timeout_s=10)
    assert len(first.rows) == 3
    assert [r["contestant"] for r in second.rows + third.rows] == ["reference", "reference"]
    whys = {o["contestant"]: o["why"] for o in second.out}
    assert "exit code 7" in whys["test_bench:mortal"]
    assert "no answer within" in whys["test_bench:sleeper"]
    assert first.out == third.out == []


def row(contestant: str, *medians: float) -> dict:
    return {"contestant": contestant, "median_us": sorted(medians)[len(medians) // 2], "repeat_medians": list(medians), "us": list(medians)}


@pytest.mark.parametrize(("rows", "words"), [
    ([row("a", 2, 3, 4), row("b", 5, 6, 7)], ["first", "2.00× slower"]),
    ([row("b", 5, 6, 7), row("a", 2, 3, 4)], ["2.00× slower", "first"]),
    ([row("a", 2, 3, 4), row("b", 4, 6, 7)], ["tie", "tie"]),
    ([row("a", 2, 3, 5), row("b", 6, 7, 8), row("c", 4, 9, 10)], ["tie", "2.33× slower", "tie"]),
    ([row("a", 4)], ["first"]),
])
def test_verdict(rows: list[dict], words: list[str]) -> None:
    found = verdict(rows)
    assert [found.word(r) for r in rows] == words
    assert (found.winner is None) == ("tie" in words)


def test_verdict_of_one_repeat_goes_by_samples() -> None:
    a, b = row("a", 2), row("b", 3)
    a["us"], b["us"] = [2, 3.5], [3, 4]
    assert verdict([a, b]).winner is None
    with pytest.raises(ValueError, match="no rows"): verdict([])


def test_checksum_sees_every_bit() -> None:
    x = torch.arange(37, dtype=torch.float32)
    seen = {checksum([x]), checksum([x.flip(0)]), checksum([x[:36]]), checksum([x[:18], x[18:]]), checksum([x.double()]), checksum([])}
    for i in (0, 17, 36):
        y = x.clone(); y.view(torch.int32)[i] ^= 1
        seen.add(checksum([y]))
    assert len(seen) == 9
    assert checksum([x.clone()]) == checksum([x])


def test_where_a_contestant_runs(tmp_path: Path) -> None:
    (tmp_path / "marvel").mkdir()
    assert python_for(None) == (sys.executable, [])
    assert python_for(str(tmp_path)) == (sys.executable, [str(tmp_path)])
    assert python_for(sys.executable) == (sys.executable, [])
    assert has_package("marvel", str(tmp_path))
    assert not has_package("marvel")
    assert python_of("vllm-tuned", {"vllm": "here"}) == "here"
    with pytest.raises(FileNotFoundError, match="no interpreter"): python_for(str(tmp_path / "nowhere"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    assert python_for(str(tmp_path)) == (str(tmp_path / "bin/python"), [])


@pytest.mark.parametrize(("change", "says"), [
    (dict(modes=["fast"]), "accepted are 'graph' and 'eager'"), (dict(modes=["graph"]), "need a GPU"), (dict(repeats=0), "1 and more")])
def test_a_race_that_makes_no_sense(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says): next(race(["stock"], [(TINY, 1, "uniform")], device="cpu", **change))


def test_contestants_by_name() -> None:
    with pytest.raises(ValueError, match="accepted are dispatch, reference, naive"): find_contestant("fastest")
    assert find_contestant("dispatch").backend == "auto"
    for name in CONTESTANTS:
        if importlib.util.find_spec(PACKAGES.get(name, "torch")) is None:
            who = name.partition("@")[0].removesuffix("-marlin").removesuffix("-cutlass")
            with pytest.raises(MissingPackage, match=rf"{who} needs the package .* --python {who}="): find_contestant(name)
    for tokens in (1, 32, 33, 512, 513, 8192): assert 10 <= len(vllm_candidates(tokens)) <= 13


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dispatch", "torch-grouped-mm", "vllm", "vllm-tuned", "sglang"])
def test_a_race_on_the_gpu(name: str) -> None:
    "vllm and sglang must be installed for this interpreter."
    shape = MoEShape("small", 16, 4, 512, 256)
    [result] = race([name, "stock"], [(shape, 16, "uniform")], ceilings=Ceilings(4e12, 7e14), repeats=2, samples=2, progress=False)
    assert not result.out
    assert [(r["contestant"], r["mode"]) for r in result.rows if r["contestant"] != "stock"] == [(name, "graph"), (name, "eager")]


def test_nobody_runs_twice() -> None:
    with pytest.raises(ValueError, match="each can run once"): next(race(["stock", "stock"], [(TINY, 1, "uniform")], device="cpu"))


def test_what_is_no_python_is_told() -> None:
    from dispatch.bench.race import has_package
    with pytest.raises(FileNotFoundError, match="is no Python"): has_package("torch", "/bin/true")
    assert has_package("torch")
    assert not has_package("no_such_package")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_race_beside_floats(name: str) -> None:
    "Rows of both, each against what its weights stand for, the bytes' with their own floor."
    shape = MoEShape("tiny", 8, 2, 64, 32)
    cells = [(shape, 4, "uniform")]
    (rows, out), = race(["reference", f"dispatch@{name}"], cells, ["eager"], "float32", H200, repeats=2, samples=2, device="cpu", progress=False)
    assert not out
    plain, bytes_ = sorted(rows, key=lambda r: r["precision"] == name)
    assert (plain["precision"], bytes_["precision"]) == ("fp32", name)
    assert plain["weight_bytes"] == 4 * bytes_["weight_bytes"]
    assert bytes_["floor_us"] < plain["floor_us"]
    assert plain["inputs"] == bytes_["inputs"]
    assert bytes_["rel_err"] < 1e-5, "against dequantized weights"


def test_a_contestant_that_rounds_tokens_passes_up_to_its_own_bound() -> None:
    shape = MoEShape("tiny", 8, 2, 64, 32)
    sets = weight_sets(shape, 1, torch.float32, "cpu")
    inputs = problems(shape, 4, "uniform", sets, 2)
    who = dispatch_contestant("reference", torch.int8)
    def rounding(*given: object) -> object:
        layer = who.build(*given)
        return lambda x, *routing: layer(x, *routing) * 1.03
    with pytest.raises(Disagreement): race_cell(replace(who, build=rounding), shape, "uniform", inputs, sets, "eager", samples=1)
    assert race_cell(replace(who, build=rounding, bound=0.06), shape, "uniform", inputs, sets, "eager", samples=1)["rel_err"] == pytest.approx(0.03, rel=0.01)


def test_an_interpreter_for_other_weights() -> None:
    assert python_of("vllm@int8", {"vllm": "/a"}) == python_of("vllm-marlin@int8", {"vllm": "/a"}) == python_of("vllm-tuned", {"vllm": "/a"}) == "/a"
    assert python_of("vllm@int8", {"vllm": "/a", "vllm@int8": "/b"}) == "/b"
    assert python_of("vllm-marlin@int8", {"vllm": "/a", "vllm-marlin": "/b"}) == "/b"
    assert python_of("sglang@fp8", {"vllm": "/a"}) is None
