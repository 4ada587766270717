"""Weights of one byte: how far they are from what they stand for, what is refused, and what the tiny model makes of them."""
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dispatch.bench.contestants import as_backend, find_contestant
from dispatch.cli import main
from dispatch.core.quantization import KINDS, NAMES, Quantized, quantize
from dispatch.core.timing import check_agreement
from dispatch.kernels.fused_moe import BACKENDS, choose_backend, fused_moe
from dispatch.kernels.reference import example_inputs, random_experts, reference_moe
from dispatch.model.checkpoint import (
    CheckpointError,
    load_weights,
    open_checkpoint,
    quantize_checkpoint,
    tensor_shapes,
    write_checkpoint,
    write_random_checkpoint,
)
from dispatch.model.config import ConfigError, ModelConfig, read_config
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


SMALL = ModelConfig(vocab_size=64, hidden_size=256, intermediate_size=320, moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=4, n_routed_experts=96, n_shared_experts=1, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A small checkpoint in the published format: 57 MB in bf16, nearly all of it experts."
    return write_random_checkpoint(tmp_path_factory.mktemp("published") / "small", SMALL, progress=False)


class Held(TorchDispatchMode):
    "Counts the bytes of all tensors that operations make and that still live, and their most at any time."
    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if not isinstance(t, torch.Tensor) or (storage := t.untyped_storage())._cdata in self.known: continue
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return found

    def freed(self, which: int, size: int) -> None:
        self.known.discard(which)
        self.now -= size


@pytest.mark.parametrize("name", NAMES)
def test_loading_never_holds_much_more_than_the_bytes(name: str, published: Path) -> None:
    with Held() as held: weights = load_weights(open_checkpoint(published), progress=False, kind=NAMES[name])
    plain = sum(w.values.numel() * 2 for layer in weights.layers[1:] for w in (layer.gate_up_proj, layer.down_proj))
    assert weights.expert_nbytes <= 0.52 * plain, "bytes and scales; 0.51 from rows of 200 on"
    assert weights.nbytes <= held.most <= 1.15 * weights.nbytes
    assert held.now <= 1.01 * weights.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_loading_never_holds_much_more_than_the_bytes(name: str, published: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = load_weights(open_checkpoint(published), device="cuda", progress=False, kind=NAMES[name])
    assert torch.cuda.max_memory_allocated() - before <= 1.15 * weights.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_written_and_loaded_again(name: str, published: Path, tmp_path: Path) -> None:
    (published / "tokenizer_config.json").write_text("{}")
    (published / "pytorch_model.bin").write_text("the same weights in another format")
    folder = quantize_checkpoint(published, tmp_path / name, name, progress=False)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer_config.json"]
    assert read_config(folder) == replace(SMALL, expert_weights=name)
    at_once, again = (DeepseekMoE.load(f, torch.float32, "cpu", progress=False, kind=k) for f, k in ((published, NAMES[name]), (folder, None)))
    ids = torch.arange(12).view(1, -1)
    assert torch.equal(at_once.forward(ids), again.forward(ids))
    assert again.weights.expert_nbytes == at_once.weights.expert_nbytes
    assert torch.equal(DeepseekMoE.load(folder, torch.float32, progress=False, kind=NAMES[name]).forward(ids), again.forward(ids))
    other = next(n for n in NAMES if n != name)
    with pytest.raises(CheckpointError, match=f"holds {name} experts, which can't become .*; quantize the original"):
        DeepseekMoE.load(folder, torch.float32, progress=False, kind=NAMES[other])
    with pytest.raises(CheckpointError, match="already holds a checkpoint"): quantize_checkpoint(published, folder, name, progress=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; name an empty or a new folder"): quantize_checkpoint(published, tmp_path / "mine", progress=False)
    assert (tmp_path / "mine/notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; name an empty or a new folder"): quantize_checkpoint(published, tmp_path / "file", progress=False)
    with pytest.raises(ValueError, match="kind is 'int4'; accepted are int8, fp8"): quantize_checkpoint(published, tmp_path / "x", "int4")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_broken_scales_in_a_file_are_named(scale: float, tmp_path: Path) -> None:
    config = replace(SMALL, n_routed_experts=2, num_hidden_layers=2)
    folder = quantize_checkpoint(write_random_checkpoint(tmp_path / "plain", config, progress=False), tmp_path / "int8", progress=False)
    made = load_file(folder / "model.safetensors")
    made["model.layers.1.mlp.experts.1.down_proj.weight_scale"][3] = scale
    save_file(made, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"scales in model\.layers\.1\.mlp\.experts\.1\.down_proj\.weight_scale that are negative or not finite"):
        load_weights(open_checkpoint(folder), progress=False)


def test_a_copy_that_fails_leaves_nothing_that_looks_complete(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (published / "tokenizer.json").write_text("{}")
    def full(*args: object) -> None: raise OSError(28, "No space left on device")
    monkeypatch.setattr("dispatch.model.checkpoint.shutil.copy2", full)
    with pytest.raises(OSError, match="No space left"): quantize_checkpoint(published, tmp_path / "q", progress=False)
    with pytest.raises(Exception, match=r"config\.json"): open_checkpoint(tmp_path / "q")
    (published / "tokenizer.json").unlink()


def test_too_large_for_float32_is_not_finite() -> None:
    with pytest.raises(ValueError, match="has 1 values that are not finite, the first at \\[1, 2\\]: 1e"):
        w = torch.ones(2, 3, dtype=torch.float64)
        w[1, 2] = 1e300
        quantize(w, torch.int8)
    assert not quantize(torch.nn.Parameter(torch.ones(2, 3)), torch.int8).scales.requires_grad


def test_compiled_a_mixture_is_refused() -> None:
    (x, gate_up, _, weights, index), _ = quantized(example_inputs(), torch.int8)
    with pytest.raises(Exception, match="some weights are quantized and some are plain tensors"):
        torch.compile(fused_moe, backend="eager", fullgraph=True)(x, gate_up, example_inputs()[2], weights, index)


def test_a_contestant_inside_a_model_wants_its_own_kind() -> None:
    model = DeepseekMoE.load(tiny_folder(), torch.float32, progress=False, kind=torch.int8)
    ids = torch.arange(6)[None]
    want = model.forward(ids)
    shape = model.config.moe_shape
    model.backend = as_backend(find_contestant("dispatch@int8"), shape)
    assert torch.equal(model.forward(ids), want)
    model.backend = as_backend(find_contestant("dispatch"), shape)
    with pytest.raises(TypeError, match=r"dispatch takes plain weights here, and the model's are torch\.int8"): model.forward(ids)


def test_a_broken_weight_in_a_file_is_named(tmp_path: Path) -> None:
    config = replace(SMALL, n_routed_experts=2, num_hidden_layers=2)
    def tensor(name: str) -> torch.Tensor:
        w = torch.ones(tensor_shapes(config)[name], dtype=torch.bfloat16)
        if name.endswith("experts.1.up_proj.weight"): w[3, 7] = float("inf")
        return w
    folder = write_checkpoint(tmp_path / "broken", config, tensor, progress=False)
    with pytest.raises(CheckpointError, match=r"can't be quantized: model\.layers\.1\.mlp\.experts\.1\.up_proj\.weight has 1 values that are not finite, "
                                              r"the first at \[3, 7\]: inf"):
        load_weights(open_checkpoint(folder), progress=False, kind=torch.int8)


@pytest.mark.parametrize(("change", "message"), [
    (lambda made: made.pop("model.layers.1.mlp.experts.0.up_proj.weight_scale"), "experts.0.up_proj.weight_scale is missing from every file"),
    (lambda made: made.update({"model.layers.1.mlp.experts.0.up_proj.weight": made["model.layers.1.mlp.experts.0.up_proj.weight"].bfloat16()}),
     "has dtype BF16; accepted: I8"),
    (lambda made: made.update({"model.layers.1.mlp.experts.0.up_proj.weight_scale": torch.ones(3)}), r"has shape \(3,\); accepted is \(128,\)"),
])
def test_a_quantized_checkpoint_with_a_fault_is_refused(change: Callable, message: str, tmp_path: Path) -> None:
    config = replace(SMALL, n_routed_experts=2, num_hidden_layers=2)
    source = write_random_checkpoint(tmp_path / "plain", config, progress=False)
    folder = quantize_checkpoint(source, tmp_path / "int8", progress=False)
    made = load_file(folder / "model.safetensors")
    change(made)
    save_file(made, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message): open_checkpoint(folder)


def test_somebody_elses_quantization_is_refused(published: Path, tmp_path: Path) -> None:
    raw = json.loads((published / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"quantization_config is \{'quant_method': 'gptq', 'bits': 4\}; accepted: None or"): read_config(tmp_path)


def test_the_command_line_quantizes_and_generates(published: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(main, ["checkpoint", "quantize", str(tiny_folder()), str(tmp_path / "tiny8")])
    assert done.exit_code == 0, done.output
    stored = run(main, ["generate", "Once", "--model", str(tmp_path / "tiny8"), "--max-tokens", "8", "--device", "cpu", "--dtype", "bfloat16"])
    loaded = run(main, ["generate", "Once", "--quantize", "int8", "--max-tokens", "8", "--device", "cpu", "--dtype", "bfloat16"])
    assert stored.exit_code == loaded.exit_code == 0, stored.output + loaded.output
    assert stored.stdout == loaded.stdout
    wrong = run(main, ["checkpoint", "quantize", str(tmp_path / "nowhere"), str(tmp_path / "x")])
    assert wrong.exit_code == 1
    assert "is no folder" in wrong.output


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_model_hardly_notices(name: str) -> None:
    "At least 97 % of the likeliest tokens stay, and none changes that was ahead by more than one."
    plain, small = (DeepseekMoE.load(tiny_folder(), torch.float32, progress=False, kind=kind) for kind in (None, NAMES[name]))
    ids = load_tokenizer(tiny_folder()).encode((tiny_folder() / "heldout.txt").read_text(encoding="utf-8")).ids
    width = plain.config.max_position_embeddings
    batch = torch.tensor(ids[:1200 // width * width + width]).view(-1, width)
    found = compare_logits(*(m.forward(batch).flatten(0, 1) for m in (small, plain)))
    assert found.positions >= 1000
    if name == "int8": assert found.top1 >= 0.97, found
    else: assert found.top1 >= 0.93, found
    assert found.largest_gap <= 1.0, found


# ---------------------------------------------------------------- kernels that read bytes

READERS = ["reference", "gemv", "swap_ab"]
CASES = [dict(T=0), dict(T=1), dict(T=5, E=60, K=8, H=50, I=33), dict(T=40, E=5, K=3, H=65, I=32), dict(T=130, E=4, K=3, H=64, I=32, distribution="zipf:1.2")]


def quantized(args: tuple[torch.Tensor, ...], kind: torch.dtype, shared: bool = False) -> tuple[tuple, dict]:
    "A problem with its weights quantized, and two shared experts."
    x, gate_up, down, weights, index = args
    more = {}
    if shared:
        both = random_experts(1, x.shape[1], 2 * down.shape[2], x.dtype, x.device, seed=5)
        more = {n: quantize(w[0], kind) for n, w in zip(("shared_gate_up_proj", "shared_down_proj"), both, strict=True)}
    return (x, quantize(gate_up, kind), quantize(down, kind), weights, index), more


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernels_agree_with_dequantized_weights(kind: torch.dtype, backend: str) -> None:
    for i, case in enumerate(CASES[:3] if backend == "gemv" else CASES):
        args, more = quantized(example_inputs(**case, dtype=(torch.float32, torch.float16)[i % 2]), kind, shared=i > 1)
        x, gate_up, down, *routing = args
        want = reference_moe(x.float(), gate_up.dequantize(), down.dequantize(), *routing, **{n: w.dequantize() for n, w in more.items()})
        check_agreement(fused_moe(*args, **more, backend=backend), want, f"{backend} {case}")


def test_bytes_with_strides_and_nobodys_indices() -> None:
    x, gate_up, down, weights, index = quantized(example_inputs(T=40, E=6, K=2, H=64, I=32), torch.int8)[0]
    index[3, 1] = 6
    wide = Quantized(torch.cat([gate_up.values, gate_up.values], dim=2)[:, :, 64:], gate_up.scales)
    every = Quantized(torch.repeat_interleave(down.values, 2, dim=0)[::2], down.scales)
    want = reference_moe(x, gate_up, down, weights, index, skip_invalid=True)
    for backend in READERS: check_agreement(fused_moe(x, wide, every, weights, index, skip_invalid=True, backend=backend), want, backend)


def test_what_is_refused() -> None:
    (x, gate_up, down, weights, index), _ = quantized(example_inputs(), torch.int8)
    plain = example_inputs()
    with pytest.raises(TypeError, match="gate_up_proj is int8 with scales and down_proj is a plain tensor; accepted here are tensors, and weights"):
        fused_moe(x, gate_up, plain[2], weights, index)
    with pytest.raises(TypeError, match="gate_up_proj is int8 with scales and down_proj is float8_e4m3fn with scales"):
        fused_moe(x, gate_up, quantize(plain[2], torch.float8_e4m3fn), weights, index)
    with pytest.raises(TypeError, match="gate_up_proj is int8 with scales and shared_gate_up_proj is a plain tensor"):
        fused_moe(x, gate_up, down, weights, index, shared_gate_up_proj=plain[1][0], shared_down_proj=plain[2][0])
    with pytest.raises(ValueError, match=r"down_proj has shape \(7, 16, 24\)"):
        fused_moe(x, gate_up, Quantized(down.values[:7], down.scales[:7].clone()), weights, index)
    with pytest.raises(ValueError, match="gate_up_proj's scales have strides"):
        fused_moe(x, Quantized(gate_up.values, gate_up.scales.repeat_interleave(2, 1)[:, ::2]), down, weights, index)
    with pytest.raises(TypeError, match="gate_up_proj is a str and down_proj is int8"): fused_moe(x, "weights", down, weights, index)
    gate_up.scales.requires_grad_()
    for backend in READERS:
        with pytest.raises(RuntimeError, match="requires gradients"): fused_moe(x, gate_up, down, weights, index, backend=backend)
    gate_up.scales.requires_grad_(False)
    with pytest.raises(ValueError, match="'hopper_bytes', which reads quantized weights alone; accepted with these are 'auto', 'reference', 'naive'"):
        fused_moe(*plain, backend="hopper_bytes")
    for backend in BACKENDS.keys() - {*READERS, "hopper_bytes"}:
        with pytest.raises(ValueError, match=f"'{backend}', which reads no quantized weights; accepted with them are 'auto', 'reference', 'gemv', 'swap_ab'"):
            fused_moe(x, gate_up, down, weights, index, backend=backend)


def test_the_choice_for_bytes() -> None:
    from dispatch.core.roofline import SHAPES
    def pick(T: int, capability: tuple[int, int], kind: torch.dtype = torch.int8) -> str:
        return choose_backend(SHAPES["olmoe"], T, torch.bfloat16, "cuda", capability, "NVIDIA H200", kind=kind).backend
    assert [pick(T, (9, 0)) for T in (1, 3, 4, 4096)] == ["gemv", "gemv", "hopper_bytes", "hopper_bytes"]
    assert [pick(T, (9, 0), torch.float8_e4m3fn) for T in (3, 160, 161)] == ["gemv", "hopper_bytes", "hopper"]
    assert [pick(T, (8, 9)) for T in (3, 4, 4096)] == ["gemv", "swap_ab", "swap_ab"]
    assert pick(1, (7, 5)) == "reference"


@pytest.mark.parametrize("shared", [False, True])
def test_compiled_it_is_one_operator(shared: bool) -> None:
    args, more = quantized(example_inputs(T=3), torch.int8, shared)
    torch.testing.assert_close(torch.compile(fused_moe, backend="eager", fullgraph=True)(*args, **more), fused_moe(*args, **more))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("case", [dict(T=1), dict(T=2), dict(T=7), dict(T=64, distribution="zipf:1.2"), dict(T=200), dict(T=700, E=60, K=4),
                                  dict(T=3000, E=8, K=2)], ids=str)
def test_gpu_kernels_agree_with_dequantized_weights(kind: torch.dtype, case: dict) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        args, more = quantized(example_inputs(**dict(E=64, K=6, H=2048, I=1408) | case, dtype=dtype, device="cuda"), kind, shared=True)
        want = reference_moe(*args, **more)
        for backend in ("auto", "gemv", "swap_ab") if case["T"] < 10 else ("auto", "swap_ab"):
            y = fused_moe(*args, **more, backend=backend)
            check_agreement(y, want, f"{backend} {case}")
            assert torch.equal(y, fused_moe(*args, **more, backend=backend))


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    config = replace(SMALL, n_routed_experts=2, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="has int8 experts, and these are floats; `quantize_checkpoint`"):
        write_random_checkpoint(tmp_path / "a", replace(config, expert_weights="int8"), progress=False)
    weights = load_weights(open_checkpoint(write_random_checkpoint(tmp_path / "b", config, progress=False)), progress=False, kind=torch.int8)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight is int8 \[128, 256\]; accepted under this configuration is float64 or"):
        write_checkpoint(tmp_path / "c", config, weights.tensor, progress=False)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is bfloat16 \[2\]; accepted .* \[64, 256\]"):
        write_checkpoint(tmp_path / "d", config, lambda name: torch.ones(2, dtype=torch.bfloat16), progress=False)
    assert not (tmp_path / "c/config.json").exists()
    plain = load_weights(open_checkpoint(tmp_path / "b"), progress=False)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale \(they are not quantized\)"):
        plain.tensor("model.layers.1.mlp.experts.0.up_proj.weight_scale")
    with pytest.raises(CheckpointError, match="no tensor nonsense"): plain.tensor("nonsense")
