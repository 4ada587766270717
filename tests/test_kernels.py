"""Every backend against the float32 reference at awkward shapes, and each bad input's error."""
import pytest
import torch

from dispatch.core.timing import agreement, check_agreement
from dispatch.kernels.fused_moe import BACKENDS, choose_backend, fused_moe
from dispatch.kernels.reference import example_inputs, random_experts, reference_moe
from dispatch.kernels.routing import max_tiles, sort_by_expert, synthetic_routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "top_k_index")

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
@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_and_repeats(backend: str, case: dict, dtype: torch.dtype) -> None:
    args = example_inputs(**case, dtype=dtype, device=DEVICE)
    out = torch.full_like(args[0], float("nan"))  # poisoned: every element must be written
    y = fused_moe(*args, backend=backend, out=out)
    assert y is out
    check_agreement(y, reference_moe(*args), backend)
    assert torch.equal(y, fused_moe(*args, backend=backend)), "the same inputs gave other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33, 100, 1000, 3000])
@pytest.mark.parametrize("shape", [(64, 6, 2048, 1408), (60, 4, 2048, 1408), (8, 2, 1000, 344), (128, 8, 2048, 768)], ids=str)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_bf16(backend: str, shape: tuple[int, int, int, int], tokens: int) -> None:
    E, K, H, I = shape
    args = example_inputs(tokens, E, K, H, I, torch.bfloat16, "cuda", distribution="zipf:1.2")
    y = fused_moe(*args, backend=backend)
    check_agreement(y, reference_moe(*args), backend)
    assert torch.equal(y, fused_moe(*args, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_offsets_past_2_31_elements(backend: str) -> None:
    "gate_up_proj of 4.3e9 elements, then T*K*H of 2.1e9."
    args = example_inputs(40, 64, 4, 8192, 4096, torch.bfloat16, "cuda")
    assert args[1].numel() > 2**31
    check_agreement(fused_moe(*args, backend=backend), reference_moe(*args), backend)
    del args
    torch.cuda.empty_cache()
    args = example_inputs(66000, 8, 8, 4096, 64, torch.bfloat16, "cuda")
    assert args[0].shape[0] * 8 * 4096 > 2**31
    check_agreement(fused_moe(*args, backend=backend), reference_moe(*args), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
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


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_expert_twice_for_one_token(backend: str) -> None:
    x, w13, w2, tw, ti = example_inputs(T=5, device=DEVICE)
    ti[:] = 3
    y = fused_moe(x, w13, w2, tw, ti, backend=backend)
    once = fused_moe(x, w13, w2, tw.sum(1, keepdim=True), ti[:, :1], backend=backend)
    check_agreement(y, once, backend)


@pytest.mark.parametrize("backend", BACKENDS)
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
        "backend": (dict(backend="fastest"), ValueError, "backend is 'fastest'; accepted are 'auto', 'reference', 'naive'"),
    }


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_named(name: str, backend: str) -> None:
    changed, kind, message = bad_inputs()[name]
    with pytest.raises(kind, match=message):
        fused_moe(**({"backend": backend} | dict(zip(NAMES, example_inputs(), strict=True)) | changed))


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sentinels_weight_is_never_looked_at(backend: str) -> None:
    x, w13, w2, tw, ti = example_inputs(device=DEVICE)
    ti[0, 0], tw[0, 0] = -1, float("nan")
    assert fused_moe(x, w13, w2, tw, ti, skip_invalid=True, backend=backend).isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="about the interpreter, which only machines without a GPU use")
def test_bf16_in_the_interpreter_is_refused() -> None:
    with pytest.raises(RuntimeError, match="bfloat16"): fused_moe(*example_inputs(dtype=torch.bfloat16), backend="naive")


def test_gradients_are_fine_under_no_grad() -> None:
    args = [a.requires_grad_() if a.is_floating_point() else a for a in example_inputs()]
    with torch.no_grad(): assert fused_moe(*args).shape == args[0].shape


def test_choice_of_backend() -> None:
    from dispatch.core.roofline import SHAPES
    shape = SHAPES["deepseek-moe-16b"]
    assert choose_backend(shape, 1, torch.bfloat16, "cpu").backend == "reference"
    assert choose_backend(shape, 1, torch.bfloat16, "cuda", (7, 5)).backend == "reference"
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0)):
        assert choose_backend(shape, 1, torch.bfloat16, "cuda", capability).backend == "naive"


@pytest.mark.parametrize(("T", "E", "K", "block", "kind"), [
    (0, 8, 2, 16, "uniform"), (1, 8, 2, 16, "uniform"), (37, 60, 8, 16, "zipf:1.2"), (64, 8, 1, 16, "all-to-one"), (5, 4, 4, 1, "uniform"),
    (300, 7, 3, 128, "zipf:2")])
def test_tiles_cover_each_pair_once(T: int, E: int, K: int, block: int, kind: str) -> None:
    _, index = synthetic_routing(T, E, K, kind)
    t, flat, seen = sort_by_expert(index, E, block), index.flatten(), []
    assert t.tile_expert.numel() == max_tiles(T * K, E, block)
    for e, row in zip(t.tile_expert.tolist(), t.tile_row.tolist(), strict=True):
        if e < 0: continue
        rows = t.pairs[row:min(row + block, int(t.ends[e]))].long()
        assert len(rows)
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
