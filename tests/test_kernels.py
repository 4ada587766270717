"""Every backend against the float32 reference at awkward shapes, and each bad input's error."""
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.core.quantization import quantize
from dispatch.core.roofline import SHAPES, MoEShape
from dispatch.core.timing import agreement, check_agreement
from dispatch.kernels.fused_moe import BACKENDS, _choose, _fused_moe_op, _pick, _table, choose_backend, fused_moe
from dispatch.kernels.gemv import gemv_moe
from dispatch.kernels.hopper import HOPPER
from dispatch.kernels.persistent import Blocks, PersistentConfig, multiprocessors, persistent_config, persistent_moe
from dispatch.kernels.reference import Sizes, _look_closer, _sizes, check_inputs, example_inputs, random_experts, reference_moe
from dispatch.kernels.routing import ExpertLoads, max_tiles, read_loads, sort_by_expert, synthetic_routing, write_loads
from dispatch.kernels.sort import sort_pairs
from dispatch.kernels.swap_ab import Product, SwapConfig, swap_ab_moe, swap_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "top_k_index")
SHARED = ("shared_gate_up_proj", "shared_down_proj")
PLAIN = [b for b in BACKENDS if not b.startswith("hopper")]  # those have sizes and a GPU of their own, and tests in test_hopper.py
TRITON_BACKENDS = [b for b in PLAIN if b != "reference"]
ON_GPU = TRITON_BACKENDS + ["hopper"] * (DEVICE == "cuda" and torch.cuda.get_device_capability() == HOPPER)


def shared_experts(w2: torch.Tensor, S: int, seed: int = 5) -> dict[str, torch.Tensor]:
    "S shared experts that go with down_proj, as keyword arguments."
    _, H, I = w2.shape
    return dict(zip(SHARED, (w[0] for w in random_experts(1, H, S * I, w2.dtype, w2.device, seed)), strict=True))

CASES = {
    "no tokens": dict(T=0),
    "one token": dict(T=1),
    "one token, K=1": dict(T=1, K=1),
    "one expert": dict(T=9, E=1, K=1),
    "K equals E": dict(T=5, E=4, K=4),
    "all to one": dict(T=37, K=1, distribution="all-to-one"),
    "all to one, K=8": dict(T=21, E=60, K=8, distribution="all-to-one"),
    "many experts nobody picked": dict(T=2, E=64, K=1),
    "E=60, K=8": dict(T=19, E=60, K=8, H=50, I=33),
    "zipf": dict(T=65, E=16, K=3, distribution="zipf:1.2"),
    "H and I no multiple of a tile": dict(T=17, H=129, I=65),
    "H and I below a tile": dict(T=3, H=1, I=1),
    "many rows an expert": dict(T=150, E=3, K=2, H=40, I=24),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("backend", PLAIN)
def test_agrees_and_repeats(backend: str, case: dict, dtype: torch.dtype) -> None:
    if backend == "gemv" and DEVICE == "cpu": case = case | dict(T=min(case["T"], 3), K=min(case.get("K", 2), 3))  # a second a token
    args = example_inputs(**case, dtype=dtype, device=DEVICE)
    out = torch.full_like(args[0], float("nan"))  # poisoned: every element must be written
    y = fused_moe(*args, backend=backend, out=out)
    assert y is out
    check_agreement(y, reference_moe(*args), backend)
    assert torch.equal(y, fused_moe(*args, backend=backend)), "the same inputs gave other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33, 100, 1000, 3000])
@pytest.mark.parametrize("shape", [(64, 6, 2048, 1408), (60, 4, 2048, 1408), (8, 2, 1000, 344), (128, 8, 2048, 768), (256, 8, 7168, 2048)], ids=str)
@pytest.mark.parametrize("backend", ON_GPU)
def test_bf16(backend: str, shape: tuple[int, int, int, int], tokens: int) -> None:
    E, K, H, I = shape
    if E == 256 and tokens not in (1, 33): pytest.skip("22.5 GB of weights: two token counts are enough")
    args = example_inputs(tokens, E, K, H, I, torch.bfloat16, "cuda", distribution="zipf:1.2")
    if backend == "hopper" and (H % 64 or I % 64):
        with pytest.raises(ValueError, match="accepted are multiples of 64"): fused_moe(*args, backend=backend)
        return
    y = fused_moe(*args, backend=backend)
    check_agreement(y, reference_moe(*args), backend)
    assert torch.equal(y, fused_moe(*args, backend=backend))
    if E == 256:
        del args
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_offsets_past_2_31_elements(backend: str) -> None:
    "gate_up_proj of 4.3e9 elements, then T*K*H of 2.1e9."
    args = example_inputs(40, 64, 4, 8192, 4096, torch.bfloat16, "cuda")
    assert args[1].numel() > 2**31
    check_agreement(fused_moe(*args, backend=backend), reference_moe(*args), backend)
    del args
    torch.cuda.empty_cache()
    if backend == "gemv": return  # no workspace of T*K*H, and 66000 tokens take it half a minute
    args = example_inputs(66000, 8, 8, 4096, 64, torch.bfloat16, "cuda")
    assert args[0].shape[0] * 8 * 4096 > 2**31
    check_agreement(fused_moe(*args, backend=backend), reference_moe(*args), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_gpu_never_synchronises_and_skips_bad_indices(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w13, w2, tw, ti = example_inputs(T=33, E=16, K=4, H=256, I=128, dtype=torch.bfloat16, device="cuda")
    fused_moe(x, w13, w2, tw, ti, backend=backend)  # compiled
    ti[0], ti[1, 1], ti[2, 0] = 16, -1, 2**31 - 1
    torch.cuda.set_sync_debug_mode("error")
    try: y = fused_moe(x, w13, w2, tw, ti, backend=backend)
    finally: torch.cuda.set_sync_debug_mode("default")
    check_agreement(y, reference_moe(x, w13, w2, tw, ti, skip_invalid=True), backend)
    assert (y[0] == 0).all()
    monkeypatch.setenv("DISPATCH_CHECK", "1")
    with pytest.raises(IndexError, match=r"top_k_index\[0, 0\] is 16"): fused_moe(x, w13, w2, tw, ti, backend=backend)


@pytest.mark.parametrize("backend", PLAIN)
def test_strides_and_writing_in_place(backend: str) -> None:
    x, w13, w2, tw, ti = example_inputs(T=6, H=32, I=40, device=DEVICE)
    want = reference_moe(x, w13, w2, tw, ti)
    wide = torch.zeros(6, 64, device=DEVICE)
    wide[:, ::2] = x
    check_agreement(fused_moe(wide[:, ::2], w13, w2, tw, ti, backend=backend), want, "strided rows")
    turned = w13.transpose(1, 2).contiguous().transpose(1, 2), w2.transpose(1, 2).contiguous().transpose(1, 2)
    check_agreement(fused_moe(x, *turned, tw, ti, backend=backend), want, "transposed weights")
    check_agreement(fused_moe(x, w13, w2, tw.T.contiguous().T, ti.T.contiguous().T, backend=backend), want, "strided routing")
    check_agreement(fused_moe(x, w13, w2, tw, ti.int(), backend=backend), want, "int32 index")
    strided = torch.zeros(6, 64, device=DEVICE)
    check_agreement(fused_moe(x, w13, w2, tw, ti, out=strided[:, ::2], backend=backend), want, "strided out")
    assert fused_moe(x, w13, w2, tw, ti, out=x, backend=backend) is x
    check_agreement(x, want, "in place")


@pytest.mark.parametrize("backend", PLAIN)
def test_the_same_expert_twice_for_one_token(backend: str) -> None:
    x, w13, w2, tw, ti = example_inputs(T=5, device=DEVICE)
    ti[:] = 3
    y = fused_moe(x, w13, w2, tw, ti, backend=backend)
    once = fused_moe(x, w13, w2, tw.sum(1, keepdim=True), ti[:, :1], backend=backend)
    check_agreement(y, once, backend)


@pytest.mark.parametrize("backend", PLAIN)
def test_skip_invalid(backend: str) -> None:
    x, w13, w2, tw, ti = example_inputs(T=5, device=DEVICE)
    ti[2], ti[3, 0] = 8, -1
    y = fused_moe(x, w13, w2, tw, ti, skip_invalid=True, backend=backend)
    kept = ((ti >= 0) & (ti < 8)).float()
    check_agreement(y, reference_moe(x, w13, w2, tw * kept, ti.clamp(0, 7)), backend)
    assert (y[2] == 0).all()


def bad_inputs() -> dict[str, tuple[dict, type[Exception], str]]:
    x, w13, w2, tw, ti = example_inputs()
    over, under = ti.clone(), ti.clone()
    over[1, 1], under[0, 0] = 8, -1
    sg, sd = shared_experts(w2, 2).values()
    return {
        "rank of x": (dict(hidden_states=x[None]), ValueError, r"hidden_states has shape \(1, 4, 16\); accepted is \[T, H\]"),
        "rank of gate_up": (dict(gate_up_proj=w13[0]), ValueError, "gate_up_proj has shape"),
        "H of gate_up": (dict(gate_up_proj=w13[..., :15]), ValueError, r"gate_up_proj has shape \(8, 48, 15\).*16"),
        "odd 2I": (dict(gate_up_proj=w13[:, :47]), ValueError, "gate_up_proj has shape"),
        "no experts": (dict(gate_up_proj=w13[:0], down_proj=w2[:0]), ValueError, "gate_up_proj has shape .* at least 1"),
        "down transposed": (dict(down_proj=w2.transpose(1, 2)), ValueError, r"down_proj has shape \(8, 24, 16\).*\(8, 16, 24\)"),
        "E of down": (dict(down_proj=w2[:7]), ValueError, "down_proj has shape"),
        "T of index": (dict(top_k_index=ti[:3]), ValueError, "top_k_index has shape"),
        "T of weights": (dict(top_k_weights=tw[:3]), ValueError, "top_k_weights has shape"),
        "K over E": (dict(top_k_index=torch.zeros(4, 9, dtype=torch.int64), top_k_weights=torch.zeros(4, 9)), ValueError, "K=9.*1 to 8"),
        "K of zero": (dict(top_k_index=ti[:, :0], top_k_weights=tw[:, :0]), ValueError, "K=0.*1 to 8"),
        "float64": (dict(hidden_states=x.double()), TypeError, "hidden_states is float64; accepted are bfloat16"),
        "mixed dtypes": (dict(down_proj=w2.half()), TypeError, "down_proj is float16; accepted here: float32"),
        "half weights": (dict(top_k_weights=tw.half()), TypeError, "top_k_weights is float16; accepted here: float32"),
        "float index": (dict(top_k_index=ti.float()), TypeError, "top_k_index is float32; accepted here: int32, int64"),
        "device": (dict(down_proj=w2.to("meta")), ValueError, "down_proj is on meta; accepted is"),
        "no tensor": (dict(top_k_index=ti.tolist()), TypeError, "top_k_index is a list"),
        "x no tensor": (dict(hidden_states=x.tolist()), TypeError, "hidden_states is a list"),
        "index over": (dict(top_k_index=over), IndexError, r"top_k_index\[1, 1\] is 8; accepted are 0 to 7"),
        "index under": (dict(top_k_index=under), IndexError, r"top_k_index\[0, 0\] is -1; accepted are 0 to 7"),
        "gradients": (dict(gate_up_proj=w13.clone().requires_grad_()), RuntimeError, r"torch\.no_grad"),
        "shape of out": (dict(out=torch.empty(4, 15)), ValueError, "out has shape"),
        "dtype of out": (dict(out=torch.empty(4, 16).half()), TypeError, "out is float16"),
        "requires_grad of out": (dict(out=torch.empty(4, 16, requires_grad=True)), RuntimeError, r"torch\.no_grad"),
        "out overlaps itself": (dict(out=torch.zeros(4, 1).expand(4, 16)), ValueError, "share memory"),
        "out's rows overlap": (dict(out=torch.zeros(99).as_strided((4, 16), (8, 1))), ValueError, "share memory"),
        "all on meta": ({n: t.to("meta") for n, t in zip(NAMES, example_inputs(), strict=True)}, ValueError, "is on meta; accepted are"),
        "sparse": (dict(hidden_states=x.to_sparse()), ValueError, "hidden_states is torch.sparse_coo; accepted is a dense"),
        "shared down missing": (dict(shared_gate_up_proj=sg), ValueError, "shared_down_proj is missing"),
        "shared gate_up missing": (dict(shared_down_proj=sd), ValueError, "shared_gate_up_proj is missing"),
        "shared rank": (dict(shared_gate_up_proj=sg[None], shared_down_proj=sd), ValueError, "shared_gate_up_proj has shape"),
        "shared H": (dict(shared_gate_up_proj=sg[:, :15], shared_down_proj=sd), ValueError, "shared_gate_up_proj has shape"),
        "shared width": (dict(shared_gate_up_proj=sg[:94], shared_down_proj=sd[:, :47]), ValueError, "shared_down_proj is 47 wide.*I = 24"),
        "shared widths differ": (dict(shared_gate_up_proj=sg[:48], shared_down_proj=sd), ValueError, r"shared_gate_up_proj has shape.*96"),
        "shared of no width": (dict(shared_gate_up_proj=sg[:0], shared_down_proj=sd[:, :0]), ValueError, "shared_down_proj is 0 wide"),
        "shared strides": (dict(shared_gate_up_proj=sg, shared_down_proj=sd.T.contiguous().T), ValueError, "shared_down_proj has strides"),
        "shared dtype": (dict(shared_gate_up_proj=sg.half(), shared_down_proj=sd), TypeError, "shared_gate_up_proj is float16"),
        "shared device": (dict(shared_gate_up_proj=sg, shared_down_proj=sd.to("meta")), ValueError, "shared_down_proj is on meta"),
        "shared list": (dict(shared_gate_up_proj=sg, shared_down_proj=sd.tolist()), TypeError, "shared_down_proj is a list"),
        "shared gradients": (dict(shared_gate_up_proj=sg, shared_down_proj=sd.clone().requires_grad_()), RuntimeError, r"torch\.no_grad"),
        "backend": (dict(backend="fastest"), ValueError, "backend is 'fastest'; accepted are 'auto', 'reference', 'naive', 'grouped', 'gemv', 'swap_ab'"),
    }


@pytest.mark.parametrize("backend", ["auto", *PLAIN])
@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_named(name: str, backend: str) -> None:
    changed, kind, message = bad_inputs()[name]
    with pytest.raises(kind, match=message):
        fused_moe(**({"backend": backend} | dict(zip(NAMES, example_inputs(), strict=True)) | changed))


@pytest.mark.parametrize("backend", PLAIN)
def test_surroundings_change_nothing(backend: str) -> None:
    "Default dtype, autocast and reduced matmul precision are the caller's business."
    args = example_inputs(T=9, H=64, I=48, device=DEVICE)
    want = fused_moe(*args, backend=backend)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(DEVICE, dtype=torch.bfloat16): assert torch.equal(fused_moe(*args, backend=backend), want)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("backend", PLAIN)
def test_a_sentinels_weight_is_never_looked_at(backend: str) -> None:
    x, w13, w2, tw, ti = example_inputs(device=DEVICE)
    ti[0, 0], tw[0, 0] = -1, float("nan")
    assert fused_moe(x, w13, w2, tw, ti, skip_invalid=True, backend=backend).isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="about the interpreter, which only machines without a GPU use")
@pytest.mark.parametrize("backend", TRITON_BACKENDS)
def test_bf16_in_the_interpreter_is_refused(backend: str) -> None:
    with pytest.raises(RuntimeError, match="bfloat16"): fused_moe(*example_inputs(dtype=torch.bfloat16), backend=backend)


def test_gradients_are_fine_under_no_grad() -> None:
    args = [a.requires_grad_() if a.is_floating_point() else a for a in example_inputs()]
    with torch.no_grad(): assert fused_moe(*args).shape == args[0].shape


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    "Sets what kernels.json says."
    def put(rows: dict) -> None:
        monkeypatch.setattr(sys.modules["dispatch.kernels.fused_moe"], "_table", lambda: [rows])
        _choose.cache_clear()
    yield put
    _choose.cache_clear()


def test_choice_of_backend(table) -> None:
    shape = SHAPES["deepseek-moe-16b"]
    table({})
    assert choose_backend(shape, 1, torch.bfloat16, "cpu").backend == "reference"
    assert "7.5" in choose_backend(shape, 1, torch.bfloat16, "cuda", (7, 5)).why
    def chosen(capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16, shape: MoEShape = shape) -> list[str]:
        return [choose_backend(shape, T, dtype, "cuda", capability).backend for T in (0, 1, 2, 3, 682, 683, 4096)]
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert chosen(capability) == ["gemv", "gemv", "gemv", "swap_ab", "swap_ab", "grouped", "grouped"]
    assert chosen((9, 0)) == ["gemv", "gemv", "gemv", "swap_ab", "swap_ab", "hopper", "hopper"]
    assert chosen((9, 0), torch.float32)[-1] == chosen((9, 0), shape=replace(shape, intermediate=1400))[-1] == "grouped"


@pytest.mark.parametrize(("stride", "picked"), [(1, "hopper"), (2, "grouped")])
def test_what_a_kernel_refuses_another_takes(table, stride: int, picked: str) -> None:
    table({})
    _, gate_up, down, *_ = example_inputs(T=1, E=4, K=1, H=64, I=64, dtype=torch.bfloat16)
    sizes = Sizes(4096, 1, 4, 64, 64, 0)
    x = torch.empty(4096, 128, dtype=torch.bfloat16)[:, ::stride][:, :64]
    assert _pick(sizes, x, gate_up, down, None, None, (9, 0), "GPU X") == (picked, None)
    assert _pick(sizes, x, gate_up, down, None, None, (8, 0), "GPU X") == ("grouped", None)


def test_a_measured_choice_comes_first(table) -> None:
    shape = SHAPES["deepseek-moe-16b"]
    table({("GPU X", 64, 6, 2048, 1408): [(1, "naive", None), (64, "gemv", None)]})
    def chosen(T: int, dtype: torch.dtype = torch.bfloat16, gpu: str = "GPU X", shape=shape) -> str:
        return choose_backend(shape, T, dtype, "cuda", (9, 0), gpu).backend
    assert [chosen(T) for T in (1, 2, 64, 65, 4096)] == ["naive", "gemv", "gemv", "swap_ab", "hopper"]
    assert chosen(64, torch.float16) == "gemv"
    assert chosen(64, torch.float32) == chosen(64, gpu="GPU Y") == chosen(64, shape=SHAPES["olmoe"]) == "swap_ab"
    assert "measurements" in choose_backend(shape, 1, torch.bfloat16, "cuda", (9, 0), "GPU X").why
    assert choose_backend(shape, 1, torch.bfloat16, "cuda", (7, 5), "GPU X").backend == "reference"


def test_the_table_names_backends_in_rising_order() -> None:
    for up_to in _table()[-1].values():
        assert {b for _, b, _ in up_to} <= BACKENDS.keys()
        assert [t for t, *_ in up_to] == sorted({t for t, *_ in up_to})


@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_a_trace_gives_each_expert_its_share(tmp_path: Path, top_k: int) -> None:
    counts = [int(1000 / (i + 1)) for i in range(32)]
    write_loads(ExpertLoads([counts], 6, "made up"), tmp_path / "loads.json")
    assert read_loads(tmp_path / "loads.json") == ExpertLoads([counts], 6, "made up")
    _, index = synthetic_routing(20000, 32, top_k, f"trace:{tmp_path}/loads.json", seed=3)
    assert all(len(set(row)) == top_k for row in index[:200].tolist())
    share, want = torch.bincount(index.flatten(), minlength=32) / 20000, torch.tensor(counts) / sum(counts) * top_k
    torch.testing.assert_close(share.float()[want < 0.95], want[want < 0.95] * (top_k - share[want >= 0.95].sum()) / want[want < 0.95].sum(),
                               rtol=0.1, atol=0.005)


def test_each_seed_of_a_trace_draws_a_layer(tmp_path: Path) -> None:
    write_loads(ExpertLoads([[1] * 4 + [0] * 4, [0] * 4 + [1] * 4], 2, "two halves"), tmp_path / "loads.json")
    halves = {int(synthetic_routing(50, 8, 2, f"trace:{tmp_path}/loads.json", seed)[1].min()) // 4 for seed in range(8)}
    assert halves == {0, 1}


@pytest.mark.parametrize(("text", "message"), [
    ("", "is no trace of expert loads"), ("[1]", "is no trace"), ('{"counts": []}', "is no trace"),
    ('{"counts": [], "top_k": 1, "source": ""}', "has no counts"), ('{"counts": [[1, 2], [3]], "top_k": 1, "source": ""}', "has no counts"),
    ('{"counts": [[1, -2]], "top_k": 1, "source": ""}', "no whole numbers from 0 up"), ('{"counts": [[1, 0.5]], "top_k": 1, "source": ""}', "no whole"),
    ('{"counts": [[0, 0]], "top_k": 1, "source": ""}', "a layer that nobody chose"),
    ('{"counts": [[1, 1, 1]], "top_k": 1, "source": ""}', "has 3 experts a layer, the shape 2"),
    ('{"counts": [[1, 0]], "top_k": 1, "source": ""}', "fewer than 2 experts of a layer"),
])
def test_a_bad_trace_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(ValueError, match=message): synthetic_routing(4, 2, 2, f"trace:{tmp_path}/loads.json")
    with pytest.raises(ValueError, match="can't be read"): synthetic_routing(4, 2, 2, f"trace:{tmp_path}")
    with pytest.raises(ValueError, match=r"accepted are uniform, zipf:S .*, all-to-one and trace:FILE"): synthetic_routing(4, 2, 2, "trace")


@pytest.mark.parametrize("S", [1, 2, 3])
@pytest.mark.parametrize("backend", PLAIN)
def test_shared_experts(backend: str, S: int) -> None:
    "They are experts E to E + S - 1 that every token takes with weight 1."
    x, w13, w2, tw, ti = example_inputs(T=2, device=DEVICE)
    shared, (E, H, I), T = shared_experts(w2, S), w2.shape, len(x)
    ti[0], ti[1, 1] = 8, -1
    kept, every = ((ti >= 0) & (ti < E)).float(), torch.arange(E, E + S, device=DEVICE).expand(T, S)
    rows, columns = shared[SHARED[0]].view(2, S, I, H).transpose(0, 1).reshape(S, 2 * I, H), shared[SHARED[1]].view(H, S, I).transpose(0, 1)
    want = reference_moe(x, torch.cat([w13, rows]), torch.cat([w2, columns]), torch.cat([tw * kept, torch.ones(T, S, device=DEVICE)], 1),
                         torch.cat([ti.clamp(0, 7), every], 1))
    out = torch.full_like(x, float("nan"))
    y = fused_moe(x, w13, w2, tw, ti, **shared, out=out, skip_invalid=True, backend=backend)
    assert y is out
    check_agreement(y, want, backend)
    assert torch.equal(y, fused_moe(x, w13, w2, tw, ti.int(), **shared, skip_invalid=True, backend=backend))
    turned = w13.transpose(1, 2).contiguous().transpose(1, 2), w2.transpose(1, 2).contiguous().transpose(1, 2)
    check_agreement(fused_moe(x, *turned, tw, ti, **shared, skip_invalid=True, backend=backend), want, "transposed routed weights")
    assert fused_moe(x[:0], w13, w2, tw[:0], ti[:0], **shared, backend=backend).shape == (0, H)
    assert fused_moe(x, w13, w2, tw, ti, **shared, out=x, skip_invalid=True, backend=backend) is x
    check_agreement(x, want, "in place")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [b for b in PLAIN if b != "gemv"])
def test_shared_experts_with_many_tokens(backend: str, dtype: torch.dtype) -> None:
    args = example_inputs(T=130, E=3, K=2, H=40, I=24, dtype=dtype, device=DEVICE)
    shared = shared_experts(args[2], 1)
    check_agreement(fused_moe(*args, **shared, backend=backend), reference_moe(*args, **shared), backend)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2), st.sampled_from([1, 5, 16, 64]), st.booleans(), st.integers(0, 999))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_sort_pairs(T: int, E: int, K: int, S: int, block: int, wide: bool, seed: int) -> None:
    "It equals sort_by_expert, with the shared experts as E to E + S - 1. Indices -1 and E are nobody's."
    index = torch.randint(-1, E + 1, (T, K), generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.int64 if wide else torch.int32)
    every = torch.where(index < E, index, -1)
    every = torch.cat([every, torch.arange(E, E + S, device=DEVICE, dtype=index.dtype).expand(T, S)], 1)
    want, got = sort_by_expert(every, E + S, block), sort_pairs(index, E, block, S)
    assert torch.equal(got.ends, want.ends)
    assert torch.equal(got.tile_expert, want.tile_expert)
    used, real = want.tile_expert >= 0, int(want.ends[-1])
    assert torch.equal(got.pairs[:real], want.pairs[:real])
    assert torch.equal(got.tile_row[used], want.tile_row[used])
    assert torch.equal(got.tile_rows[used], want.tile_rows[used])
    assert not [t for t in got if t.data_ptr() % 16], "whatever T is, no kernel that reads these is compiled for another alignment"


def test_sort_refuses_a_tile_of_no_rows() -> None:
    for sort in (sort_by_expert, sort_pairs):
        with pytest.raises(ValueError, match="block is 0"): sort(torch.zeros(1, 1, dtype=torch.int64), 4, 0)


@pytest.mark.parametrize("S", [0, 2])
@pytest.mark.parametrize(("small", "big"), [(16, 16), (16, 32), (32, 64)])
def test_swap_ab_finds_what_it_would_sort(small: int, big: int, S: int) -> None:
    "The two ways to the tokens give the same bits, whatever the tiles."
    args = example_inputs(T=37, E=3, K=2, H=20, I=24, distribution="zipf:1.2", device=DEVICE)
    shared = shared_experts(args[2], S) if S else {}
    product = Product(32, 32, 4, 2, 2)
    config = SwapConfig(small, big, True, product, replace(product, block_n=64, block_k=16), DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0))
    found = swap_ab_moe(*args, **shared, config=config)
    check_agreement(found, reference_moe(*args, **shared), "find")
    assert torch.equal(found, swap_ab_moe(*args, **shared, config=replace(config, find=False)))


def test_swap_configs_are_sound() -> None:
    for T, E, size, capability in itertools.product((1, 5, 32, 33, 100, 1000, 9000), (8, 64, 256), (2, 4), ((8, 0), (8, 6), (8, 9), (9, 0))):
        c = swap_config(T, 8, E, size, capability)
        assert 16 <= c.small <= c.big
        assert c.find == (T * 8 <= 256)
        assert c.pdl == (capability == (9, 0))


# both orders and both ways to take turns, in tiles small enough that an expert has several
PERSISTENT = {f"group {group}, {'persistent' if persistent else 'a program a unit'}":
              PersistentConfig(16, Blocks(32, 32, 4, 2), Blocks(64, 16, 4, 2), group, persistent, False) for group in (1, 3) for persistent in (True, False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_persistent_agrees_and_repeats(case: dict, dtype: torch.dtype) -> None:
    args = example_inputs(**case, dtype=dtype, device=DEVICE)
    y = persistent_moe(*args, out=torch.full_like(args[0], float("nan")))
    check_agreement(y, reference_moe(*args), "persistent")
    assert torch.equal(y, persistent_moe(*args))


@pytest.mark.parametrize("case", [dict(T=70, K=1, distribution="all-to-one"), dict(T=25, E=3, K=2, H=33, I=40, distribution="zipf:1.2")], ids=str)
def test_persistent_orders_give_the_same_bits(case: dict) -> None:
    args = example_inputs(**case, device=DEVICE)
    shared = shared_experts(args[2], 2)
    args[4][0, 0] = -1
    found = [persistent_moe(*args, **shared, skip_invalid=True, config=c) for c in PERSISTENT.values()]
    check_agreement(found[0], reference_moe(*args, **shared, skip_invalid=True), "persistent")
    assert all(torch.equal(found[0], y) for y in found)


@pytest.mark.parametrize("config", PERSISTENT.values(), ids=PERSISTENT.keys())
def test_persistent_takes_any_strides_and_index(config: PersistentConfig) -> None:
    x, w13, w2, tw, ti = example_inputs(T=6, H=32, I=40, device=DEVICE)
    shared = shared_experts(w2, 1)
    ti[2], ti[3, 0] = 8, -1
    def call(x, w13, w2, tw, ti, **kw): return persistent_moe(x, w13, w2, tw, ti, **shared, skip_invalid=True, config=config, **kw)
    want = reference_moe(x, w13, w2, tw, ti, **shared, skip_invalid=True)
    wide, out = torch.zeros(6, 64, device=DEVICE), torch.zeros(6, 64, device=DEVICE)
    wide[:, ::2] = x
    check_agreement(call(wide[:, ::2], w13, w2, tw.T.contiguous().T, ti.T.contiguous().T, out=out[:, ::2]), want, "strided rows and routing")
    check_agreement(call(x, w13.mT.contiguous().mT, w2.mT.contiguous().mT, tw, ti.int()), want, "transposed weights, int32 index")
    assert call(x[:0], w13, w2, tw[:0], ti[:0]).shape == (0, 32)
    assert call(x, w13, w2, tw, ti, out=x) is x
    check_agreement(x, want, "in place")


@pytest.mark.parametrize("config", PERSISTENT.values(), ids=PERSISTENT.keys())
def test_persistent_with_nobody_chosen(config: PersistentConfig) -> None:
    x, w13, w2, tw, ti = example_inputs(device=DEVICE)
    tw[:], ti[:] = float("nan"), -1
    y = persistent_moe(x, w13, w2, tw, ti, skip_invalid=True, out=torch.full_like(x, float("nan")), config=config)
    assert (y == 0).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="about the interpreter")
def test_persistent_programs_take_several_units() -> None:
    assert multiprocessors(torch.device("cpu")) == 4
    with pytest.raises(RuntimeError, match="bfloat16"): persistent_moe(*example_inputs(dtype=torch.bfloat16))


def test_persistent_configs_are_sound() -> None:
    for pairs, size, capability in itertools.product((1, 4095, 4096, 100000), (2, 4), ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))):
        c = persistent_config(pairs, 64, size, capability)
        assert c.block_m == (32 if size == 4 else 128 if pairs >= 4096 else 64)
        assert c.pdl == (capability >= (9, 0))
        assert not c.persistent, "it lost where it was measured"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 100, 1000, 3000])
@pytest.mark.parametrize("shape", [(64, 6, 2048, 1408), (8, 2, 1000, 344), (128, 8, 2048, 768)], ids=str)
def test_persistent_bf16(shape: tuple[int, int, int, int], tokens: int) -> None:
    "Every switch gives the same bits, again and again."
    args = example_inputs(tokens, *shape, torch.bfloat16, "cuda", distribution="zipf:1.2")
    shared = shared_experts(args[2], 2)
    y = persistent_moe(*args, **shared)
    check_agreement(y, reference_moe(*args, **shared), "persistent")
    c = persistent_config(tokens * (shape[1] + 2), shape[0] + 2, 2, torch.cuda.get_device_capability())
    for other in (c, replace(c, persistent=not c.persistent), replace(c, group=1), replace(c, group=10**6, persistent=False), replace(c, pdl=False)):
        for _ in range(5): assert torch.equal(y, persistent_moe(*args, **shared, config=other)), other


@pytest.mark.gpu
@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_offsets_past_2_31_elements(persistent: bool) -> None:
    for sizes in ((40, 64, 4, 8192, 4096), (66000, 8, 8, 4096, 64)):
        args = example_inputs(*sizes, torch.bfloat16, "cuda")
        c = replace(persistent_config(sizes[0] * sizes[2], sizes[1], 2, torch.cuda.get_device_capability()), persistent=persistent)
        check_agreement(persistent_moe(*args, config=c), reference_moe(*args), "persistent")
        del args
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_persistent_in_a_graph_and_without_synchronising() -> None:
    (x, w13, w2, tw, ti), shared = deepseek(1024)
    run = lambda: persistent_moe(x, w13, w2, tw, ti, **shared)
    run()  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try: run()
    finally: torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): y = run()
    for old, new in zip((tw, ti), synthetic_routing(1024, 64, 6, "zipf:1.2", 1, "cuda"), strict=True): old.copy_(new)
    ti[0] = 64
    graph.replay()
    torch.cuda.synchronize()
    check_agreement(y, reference_moe(x, w13, w2, tw, ti, **shared, skip_invalid=True), "persistent")
    assert torch.equal(y, run())


def valid_inputs() -> dict[str, dict]:
    x, w13, w2, tw, ti = example_inputs()
    base, shared = dict(zip(NAMES, (x, w13, w2, tw, ti), strict=True)), shared_experts(w2, 2)
    empty = base | dict(hidden_states=x[:0], top_k_weights=tw[:0], top_k_index=ti[:0])
    return {
        "plain": base, "shared": base | shared, "out": base | dict(out=torch.empty(4, 16)), "in place": base | shared | dict(out=x), "no tokens": empty,
        "no tokens, out": empty | dict(out=x[:0]), "int32": base | dict(top_k_index=ti.int()), "strided out": base | dict(out=torch.empty(4, 32)[:, ::2]),
        "out transposed": base | shared | dict(out=torch.empty(16, 4).T), "repeated x": base | dict(hidden_states=x[:1].expand(4, 16)),
        "repeated weights": base | dict(gate_up_proj=w13[:1].expand(8, -1, -1)), "turned": base | dict(down_proj=w2.mT.contiguous().mT),
        "K equals E": base | dict(top_k_weights=torch.ones(4, 8), top_k_index=torch.arange(8).expand(4, 8)),
        "half": {n: a.half() if n in NAMES[:3] or n in SHARED else a for n, a in (base | shared).items()},
    }


@pytest.mark.parametrize("case", valid_inputs().values(), ids=valid_inputs().keys())
def test_the_fast_check_agrees_with_the_slow(case: dict) -> None:
    args = [*(case.get(name) for name in (*NAMES, "out", *SHARED)), None]
    slow, fast = _look_closer(*args), _sizes(*args)
    assert fast in (None, slow)
    assert (fast is None) == (case.get("out") is not None and not case["out"].is_contiguous())
    assert check_inputs(**case) == slow == Sizes(len(case["hidden_states"]), case["top_k_index"].shape[1], 8, 16, 24, 2 if SHARED[0] in case else 0)


@pytest.mark.parametrize("name", [n for n in bad_inputs() if not n.startswith(("index", "backend"))])
def test_the_fast_check_takes_nothing_bad(name: str) -> None:
    case = dict(zip(NAMES, example_inputs(), strict=True)) | bad_inputs()[name][0]
    assert _sizes(*(case.get(n) for n in (*NAMES, "out", *SHARED)), None) is None


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference", "naive"])
def test_the_operator(backend: str, shared: bool) -> None:
    args = example_inputs(device=DEVICE)
    torch.library.opcheck(_fused_moe_op, (*args, *(shared_experts(args[2], 2).values() if shared else (None, None)), False, backend, []))


@pytest.mark.parametrize("shared", [False, True])
def test_the_operator_with_bytes(shared: bool) -> None:
    x, w13, w2, tw, ti = example_inputs(device=DEVICE)
    routed, both = [quantize(w, torch.int8) for w in (w13, w2)], [quantize(w, torch.int8) for w in shared_experts(w2, 2).values()] if shared else []
    given = x, *(q.values for q in routed), tw, ti, *([q.values for q in both] or (None, None)), False, "auto", [q.scales for q in routed + both]
    torch.library.opcheck(_fused_moe_op, given)


@pytest.mark.parametrize("shared", [False, True])
def test_compiled_eagerly(shared: bool) -> None:
    "One graph, any number of tokens, the same bits, with and without out."
    torch._dynamo.reset()
    call = torch.compile(lambda args, kw, out: fused_moe(*args, **kw, out=out), fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for T in (4, 7):
            args = example_inputs(T=T, device=DEVICE)
            x, _, w2, tw, ti = args
            kw, out = shared_experts(w2, 2) if shared else {}, torch.full_like(x, float("nan"))
            want = fused_moe(*args, **kw)
            for t in (x, tw, ti, out): torch._dynamo.mark_dynamic(t, 0)
            assert torch.equal(call(args, kw, None), want)
            got = call(args, kw, out)
            assert got.data_ptr() == out.data_ptr()
            assert torch.equal(out, want)


def test_dynamic_tokens_compile_once() -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda *args: fused_moe(*args), fullgraph=True, backend="eager")
    for T in (4, 9, 31):
        x, w13, w2, tw, ti = example_inputs(T=T, device=DEVICE)
        for t in (x, tw, ti): torch._dynamo.mark_dynamic(t, 0)
        with torch._dynamo.config.patch(error_on_recompile=T > 4): assert torch.equal(call(x, w13, w2, tw, ti), fused_moe(x, w13, w2, tw, ti))


def deepseek(T: int, seed: int = 0, S: int = 2) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    args = example_inputs(T, 64, 6, 2048, 1408, torch.bfloat16, "cuda", seed)
    return args, shared_experts(args[2], S)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 64, 512])
@pytest.mark.parametrize("backend", ON_GPU)
def test_shared_bf16_repeats_bit_for_bit(backend: str, T: int) -> None:
    args, shared = deepseek(T)
    y = fused_moe(*args, **shared, backend=backend)
    check_agreement(y, reference_moe(*args, **shared), backend)
    for _ in range(20): assert torch.equal(y, fused_moe(*args, **shared, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 64, 512])
@pytest.mark.parametrize("backend", ON_GPU)
def test_cuda_graph(backend: str, T: int) -> None:
    "Captured once, replayed with other inputs in the same places."
    (x, w13, w2, tw, ti), shared = deepseek(T)
    run = lambda: fused_moe(x, w13, w2, tw, ti, **shared, backend=backend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): y = run()
    for seed in (1, 2):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        for old, new in zip((tw, ti), synthetic_routing(T, 64, 6, "zipf:1.2", seed, "cuda"), strict=True): old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check_agreement(y, reference_moe(x, w13, w2, tw, ti, **shared), backend)
        assert torch.equal(y, run())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", *ON_GPU])
def test_compiled_by_inductor(backend: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda args, kw: fused_moe(*args, **kw, backend=backend) * 2, fullgraph=True)
    for T in (1, 5, 70):
        args, shared = deepseek(T)
        assert torch.equal(call(args, shared), fused_moe(*args, **shared, backend=backend) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 20, 64, 512])
def test_early_launch_changes_no_bit(T: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0): pytest.skip("programmatic dependent launch needs compute capability 9.0")
    args, shared = deepseek(T)
    c = swap_config(T, 8, 66)
    assert c.pdl
    for _ in range(5):
        assert torch.equal(gemv_moe(*args, **shared, pdl=True), gemv_moe(*args, **shared, pdl=False))
        assert torch.equal(swap_ab_moe(*args, **shared, config=c), swap_ab_moe(*args, **shared, config=replace(c, pdl=False)))
        if c.find: assert torch.equal(swap_ab_moe(*args, **shared, config=c), swap_ab_moe(*args, **shared, config=replace(c, find=False)))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_two_streams_at_once(backend: str) -> None:
    calls = [deepseek(T) for T in (2, 100)]
    want = [fused_moe(*args, **kw, backend=backend) for args, kw in calls]
    streams, got = [torch.cuda.Stream() for _ in calls], [[], []]
    torch.cuda.synchronize()
    for _ in range(20):
        for i, ((args, kw), stream) in enumerate(zip(calls, streams, strict=True)):
            with torch.cuda.stream(stream): got[i].append(fused_moe(*args, **kw, backend=backend))
    torch.cuda.synchronize()
    for ys, y in zip(got, want, strict=True): assert all(torch.equal(y, other) for other in ys)


@pytest.mark.parametrize(("T", "E", "K", "block", "kind"), [
    (0, 8, 2, 16, "uniform"), (1, 8, 2, 16, "uniform"), (37, 60, 8, 16, "zipf:1.2"), (64, 8, 1, 16, "all-to-one"), (5, 4, 4, 1, "uniform"),
    (300, 7, 3, 128, "zipf:2")])
def test_tiles_cover_each_pair_once(T: int, E: int, K: int, block: int, kind: str) -> None:
    _, index = synthetic_routing(T, E, K, kind)
    t, flat, seen = sort_by_expert(index, E, block), index.flatten(), []
    assert t.tile_expert.numel() == max_tiles(T * K, E, block)
    for e, row, length in zip(t.tile_expert.tolist(), t.tile_row.tolist(), t.tile_rows.tolist(), strict=True):
        if e < 0:
            assert length == 0
            continue
        rows = t.pairs[row:min(row + block, int(t.ends[e]))].long()
        assert len(rows) == length > 0
        assert (flat[rows] == e).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(T * K))


def test_synthetic_routing_is_the_same_everywhere() -> None:
    "Pinned values: a race's inputs must not change under anybody's feet."
    assert synthetic_routing(3, 64, 6, "zipf:1.2", seed=7)[1].tolist() == PINNED
    w, _ = synthetic_routing(1000, 64, 6)
    torch.testing.assert_close(w.sum(-1), torch.ones(1000))
    for bad in ("zipf", "zipf:x", "zipf:nan", "zipf:inf", "zipf:-1", "uniform:2", "poisson", "all-to-one:1"):
        with pytest.raises(ValueError, match="distribution is"): synthetic_routing(2, 8, 2, bad)
    with pytest.raises(ValueError, match="top_k is 9; accepted are 1 to 8"): synthetic_routing(2, 8, 9)


PINNED = [[8, 57, 10, 32, 29, 48], [8, 57, 14, 11, 29, 40], [55, 17, 16, 8, 39, 29]]


def test_random_experts_scale() -> None:
    w13, w2 = random_experts(2, 256, 128, torch.float32, seed=1)
    assert abs(float(w13.std()) * 16 - 1) < 0.05
    assert abs(float(w2.std()) * 128**0.5 - 1) < 0.05


def test_agreement_of_odd_values() -> None:
    assert agreement(torch.zeros(2, 3), torch.zeros(2, 3)).rel_err == 0
    assert agreement(torch.ones(1, 3), torch.zeros(1, 3)).rel_err == float("inf")
    with pytest.raises(ValueError, match="shapes must be equal"): agreement(torch.zeros(2, 3), torch.zeros(3, 2))
