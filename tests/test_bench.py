"""The race and its tables, on a CPU at small sizes."""
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dispatch.bench.contestants import dispatch_contestant, stock_contestant
from dispatch.bench.headlines import as_markdown, disturbance_us, published_race, race_rows, race_table, results_root
from dispatch.bench.race import checksum, problems, race_cell, weight_sets
from dispatch.core.evidence import Run, read_run
from dispatch.core.roofline import Ceilings, MoEShape
from dispatch.core.timing import Disagreement

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = MoEShape("tiny", 8, 2, 32, 24)


@pytest.fixture(scope="module")
def sets() -> list:
    return weight_sets(TINY, 2, torch.float32, DEVICE)


def test_inputs_are_the_same_for_everyone(sets: list) -> None:
    a, b = (problems(TINY, 5, "zipf:1.2", sets) for _ in range(2))
    assert checksum(a) == checksum(b)
    assert checksum(a) != checksum(problems(TINY, 5, "zipf:1.2", sets, seed=1))
    assert [p.weight_set for p in a] == [0, 1, 0, 1, 0, 1]
    assert torch.equal(weight_sets(TINY, 1, torch.float32, DEVICE)[0][0], sets[0][0])
    assert not torch.equal(sets[0][0], sets[1][0])


CONTESTANTS = [stock_contestant(), dispatch_contestant("reference"), dispatch_contestant("naive")]


@pytest.mark.parametrize("who", CONTESTANTS, ids=lambda w: w.backend)
def test_a_row_has_all_that_the_format_asks(who, sets: list) -> None:
    row = race_cell(who, TINY, "uniform", problems(TINY, 3, "uniform", sets), sets, "eager", Ceilings(1e11, 1e12), samples=2)
    wanted = {"contestant", "backend", "version", "shape", "precision", "tokens", "distribution", "mode", "us", "median_us", "floor_us",
              "rel_err", "config", "experts_hit"}
    assert wanted <= row.keys()
    assert len(row["us"]) == 2
    assert row["precision"] == "fp32"


def test_the_liar_gets_no_row(sets: list) -> None:
    liar = replace(stock_contestant(), name="liar", build=lambda shape, gate_up, down: lambda x, weights, index: x)
    with pytest.raises(Disagreement, match=r"liar .* not timed"):
        race_cell(liar, TINY, "uniform", problems(TINY, 3, "uniform", sets), sets, "eager")


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="accepted are 'reference', 'naive', 'gemv', 'swap_ab'"): dispatch_contestant("fastest")


def test_table_by_hand(tmp_path: Path) -> None:
    with Run("phase-1", root=tmp_path) as run:
        for who, mode, us in (("stock", "eager", 400.0), ("dispatch", "eager", 100.0), ("dispatch", "graph", 50.0)):
            run.log("kernels", contestant=who, backend="naive", shape="deepseek-moe-16b", tokens=1, distribution="uniform", mode=mode,
                    median_us=us, floor_us=25.0, weight_bytes=10**8, experts_hit=6.0)
    [row] = race_table(race_rows(read_run(run.folder))).to_dict("records")
    assert row["stock eager µs"] == 400.0
    assert row["over floor"] == 2.0
    assert row["GB/s"] == pytest.approx(2000)
    assert row["TFLOP/s"] == pytest.approx(6 * 6 * 2048 * 1408 / 50e-6 / 1e12)
    assert "2.00×" in as_markdown(race_table(race_rows(read_run(run.folder))))


def test_a_table_without_a_gpu_has_no_empty_columns(tmp_path: Path) -> None:
    with Run("phase-1", root=tmp_path) as run:
        for who in ("stock", "reference"):
            run.log("kernels", contestant=who, backend="reference", shape="cpu-small", tokens=1, distribution="uniform", mode="eager",
                    median_us=10.0, floor_us=None, weight_bytes=10, experts_hit=4.0)
    assert list(race_table(race_rows(read_run(run.folder)))) == ["tokens", "experts hit", "stock eager µs", "reference eager µs"]


@pytest.mark.parametrize(("control", "late"), [(100.0, 0.0), (97.5, 0.0), (90.0, 10.0), (None, 0.0)])
def test_a_disturbed_clock_is_told(tmp_path: Path, control: float | None, late: float) -> None:
    with Run("phase-1", root=tmp_path) as run:
        if control: run.log("control", name="naive graph, 64 tokens, uniform", value=control)
        run.log("kernels", contestant="dispatch", backend="naive", shape="deepseek-moe-16b", tokens=64, distribution="uniform", mode="graph",
                median_us=100.0, floor_us=50.0, weight_bytes=10, experts_hit=4.0)
    info = read_run(run.folder)
    assert disturbance_us(info, race_rows(info)) == pytest.approx(late)


def test_results_lie_in_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="clone"): results_root()
    with pytest.raises(FileNotFoundError): published_race()
