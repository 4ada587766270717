"""The engine on the tiny checkpoint: every answer as if its request were alone, and a defined answer to whatever is asked."""
from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dispatch.model.deepseek_moe import DeepseekMoE
from dispatch.model.generate import generate
from dispatch.model.runner import ModelRunner
from dispatch.model.sampling import SamplingParams
from dispatch.model.tiny import tiny_folder
from dispatch.model.tokenizer import load_tokenizer
from dispatch.serving.engine import AsyncEngine, Engine, EngineError, Output

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def model() -> DeepseekMoE: return DeepseekMoE.load(tiny_folder(), torch.float32, DEVICE, progress=False)


def engine_of(model: DeepseekMoE, blocks: int = 200, block_size: int = 4, max_batch: int = 8, max_step_tokens: int = 64, prefix_cache: bool = True) -> Engine:
    runner = ModelRunner(model.config, model.weights, block_size=block_size, max_batch=max_batch, max_step_tokens=max_step_tokens)
    runner.allocate(blocks)
    return Engine(runner, prefix_cache, load_tokenizer(tiny_folder()))


@pytest.fixture(scope="module")
def mixed(model: DeepseekMoE) -> list[tuple[list[int], SamplingParams, list[int]]]:
    "64 prompts, texts and random ids, some of which begin alike, and what the plain harness answers."
    g, tokenizer = np.random.default_rng(0), load_tokenizer(tiny_folder())
    ids = tokenizer.encode((tiny_folder() / "heldout.txt").read_text(encoding="utf-8")).ids
    found = []
    for i in range(64):
        start, n = int(g.integers(0, 2000)), int(g.integers(1, 70))
        prompt = ids[start:start + n] if i % 3 else g.integers(0, model.config.vocab_size, n).tolist()
        if i % 4 == 0: prompt = ids[:24] + prompt
        params = SamplingParams(max_tokens=int(g.integers(1, 24)), ignore_eos=bool(i % 2))
        found.append((prompt, params, list(generate(model, prompt, params))))
    return found


@pytest.mark.parametrize(("options", "preempts"), [
    (dict(), False), (dict(max_batch=1), False), (dict(max_batch=64, max_step_tokens=512, blocks=2000), False), (dict(max_step_tokens=5), False),
    (dict(block_size=16, blocks=60), False), (dict(block_size=1, blocks=900), False), (dict(prefix_cache=False), False),
    (dict(blocks=32, max_batch=16), True), (dict(blocks=32, max_batch=16, prefix_cache=False), True),
], ids=str)
def test_answers_are_those_of_the_plain_harness(model: DeepseekMoE, mixed: list, options: dict, preempts: bool) -> None:
    engine = engine_of(model, **options)
    answers = engine.generate([p for p, *_ in mixed], [s for _, s, _ in mixed], progress=False)
    wrong = [i for i, (a, (*_, want)) in enumerate(zip(answers, mixed, strict=True)) if a.token_ids != want]
    assert not wrong
    assert (sum(a.request.preemptions for a in answers) > 0) == preempts
    assert all(a.finished == ("stop" if want[-1] == 1 and not s.ignore_eos else "length") for a, (_, s, want) in zip(answers, mixed, strict=True))
    engine.scheduler.check()
    assert len(engine.scheduler.pool.free) == engine.scheduler.pool.size
    again = engine.generate([p for p, *_ in mixed[:8]], [s for _, s, _ in mixed[:8]], progress=False)
    assert [a.token_ids for a in again] == [want for *_, want in mixed[:8]], "with a cache that knows the prompts"


@pytest.mark.parametrize(("prompt", "params", "says"), [
    ([], {}, "no tokens"), (range(3, 500), {}, "accepted are at most 79"), ([5, 9999], {}, "position 1 is outside the vocabulary"),
    ([5, -1], {}, "position 1 is outside"), ([5], dict(max_tokens=0), "max_tokens is 0"), ([5], dict(temperature=-1), "temperature"),
    ([5], dict(top_p=0), "top_p"), ([5], dict(stop=("",)), "not empty"), ([5], dict(min_tokens=9, max_tokens=3), "min_tokens is 9"),
])
def test_what_cannot_be_answered_is_refused_and_the_others_go_on(model: DeepseekMoE, prompt: list[int], params: dict, says: str) -> None:
    engine = engine_of(model, blocks=20)
    other = engine.add(engine.request([5, 6, 7], SamplingParams(max_tokens=6)))
    engine.step()
    with pytest.raises(ValueError, match=says): engine.add(engine.request(list(prompt), SamplingParams(**params)))
    with pytest.raises(ValueError, match=says): engine.generate([[5], list(prompt)], [SamplingParams(), SamplingParams(**params)], progress=False)
    while engine.busy: engine.step()
    assert other.generated == list(generate(model, [5, 6, 7], SamplingParams(max_tokens=6)))
    engine.scheduler.check()


def test_a_prompt_that_fills_the_cache_ends_by_length(model: DeepseekMoE) -> None:
    engine = engine_of(model, blocks=5)
    [answer] = engine.generate([list(range(3, 20))], SamplingParams(max_tokens=100, ignore_eos=True), progress=False)
    assert (answer.finished, answer.token_ids) == ("length", list(generate(model, list(range(3, 20)), SamplingParams(max_tokens=3, ignore_eos=True))))


def test_stop_at_the_first_token_and_min_tokens(model: DeepseekMoE) -> None:
    engine, prompt = engine_of(model), [9, 8, 7]
    plain = list(generate(model, prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
    def ask(**params: object) -> Output: return engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True, **params), progress=False)[0]
    assert (ask(stop_token_ids=plain[:1]).token_ids, ask(stop_token_ids=plain[:1]).finished) == (plain[:1], "stop")
    assert ask(stop_token_ids=(plain[3],)).token_ids == plain[:plain.index(plain[3]) + 1]
    late = ask(stop_token_ids=plain[:1], min_tokens=4)
    assert plain[0] not in late.token_ids[:4]
    assert len(late.token_ids) >= 4


def test_stop_texts_end_the_answer_and_are_not_told(model: DeepseekMoE) -> None:
    engine, tokenizer = engine_of(model), load_tokenizer(tiny_folder())
    prompt = tokenizer.encode("The little dog ran to the").ids
    whole = engine.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True), progress=False)[0]
    for start in range(len(whole.text) - 2):
        stop = whole.text[start:start + 3]
        got = engine.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True, stop=(stop, "never there")), progress=False)[0]
        assert (got.text, got.finished) == (whole.text[:whole.text.index(stop)], "stop")
        assert got.token_ids == whole.token_ids[:len(got.token_ids)]
    assert not engine.busy or [engine.step() for _ in range(3)]
    engine.scheduler.check()


def test_logprobs(model: DeepseekMoE) -> None:
    engine, prompt = engine_of(model), [9, 8, 7, 30]
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3), progress=False)
    logits = model.forward(torch.tensor([[*prompt, *answer.token_ids]], device=model.device))[0].log_softmax(-1).cpu()
    for i, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        want = logits[len(prompt) - 1 + i].topk(3)
        assert next(iter(found)) == token
        assert set(found) == set(want.indices.tolist())
        torch.testing.assert_close(torch.tensor(sorted(found.values(), reverse=True)), want.values, rtol=1e-3, atol=1e-4)


def test_a_seed_gives_the_same_answer_in_any_company(model: DeepseekMoE) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
    alone = engine_of(model).generate([[4, 5, 6]], params, progress=False)[0].token_ids
    others = [[i, i + 1] for i in range(10, 30)]
    each = [SamplingParams(max_tokens=9, temperature=1.0)] * 20 + [params]
    crowd = engine_of(model, blocks=24, max_step_tokens=7).generate([*others, [4, 5, 6]], each, progress=False)
    assert crowd[-1].token_ids == alone
    other = SamplingParams(max_tokens=12, temperature=1.0, seed=12, ignore_eos=True)
    assert engine_of(model).generate([[4, 5, 6]], other, progress=False)[0].token_ids != alone


def test_abort_while_waiting_in_prefill_and_in_decode(model: DeepseekMoE) -> None:
    engine = engine_of(model, max_batch=2, max_step_tokens=8)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    decodes, prefills, waits, goes_on = (engine.add(engine.request(list(range(3, 3 + n)), params)) for n in (4, 40, 5, 6))
    for _ in range(3): engine.step()
    for r in (decodes, prefills, waits):
        engine.abort(r)
        engine.abort(r)
        engine.scheduler.check()
    while engine.busy: engine.step()
    assert [r.finished for r in (decodes, prefills, waits)] == ["abort"] * 3
    assert goes_on.generated == list(generate(model, list(range(3, 9)), SamplingParams(max_tokens=20, ignore_eos=True)))
    assert len(engine.scheduler.pool.free) == engine.scheduler.pool.size


@pytest.fixture
def serving(model: DeepseekMoE) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(engine_of(model, blocks=400, max_batch=16, max_step_tokens=128))
    yield engine
    engine.close()
    assert not engine._thread.is_alive()


async def text_of(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [t async for out in engine.generate(prompt, params) for t in out.token_ids]


def test_streams_of_many_coroutines(model: DeepseekMoE, mixed: list, serving: AsyncEngine) -> None:
    async def all_of_them() -> list[list[int]]: return await asyncio.gather(*(text_of(serving, p, s) for p, s, _ in mixed))
    assert asyncio.run(all_of_them()) == [want for *_, want in mixed]
    assert asyncio.run(text_of(serving, mixed[0][0], mixed[0][1])) == mixed[0][2], "from another event loop"
    assert serving.call(lambda e: e.busy) is False
    with pytest.raises(ValueError, match="no tokens"): asyncio.run(text_of(serving, [], SamplingParams()))
    assert serving.experts_hit([[5, 6], [7, 8, 9]])
    assert all(e["dur_us"] >= 0 for e in serving.profile_step(2, 5))


def test_who_stops_listening_aborts(serving: AsyncEngine) -> None:
    async def leave() -> None:
        async for _ in (stream := serving.generate([5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True))): break
        await stream.aclose()
    asyncio.run(leave())
    async def cancelled() -> None:
        task = asyncio.create_task(text_of(serving, [5, 6], SamplingParams(max_tokens=500, ignore_eos=True)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
    asyncio.run(cancelled())
    def idle(e: Engine) -> bool: return not (e.scheduler.running or e.scheduler.waiting)
    assert serving.call(idle)
    assert not serving._boxes


def test_ten_thousand_requests_are_queued(model: DeepseekMoE) -> None:
    engine = engine_of(model, blocks=2000, max_batch=256, max_step_tokens=1024)
    requests = [engine.add(engine.request([3 + i % 900], SamplingParams(max_tokens=1))) for i in range(10_000)]
    while engine.busy: engine.step()
    assert all(r.finished in ("length", "stop") for r in requests)


def test_an_engine_that_breaks_tells_everyone(model: DeepseekMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(engine_of(model))
    broken = threading.Event()
    def launch(batch: object) -> None:
        broken.set()
        raise RuntimeError("the GPU is gone")
    monkeypatch.setattr(engine.engine.runner, "launch", launch)
    with pytest.raises(EngineError, match="the GPU is gone"): asyncio.run(text_of(engine, [5], SamplingParams()))
    assert broken.is_set()
    with pytest.raises(EngineError, match="the GPU is gone"): asyncio.run(text_of(engine, [5], SamplingParams()))
    with pytest.raises(EngineError, match="the GPU is gone"): engine.call(lambda e: e.busy)
    assert not engine._boxes
    engine.close()


def test_what_is_asked_while_the_engine_breaks_or_closes_ends_too(model: DeepseekMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun, go = AsyncEngine(engine_of(model)), threading.Event(), threading.Event()
    def launch(batch: object) -> None:
        begun.set()
        go.wait()
        raise RuntimeError("the GPU is gone")
    monkeypatch.setattr(engine.engine.runner, "launch", launch)
    async def asked() -> list[object]:
        first = asyncio.create_task(text_of(engine, [5], SamplingParams()))
        await asyncio.to_thread(begun.wait)
        late = [asyncio.create_task(text_of(engine, [i], SamplingParams())) for i in range(3)]
        called = asyncio.create_task(asyncio.to_thread(engine.call, lambda e: e.busy))
        await asyncio.sleep(0.1)
        go.set()
        return await asyncio.wait_for(asyncio.gather(first, *late, called, return_exceptions=True), 10)
    assert [type(e) for e in asyncio.run(asked())] == [EngineError] * 5
    engine.close()
    closed = AsyncEngine(engine_of(model))
    closed.close()
    closed.close()
    with pytest.raises(EngineError, match="closed"): closed.call(lambda e: e.busy)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_quantized_experts_and_a_loaded_engine(kind: torch.dtype, mixed: list) -> None:
    engine = AsyncEngine.load(tiny_folder(), dtype=torch.float32, device=DEVICE, kind=kind, max_batch=4, max_step_tokens=48, progress=False)
    plain = DeepseekMoE.load(tiny_folder(), torch.float32, DEVICE, progress=False, kind=kind)
    async def some() -> list[list[int]]: return await asyncio.gather(*(text_of(engine, p, s) for p, s, _ in mixed[:8]))
    assert asyncio.run(some()) == [list(generate(plain, p, s)) for p, s, _ in mixed[:8]]
    engine.close()


@pytest.mark.parametrize(("options", "says"), [
    (dict(memory=0), "memory is 0"), (dict(memory=2), "memory is 2"), (dict(max_batch=0), "max_batch is 0"), (dict(max_step_tokens=0), "max_step_tokens is 0"),
    (dict(block_size=0), "blocks of 0 tokens|block_size is 0"), (dict(blocks=-3), "-3 blocks|blocks is -3"),
])
def test_options_that_leave_nothing_to_do(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says): Engine.load(tiny_folder(), dtype=torch.float32, device="cpu", progress=False, **options)
