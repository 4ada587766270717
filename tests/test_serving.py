"""Blocks and scheduling: no block leaked, freed twice or shared wrongly, whatever arrives, ends, or is aborted; and answers as if each request were alone."""
from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from dispatch.serving.kv_cache import BlockPool, Table, block_hash
from dispatch.serving.scheduler import PENDING, Piece, Request, Scheduler


def next_token(tokens: list[int]) -> int:
    "A model: what follows depends on every token before."
    return block_hash(b"", tokens)[0] % 50


def answer(request: Request, max_length: int) -> list[int]:
    "What a request is answered when it is alone."
    tokens = list(request.prompt_ids)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids or len(tokens) - len(request.prompt_ids) >= request.max_tokens or len(tokens) >= max_length:
            return tokens[len(request.prompt_ids):]


class Cache:
    "The GPU's stand-in: each place has the beginning that was computed into it, each slot the token that was sampled last."
    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.places, self.last = pool, [[b""] * pool.block_size for _ in range(pool.size)], dict[int, int]()

    def run(self, pieces: list[Piece]) -> list[int]:
        "A step: write what is computed, read all that came before, and sample."
        known = {id(p): [self.last[p.request.slot or 0] if t == PENDING else t for t in p.request.token_ids] for p in pieces}
        for p in pieces:
            for t in range(p.start, p.end): self._place(p, known[id(p)], t, write=True)
        for p in pieces:
            for t in range(p.end): self._place(p, known[id(p)], t, write=False)
        tokens = [next_token(known[id(p)]) for p in pieces if p.samples]
        self.last |= zip((p.request.slot or 0 for p in pieces if p.samples), tokens, strict=True)
        return tokens

    def _place(self, p: Piece, tokens: list[int], t: int, write: bool) -> None:
        block, name = self.places[p.request.table.blocks[t // self.pool.block_size]], block_hash(b"", tokens[:t + 1])
        if write: block[t % self.pool.block_size] = name
        assert block[t % self.pool.block_size] == name, f"request {p.request.id} reads another's keys at {t}"


class Serving(RuleBasedStateMachine):
    "Arrivals with common beginnings, steps, aborts before and within a step, in small caches."
    requests = Bundle("requests")

    @initialize(blocks=st.integers(3, 12), block_size=st.sampled_from([1, 2, 4]), prefix=st.booleans(), batch=st.integers(1, 6), budget=st.integers(1, 12))
    def begin(self, blocks: int, block_size: int, prefix: bool, batch: int, budget: int) -> None:
        self.scheduler = Scheduler(BlockPool(blocks, block_size, prefix), batch, budget, max_length=20)
        self.cache, self.all, self.flight = Cache(self.scheduler.pool), list[Request](), list[tuple[list[Piece], list[int]]]()

    @rule(target=requests, common=st.integers(0, 12), own=st.lists(st.integers(0, 3), max_size=4), max_tokens=st.integers(1, 8),
          stop=st.frozensets(st.integers(0, 49), max_size=10))
    def arrive(self, common: int, own: list[int], max_tokens: int, stop: frozenset[int]) -> Request:
        request = Request([*range(common), *own], max_tokens, stop)
        fits = 0 < len(request.prompt_ids) < self.scheduler.max_length
        if fits:
            self.scheduler.add(request)
            self.all.append(request)
        else:
            with pytest.raises(ValueError, match=r"accepted|needed"): self.scheduler.add(request)
            request.finished = "refused"
        return request

    @rule(request=requests)
    def abort(self, request: Request) -> None: self.scheduler.finish(request)

    @rule(request=st.none() | requests, ahead=st.booleans())
    def step(self, request: Request | None, ahead: bool) -> None:
        "Choose and launch a step, perhaps before the one before is read."
        pieces = self.scheduler.schedule()
        assert pieces or not (self.scheduler.running or self.scheduler.waiting), "something is left, and nothing is done"
        assert sum(p.end - p.start for p in pieces) <= self.scheduler.max_step_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_batch
        assert all(p.end > p.start for p in pieces)
        self.flight.append((pieces, self.cache.run(pieces)))
        self.scheduler.advance(pieces)
        if request: self.scheduler.finish(request)  # while the step was under way
        while len(self.flight) > ahead: self.scheduler.settle(*self.flight.pop(0))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "scheduler"): self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"): return
        for flight in self.flight: self.scheduler.settle(*flight)
        for _ in range(2000):
            if not (pieces := self.scheduler.schedule()): break
            step(self.scheduler, self.cache, pieces)
            self.scheduler.check()
        assert not self.scheduler.running
        assert not self.scheduler.waiting, "somebody starved"
        for r in self.all:
            want = answer(r, self.scheduler.max_length)
            assert r.generated == (want[:len(r.generated)] if r.finished == "abort" else want)
        assert len(self.scheduler.pool.free) == self.scheduler.pool.size, "all blocks come back"


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def step(scheduler: Scheduler, cache: Cache, pieces: list[Piece]) -> None:
    "Run a step and read what came out."
    tokens = cache.run(pieces)
    scheduler.advance(pieces)
    scheduler.settle(pieces, tokens)


def finish(scheduler: Scheduler, cache: Cache) -> int:
    "Run until nothing is left; the number of steps."
    steps = 0
    while pieces := scheduler.schedule():
        step(scheduler, cache, pieces)
        steps += 1
    scheduler.check()
    return steps


def test_a_prompt_wholly_in_the_cache_computes_only_its_last_block() -> None:
    scheduler = Scheduler(pool := BlockPool(8, 4))
    cache = Cache(pool)
    first, second = Request(list(range(8)), 1), Request(list(range(8)), 3)
    scheduler.add(first)
    finish(scheduler, cache)
    scheduler.add(second)
    [piece] = scheduler.schedule()
    assert (piece.start, piece.end, piece.samples) == (4, 8, True)
    step(scheduler, cache, [piece])
    finish(scheduler, cache)
    assert second.generated == answer(second, scheduler.max_length)


def test_the_youngest_is_preempted_and_answers_all_the_same() -> None:
    scheduler = Scheduler(pool := BlockPool(6, 2, prefix_cache=False))
    requests = [Request([i, i + 1, i + 2], 6) for i in (0, 10)]
    for r in requests: scheduler.add(r)
    finish(scheduler, Cache(pool))
    assert [r.preemptions for r in requests] == [0, 1]
    assert [r.generated for r in requests] == [answer(r, scheduler.max_length) for r in requests]


def test_a_long_prompt_is_computed_beside_those_that_decode_and_nobody_overtakes_it() -> None:
    scheduler = Scheduler(pool := BlockPool(16, 4), max_step_tokens=8)
    cache = Cache(pool)
    early, long, late = Request([1, 2], 20), Request(list(range(30)), 2), Request([3], 1)
    scheduler.add(early)
    step(scheduler, cache, scheduler.schedule())
    for r in (long, late): scheduler.add(r)
    pieces = scheduler.schedule()
    assert [(p.request, p.end - p.start) for p in pieces] == [(early, 1), (long, 7)]
    step(scheduler, cache, pieces)
    blocked = Request(list(range(100, 140)), 1)
    scheduler.waiting.appendleft(blocked)
    assert late not in [p.request for p in scheduler.schedule()], "the head of the queue waits for blocks, and the others for it"
    scheduler.finish(blocked)
    scheduler.check()


def test_ten_thousand_are_queued_and_answered() -> None:
    scheduler = Scheduler(pool := BlockPool(64, 4))
    requests = [Request([i % 7, i % 5], 1 + i % 2) for i in range(10_000)]
    for r in requests: scheduler.add(r)
    for r in requests[5000:5100]: scheduler.finish(r)
    steps = finish(scheduler, Cache(pool))
    assert steps < 1000
    assert all(r.finished == ("abort" if 5000 <= i < 5100 else "length") for i, r in enumerate(requests))


@pytest.mark.parametrize(("request_", "says"), [
    (Request([]), "no tokens"), (Request([1], max_tokens=0), "max_tokens is 0"), (Request(list(range(40))), "accepted are at most 39"),
])
def test_what_can_never_be_answered_is_refused(request_: Request, says: str) -> None:
    scheduler = Scheduler(BlockPool(10, 4))
    with pytest.raises(ValueError, match=says): scheduler.add(request_)
    assert not scheduler.waiting


def test_bounds_and_integrity() -> None:
    with pytest.raises(ValueError, match="0 blocks of 16 tokens"): BlockPool(0)
    with pytest.raises(ValueError, match="max_batch is 0"): Scheduler(BlockPool(1), max_batch=0)
    pool = BlockPool(4, 2)
    table = pool.open([1, 2, 3])
    pool.extend(table, 3)
    with pytest.raises(AssertionError, match="counts 1 holders and has 0"): pool.check([])
    with pytest.raises(AssertionError, match="counts 1 holders and has 2"): pool.check([table, Table(list(table.blocks))])
    table.blocks.append(table.blocks[0])
    with pytest.raises(AssertionError, match="twice"): pool.check([table])
