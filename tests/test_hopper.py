"""The Gluon kernels of kernels/17_hopper and 18_hopper_bytes: simulated in threads without a GPU, the real ones where there is an H100 or H200."""
from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch
from gluon_sim import Deadlock, simulate
from triton.experimental.gluon._runtime import GluonJITFunction

from dispatch.core.quantization import KINDS, Quantized, quantize
from dispatch.core.timing import Disagreement, check_agreement
from dispatch.kernels import hopper, hopper_bytes
from dispatch.kernels.fused_moe import fused_moe
from dispatch.kernels.hopper import hopper_moe
from dispatch.kernels.hopper_bytes import hopper_bytes_moe
from dispatch.kernels.reference import example_inputs, random_experts, reference_moe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES: dict[str, dict[str, Any]] = {
    "one token": dict(T=1, E=8, K=2, H=64, I=64),
    "every size of tile": dict(T=330, E=6, K=3, H=128, I=192, distribution="zipf:1.2"),
    "one expert has all": dict(T=600, E=3, K=1, H=192, I=64, distribution="all-to-one"),
    "columns and steps that don't fill a tile": dict(T=70, E=2, K=2, H=320, I=320),
    "more programs than work": dict(T=3, E=64, K=1, H=64, I=64),
}


def shared_experts(H: int, I: int, S: int, like: torch.Tensor) -> dict[str, torch.Tensor]:
    gate_up, down = (w[0] for w in random_experts(1, H, S * I, like.dtype, like.device, seed=5))
    return dict(shared_gate_up_proj=gate_up, shared_down_proj=down)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    "`hopper_moe` on a CPU that passes for an H200 with five multiprocessors. The list gets each launch's bytes of shared memory."
    used: list[int] = []
    for module in (hopper, hopper_bytes):
        def launch(kernel: Any, key: object, programs: int, tensors: tuple[torch.Tensor, ...], rest: tuple[Any, ...], module: Any = module,
                   **options: Any) -> None:
            # the last argument says whether kernels overlap: here they don't, and what a kernel does early it does all the same
            if isinstance(kernel, GluonJITFunction): used.append(simulate(kernel, module, programs, *tensors, *rest[:-1], True, seed=len(used)))
            else: kernel[(programs,)](*tensors, *rest)
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
        monkeypatch.setattr(module, "multiprocessors", lambda device: 5)
    def quantize_rows(x: torch.Tensor, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        q = quantize(torch.where(x.isfinite(), x, 0), torch.float8_e4m3fn)  # rows that are nobody's hold anything
        return q.values, q.scales
    monkeypatch.setattr(hopper, "quantize_rows", quantize_rows)  # Triton's interpreter rounds to fp8 in its own way
    return used


def test_rows_as_fp8() -> None:
    x = torch.randn(5, 144, dtype=torch.float16, generator=torch.Generator().manual_seed(0))[:, :131]
    x[3] = 0
    values, scales = hopper.quantize_rows(x.to(DEVICE))
    want = quantize(x, torch.float8_e4m3fn)
    assert torch.equal(scales.cpu(), want.scales)
    if DEVICE == "cuda": assert torch.equal(values.cpu().float(), want.values.float())
    else:  # the interpreter rounds towards zero: an error of 0.06, where rounding to the nearest has 0.03
        assert (values.float() * scales[:, None] - x.float()).norm() < 0.08 * x.float().norm()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_simulated_kernels_agree_with_the_reference(case: dict[str, Any], group: int, simulated: list[int],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "tile_group", lambda hidden, intermediate: group)
    args = example_inputs(**case, dtype=torch.float16)
    check_agreement(hopper_moe(*args), reference_moe(*args), "simulated")
    assert len(simulated) == 2
    assert max(simulated) < 232448 - 1024, "a block's shared memory on sm90, less what the launch itself takes and the barriers"


ROWS = (1, 0, 32, 63, 64, 65, 96, 97, 127, 128, 129, 192, 225, 353)  # of each expert: every size of tile at its ends


def given_rows(device: str, dtype: torch.dtype, H: int = 64, I: int = 64) -> tuple[torch.Tensor, ...]:
    "A problem in which each expert has as many rows as ROWS says."
    x, gate_up, down, weights, _ = example_inputs(T=sum(ROWS), E=len(ROWS), K=1, H=H, I=I, dtype=dtype, device=device)
    index = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS))[torch.randperm(sum(ROWS), generator=torch.Generator().manual_seed(0))]
    return x, gate_up, down, weights, index[:, None].to(device)


def test_simulated_every_size_of_tile(simulated: list[int]) -> None:
    args = given_rows("cpu", torch.float16)
    check_agreement(hopper_moe(*args), reference_moe(*args), "simulated")


def test_simulated_shared_experts_strides_and_nobodys_indices(simulated: list[int]) -> None:
    x, gate_up, down, weights, index = example_inputs(T=140, E=5, K=2, H=128, I=64, dtype=torch.float16)
    index[3, 1], index[77, 0] = -1, 5
    x = torch.cat([x, x.flip(1)], dim=1)[:, 128:]
    gate_up, down = torch.cat([gate_up, gate_up], dim=2)[:, :, :128], torch.cat([down, down])[::2]
    shared = shared_experts(128, 64, 2, x)
    want = reference_moe(x, gate_up, down, weights, index, skip_invalid=True, **shared)
    out = torch.empty(128, 140, dtype=x.dtype).t()
    got = hopper_moe(x, gate_up, down, weights, index, skip_invalid=True, out=out, **shared)
    assert got is out
    check_agreement(got, want, "simulated, shared")
    assert torch.equal(got, hopper_moe(x, gate_up, down, weights, index, skip_invalid=True, **shared))


def quantized(args: tuple[torch.Tensor, ...], kind: torch.dtype) -> tuple[Any, ...]:
    return args[0], quantize(args[1], kind), quantize(args[2], kind), *args[3:]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_simulated_bytes_agree_with_dequantized_weights(case: dict[str, Any], kind: torch.dtype, simulated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_bytes, "tile_group", lambda hidden, intermediate: 3 if kind == torch.int8 else 1)
    args = quantized(example_inputs(**case, dtype=torch.float16), kind)
    check_agreement(hopper_bytes_moe(*args), reference_moe(*args), "simulated")
    assert len(simulated) == 2
    assert max(simulated) < 232448 // 2 - 2048, "half the shared memory of sm90, less what each of two launches takes, barriers and changes of layout"


def test_simulated_bytes_every_size_of_tile_strides_and_nobodys_indices(simulated: list[int]) -> None:
    x, gate_up, down, weights, index = quantized(given_rows("cpu", torch.float16, 192, 64), torch.int8)
    index[3, 0] = -1
    x = torch.cat([x, x.flip(1)], dim=1)[:, 192:]
    gate_up = Quantized(torch.cat([gate_up.values, gate_up.values], dim=2)[:, :, :192], gate_up.scales)
    down = Quantized(torch.repeat_interleave(down.values, 2, 0)[::2], down.scales)
    want = reference_moe(x, gate_up, down, weights, index, skip_invalid=True)
    out = torch.empty(192, len(x), dtype=x.dtype).t()
    assert hopper_bytes_moe(x, gate_up, down, weights, index, skip_invalid=True, out=out) is out
    check_agreement(out, want, "simulated")
    shared = {name: quantize(w, torch.int8) for name, w in shared_experts(192, 64, 2, x).items()}
    want = reference_moe(x, gate_up, down, weights, index, skip_invalid=True, **shared)
    check_agreement(hopper_bytes_moe(x, gate_up, down, weights, index, skip_invalid=True, **shared), want, "simulated, shared")


FLIPS = 0.02  # a sum in another order can round to another step of fp8; rounding itself is worth 0.04


def rounded(x: torch.Tensor) -> torch.Tensor:
    "What remains of rows that are stored as fp8."
    return quantize(x, torch.float8_e4m3fn).dequantize()


def both_in_fp8(x: torch.Tensor, gate_up: Quantized, down: Quantized, weights: torch.Tensor, index: torch.Tensor,
                shared_gate_up_proj: Quantized | None = None, shared_down_proj: Quantized | None = None) -> torch.Tensor:
    "The layer as it is defined with tokens and intermediate rounded to fp8, each expert by itself."
    def expert(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (rows @ gate_up.t()).chunk(2, dim=1)
        h = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        return (rounded(h) @ down.t()).to(x.dtype).float()
    y, tokens = torch.zeros(x.shape, device=x.device), rounded(x)
    for e in range(len(gate_up.values)):
        t, k = (index == e).nonzero(as_tuple=True)
        if len(t): y.index_add_(0, t, weights[t, k, None] * expert(tokens[t], gate_up[e].dequantize(), down[e].dequantize()))
    if shared_gate_up_proj is not None and shared_down_proj is not None:
        S = shared_down_proj.values.shape[1] // down.values.shape[2]
        gates, ups = (w.chunk(S) for w in shared_gate_up_proj.dequantize().chunk(2))
        for gate, up, d in zip(gates, ups, shared_down_proj.dequantize().chunk(S, dim=1), strict=True): y += expert(tokens, torch.cat([gate, up]), d)
    return y.to(x.dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_simulated_fp8_agrees_with_its_definition(case: dict[str, Any], simulated: list[int]) -> None:
    args = quantized(example_inputs(**case, dtype=torch.float16), torch.float8_e4m3fn)
    args[0][0] = 0.0
    check_agreement(hopper_moe(*args), both_in_fp8(*args), "simulated", bound=FLIPS)
    assert max(simulated) < 232448 - 1024


def test_simulated_fp8_shared_experts_and_strides(simulated: list[int]) -> None:
    x, gate_up, down, weights, index = quantized(example_inputs(T=80, E=3, K=2, H=192, I=64, dtype=torch.float16), torch.float8_e4m3fn)
    x = torch.cat([x, x.flip(1)], dim=1)[:, 192:]
    shared = {name: quantize(w, torch.float8_e4m3fn) for name, w in shared_experts(192, 64, 2, x).items()}
    want = both_in_fp8(x, gate_up, down, weights, index, **shared)
    check_agreement(hopper_moe(x, gate_up, down, weights, index, **shared), want, "simulated, shared", bound=FLIPS)


@pytest.mark.parametrize(("module", "layer"), [(hopper, hopper_moe), (hopper_bytes, hopper_bytes_moe)], ids=["hopper", "hopper_bytes"])
def test_scales_at_an_odd_address_are_another_kind_of_call(module: Any, layer: Any, simulated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[object] = []
    monkeypatch.setattr(module, "launch", lambda kernel, key, *rest, **options: keys.append(key) if isinstance(kernel, GluonJITFunction) else None)
    x, gate_up, down, weights, index = quantized(example_inputs(T=4, E=4, K=2, H=64, I=64, dtype=torch.float16), torch.float8_e4m3fn)
    odd = Quantized(down.values, torch.cat([torch.zeros(1), down.scales.flatten()])[1:].view(down.scales.shape))
    layer(x, gate_up, down, weights, index)
    first, keys[:] = list(keys), []
    layer(x, gate_up, odd, weights, index)
    assert first
    assert all(a != b for a, b in zip(first, keys, strict=True)), "what is compiled may load scales sixteen bytes at a time"


def broken(original: Any, replacements: dict[str, str]) -> Any:
    "The module with a fault in one of its Gluon functions."
    import inspect
    module = types.ModuleType("broken")
    vars(module).update(vars(original))
    functions = {name: f for name, f in vars(original).items() if isinstance(f, GluonJITFunction)}
    assert all(any(old in inspect.getsource(f.fn) for f in functions.values()) for old in replacements), "nothing to break"
    for name, f in functions.items():
        source = inspect.getsource(f.fn)
        for old, new in replacements.items(): source = source.replace(old, new)
        source = re.sub(r"^@gluon.jit\n", "", source)
        exec(compile(source, "broken", "exec"), vars(module))
        plain = vars(module)[name]
        vars(module)[name] = GluonJITFunction.__new__(GluonJITFunction)
        vars(module)[name].__dict__["fn"] = plain
    return module


FAULTS: dict[str, tuple[Any, dict[str, str]]] = {
    "early release": (hopper, {"warpgroup_mma_wait(1, deps": "warpgroup_mma_wait(2, deps"}),  # a stage still being multiplied
    "wrong phase": (hopper, {"it // STAGES & 1 ^ 1": "it // STAGES & 1"}),  # of the barrier that the producer waits for
    "no wait": (hopper, {"mbarrier.wait(ready.index(i), it // STAGES & 1)": "pass"}),  # for the copies
    "overwritten panel": (hopper, {"if p > 1: tma.store_wait(1)": "pass"}),
    "wrong count": (hopper, {"_barriers(1 + 128, ": "_barriers(128, "}),
    "early weights twice": (hopper, {"if it >= EARLY: _fetch": "if it >= 0: _fetch"}),
    "fp8, up's scales for gate": (hopper, {"gate + n // 8 % 2 * up": "gate + up"}),
    "bytes, early release": (hopper_bytes, {"warpgroup_mma_wait(0, deps=(acc, left": "warpgroup_mma_wait(2 if s < STEPS - 1 else 0, deps=(acc, left"}),
    "bytes, no wait": (hopper_bytes, {"mbarrier.wait(ready.index(i), it // STAGES & 1)": "pass"}),
    "bytes, too few announced": (hopper_bytes, {"mbarrier.expect(bar, 128 * 128)": "mbarrier.expect(bar, 64 * 128)"}),
    "bytes, columns out of order": (hopper_bytes, {"permute(1, 2, 0, 3, 4)": "permute(2, 1, 0, 3, 4)"}),
    "bytes, a part too few": (hopper_bytes, {"if rows > SIZES[1] * j:": "if rows > SIZES[1] * (j + 1):"}),
    "bytes, up's scales for gate": (hopper_bytes, {"gate + r // 8 % 2 * up": "gate + up"}),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_the_simulator_notices(fault: tuple[Any, dict[str, str]], monkeypatch: pytest.MonkeyPatch, simulated: list[int]) -> None:
    monkeypatch.setattr("gluon_sim.PATIENCE_S", 0.5)
    original, replacements = fault
    module = broken(original, replacements)
    monkeypatch.setattr(original, "launch", lambda kernel, key, programs, tensors, rest, **options: (
        simulate(getattr(module, kernel.fn.__name__), module, programs, *tensors, *rest[:-1], True) if isinstance(kernel, GluonJITFunction)
        else kernel[(programs,)](*tensors, *rest)))
    args: Any = example_inputs(T=150, E=2, K=1, H=1024, I=896, dtype=torch.float16)
    layer = hopper_moe
    if original is hopper_bytes: args, layer = quantized(args, torch.int8), hopper_bytes_moe
    if original is hopper and any("gate + n" in old for old in replacements): args = quantized(args, torch.float8_e4m3fn)
    want = both_in_fp8(*args) if original is hopper and isinstance(args[1], Quantized) else reference_moe(*args)
    with pytest.raises((Deadlock, Disagreement, AssertionError)): check_agreement(layer(*args), want, "broken")


@pytest.mark.parametrize(("changes", "message"), [
    (dict(H=96), "H is 96 and I is 64; accepted are multiples of 64"), (dict(dtype=torch.float32), "the tokens are torch.float32; accepted are bfloat16"),
])
def test_what_the_copy_engine_cannot_read_of_bytes_is_refused(changes: dict[str, Any], message: str, simulated: list[int]) -> None:
    args = example_inputs(**dict(T=4, E=4, K=2, H=64, I=64, dtype=torch.float16) | changes)
    with pytest.raises(ValueError, match=message): hopper_bytes_moe(*quantized(args, torch.int8))
    with pytest.raises(TypeError, match="gate_up_proj is a Tensor; accepted here is a Quantized"): hopper_bytes_moe(*args)
    x, gate_up, *rest = quantized(example_inputs(T=4, E=4, K=2, H=64, I=64, dtype=torch.float16), torch.int8)
    odd = Quantized(torch.cat([gate_up.values, gate_up.values[:, :, :8]], dim=2)[:, :, :64], gate_up.scales)
    with pytest.raises(ValueError, match="gate_up_proj has strides"): hopper_bytes_moe(x, odd, *rest)


def test_a_cpu_is_refused() -> None:
    args = example_inputs(T=4, E=4, K=2, H=64, I=64, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"need a GPU of compute capability 9\.0 .* the tensors are on cpu"): hopper_moe(*args)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(H=96), "H is 96 and I is 64; accepted are multiples of 64"),
    (dict(I=72), "H is 64 and I is 72; accepted are multiples of 64"),
    (dict(dtype=torch.float32), "the tensors are torch.float32; accepted are bfloat16 and float16"),
])
def test_what_the_copy_engine_cannot_read_is_refused(changes: dict[str, Any], message: str, simulated: list[int]) -> None:
    args = example_inputs(**dict(T=4, E=4, K=2, H=64, I=64, dtype=torch.float16) | changes)
    with pytest.raises(ValueError, match=re.escape(message)): hopper_moe(*args)


def test_no_tokens(simulated: list[int]) -> None:
    empty = example_inputs(T=0, E=4, K=2, H=64, I=64, dtype=torch.float16)
    assert hopper_moe(*empty).shape == (0, 64)
    assert not simulated


def test_shared_experts_at_an_odd_address_are_refused(simulated: list[int]) -> None:
    args = example_inputs(T=4, E=4, K=2, H=64, I=64, dtype=torch.float16)
    shared = shared_experts(64, 64, 1, args[0])
    odd = torch.empty(64 * 64 + 1, dtype=torch.float16)[1:].view(64, 64)
    with pytest.raises(ValueError, match="shared_down_proj has strides"): hopper_moe(*args, **shared | dict(shared_down_proj=odd))


def test_strides_the_copy_engine_cannot_read_are_refused(simulated: list[int]) -> None:
    x, *rest = example_inputs(T=4, E=4, K=2, H=64, I=64, dtype=torch.float16)
    for bad in (x.t().contiguous().t(), torch.cat([x, x[:, :4]], dim=1)[:, :64], torch.cat([x[:, :8], x], dim=1)[:, 1:65]):
        with pytest.raises(ValueError, match="hidden_states has strides"): hopper_moe(bad, *rest)

# ---------------------------------------------------------------- on a GPU

GPU_CASES: dict[str, dict[str, Any]] = CASES | {
    "deepseek, few tokens": dict(T=7, E=64, K=6, H=2048, I=1408),
    "deepseek, every size of tile": dict(T=2048, E=64, K=6, H=2048, I=1408, distribution="zipf:1.2"),
    "mixtral": dict(T=1000, E=8, K=2, H=4096, I=14336),
    "qwen1.5": dict(T=777, E=60, K=4, H=2048, I=1408),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES.keys())
def test_gpu_agrees_with_the_reference_and_itself(case: dict[str, Any], dtype: torch.dtype) -> None:
    args = example_inputs(**case, dtype=dtype, device="cuda")
    got = hopper_moe(*args)
    check_agreement(got, reference_moe(*args), "hopper")
    assert torch.equal(got, hopper_moe(*args[:4], args[4].int()))


@pytest.mark.gpu
def test_gpu_every_size_of_tile() -> None:
    args = given_rows("cuda", torch.bfloat16, 256, 192)
    check_agreement(hopper_moe(*args), reference_moe(*args), "hopper")


@pytest.mark.gpu
def test_gpu_shared_experts_strides_and_nobodys_indices() -> None:
    x, gate_up, down, weights, index = example_inputs(T=900, E=20, K=4, H=512, I=320, dtype=torch.bfloat16, device="cuda")
    index[3, 1], index[77, 0] = -1, 20
    x = torch.cat([x, x.flip(1)], dim=1)[:, 512:]
    gate_up, down = torch.cat([gate_up, gate_up], dim=2)[:, :, :512], torch.cat([down, down])[::2]
    shared = shared_experts(512, 320, 2, x)
    want = reference_moe(x, gate_up, down, weights, index, skip_invalid=True, **shared)
    out = torch.empty(512, 900, dtype=x.dtype, device="cuda").t()
    assert hopper_moe(x, gate_up, down, weights, index, skip_invalid=True, out=out, **shared) is out
    check_agreement(out, want, "hopper, shared")


@pytest.mark.gpu
def test_gpu_fused_moe_takes_what_the_copy_engine_cannot_read() -> None:
    x, gate_up, down, weights, index = example_inputs(T=3000, E=8, K=2, H=512, I=256, dtype=torch.bfloat16, device="cuda")
    want = reference_moe(x, gate_up, down, weights, index)
    check_agreement(fused_moe(x, gate_up, down, weights, index), want, "auto")
    wide = torch.cat([x, x[:, :8]], dim=1)[:, :512]  # rows 520 elements apart: a multiple of 8 and not of 16
    check_agreement(fused_moe(wide, gate_up, down, weights, index, backend="hopper"), want, "rows of 520")
    x = torch.stack([x, x], dim=2)[:, :, 0]
    with pytest.raises(ValueError, match="hidden_states has strides"): fused_moe(x, gate_up, down, weights, index, backend="hopper")
    check_agreement(fused_moe(x, gate_up, down, weights, index), want, "auto, strided")


@pytest.mark.gpu
def test_gpu_captured_in_a_graph_it_follows_its_inputs() -> None:
    args = example_inputs(T=1024, E=16, K=2, H=512, I=256, dtype=torch.bfloat16, device="cuda")
    hopper_moe(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = hopper_moe(*args)
    for seed in range(3):
        fresh = example_inputs(T=1024, E=16, K=2, H=512, I=256, dtype=torch.bfloat16, device="cuda", seed=seed, distribution="zipf:1.2")
        for a, b in zip(args, fresh, strict=True): a.copy_(b)
        graph.replay()
        check_agreement(out, reference_moe(*args), "hopper in a graph")


@pytest.mark.gpu
def test_gpu_offsets_past_two_gigaelements() -> None:
    E, H, I = 200, 4096, 1408  # 2·I·H·E elements of gate and up are 2.3e9
    args = example_inputs(T=64, E=E, K=2, H=H, I=I, dtype=torch.bfloat16, device="cuda")
    args[4][:, 0] = E - 1
    args[4][:, 1] = torch.arange(64, device="cuda") % (E - 1)
    check_agreement(hopper_moe(*args), reference_moe(*args), "hopper, far weights")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES.keys())
def test_gpu_bytes_agree_with_dequantized_weights(case: dict[str, Any], kind: torch.dtype) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        args = quantized(example_inputs(**case, dtype=dtype, device="cuda"), kind)
        got = hopper_bytes_moe(*args)
        check_agreement(got, reference_moe(*args), "hopper, bytes")
        assert torch.equal(got, hopper_bytes_moe(*args[:4], args[4].int()))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES.keys())
def test_gpu_fp8_agrees_with_its_definition(case: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        args = quantized(example_inputs(**case, dtype=dtype, device="cuda"), torch.float8_e4m3fn)
        got = hopper_moe(*args)
        check_agreement(got, both_in_fp8(*args), "hopper, fp8", bound=FLIPS)
        assert torch.equal(got, hopper_moe(*args[:4], args[4].int()))


@pytest.mark.gpu
def test_gpu_fp8_shared_experts_strides_and_nobodys_indices() -> None:
    x, gate_up, down, weights, index = quantized(example_inputs(T=900, E=20, K=4, H=512, I=320, dtype=torch.bfloat16, device="cuda"), torch.float8_e4m3fn)
    index[3, 1], index[77, 0] = -1, 20
    x = torch.cat([x, x.flip(1)], dim=1)[:, 512:]
    shared = {name: quantize(w, torch.float8_e4m3fn) for name, w in shared_experts(512, 320, 2, x).items()}
    out = torch.empty(512, 900, dtype=x.dtype, device="cuda").t()
    assert hopper_moe(x, gate_up, down, weights, index, skip_invalid=True, out=out, **shared) is out
    check_agreement(out, both_in_fp8(x, gate_up, down, weights, index, **shared), "hopper, fp8, shared", bound=FLIPS)


@pytest.mark.gpu
def test_gpu_bytes_every_size_of_tile() -> None:
    args = quantized(given_rows("cuda", torch.bfloat16, 256, 192), torch.int8)
    check_agreement(hopper_bytes_moe(*args), reference_moe(*args), "hopper, bytes")
