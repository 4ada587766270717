"""Generation, its metrics, the tiny checkpoint, and the commands around them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from dispatch.cli import main
from dispatch.core.evidence import find_runs
from dispatch.model.config import read_config
from dispatch.model.deepseek_moe import DeepseekMoE, KVCache
from dispatch.model.generate import SamplingParams, Times, capture_logits, compare_logits, generate, percentile, sample, summarise
from dispatch.model.tiny import tiny_folder
from dispatch.model.tokenizer import SAMPLES, load_tokenizer, lost_text, random_tokenizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny() -> DeepseekMoE:
    return DeepseekMoE.load(tiny_folder(), torch.float32, progress=False)


@pytest.fixture(scope="module")
def heldout() -> list[int]:
    return [0, *load_tokenizer(tiny_folder()).encode((tiny_folder() / "heldout.txt").read_text(encoding="utf-8")).ids]


def test_cached_decoding_equals_full_recomputation(tiny: DeepseekMoE, heldout: list[int]) -> None:
    prompt = heldout[:37]
    cached = list(generate(tiny, prompt, SamplingParams(max_tokens=25, ignore_eos=True)))
    whole = list(prompt)
    for _ in range(25): whole.append(int(tiny.forward(torch.tensor([whole]))[0, -1].argmax()))
    assert cached == whole[37:]


def test_a_batch_is_its_sequences(tiny: DeepseekMoE, heldout: list[int]) -> None:
    ids = torch.tensor([heldout[:30], heldout[30:60]])
    torch.testing.assert_close(tiny.forward(ids)[1:], tiny.forward(ids[1:]), atol=1e-4, rtol=1e-4)


def test_the_tiny_checkpoint_is_what_its_run_says(tiny: DeepseekMoE) -> None:
    "The loss on the shipped excerpt, computed here, is the one that the training run logged; and it beats the trigram clearly."
    result = [r for r in find_runs(ROOT / "results", "tiny") if r.ok][-1].rows("result")[0]
    text = (tiny_folder() / "heldout.txt").read_text(encoding="utf-8")
    ids = [0, *load_tokenizer(tiny_folder()).encode(text).ids, 1]
    windows = torch.tensor(ids[:(len(ids) - 1) // 512 * 512 + 1])
    logits = tiny.forward(windows[:-1].view(-1, 512))
    loss = float(F.cross_entropy(logits.flatten(0, 1), windows[1:]))
    assert loss == pytest.approx(result["excerpt_loss"], abs=2e-3)
    assert result["heldout_loss"] < result["trigram_loss"] - 0.3
    assert result["parameters"] == sum(t.numel() for t in tiny.weights.slots.values())


def test_the_tiny_experts_are_really_skewed() -> None:
    loads = [r for r in find_runs(ROOT / "results", "tiny") if r.ok][-1].rows("loads")
    busiest = [max(row["counts"]) / (sum(row["counts"]) / len(row["counts"])) for row in loads]
    assert sum(b >= 2 for b in busiest) >= len(busiest) / 2, busiest


def test_the_tiny_checkpoint_is_small_and_in_the_published_format() -> None:
    assert sum(f.stat().st_size for f in tiny_folder().iterdir()) < 6e6
    config = read_config(tiny_folder())
    assert config.first_k_dense_replace == 1
    assert config.n_routed_experts >= 16
    assert config.num_experts_per_tok >= 4
    assert not lost_text(load_tokenizer(tiny_folder()))


def test_it_stops_where_it_should(tiny: DeepseekMoE, heldout: list[int]) -> None:
    assert len(list(generate(tiny, heldout[:5], SamplingParams(max_tokens=3)))) == 3
    limit = tiny.config.max_position_embeddings
    assert len(list(generate(tiny, heldout[:limit - 2], SamplingParams(max_tokens=10, ignore_eos=True)))) == 2
    with pytest.raises(ValueError, match=f"has {limit} tokens; accepted are at most {limit - 1}"): next(generate(tiny, heldout[:limit]))
    with pytest.raises(ValueError, match="no tokens"): next(generate(tiny, []))
    with pytest.raises(ValueError, match=r"accepted are 0 to 1023"): next(generate(tiny, [0, 5000]))
    with pytest.raises(ValueError, match=r"accepted are 0 to 1023"): next(generate(tiny, [-1]))
    eos = DeepseekMoE(tiny.config, tiny.weights, lambda *a: torch.zeros_like(a[0]))
    eos.forward = lambda ids, *_, **__: F.one_hot(torch.tensor([[1]]), 1024).float()  # type: ignore[method-assign]
    assert list(generate(eos, [0])) == [1]
    assert len(list(generate(eos, [0], SamplingParams(max_tokens=4, ignore_eos=True)))) == 4


def test_a_full_cache_is_refused(tiny: DeepseekMoE) -> None:
    cache = KVCache.empty(tiny.config, 1, 4, torch.float32, "cpu")
    with pytest.raises(ValueError, match="over the 4 positions"): tiny.forward(torch.zeros(1, 5, dtype=torch.int64), cache)


@pytest.mark.parametrize("bad", [dict(max_tokens=0), dict(temperature=-1), dict(top_k=-1), dict(top_p=0), dict(top_p=1.1)], ids=str)
def test_sampling_params_are_checked(bad: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is"): SamplingParams(**bad)


def test_sampling_follows_its_distribution() -> None:
    g, logits = torch.Generator().manual_seed(0), torch.tensor([2.0, 1.0, 0.0, -9.0])
    draws = torch.bincount(torch.tensor([sample(logits.clone(), SamplingParams(temperature=2.0), g) for _ in range(4000)]), minlength=4) / 4000
    torch.testing.assert_close(draws, (logits / 2).softmax(-1), atol=0.03, rtol=0)
    assert {sample(logits.clone(), SamplingParams(temperature=1.0, top_p=0.9), g) for _ in range(300)} == {0, 1}
    assert {sample(logits.clone(), SamplingParams(temperature=5.0, top_k=9), g) for _ in range(900)} == {0, 1, 2, 3}


def test_the_same_seed_gives_the_same_text(tiny: DeepseekMoE) -> None:
    draw = lambda seed: list(generate(tiny, [0, 300], SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)))
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_metrics_by_hand() -> None:
    times = [Times([0.1, 0.2, 0.4]), Times([0.3])]
    assert times[0].tpot == pytest.approx(0.15)
    assert times[1].tpot == 0
    found = summarise(times)
    assert found["output_throughput"] == pytest.approx(4 / 0.7)
    assert found["median_ttft_ms"] == pytest.approx(200)
    assert found["p99_itl_ms"] == pytest.approx(199)
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    with pytest.raises(ValueError, match="no samples"): percentile([], 50)


def test_logit_agreement_by_hand(tiny: DeepseekMoE, heldout: list[int]) -> None:
    reference = torch.tensor([[5.0, 4.0, 0, 0, 0, 0, 0], [5.0, 0, 0, 0, 0, 0, 0.5]])
    other = torch.tensor([[4.0, 5.0, 0, 0, 0, 0, 0], [5.0, 0, 0, 0, 0, 0, 0.5]])
    a = compare_logits(other, reference)
    assert (a.positions, a.top1, a.mutual_top5, a.largest_gap) == (2, 0.5, 1.0, 1.0)
    with pytest.raises(ValueError, match="accepted are two of"): compare_logits(other, reference[:1])
    logits = capture_logits(tiny, heldout[:64])
    assert compare_logits(logits, logits).top1 == 1
    bf16 = DeepseekMoE.load(tiny_folder(), torch.bfloat16, progress=False)
    assert compare_logits(capture_logits(bf16, heldout[:64]), logits).mutual_top5 > 0.9


@pytest.mark.gpu
def test_the_kernel_serves_the_tiny_checkpoint(heldout: list[int]) -> None:
    models = [DeepseekMoE.load(tiny_folder(), torch.float32, "cuda", backend, progress=False) for backend in ("reference", "naive")]
    a, b = (list(generate(m, heldout[:50], SamplingParams(max_tokens=60, ignore_eos=True))) for m in models)
    assert a == b


def test_generate_streams_from_the_command(tmp_path: Path) -> None:
    code = "from dispatch.cli import main; main()"
    args = [sys.executable, "-c", code, "generate", "And the king said", "--max-tokens", "20"]
    done = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("And the king said unto")
    assert "tokens/s" in done.stderr
    assert len(done.stdout) > 40


@pytest.mark.parametrize(("args", "says"), [
    (("--model", "nowhere"), "nowhere"), (("--temperature", "-1"), "temperature is -1"), (("--backend", "fastest"), "backend is 'fastest'"),
    (("--max-tokens", "0"), "max_tokens is 0"), (("--device", "tpu"), "tpu"),
])
def test_generate_says_what_is_wrong(args: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(main, ["generate", "And", *args])
    assert done.exit_code == 1
    assert says in done.output
    assert "Traceback" not in done.output


def test_a_random_checkpoint_from_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dispatch.model.config as configs
    small = configs.ModelConfig(**vars(configs.DEEPSEEK_MOE_16B) | dict(
        vocab_size=600, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, bos_token_id=500, eos_token_id=501))
    monkeypatch.setitem(configs.CONFIGS, "small", small)
    done = CliRunner().invoke(main, ["checkpoint", "random", str(tmp_path / "c"), "--shape", "small"])
    assert done.exit_code == 0, done.output
    assert read_config(tmp_path / "c") == small
    assert json.loads((tmp_path / "c/config.json").read_text())["auto_map"]
    said = CliRunner().invoke(main, ["generate", "hello", "--model", str(tmp_path / "c"), "--max-tokens", "4"])
    assert said.exit_code == 0, said.output
    again = CliRunner().invoke(main, ["checkpoint", "random", str(tmp_path / "c"), "--shape", "small"])
    assert again.exit_code == 1
    assert "already holds a checkpoint" in again.output
    assert CliRunner().invoke(main, ["checkpoint", "random", str(tmp_path / "d"), "--shape", "gpt"]).exit_code == 2


def test_transformers_reads_the_random_checkpoints_companions(tmp_path: Path) -> None:
    "What other engines need of it: a configuration class and a tokenizer of the whole vocabulary."
    from transformers import PreTrainedTokenizerFast
    random_tokenizer(1024, 1000, 1001).save(str(tmp_path / "tokenizer.json"))
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert len(fast) == 1024
    assert all(fast.decode(fast.encode(s)) == s for s in SAMPLES)
    with pytest.raises(ValueError, match="at least 258"): random_tokenizer(100)


