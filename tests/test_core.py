"""Timing, roofline and plots: the parts that any CPU can check."""
import functools
import operator
import xml.etree.ElementTree as ET

import pandas as pd
import pytest
import torch

from dispatch.core.plots import over_tokens
from dispatch.core.roofline import H200, SHAPES, MoEShape, expected_experts_hit, floor_us, moe_flops, read_xor, weight_bytes
from dispatch.core.timing import Disagreement, Timing, check_agreement, rotate, time_checked, time_eager

DEEPSEEK = SHAPES["deepseek-moe-16b"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_nothing_wrong_is_timed() -> None:
    timed = []
    def wrong(x: torch.Tensor) -> torch.Tensor:
        timed.append(1)
        return x * 1.1
    with pytest.raises(Disagreement, match=r"liar disagrees with the reference: relative error 0\.1 .*not timed"):
        time_checked("liar", wrong, lambda x: x, [torch.ones(2, 4)], samples=5)
    assert len(timed) == 2, "called once to compile and once for the gate, and never for a clock"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_never_pass(value: float) -> None:
    y = torch.ones(3, 4)
    y[1, 2] = value
    with pytest.raises(Disagreement): check_agreement(y, torch.ones(3, 4), "y")
    with pytest.raises(Disagreement): check_agreement(torch.full((3, 4), value), torch.ones(3, 4), "y")


def test_tiny_and_huge_values_are_told_apart() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(Disagreement): check_agreement(-1e-25 * ones, 1e-25 * ones, "y")
    assert check_agreement(1e30 * ones, 1e30 * (ones + 1e-6), "y").rel_err < 2e-6


def test_one_bad_token_among_many_is_caught() -> None:
    ref = torch.ones(10_000, 8)
    y = ref.clone()
    y[1234] = 1.001
    with pytest.raises(Disagreement, match="worst token 1234"): check_agreement(y, ref, "y", bound=1e-4)


def test_time_checked_returns_every_sample() -> None:
    timing, found = time_checked("double", lambda x: x + x, lambda x: 2 * x, [torch.ones(2, 4)] * 3, samples=7)
    assert len(timing.us) == 7
    assert timing.first_call_s > 0
    assert found.rel_err == 0
    with pytest.raises(ValueError, match="accepted are 'graph' and 'eager'"): time_checked("d", lambda x: x, lambda x: x, [1], mode="fast")
    with pytest.raises(ValueError, match="inputs is empty"): time_checked("d", lambda x: x, lambda x: x, [])


def test_median_and_spread() -> None:
    assert Timing([1.0, 2.0, 30.0], 0.0).median_us == 2.0
    assert Timing([2.0], 0.0).spread == 0.0
    assert Timing([9.0, 10.0, 11.0, 12.0], 0.0).spread == pytest.approx(2.5 / 10.5)


def test_calls_rotate_over_inputs() -> None:
    seen: list[int] = []
    calls = rotate(seen.append, [0, 1, 2], 7)
    us = time_eager(calls, repeats=2, warmup_s=0)
    assert seen == [0, 1, 2, 0, 1, 2, 0] * 3
    assert len(us) == 2


def test_floor_by_hand() -> None:
    "6 experts of 3·2048·1408 bf16 weights at 4.3 TB/s; 8192·6 pairs of 2·3·2048·1408 FLOPs at 790 TFLOP/s."
    assert floor_us(DEEPSEEK, 1, 6) == pytest.approx(6 * 3 * 2048 * 1408 * 2 / 4.3e12 * 1e6)
    assert floor_us(DEEPSEEK, 8192, 64) == pytest.approx(8192 * 6 * 2 * 3 * 2048 * 1408 / 790e12 * 1e6)
    assert floor_us(DEEPSEEK, 8, 40, element_bytes=1) == pytest.approx(floor_us(DEEPSEEK, 8, 40) / 2)
    assert weight_bytes(DEEPSEEK, 64) == 64 * 3 * 2048 * 1408 * 2
    assert moe_flops(DEEPSEEK, 1) == 6 * 6 * 2048 * 1408
    assert H200.bandwidth == 4.3e12


def test_expected_experts_hit() -> None:
    assert expected_experts_hit(DEEPSEEK, 0) == 0
    assert expected_experts_hit(DEEPSEEK, 1) == pytest.approx(6)
    assert expected_experts_hit(MoEShape("", 4, 4, 8, 8), 3) == 4


def test_read_xor() -> None:
    x = torch.randint(-2**31, 2**31 - 1, (32768,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert read_xor(x).tolist() == [functools.reduce(operator.xor, half.tolist()) for half in x.split(16384)]
    with pytest.raises(ValueError, match="multiple of 16384"): read_xor(x[:5])


@pytest.mark.gpu
def test_graph_timing_and_ceilings() -> None:
    from dispatch.core.roofline import measure_ceilings
    from dispatch.core.timing import count_launches
    xs = [torch.randn(4096, 4096, device="cuda") for _ in range(3)]
    timing, _ = time_checked("double", lambda x: x + x, lambda x: 2 * x, xs, mode="graph")
    assert timing.spread < 0.2
    assert count_launches(lambda: xs[0] + xs[1]) == 1
    ceilings = measure_ceilings(gib=1)
    assert ceilings["read_bandwidth"] > 0.8 * ceilings["copy_bandwidth"] > 1e11


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame([dict(tokens=2**i, distribution=d, contestant=c, mode=m, us=10.0 * 2**i, floor=5.0)
                         for i in range(10) for d in ("uniform", "zipf:1.2") for c, m in (("dispatch", "graph"), ("stock", "eager"))])


def test_plots_are_stable_and_labelled(frame: pd.DataFrame) -> None:
    draw = lambda: over_tokens(frame, "us", "µs a call", "Title", floor="floor", ceiling=9.0, caption="run-1").data
    svg = draw()
    assert svg == draw()
    assert "<dc:date>" not in svg
    texts = {"".join(t.itertext()) for t in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"µs a call", "tokens in the call", "dispatch (graph)", "stock (eager)", "floor", "ceiling", "run-1", "zipf:1.2"} <= texts


def test_a_plot_of_few_points_without_a_floor(frame: pd.DataFrame) -> None:
    few = frame[frame.tokens <= 4].assign(floor=float("nan"))
    assert ">floor<" not in over_tokens(few, "us", "µs", "T", floor="floor", log=False).data
