"""Weights of one byte: how far they are from what they stand for, what is refused, and what the tiny model makes of them."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.core.quantization import KINDS, NAMES, Quantized, quantize
from dispatch.model.checkpoint import Layer
from dispatch.model.deepseek_moe import DeepseekMoE
from dispatch.model.generate import compare_logits
from dispatch.model.tiny import tiny_folder
from dispatch.model.tokenizer import load_tokenizer

ROWS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_int8_is_never_off_by_more_than_half_a_step(row: list[float]) -> None:
    w = torch.tensor([row])
    q = quantize(w, torch.int8)
    assert ((q.dequantize() - w).abs() <= q.scales[:, None] * 0.5 * (1 + 1e-5) + 1e-38).all()
    assert q.values.abs().max() <= 127


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_fp8_is_never_off_by_more_than_a_sixteenth_or_half_the_smallest_step(row: list[float]) -> None:
    w = torch.tensor([row])
    q = quantize(w, torch.float8_e4m3fn)
    back = q.dequantize()
    assert back.isfinite().all()
    assert ((back - w).abs() <= torch.maximum(w.abs() / 16, q.scales[:, None] * 2**-10) * (1 + 1e-5) + 1e-38).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_zeros_and_outliers(kind: torch.dtype, dtype: torch.dtype) -> None:
    w = torch.zeros(2, 3, 8, dtype=dtype)
    w[1, 1, 3], w[1, 2, 0], w[1, 2, 1] = -6e4, 1.0, 1e-3
    q = quantize(w, kind)
    assert q.values.shape == (2, 3, 8)
    assert q.scales.shape == (2, 3)
    assert (q.scales[0] == 0).all()
    back = q.dequantize(dtype)
    assert back.dtype == dtype
    assert (back[0] == 0).all()
    torch.testing.assert_close(back[1, 1, 3], w[1, 1, 3])
    assert back[1, 2, 0] == 1.0
    assert q.nbytes == 2 * 3 * 8 + 4 * 2 * 3


def test_nothing_in_nothing_out() -> None:
    assert quantize(torch.empty(0, 4, 8), torch.int8).dequantize().shape == (0, 4, 8)
    assert quantize(torch.empty(2, 4, 0), torch.int8).dequantize().shape == (2, 4, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_weight_is_named(bad: float) -> None:
    w = torch.ones(3, 4, 5, dtype=torch.bfloat16)
    w[2, 1, 3], w[2, 2, 0] = bad, bad
    with pytest.raises(ValueError, match=r"down_proj has 2 values that are not finite, the first at \[2, 1, 3\]: -?(nan|inf)"):
        quantize(w, torch.int8, "down_proj")


def test_what_is_refused_is_said() -> None:
    w = torch.ones(2, 2)
    with pytest.raises(TypeError, match=r"kind is torch\.int16; accepted are torch\.int8, torch\.float8_e4m3fn"): quantize(w, torch.int16)
    with pytest.raises(TypeError, match=r"w is torch\.int64; accepted are floats"): quantize(w.long(), torch.int8, "w")
    with pytest.raises(TypeError, match=r"is torch\.float8_e4m3fn; accepted are floats of two bytes"): quantize(w.to(torch.float8_e4m3fn), torch.int8)
    with pytest.raises(ValueError, match=r"has shape \(4,\); accepted is"): quantize(torch.ones(4), torch.int8)
    q = quantize(w, torch.int8)
    with pytest.raises(TypeError, match=r"values are torch\.float32"): Quantized(w, q.scales)
    with pytest.raises(TypeError, match=r"scales are torch\.float64"): Quantized(q.values, q.scales.double())
    with pytest.raises(ValueError, match=r"accepted are \[..., N, K\] and \[..., N\]"): Quantized(q.values, q.scales[:1])


def rounded(layer: Layer, kind: torch.dtype) -> None:
    "The experts' weights as a quantized model has them."
    for name in ("gate_up_proj", "down_proj"):
        w = getattr(layer, name)
        if w is not None: setattr(layer, name, quantize(w, kind, name).dequantize(w.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_model_hardly_notices(name: str) -> None:
    "At least 97 % of the likeliest tokens stay, and none changes that was ahead by more than one."
    plain, small = (DeepseekMoE.load(tiny_folder(), torch.float32, progress=False) for _ in range(2))
    for layer in small.weights.layers: rounded(layer, NAMES[name])
    ids = load_tokenizer(tiny_folder()).encode((tiny_folder() / "heldout.txt").read_text(encoding="utf-8")).ids
    width = plain.config.max_position_embeddings
    batch = torch.tensor(ids[:1200 // width * width + width]).view(-1, width)
    found = compare_logits(*(m.forward(batch).flatten(0, 1) for m in (small, plain)))
    assert found.positions >= 1000
    if name == "int8": assert found.top1 >= 0.97, found
    else: assert found.top1 >= 0.93, found
    assert found.largest_gap <= 1.0, found
