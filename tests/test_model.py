"""The model against an independent one made of transformers' parts, and what each broken folder is refused with."""
import builtins
import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.profiler import ProfilerActivity, profile

from dispatch.kernels.fused_moe import BACKENDS, fused_moe
from dispatch.model import checkpoint as checkpoint_module
from dispatch.model.checkpoint import (
    CheckpointError,
    Weights,
    load_weights,
    open_checkpoint,
    tensor_shapes,
    write_checkpoint,
    write_random_checkpoint,
)
from dispatch.model.config import CONFIGS, DEEPSEEK_MOE_16B, ConfigError, ModelConfig, parse_config, read_config
from dispatch.model.deepseek_moe import DeepseekMoE, KVCache
from dispatch.model.tokenizer import SAMPLES, Detokenizer, TokenizerError, byte_alphabet, is_byte_level, load_tokenizer, lost_text

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3)

# ---------------------------------------------------------------- config.json

PUBLISHED: dict[str, Any] = {  # of deepseek-ai/deepseek-moe-16b-base
    "architectures": ["DeepseekForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig", "AutoModel": "modeling_deepseek.DeepseekModel",
                 "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 4096,
    "model_type": "deepseek", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16,
    "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True, "vocab_size": 102400,
}
V2 = {"model_type": "deepseek_v2", "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "kv_lora_rank": None, "q_lora_rank": None,
      "topk_method": "greedy", "use_mla": False}
DROP = object()  # in place of a value: leave the key out


def changed(**keys: Any) -> dict[str, Any]:
    return {k: v for k, v in (PUBLISHED | keys).items() if v is not DROP}


@pytest.mark.parametrize("raw", [
    changed(), changed(**V2), changed(rope_theta=DROP, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    changed(rope_theta=DROP), changed(num_key_value_heads=DROP), changed(rope_scaling=DROP, attention_bias=DROP, scoring_func=DROP),
    changed(rope_parameters=None), changed(a_key_of_tomorrow=[1]), DEEPSEEK_MOE_16B.to_dict(),
], ids=["published", "deepseek_v2", "transformers v5", "default base", "default kv heads", "defaults", "null", "unknown key", "to_dict"])
def test_configurations_of_the_published_model(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == read_config(str(tmp_path)) == parse_config(raw) == DEEPSEEK_MOE_16B == CONFIGS["deepseek-moe-16b"]


def test_values_are_read_not_assumed() -> None:
    other = replace(SMALL, first_k_dense_replace=2, moe_layer_freq=2, norm_topk_prob=True, routed_scaling_factor=2.5, rms_norm_eps=1e-5,
                    rope_theta=5e5, max_position_embeddings=99, tie_word_embeddings=True, bos_token_id=None, eos_token_id=7,
                    num_key_value_heads=2, n_shared_experts=0, num_hidden_layers=6)
    assert parse_config(json.loads(json.dumps(other.to_dict()))) == other
    assert [l for l in range(6) if other.is_moe(l)] == [2, 4]
    assert other.head_dim == 8
    assert [l for l in range(28) if not DEEPSEEK_MOE_16B.is_moe(l)] == [0]
    theta = changed(rope_theta=1.0, rope_parameters={"rope_theta": 5e5})
    assert parse_config(theta).rope_theta == 5e5


REFUSED: list[tuple[dict[str, Any], list[str]]] = [  # keys changed; in the message: the key, what came, what is accepted
    (V2 | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536},
     ["qk_nope_head_dim is 128; accepted: 0", "qk_rope_head_dim is 64; accepted: 0", "kv_lora_rank is 512; accepted: None",
      "q_lora_rank is 1536; accepted: None"]),
    (V2 | {"qk_nope_head_dim": DROP, "qk_rope_head_dim": DROP}, ["qk_nope_head_dim is missing", "qk_rope_head_dim is missing", "by 0"]),
    ({"rope_scaling": {"type": "yarn", "factor": 40}}, ["rope_scaling is {'type': 'yarn', 'factor': 40}; accepted: None"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 40.0}}, ["rope_type is 'yarn'; accepted: 'default'"]),
    ({"rope_parameters": {"type": "linear", "factor": 2.0}}, ["type", "'linear'", "'default'"]),  # the older name, still read by v5
    ({"rope_parameters": {"rope_theta": "1e4"}}, ["rope_theta is '1e4'; accepted is float"]),
    ({"rope_parameters": "default"}, ["rope_parameters", "'default'", "accepted"]),
    ({"rope_parameters": [1]}, ["rope_parameters", "[1]", "accepted"]),
    ({"topk_method": "group_limited_greedy"}, ["topk_method is 'group_limited_greedy'; accepted: 'greedy'"]),
    ({"scoring_func": "sigmoid"}, ["scoring_func is 'sigmoid'; accepted: 'softmax'"]),
    ({"attention_bias": True}, ["attention_bias is True; accepted: False"]),
    ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'; accepted: 'silu'"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config is {'bits': 4}; accepted: None"]),
    ({"hidden_size": "2048"}, ["hidden_size is '2048'; accepted is int"]),
    ({"hidden_size": 2048.0}, ["hidden_size is 2048.0; accepted is int"]),
    ({"hidden_size": True}, ["hidden_size is True; accepted is int"]),
    ({"hidden_size": None}, ["hidden_size is None; accepted is int"]),
    ({"rms_norm_eps": False}, ["rms_norm_eps is False; accepted is float"]),
    ({"norm_topk_prob": 1}, ["norm_topk_prob is 1; accepted is bool"]),
    ({"eos_token_id": [1, 2]}, ["eos_token_id is [1, 2]; accepted is int | None"]),
    ({"eos_token_id": True}, ["eos_token_id is True; accepted is int | None"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers is 0; accepted is at least 1"]),
    ({"n_shared_experts": -1}, ["n_shared_experts is -1; accepted is at least 0"]),
    ({"hidden_size": DROP, "num_experts_per_tok": DROP}, ["hidden_size is missing", "num_experts_per_tok is missing", "accepted", "int"]),
    ({"num_experts_per_tok": 65}, ["num_experts_per_tok is 65", "n_routed_experts", "64"]),
    ({"num_attention_heads": 12, "num_key_value_heads": 12}, ["hidden_size", "2048", "multiple of num_attention_heads", "12"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads", "16", "multiple of num_key_value_heads", "3"]),
    ({"hidden_size": 48}, ["head dimension 3 is odd", "even"]),
    ({"model_type": "llama"}, ["model_type is 'llama'; accepted: 'deepseek' or 'deepseek_v2'"]),
    ({"model_type": ["deepseek"]}, ["model_type is ['deepseek']; accepted: 'deepseek' or 'deepseek_v2'"]),
    ({"model_type": DROP}, ["no model_type", "'deepseek', 'deepseek_v2'"]),
    ({"rope_theta": 0}, ["rope_theta is 0", "accepted"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan", "accepted"]),
    ({"rms_norm_eps": -1.0}, ["rms_norm_eps is -1.0", "accepted"]),
]


@pytest.mark.parametrize(("keys", "named"), REFUSED, ids=[
    ", ".join(f"{k} {'missing' if v is DROP else v}" for k, v in keys.items()) for keys, _ in REFUSED])
def test_a_refused_configuration_is_told_why(keys: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(**keys)))
    with pytest.raises(ConfigError) as e: read_config(tmp_path)
    assert [n for n in named if n not in str(e.value)] == [], str(e.value)


@pytest.mark.parametrize(("content", "named"), [
    (b"[]", ["holds a list", "accepted is an object"]), (b"null", ["holds a NoneType", "accepted is an object"]),
    (b"3", ["holds a int", "accepted is an object"]), (b"", ["config.json is not JSON"]), (b"{", ["config.json is not JSON"]),
    (b"\xff\xfe\x00\x80", ["config.json is not JSON"]), (b"{}", ["no model_type"]),
], ids=repr)
def test_what_is_no_configuration_is_refused(content: bytes, named: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as e: read_config(tmp_path)
    assert all(n in str(e.value) for n in named), str(e.value)


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    for ask in (read_config, open_checkpoint):
        with pytest.raises(FileNotFoundError, match=r"no config\.json; accepted is a folder in the Hugging Face format"): ask(tmp_path)

# ---------------------------------------------------------------- checkpoints

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
INDEX = "model.safetensors.index.json"


def published(config: ModelConfig, seed: int = 0, sigma: float = 0.4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    "Random tensors of the published names; norms near 1, so that a swapped or forgotten one shows."
    g = torch.Generator().manual_seed(seed)
    def one(shape: tuple[int, ...]) -> torch.Tensor:
        x = torch.randn(shape, generator=g)
        return (x * sigma if len(shape) > 1 else 1 + 0.1 * x).to(dtype)
    return {n: one(s) for n, s in tensor_shapes(config).items()}


def written(folder: Path, config: ModelConfig = SMALL, files: int = 4, **how: Any) -> dict[str, torch.Tensor]:
    tensors = published(config, **how)
    total = sum(t.numel() * 2 for t in tensors.values())
    write_checkpoint(folder, config, tensors.__getitem__, file_gb=(total / (files - 0.5) if files > 1 else 2 * total) / 1e9, progress=False)
    assert (len(list(folder.glob("*.safetensors"))) == 1) == (files == 1)
    return tensors


def same(weights: Weights, tensors: dict[str, torch.Tensor]) -> bool:
    return weights.slots.keys() == tensors.keys() and all(torch.equal(weights.slots[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("changes", [
    dict(), dict(num_key_value_heads=2), dict(n_shared_experts=0), dict(tie_word_embeddings=True), dict(n_shared_experts=1),
    dict(num_hidden_layers=5, first_k_dense_replace=2, moe_layer_freq=2), dict(first_k_dense_replace=0), dict(first_k_dense_replace=9),
], ids=str)
@pytest.mark.parametrize("files", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_tensor_comes_back_bit_for_bit(dtype: torch.dtype, files: int, changes: dict[str, Any], tmp_path: Path) -> None:
    config = replace(SMALL, **changes)
    tensors = written(tmp_path / "c", config, files, dtype=dtype)
    weights = load_weights(open_checkpoint(tmp_path / "c"), dtype, progress=False)
    assert same(weights, tensors)
    assert weights.nbytes == sum(t.nbytes for t in tensors.values())
    assert (weights.head is weights.embed) == config.tie_word_embeddings
    for l, layer in enumerate(weights.layers):  # the slots are views of what the model uses
        moe = f"model.layers.{l}.mlp.gate.weight" in tensors
        assert (layer.gate_up_proj is not None) == (layer.router is not None) == moe
        p, dense = f"model.layers.{l}.mlp.experts.2", f"model.layers.{l}.mlp" + ".shared_experts" * moe
        if layer.gate_up_proj is not None and layer.down_proj is not None:
            assert torch.equal(layer.gate_up_proj[2], torch.cat([tensors[f"{p}.gate_proj.weight"], tensors[f"{p}.up_proj.weight"]]))
            assert torch.equal(layer.down_proj[2], tensors[f"{p}.down_proj.weight"])
        if moe and not config.n_shared_experts: assert layer.gate_up is None
        else: assert torch.equal(layer.gate_up, torch.cat([tensors[f"{dense}.{n}_proj.weight"] for n in ("gate", "up")]))


def test_bf16_files_as_float32(tmp_path: Path) -> None:
    tensors = written(tmp_path / "c", dtype=torch.bfloat16)
    weights = load_weights(open_checkpoint(tmp_path / "c"), torch.float32, progress=False)
    assert {t.dtype for t in weights.slots.values()} == {torch.float32}
    assert same(weights, {n: t.float() for n, t in tensors.items()})


def index_of(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def edit_index(folder: Path, **where: Any) -> None:
    "Change the index; a name mapped to DROP is taken out. `x` stands for EXPERT."
    entries = index_of(folder) | {EXPERT if n == "x" else n: v for n, v in where.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: v for n, v in entries.items() if v is not DROP}}))


def edit_file(file: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(file) | {EXPERT if n == "x" else n: v for n, v in tensors.items()}, file)


def file_of(folder: Path, tensor: str = EXPERT) -> Path:
    return folder / index_of(folder)[tensor]


@pytest.mark.parametrize("files", [1, 4])
def test_rotary_tables_and_a_tied_head_are_ignored(files: int, tmp_path: Path) -> None:
    folder, config = tmp_path / "c", replace(SMALL, tie_word_embeddings=True)
    tensors = written(folder, config, files)
    extra = {f"model.layers.{l}.self_attn.rotary_emb.inv_freq": torch.ones(4) for l in range(3)} | {"lm_head.weight": torch.ones(64, 32)}
    file = sorted(folder.glob("*.safetensors"))[0]
    edit_file(file, **extra)
    if files > 1: edit_index(folder, **dict.fromkeys(extra, file.name))
    assert same(load_weights(open_checkpoint(folder), torch.float32, progress=False), tensors)


def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    "From here on, making room for weights fails the test."
    def forbidden(*args: Any, **kwargs: Any) -> None: raise AssertionError("weights were loaded before all was checked")
    for name in ("empty_weights", "load_weights"): monkeypatch.setattr(checkpoint_module, name, forbidden)
    monkeypatch.setattr("dispatch.model.deepseek_moe.load_weights", forbidden)


LAST = "model-00004-of-00004.safetensors"
NAMES_ONLY = f"{INDEX}: weight_map must map tensors to file names in the same folder"
NO_FILE = "is cut off or no safetensors file"


@pytest.mark.parametrize(("damage", "named"), [  # {tensor} and {file}: EXPERT and the file it is in
    (lambda f: edit_index(f, x=DROP), ["{tensor} is missing from every file"]),
    (lambda f: edit_index(f, x="gone.safetensors"), ["gone.safetensors is missing, but the index names it"]),
    (lambda f: file_of(f).unlink(), ["{file} is missing, but the index names it"]),
    (lambda f: edit_index(f, x=LAST), [f"{{tensor}} is not in {LAST}, where the index says it is"]),
    (lambda f: edit_index(f, **{"model.layers.1.mlp.experts.8.up_proj.weight": LAST}),
     [f"model.layers.1.mlp.experts.8.up_proj.weight in {LAST} belongs to no layer"]),
    (lambda f: edit_index(f, **{"model.layers.1.self_attn.q_proj.bias": LAST}), [f"q_proj.bias in {LAST} belongs to no layer"]),
    (lambda f: edit_file(file_of(f), x=torch.ones(32, 16)), ["{tensor} in {file} has shape (32, 16); accepted is (16, 32)"]),
    (lambda f: edit_file(file_of(f), x=torch.ones(512)), ["{tensor} in {file} has shape (512,); accepted is (16, 32)"]),
    (lambda f: edit_file(file_of(f), x=torch.ones(16, 32, dtype=torch.int8)), ["{tensor} in {file}", "accepted"]),
    (lambda f: file_of(f).write_bytes(b""), ["{file}", NO_FILE]),
    (lambda f: file_of(f).write_bytes(file_of(f).read_bytes()[:5]), ["{file}", NO_FILE]),
    (lambda f: file_of(f).write_bytes(file_of(f).read_bytes()[:60]), ["{file}", NO_FILE]),
    (lambda f: file_of(f).write_bytes(file_of(f).read_bytes()[:-1]), ["{file}", NO_FILE]),
    (lambda f: file_of(f).write_bytes(file_of(f).read_bytes() + b"x"), ["{file}", NO_FILE]),
    (lambda f: file_of(f).write_bytes(random.Random(0).randbytes(5000)), ["{file}", NO_FILE]),
    (lambda f: file_of(f).write_text("<html>404 Not Found</html>" * 99), ["{file}", NO_FILE]),
    (lambda f: (f / INDEX).write_text("{"), [f"{INDEX} is no index"]),
    (lambda f: (f / INDEX).write_bytes(b"\xff\xfe"), [f"{INDEX} is no index"]),
    (lambda f: (f / INDEX).write_text("[]"), [f"{INDEX} is no index"]),
    (lambda f: (f / INDEX).write_text("{}"), [f"{INDEX} is no index", "weight_map"]),
    (lambda f: (f / INDEX).write_text('{"weight_map": ["x"]}'), [NAMES_ONLY]),
    (lambda f: (f / INDEX).write_text('{"weight_map": null}'), [NAMES_ONLY]),
    (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), ["model.embed_tokens.weight is missing from every file", "and 75 more"]),
    (lambda f: edit_index(f, x=3), [NAMES_ONLY]),
    (lambda f: edit_index(f, x="../x.safetensors"), [NAMES_ONLY]),
    (lambda f: edit_index(f, x=str(f.parent / "x.safetensors")), [NAMES_ONLY]),
    (lambda f: edit_index(f, x="sub/x.safetensors"), [NAMES_ONLY]),
    (lambda f: edit_index(f, x=".."), [".."]),
    (lambda f: edit_index(f, x=""), []),
], ids=["not in the index", "no such file", "file gone", "in another file", "one expert too many", "a bias", "transposed", "flat",
        "whole numbers", "empty", "cut in the length", "cut in the header", "cut in the data", "too long", "garbage", "an error page",
        "half an index", "binary index", "a list", "no weight_map", "weight_map a list", "weight_map null", "nothing in it",
        "a number for a file", "parent folder", "absolute path", "a subfolder", "dots", "no name"])
def test_a_broken_folder_is_refused_before_anything_is_loaded(damage: Callable[[Path], Any], named: list[str], tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    tensors = written(folder)
    save_file(tensors, tmp_path / "x.safetensors")  # what a path out of the folder would find
    file = file_of(folder).name
    damage(folder)
    no_loading(monkeypatch)
    with pytest.raises(CheckpointError) as e: DeepseekMoE.load(folder, progress=False)
    wanted = [n.format(tensor=EXPERT, file=file) for n in named]
    assert [n for n in wanted if n not in str(e.value)] == [], str(e.value)


def test_a_single_broken_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "c"
    tensors = written(folder, files=1)
    file = folder / "model.safetensors"
    no_loading(monkeypatch)
    for content, named in (
        ({n: t for n, t in tensors.items() if n != EXPERT}, f"{EXPERT} is missing from every file"),
        (tensors | {"more": torch.ones(1)}, r"more in model\.safetensors belongs to no layer"),
        (tensors | {EXPERT: torch.ones(1)}, rf"{EXPERT} in model\.safetensors has shape \(1,\); accepted is \(16, 32\)"),
    ):
        save_file(content, file)
        with pytest.raises(CheckpointError, match=named): open_checkpoint(folder)
    file.write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut off"): open_checkpoint(folder)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file", str(tmp_path / "none"), "deepseek-ai/deepseek-moe-16b-base"):
        with pytest.raises(CheckpointError, match="is no folder; accepted is a local folder"): open_checkpoint(path)


class Bomb:
    "Unpickling it leaves a file."

    def __init__(self, marker: Path) -> None: self.marker = marker
    def __reduce__(self) -> tuple[Any, ...]: return Path.touch, (self.marker,)


def test_a_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker, opened = tmp_path / "c", tmp_path / "ran", []
    written(folder, files=1)
    (folder / "model.safetensors").unlink()
    torch.save(Bomb(marker), folder / "pytorch_model.bin")
    def watched(open_: Callable[..., Any]) -> Callable[..., Any]: return lambda f, *a, **k: (opened.append(str(f)), open_(f, *a, **k))[1]
    for module in (builtins, io): monkeypatch.setattr(module, "open", watched(open))
    monkeypatch.setattr(checkpoint_module, "safe_open", watched(checkpoint_module.safe_open))
    with pytest.raises(CheckpointError, match=r"only safetensors are read \(found pytorch_model\.bin, which .* is not opened\)"):
        DeepseekMoE.load(folder, progress=False)
    assert any(f.endswith("config.json") for f in opened), "the watch sees nothing"
    assert not [f for f in opened if "pytorch_model" in f]
    assert not marker.exists()
    monkeypatch.undo()
    with (folder / "pytorch_model.bin").open("rb") as f: torch.load(f, weights_only=False)
    assert marker.exists(), "the bomb was a dud"


def test_code_in_the_folder_is_never_imported(tmp_path: Path) -> None:
    folder, marker = tmp_path / "c", tmp_path / "ran"
    tensors = written(folder)
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass DeepseekForCausalLM: pass\n"
    names = ("modeling_deepseek", "configuration_deepseek", "tokenization_deepseek")
    for name in (*names, "__init__"): (folder / f"{name}.py").write_text(code)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"auto_map": PUBLISHED["auto_map"], "trust_remote_code": True}))
    good_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_deepseek.T", None]}}))
    model = DeepseekMoE.load(folder, torch.float32, progress=False)
    load_tokenizer(folder)
    assert same(model.weights, tensors)
    assert not marker.exists()
    assert not [m for m in sys.modules if m.endswith(names)]
    exec(compile(code, "x", "exec"), {})
    assert marker.exists(), "the code was a dud"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_random_checkpoints(tmp_path: Path) -> None:
    a, b, c = (write_random_checkpoint(tmp_path / n, SMALL, seed, progress=False) for n, seed in (("a", 5), ("b", 5), ("c", 6)))
    assert contents(a) == contents(b)
    x, z = load_file(a / "model.safetensors"), load_file(c / "model.safetensors")
    assert all(torch.equal(x[n], z[n]) == (x[n].ndim == 1) for n in x), "another seed gave the same weights"
    assert {t.dtype for t in x.values()} == {torch.bfloat16}
    assert all((t == 1).all() for t in x.values() if t.ndim == 1)
    matrices = [t.float() for t in x.values() if t.ndim == 2]
    assert all(0.018 < m.std() < 0.022 and m.mean().abs() < 0.004 for m in matrices)
    assert len({tuple(m.flatten()[:8].tolist()) for m in matrices}) == len(matrices), "two tensors are the same"
    every = torch.cat([m.flatten() for m in matrices])
    assert every.std().item() == pytest.approx(0.02, rel=0.01)
    assert open_checkpoint(a).config == SMALL


@pytest.mark.parametrize("holds", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", INDEX])
def test_a_checkpoint_is_never_written_over(holds: str, tmp_path: Path) -> None:
    (tmp_path / holds).write_text("precious")
    with pytest.raises(CheckpointError, match="already holds a checkpoint"): write_random_checkpoint(tmp_path, SMALL, progress=False)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"): written(tmp_path)
    assert contents(tmp_path) == {holds: b"precious"}


MEDIUM = replace(SMALL, vocab_size=2048, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=4,
                 n_routed_experts=16)  # 56 MB in bf16, of which the largest tensor is 4 %


def peak_on_cpu(f: Callable[[], Any]) -> tuple[int, Any]:
    "The most bytes that PyTorch held at once on the CPU, mapped files among them, over what it held before the call."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as p: result = f()
    events = sorted((e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = peak = 0
    for e in events: now, peak = now + e.nbytes(), max(peak, now + e.nbytes())
    return peak, result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_loading_makes_no_second_copy(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = published(MEDIUM, dtype=torch.bfloat16)
    opened = open_checkpoint(write_checkpoint(tmp_path / "c", MEDIUM, tensors.__getitem__, file_gb=1e-3, progress=False))
    assert len(opened.files) > 20  # a file counts while it is mapped
    peak, weights = peak_on_cpu(lambda: load_weights(opened, dtype, progress=False))
    assert weights.nbytes <= peak <= 1.1 * weights.nbytes
    twice, _ = peak_on_cpu(lambda: [t.clone() for _ in range(2) for t in weights.slots.values()])
    assert twice >= 2 * weights.nbytes, "the gauge doesn't see copies"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_loading_makes_no_second_copy_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    opened = open_checkpoint(write_random_checkpoint(tmp_path / "c", MEDIUM, device="cuda", progress=False))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = load_weights(opened, dtype, "cuda", progress=False)
    assert weights.nbytes <= torch.cuda.max_memory_allocated() - before <= 1.1 * weights.nbytes
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert same(weights, {n: t.to("cuda", dtype) for n, t in stored.items()})

# ---------------------------------------------------------------- the forward pass

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "fewer key-value heads": dict(num_key_value_heads=2),
    "one key-value head, other base and epsilon": dict(num_key_value_heads=1, rope_theta=5e5, rms_norm_eps=1e-3),
    "every other layer a mixture": dict(num_hidden_layers=5, first_k_dense_replace=2, moe_layer_freq=2),
    "no shared experts, all mixtures": dict(n_shared_experts=0, first_k_dense_replace=0),
    "tied, scaled": dict(tie_word_embeddings=True, routed_scaling_factor=2.5),
    "renormalised": dict(norm_topk_prob=True),
    "all dense": dict(first_k_dense_replace=9),
}


def oracle(folder: Path, c: ModelConfig) -> torch.nn.Module:
    "Llama with DeepSeek-V2's mixtures, all of transformers, on the weights that the files hold. No code of ours."
    from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # DeepSeek-V2's has no renormalisation

    state = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings, attn_implementation="eager"))
    mixture = DeepseekV2Config(
        hidden_size=c.hidden_size, num_attention_heads=c.num_attention_heads, moe_intermediate_size=c.moe_intermediate_size,
        n_routed_experts=c.n_routed_experts, n_shared_experts=max(1, c.n_shared_experts), num_experts_per_tok=c.num_experts_per_tok,
        norm_topk_prob=c.norm_topk_prob, routed_scaling_factor=c.routed_scaling_factor, topk_method="greedy", hidden_act="silu",
        mlp_bias=False)
    mixture._experts_implementation = "eager"
    for l, layer in enumerate(llama.model.layers):
        p = f"model.layers.{l}.mlp"
        if f"{p}.gate.weight" not in state: continue
        layer.mlp = DeepseekV2Moe(mixture)
        if c.norm_topk_prob: layer.mlp.gate = Qwen3MoeTopKRouter(mixture)
        gate, up, down = (torch.stack([state.pop(f"{p}.experts.{e}.{n}_proj.weight") for e in range(c.n_routed_experts)])
                          for n in ("gate", "up", "down"))
        state |= {f"{p}.experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{p}.experts.down_proj": down}
        if not c.n_shared_experts:  # there: shared experts that give 0
            state |= {f"{p}.shared_experts.{n}": torch.zeros_like(t) for n, t in layer.mlp.shared_experts.state_dict().items()}
    if c.tie_word_embeddings: state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state, strict=True)
    return llama.float().eval()


def pair(folder: Path, config: ModelConfig, backend: str = "auto", device: str = "cpu", seed: int = 10) -> tuple[DeepseekMoE, Any]:
    "Our model and an oracle's logits, both of one checkpoint."
    written(folder, config, seed=seed)
    theirs = oracle(folder, config)
    @torch.inference_mode()
    def logits(ids: torch.Tensor) -> torch.Tensor: return theirs(input_ids=ids, use_cache=False).logits
    return DeepseekMoE.load(folder, torch.float32, device, backend, progress=False), logits


def prompt(length: int, vocab: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def continued(step: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, tokens: int) -> list[int]:
    "Greedy continuation: `step` is given all ids so far and gives the logits of the last position, [1, V]."
    for _ in range(tokens): ids = torch.cat([ids, step(ids).argmax(-1, keepdim=True).to(ids.device)], dim=1)
    return ids[0, -tokens:].tolist()


def expected(theirs: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, tokens: int) -> list[int]:
    "The oracle's greedy continuation: no repeated token, and no near tie that rounding could decide."
    text = continued(lambda i: theirs(i)[:, -1], ids, tokens)
    best = theirs(torch.cat([ids, torch.tensor([text])], dim=1))[0, ids.shape[1] - 1:-1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 2e-4, "a tie within the tolerance: take another seed"
    assert len(set(text)) > tokens // 4, "degenerate text: take another seed"
    return text


def cached(model: DeepseekMoE, chunks: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    "A step through a cache: a prompt in pieces that end at `chunks` and at its end, then whatever is new."
    cache = KVCache.empty(model.config, 1, 64, model.dtype, model.device)
    def step(ids: torch.Tensor) -> torch.Tensor:
        ends = [c for c in chunks if c < ids.shape[1]] if not cache.length else []
        for end in (*ends, ids.shape[1]): logits = model.forward(ids[:, cache.length:end], cache, last_only=True)
        assert cache.length == ids.shape[1]
        assert logits.shape == (1, 1, model.config.vocab_size)
        return logits[:, -1]
    return step


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_and_greedy_text_equal_an_independent_model(changes: dict[str, Any], tmp_path: Path) -> None:
    config = replace(SMALL, vocab_size=256, **changes)
    ours, theirs = pair(tmp_path / "c", config)
    for length, batch in ((1, 1), (2, 1), (7, 3), (23, 1), (50, 2)):
        ids = prompt(length, config.vocab_size, batch, seed=length)
        want = theirs(ids)
        assert want.std() > 0.3, "degenerate logits"
        torch.testing.assert_close(ours.forward(ids), want, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours.forward(ids, last_only=True), want[:, -1:], atol=1e-4, rtol=0)
    for length in (1, 9):
        ids = prompt(length, config.vocab_size, seed=100 + length)
        want = expected(theirs, ids, 40)
        assert continued(lambda i: ours.forward(i)[:, -1], ids, 40) == want
        for chunks in ((), (4,), (1, 2, 5, 8)): assert continued(cached(ours, chunks), ids, 40) == want, chunks


def test_cached_pieces_give_the_independent_logits(tmp_path: Path) -> None:
    config = replace(SMALL, num_key_value_heads=2)
    ours, theirs = pair(tmp_path / "c", config)
    ids = prompt(30, config.vocab_size, batch=3)
    cache = KVCache.empty(config, 3, 30, torch.float32, "cpu")
    pieces = [ours.forward(ids[:, a:b], cache) for a, b in ((0, 1), (1, 12), (12, 13), (13, 14), (14, 29), (29, 30))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), theirs(ids), atol=1e-4, rtol=0)


def test_naive_kernel_equals_an_independent_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "On a GPU the compiled kernel, else Triton's interpreter."
    naive, calls = BACKENDS["naive"], []
    monkeypatch.setitem(BACKENDS, "naive", replace(naive, launch=lambda *a: (calls.append(1), naive.launch(*a))[1]))
    config = replace(SMALL, vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2)
    ours, theirs = pair(tmp_path / "c", config, "naive", DEVICE)
    ids = prompt(5, config.vocab_size, batch=2)
    torch.testing.assert_close(ours.forward(ids.to(DEVICE)).cpu(), theirs(ids), atol=1e-4, rtol=0)
    want = expected(theirs, ids[:1], 6)
    assert continued(cached(ours, (2,)), ids[:1].to(DEVICE), 6) == want
    assert len(calls) == 1 + 2 + 5, "one mixture: the batch, two pieces of the prompt, five single tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "reference", "naive"])
def test_gpu_equals_an_independent_model(backend: str, tmp_path: Path) -> None:
    config = replace(SMALL, vocab_size=256, num_key_value_heads=2)
    ours, theirs = pair(tmp_path / "c", config, backend, "cuda")
    ids = prompt(23, config.vocab_size, batch=2)
    torch.testing.assert_close(ours.forward(ids.cuda()).cpu(), theirs(ids), atol=1e-4, rtol=0)
    want = expected(theirs, ids[:1], 40)
    for chunks in ((), (1, 8)): assert continued(cached(ours, chunks), ids[:1].cuda(), 40) == want, chunks


def test_experts_and_routing_are_open_to_the_caller(tmp_path: Path) -> None:
    ours, _ = pair(tmp_path / "c", SMALL)
    calls, routed, ids = [], [], prompt(6, SMALL.vocab_size, batch=2)
    def experts(*args: torch.Tensor) -> torch.Tensor:
        calls.append([tuple(t.shape) for t in args])
        return fused_moe(*args)
    other = DeepseekMoE(SMALL, ours.weights, experts)
    other.on_routing = lambda layer, index: routed.append((layer, tuple(index.shape)))
    assert torch.equal(other.forward(ids), ours.forward(ids))
    assert calls == [[(12, 32), (8, 32, 32), (8, 32, 16), (12, 3), (12, 3)]] * 2
    assert routed == [(1, (12, 3)), (2, (12, 3))]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    ours, _ = pair(tmp_path / "c", replace(SMALL, max_position_embeddings=10))
    cache = KVCache.empty(ours.config, 1, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"token_ids has shape \(3,\); accepted is \[B, S\]"): ours.forward(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="0 cached and 11 new tokens are over the 10 positions"): ours.forward(prompt(11, 64))
    with pytest.raises(ValueError, match="0 cached and 9 new tokens are over the 8 positions"): ours.forward(prompt(9, 64), cache)
    ours.forward(prompt(8, 64), cache)
    with pytest.raises(ValueError, match="8 cached and 1 new tokens are over the 8 positions"): ours.forward(prompt(1, 64), cache)
    assert cache.length == 8
    assert ours.forward(prompt(10, 64)).shape == (1, 10, 64)

# ---------------------------------------------------------------- the tokenizer

CHARACTERS = "你好，世界。 👩🏽‍🚀 and 🇫🇷 naïve 𝄞 ∑ end"
TEXTS = (*SAMPLES, CHARACTERS, " ", "\n", "  two", "tail \n", "\t\tif x:\n\t\t\ty = '▁'\n", "世界" * 9, "🙂" * 5, "")


def good_tokenizer(splitting: Any = None) -> Tokenizer:
    "A small byte-level BPE with merges over byte and word boundaries that its splitting leaves."
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = splitting or pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=sorted(byte_alphabet()), show_progress=False, special_tokens=["<eos>"])
    t.train_from_iterator([*SAMPLES * 3, "the quick brown fox jumps over the lazy dog 1234\n" * 4, "世界你好" * 3], trainer)
    return t


def rewired(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    raw = json.loads(tokenizer.to_str())
    t = Tokenizer.from_str(json.dumps(raw | dict.fromkeys(parts)))
    for name, part in parts.items():
        if part is not None: setattr(t, name, part)
    return t


def loaded(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def llama_normalizer() -> Any: return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def llama_decoder() -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def deepseek_splitting() -> Any:
    "The kind of splitting that DeepSeek's published tokenizers have: lines, words, single digits, then bytes."
    splits = [pre_tokenizers.Split(Regex(r), "isolated") for r in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥]+")]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.Digits(individual_digits=True),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("splitting", [None, deepseek_splitting], ids=["GPT-2's splitting", "DeepSeek's splitting"])
def test_a_good_byte_level_tokenizer_is_left_alone(splitting: Callable[[], Any] | None, tmp_path: Path) -> None:
    good = good_tokenizer(splitting and splitting())
    mine = loaded(good, tmp_path)
    assert mine.to_str() == good.to_str()
    assert is_byte_level(mine)
    assert lost_text(mine) == []


@pytest.mark.parametrize("parts", [
    dict(normalizer=llama_normalizer(), pre_tokenizer=None, decoder=llama_decoder()),
    dict(pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()),
    dict(decoder=llama_decoder()), dict(decoder=decoders.Metaspace()), dict(decoder=None),
    dict(pre_tokenizer=None), dict(pre_tokenizer=pre_tokenizers.Metaspace()), dict(normalizer=llama_normalizer(), pre_tokenizer=None),
    dict(pre_tokenizer=pre_tokenizers.Whitespace()), dict(normalizer=llama_normalizer()),
], ids=["Llama's", "Metaspace", "decoder Llama's", "decoder Metaspace", "no decoder", "no pre-tokenizer", "pre-tokenizer Metaspace",
        "normalizer Llama's, no pre-tokenizer", "pre-tokenizer Whitespace", "normalizer Llama's"])
def test_a_miswired_byte_level_tokenizer_is_mended(parts: dict[str, Any], tmp_path: Path) -> None:
    good = good_tokenizer()
    broken = rewired(good, **parts)
    assert lost_text(broken), "not broken"
    mended = loaded(broken, tmp_path)
    for text in TEXTS:
        ids = mended.encode(text, add_special_tokens=False).ids
        assert ids == good.encode(text, add_special_tokens=False).ids, text
        assert mended.decode(ids, skip_special_tokens=False) == text


def test_a_broken_decoder_alone_leaves_a_splitting_of_its_own_as_it_is(tmp_path: Path) -> None:
    good = good_tokenizer(deepseek_splitting())
    mended = loaded(rewired(good, decoder=llama_decoder()), tmp_path)
    differ = [t for t in TEXTS if mended.encode(t).ids != good.encode(t).ids]
    assert differ == [], "the model never saw these tokens"
    assert [t for t in TEXTS if mended.decode(mended.encode(t).ids) != t] == []


def sentencepiece_tokenizer(normalizer: Any = None, merges: Sequence[tuple[str, str]] = (("h", "e"), ("▁", "t"), ("l", "l"))) -> Tokenizer:
    "What Llama's tokenizer is: `▁` for a space, bytes for what the vocabulary lacks; and Maltese's Ġ and Ċ, to look byte-level."
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "Ġ", "Ċ", *map(chr, range(33, 127)), *(a + b for a, b in merges)]
    t = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=list(merges), unk_token="<unk>", fuse_unk=True,
                             byte_fallback=True))
    t.normalizer, t.decoder = normalizer or llama_normalizer(), llama_decoder()
    return t


def test_a_true_sentencepiece_tokenizer_is_left_alone(tmp_path: Path) -> None:
    true = sentencepiece_tokenizer()
    mine = loaded(true, tmp_path)
    assert mine.to_str() == true.to_str()
    assert not is_byte_level(mine)
    assert all(mine.decode(mine.encode(t).ids) == t for t in SAMPLES)


@pytest.mark.parametrize("normalizer", [normalizers.Sequence([normalizers.Lowercase(), llama_normalizer()]),
                                        normalizers.Sequence([llama_normalizer(), normalizers.Lowercase()])], ids=["first", "last"])
def test_lost_text_is_refused_and_shown(normalizer: Any, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json loses text: 'Hello, world!' comes back as 'hello, world!'"):
        loaded(sentencepiece_tokenizer(normalizer), tmp_path)


def test_a_vocabulary_with_holes_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "Hello": 1, ",": 2, "world": 3, "!": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(TokenizerError, match=r"'Hello, world!' comes back as 'Hello , world !'"): loaded(words, tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b'{"model": {"type": "None"}}'], ids=repr)
def test_what_is_no_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json; accepted is a folder"): load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is no tokenizer"): load_tokenizer(str(tmp_path))


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, str]:
    "The text that came token by token, and the rest."
    d = Detokenizer(tokenizer)
    return "".join([d.step(i) for i in ids]), d.rest()


@pytest.mark.parametrize("text", [CHARACTERS, "你好，世界。", "👩🏽‍🚀🇫🇷🙂", " a  b\n\n", "plain words here", "𝄞"])
def test_streaming_never_gives_half_a_character(text: str) -> None:
    tokenizer = good_tokenizer()
    ids, halves = tokenizer.encode(text).ids, 0
    for end in range(len(ids) + 1):
        came, rest = streamed(tokenizer, ids[:end])
        assert "\ufffd" not in came
        assert text.startswith(came)
        assert came + rest == tokenizer.decode(ids[:end])
        halves += "\ufffd" in rest
    assert came + rest == text
    if text in (CHARACTERS, "𝄞"): assert halves, "no prefix ended in half a character"


@pytest.mark.parametrize("text", [CHARACTERS, "你好，世界。", "plain words here"])
def test_streaming_of_byte_fallback(text: str) -> None:
    "There, half a character makes the library decode its whole neighbours as U+FFFD too; what was given already stays given."
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode(text).ids
    for end in range(len(ids) + 1):
        came, rest = streamed(tokenizer, ids[:end])
        whole = tokenizer.decode(ids[:end])
        assert "\ufffd" not in came
        assert text.startswith(came)
        if "\ufffd" not in whole: assert came + rest == whole
        else: assert set(rest) == {"\ufffd"}, f"the unfinished character after {came!r} is lost"
    assert came + rest == text


def test_streaming_any_tokens_gives_what_decoding_gives() -> None:
    "As a model with random weights would: bytes that make no text, special tokens, ids that the vocabulary lacks."
    tokenizer, rng = good_tokenizer(), random.Random(0)
    size = tokenizer.get_vocab_size() + 3
    for _ in range(2000):
        ids = [rng.randrange(size) for _ in range(rng.randrange(1, 25))]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_special_tokens_are_not_shown() -> None:
    tokenizer = good_tokenizer()
    ids = tokenizer.encode("Hello<eos>").ids
    assert ids[-1] == tokenizer.token_to_id("<eos>")
    assert streamed(tokenizer, ids) == ("Hello", "")
