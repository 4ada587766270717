"""The served race's driver: the closed loop and its summary by hand, and an engine's process with engines that do what real ones might."""
import asyncio
import itertools
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from dispatch.bench import served
from dispatch.bench.race import Left
from dispatch.bench.served import (
    Engine,
    EngineProcess,
    Options,
    Request,
    add_configuration_class,
    closed_loop,
    decode_bytes,
    engine_processes,
    samples,
    served_prompts,
    served_summary,
)
from dispatch.core.evidence import Run
from dispatch.model.checkpoint import open_checkpoint, write_random_checkpoint
from dispatch.model.config import DEEPSEEK_MOE_16B, read_config
from dispatch.model.tiny import tiny_folder

HERE = Path(__file__).resolve().parent
TINY = Options(str(tiny_folder()), precision="fp32", device="cpu", max_batch=4)


# the closed loop, on a clock that jumps from one timer to the next

@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    class Jump(selectors.SelectSelector):
        def select(self, timeout=None):
            loop.now += timeout or 0
            return super().select(0)
    loop = asyncio.SelectorEventLoop(Jump())
    loop.now = 100.0
    loop.time = lambda: loop.now
    monkeypatch.setattr(served.time, "perf_counter", loop.time)
    yield loop
    loop.close()


async def five_ms(prompt):
    "A first token after as many hundredths of a second as the prompt begins with, then three more, 5 ms apart."
    for wait in (prompt[0] / 100, 0.005, 0.005, 0.005):
        await asyncio.sleep(wait)
        yield 1


def test_closed_loop_sends_the_next_as_soon_as_one_ends(loop: asyncio.AbstractEventLoop) -> None:
    seen = loop.run_until_complete(closed_loop(five_ms, [[2, 0], [4, 0, 0], [2], [1]], concurrency=2))
    # the first worker: 0 to 35 ms, 35 to 70 ms; the second: 0 to 55 ms, 55 to 80 ms
    assert [r.input_len for r in seen] == [2, 3, 1, 1]
    assert [r.submitted - 100 for r in seen] == pytest.approx([0, 0, 0.035, 0.055])
    assert [r.ttft for r in seen] == pytest.approx([0.02, 0.04, 0.02, 0.01])
    assert [r.e2el for r in seen] == pytest.approx([0.035, 0.055, 0.035, 0.025])
    assert seen[1].itl == pytest.approx([0.005] * 3)
    found = served_summary(seen)
    assert found["duration"] == pytest.approx(0.08)
    assert found["output_throughput"] == pytest.approx(16 / 0.08)
    assert found["median_tpot_ms"] == pytest.approx(5)


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_never_more_under_way_than_asked_for(concurrency: int, loop: asyncio.AbstractEventLoop) -> None:
    under_way, most = 0, 0

    async def generate(prompt):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        yield 1
        under_way -= 1

    assert len(loop.run_until_complete(closed_loop(generate, [[0]] * 20, concurrency))) == 20
    assert most == min(concurrency, 20)


def test_an_error_in_one_request_ends_the_loop(loop: asyncio.AbstractEventLoop) -> None:
    async def generate(prompt):
        yield 1
        if prompt[0] == 2: raise ZeroDivisionError
        await asyncio.sleep(1)
    with pytest.raises(ExceptionGroup, match="TaskGroup"): loop.run_until_complete(closed_loop(generate, [[i] for i in range(9)], 3))


def test_summary_by_hand() -> None:
    seen = [Request(10, 0.0, [0.1, 0.2, 0.4], [1, 1, 1]), Request(20, 0.1, [0.3, 0.6], [1, 2]), Request(5, 0.2, [0.5], [1])]
    found = served_summary(seen)
    assert found["completed"] == 3
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (35, 7)
    hand = {"duration": 0.6, "request_throughput": 5, "output_throughput": 7 / 0.6, "total_token_throughput": 42 / 0.6,
            "mean_ttft_ms": 200, "median_ttft_ms": 200, "p99_ttft_ms": 298, "std_ttft_ms": np.std([100, 200, 300]),
            "mean_tpot_ms": 150, "median_tpot_ms": 150, "p99_tpot_ms": 150,  # two tokens at once are two tokens; one token alone has no TPOT
            "mean_itl_ms": 200, "median_itl_ms": 200, "p99_itl_ms": 298,  # but one gap
            "mean_e2el_ms": 400, "median_e2el_ms": 400, "std_tpot_ms": 0}
    assert {k: found[k] for k in hand} == pytest.approx(hand, abs=1e-9)
    assert samples(seen) == {"ttft_ms": [100, 200, 300], "itl_ms": [100, 200, 300], "itl_count": [1, 1, 1]}


def test_single_tokens_have_no_gaps() -> None:
    found = served_summary([Request(1, 0.0, [0.5], [1])])
    assert found["median_tpot_ms"] == found["p99_itl_ms"] == 0


def test_samples_count_what_is_the_same_to_a_hundredth() -> None:
    found = samples([Request(1, 0.0, [1.0, 1.005, 1.010001, 1.02], [1] * 4)])
    assert found == {"ttft_ms": [1000], "itl_ms": [5, 10], "itl_count": [2, 1]}


def test_prompts() -> None:
    a = served_prompts(1024, 300, 16, seed=7)
    assert a == served_prompts(1024, 300, 16, seed=7)
    assert a != served_prompts(1024, 300, 16, seed=8)
    assert len({p[0] for p in a}) == 300, "no two share a prefix"
    assert {len(p) for p in a} == {16}
    assert all(0 <= t < 1024 and type(t) is int for p in a for t in p)
    for wrong in ((10, 11, 4), (10, 0, 4), (10, 3, 0)):
        with pytest.raises(ValueError, match="accepted are"): served_prompts(*wrong, seed=0)


# the floor

def test_floor_by_hand() -> None:
    c = replace(DEEPSEEK_MOE_16B, vocab_size=100, hidden_size=8, intermediate_size=20, moe_intermediate_size=4, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=1)
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8  # q, k, v, o; two heads of 2 for keys and values
    dense, shared, expert, router, head = 3 * 8 * 20, 3 * 8 * 8, 3 * 8 * 4, 4 * 8, 100 * 8
    hit = 4 * (1 - (3 / 4) ** 2)
    kv = 2 * 3 * 2 * 2 * 10 * 2  # keys and values, layers, heads, head_dim, tokens, sequences
    rest = 3 * attention + dense + 2 * (shared + router) + head + kv
    assert decode_bytes(c, 2, 10) == pytest.approx(2 * (rest + 2 * hit * expert))
    assert decode_bytes(c, 2, 10, expert_bytes=1) == pytest.approx(2 * rest + 2 * hit * expert)
    assert decode_bytes(c, 2, 10, element_bytes=4) == pytest.approx(4 * (rest + 2 * hit * expert))


def test_floor_of_the_published_shape() -> None:
    ms = [decode_bytes(DEEPSEEK_MOE_16B, n, 576) / 4.3e9 for n in (1, 4, 16, 64, 256)]
    assert ms == pytest.approx([1.24, 2.95, 6.6, 9.5, 15.4], rel=0.01)


# the checkpoint that vLLM reads

@pytest.mark.slow
def test_a_checkpoint_for_vllm_stays_ours(tmp_path: Path) -> None:
    config = replace(read_config(tiny_folder()), vocab_size=64, hidden_size=16, num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2)
    folder = tmp_path / "random"
    write_random_checkpoint(folder, config, progress=False)
    add_configuration_class(folder)
    add_configuration_class(folder)  # twice is once
    assert open_checkpoint(folder).config == read_config(folder) == config
    code = ("import sys; from transformers import AutoConfig; c = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
            "if getattr(c, 'rope_parameters', None) is None: c.standardize_rope_params()  # as vLLM does\n"
            "print(type(c).__name__, c.model_type, c.architectures[0], c.n_routed_experts, c.rope_parameters['rope_theta'], c.pad_token_id, c.dtype)")
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run([sys.executable, "-c", code, folder], env=env, capture_output=True, text=True)
    assert said.stdout.split() == ["DeepseekConfig", "deepseek", "DeepseekForCausalLM", "4", "10000.0", "None", "torch.bfloat16"], said.stderr


# engines, started as test_served:NAME in a process of their own

def engine(generate, **more) -> Engine: return Engine({"version": "1"}, generate, more.pop("close", lambda: None), more)


async def counted(prompt, output_len):
    for _ in range(output_len):
        await asyncio.sleep(0.001)
        yield 1


def at_13(what):
    "An engine that does something when 13 tokens are asked for."
    async def generate(prompt, output_len):
        yield 1
        if output_len == 13: what()
        for _ in range(output_len - 1): yield 1
    return engine(generate)


async def steady(o: Options) -> Engine:
    return engine(counted, experts_hit=lambda prompts: [len(prompts)] * 2, profile_step=lambda b, c: [{"name": "k", "dur_us": b * c}])


async def mortal(o: Options) -> Engine: return at_13(lambda: (print("last words", flush=True), os._exit(7)))
async def clumsy(o: Options) -> Engine: return at_13(lambda: 1 / 0)
async def sleeper(o: Options) -> Engine: return at_13(lambda: time.sleep(600))
async def stillborn(o: Options) -> Engine: os._exit(3)
async def reluctant(o: Options) -> Engine: raise RuntimeError("not enough memory\nfor anything")


async def stingy(o: Options) -> Engine:
    async def generate(prompt, output_len): yield output_len - 1
    return engine(generate)


async def chatterbox(o: Options) -> Engine:
    async def generate(prompt, output_len):
        print('{"answer": {"completed": 99}}', flush=True)
        os.write(1, b"rubbish without an end")
        os.system("echo and a child that talks")
        yield output_len
    return engine(generate)


async def parent(o: Options) -> Engine:
    "Leaves a process behind, whatever closes it."
    Path(o.folder, "pid").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    return at_13(lambda: os._exit(1))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    running = []
    def start(name: str, options: Options = TINY) -> EngineProcess:
        running.append(EngineProcess(f"test_served:{name}", options, tmp_path / f"{name}.log"))
        return running[-1]
    yield start
    for one in running: one.close(5)


def measure(engine: EngineProcess, output_len: int = 5, seed: int = 0, timeout_s: float = 60) -> dict:
    return engine.measure(2, 6, 8, output_len, seed, timeout_s)


def gone(pid: int) -> bool:
    "Whether a process ended (or is only waiting for somebody to ask how)."
    for _ in range(100):
        try: state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError: return True
        if state == "Z": return True
        time.sleep(0.05)
    return False


def test_two_processes_measure_the_same(tmp_path: Path) -> None:
    names = ["test_served:steady", "test_served:chatterbox"]
    with engine_processes(names, TINY, tmp_path) as running:
        assert list(running) == names
        a, b = (measure(e) for e in running.values())
        assert a["prompts"] == b["prompts"]
        assert measure(running[names[0]], seed=1)["prompts"] != a["prompts"]
        assert (a["completed"], a["total_input_tokens"], a["total_output_tokens"]) == (6, 48, 30)
        assert len(a["ttft_ms"]) == 6
        assert sum(a["itl_count"]) == 6 * 4
        assert 1 <= a["median_tpot_ms"] < 100
        steady = running[names[0]]
        assert steady.facts["version"] == "1"
        assert steady.facts["versions"]["torch"]
        assert steady.ready_s > 0
        assert steady.ask(60, do="experts_hit", requests=3, input_len=4, seed=0) == {"found": [3, 3]}
        assert steady.ask(60, do="profile_step", batch=2, context=10) == {"found": [{"name": "k", "dur_us": 20}]}
        pids = [e.process.pid for e in running.values()]
    assert all(map(gone, pids))
    assert all(e.process.returncode == 0 for e in running.values()), "they left by themselves"


@pytest.mark.slow
def test_rubbish_goes_to_the_log(start, tmp_path: Path) -> None:
    talks = start("chatterbox")
    assert measure(talks)["completed"] == 6
    log = (tmp_path / "chatterbox.log").read_text()
    for said in ('{"answer"', "rubbish without an end", "and a child that talks"): assert said in log


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), [
    ("mortal", r"test_served:mortal: its process ended with exit code 7: last words; its log ends with\n(.*\n)*  last words$"),
    ("clumsy", r"ZeroDivisionError: division by zero; its log ends with\n(.*\n)*.*1 / 0"),
    ("stingy", "a request got 12 tokens, not 13"),
])
def test_one_that_dies_or_fails_while_it_is_measured(name: str, says: str, start) -> None:
    one = start(name)
    with pytest.raises(Left, match=says): measure(one, 13)
    one.close(5)
    assert gone(one.process.pid)


@pytest.mark.slow
def test_one_that_failed_can_be_asked_again(start) -> None:
    one = start("clumsy")
    with pytest.raises(Left, match="ZeroDivisionError"): measure(one, 13)
    assert measure(one)["completed"] == 6


@pytest.mark.slow
def test_one_that_hangs(start) -> None:
    one = start("sleeper")
    with pytest.raises(Left, match="no answer within 2 s"): measure(one, 13, timeout_s=2)
    one.close(0.2)
    assert gone(one.process.pid)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), [
    ("reluctant", "test_served:reluctant: RuntimeError: not enough memory; its log ends with"), ("stillborn", "exit code 3"),
    ("nobody", "AttributeError"),
])
def test_one_that_never_starts(name: str, says: str, start) -> None:
    with pytest.raises(Left, match=says): start(name)


@pytest.mark.slow
def test_nothing_is_left_where_the_second_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_folder() / "config.json").read_text())
    names = ["test_served:parent", "test_served:reluctant"]
    with pytest.raises(Left, match="not enough memory"), engine_processes(names, TINY._replace(folder=str(tmp_path)), tmp_path): pass
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_worker_of_an_engine_that_died_goes_with_it(start, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_folder() / "config.json").read_text())
    one = start("parent", TINY._replace(folder=str(tmp_path)))
    with pytest.raises(Left, match="exit code 1"): measure(one, 13)
    one.close(5)
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_an_engine_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    code = ("import os, sys, signal; from pathlib import Path; from dispatch.bench.served import EngineProcess, Options\n"
            "e = EngineProcess('test_served:steady', Options(sys.argv[1], device='cpu'), Path(sys.argv[2], 'log'))\n"
            "print(e.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    said = subprocess.run([sys.executable, "-c", code, tiny_folder(), tmp_path], capture_output=True, text=True)
    assert gone(int(said.stdout)), said.stderr


def test_unknown_engine(tmp_path: Path) -> None:
    with pytest.raises(Left, match=r"engine is 'sglang'; accepted are vllm, dispatch, or module:function"): EngineProcess("sglang", TINY, tmp_path / "log")


# the page

def written_run(root: Path, slower: float) -> str:
    "A made-up run of both engines on an H200; vLLM takes `slower` times as long for everything."
    with Run("phase-6", root=root / "out") as run:
        for name, times in (("vllm", slower), ("dispatch", 1)):
            run.log("engines", engine=name, version="1", ready_s=10 * times, first_token_s=11 * times)
            for n, repeat in itertools.product((1, 4, 16, 64, 256), range(2)):
                seen = [Request(512, i * 2e-3 * times, [(i * 2e-3 + 0.02 + j * 2e-3) * times for j in range(8)], [1] * 8) for i in range(n)]
                run.log("served", engine=name, version="1", precision="bf16", concurrency=n, input_len=512, output_len=8, repeat=repeat,
                        usd_per_million_output_tokens=1.0, floor_ms=1.0, decode_bytes=4.3e9, **served_summary(seen), **samples(seen))
        run.log("routing", sequences=64, experts_hit=[63, 64], experts=64)
        steps = [("_add_norm_kernel", 0, 2), ("nvjet_tst", 1, 3), ("_swap_gate_up_kernel", 6, 4)]
        for kernel, start_us, dur_us in steps: run.log("timeline", batch=1, name=kernel, start_us=start_us, dur_us=dur_us)
    manifest = run.folder / "manifest.json"
    gpu = {"gpu": "NVIDIA H200", "gpu_count": 1, "cuda": "13.0", "driver_version": "580", "clocks.sm": "1980"}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | gpu))
    (root / "out").rename(root / "results")
    return run.id


@pytest.mark.slow
@pytest.mark.parametrize(("slower", "reached"), [(1.4, 4), (0.9, 0)])
def test_the_page_reads_a_run(slower: float, reached: int, tmp_path: Path) -> None:
    "Ratios, aims and the step's parts are those that the rows say, whoever is faster."
    (tmp_path / "settings.ini").touch()
    (tmp_path / "nbs").mkdir()
    id = written_run(tmp_path, slower)
    nb = nbformat.read(HERE.parent / "nbs/phases/phase6_served.ipynb", as_version=4)
    NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path / "nbs")}}).execute()
    shown = ["".join(o.data.get("text/markdown", o.data.get("image/svg+xml", ""))) for c in nb.cells for o in c.get("outputs", []) if "data" in o]
    text = "\n".join(shown)
    assert "not measured" not in text
    assert text.count(id) >= 8
    assert f"{slower:.2f}× ({slower:.2f}–{slower:.2f})" in text, "tokens a second"
    assert f"{1 / slower:.2f}× ({1 / slower:.2f}–{1 / slower:.2f})" in text, "milliseconds"
    assert f"Of 5 levels {reached} reached the aimed speed" in text
    assert f"no worse at {5 if slower > 1 else 0}" in text
    assert "64 sequences hit 63.5 of 64 experts" in text
    assert sum(s.startswith("<svg") for s in shown) == 4
    assert any("a layer and a half" in s for s in shown)
    [step] = [s for s in shown if "of one decode step" in s]
    for part in ("experts", "dense products", "norms, rotary, cache", "nothing running"): assert part in step
    assert "attention" not in step


@pytest.mark.slow
@pytest.mark.skipif(find_spec("dispatch.serving.engine") is None, reason="the engine isn't written yet")
def test_the_real_engine(tmp_path: Path) -> None:
    with engine_processes(["dispatch"], TINY, tmp_path) as running:
        found = running["dispatch"].measure(4, 8, 24, 6, seed=0)
        assert (found["completed"], found["total_output_tokens"]) == (8, 48)
        c = read_config(tiny_folder())
        hit = running["dispatch"].ask(120, do="experts_hit", requests=4, input_len=8, seed=0)["found"]
        assert len(hit) == sum(map(c.is_moe, range(c.num_hidden_layers)))
        assert all(c.num_experts_per_tok <= n <= c.n_routed_experts for n in hit)
        assert json.dumps(running["dispatch"].facts)
