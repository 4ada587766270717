"""The model server on the tiny checkpoint, asked over gRPC: an explicit answer to whatever comes, and nothing left behind."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import httpx
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dispatch.model.tiny import tiny_folder
from dispatch.pb import engine_pb2 as pb
from dispatch.pb import engine_pb2_grpc as pb_grpc
from dispatch.serving.engine import AsyncEngine, EngineError
from dispatch.serving.model_server import EngineService, ModelServer


def served(ask: Callable[[ModelServer, pb_grpc.EngineStub], Coroutine[Any, Any, None]], **options: Any) -> None:
    "Ask a server of its own; what it holds afterwards must be nothing."
    async def run() -> None:
        engine = AsyncEngine.load(tiny_folder(), dtype=torch.float32, device="cpu", blocks=128, max_batch=2, progress=False)
        server = ModelServer(EngineService(engine, "tiny", **options), port=0, metrics_port=0, drain_s=5, load_every_s=0.05)
        running = asyncio.create_task(server.run())
        await asyncio.wait_for(server.ready.wait(), 30)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            await asyncio.wait_for(ask(server, pb_grpc.EngineStub(channel)), 60)
        for _ in range(50):
            if not server.service.answers: break
            await asyncio.sleep(0.02)
        assert not server.service.answers
        assert not engine._boxes
        engine.close()
        with pytest.raises(EngineError): await asyncio.wait_for(running, 30)
    asyncio.run(run())


def command(name: str, ids: list[int], **params: Any) -> pb.Command:
    return pb.Command(generate=pb.GenerateRequest(request_id=name, prompt_ids=ids, sampling_params=pb.SamplingParams(**params)))


async def outputs(stub: pb_grpc.EngineStub, commands: list[pb.Command]) -> dict[str, list[pb.Output]]:
    found = dict[str, list[pb.Output]]()
    async for message in stub.Generate(iter(commands)):
        for o in message.outputs: found.setdefault(o.request_id, []).append(o)
    return found


def test_requests_of_one_stream_and_what_is_counted() -> None:
    async def ask(server: ModelServer, stub: pb_grpc.EngineStub) -> None:
        found = await outputs(stub, [command("a", [0, 5, 6], max_tokens=5, ignore_eos=True, logprobs=2), command("b", [0, 7], max_tokens=3, ignore_eos=True)])
        assert [len([t for o in found[name] for t in o.token_ids]) for name in "ab"] == [5, 3]
        assert all(len(o.logprobs) == 1 and len(o.logprobs[0].top_ids) in (2, 3) for o in found["a"])
        end = found["a"][-1].finished
        assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", 3, 5)
        await asyncio.sleep(0.3)
        text = httpx.get(f"http://127.0.0.1:{server.metrics_port}/metrics").text
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 8.0' in text
        assert 'finished_reason="length",model_name="tiny"} 2.0' in text
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
    served(ask)


@pytest.mark.parametrize(("ids", "params", "says"), [
    ([], {}, "no tokens"), ([1024], {}, "outside the vocabulary"), ([5] * 1024, {}, "1024 tokens"), ([5], dict(temperature=float("nan")), "temperature"),
    ([5], dict(top_p=0.0), "top_p"), ([5], dict(max_tokens=0), "max_tokens"), ([5], dict(seed=2**63), "seed"), ([5], dict(logprobs=21), "logprobs"),
], ids=str)
def test_what_cannot_be_answered_is_said(ids: list[int], params: dict, says: str) -> None:
    async def ask(server: ModelServer, stub: pb_grpc.EngineStub) -> None:
        found = await outputs(stub, [command("bad", ids, **params), command("good", [0, 5], max_tokens=2, ignore_eos=True)])
        [wrong] = found["bad"]
        assert wrong.error.code == pb.Error.CODE_INVALID_ARGUMENT
        assert says in wrong.error.message
        assert found["good"][-1].finished.reason == "length"
    served(ask)


def test_aborts_a_name_in_use_and_a_stream_that_breaks() -> None:
    async def ask(server: ModelServer, stub: pb_grpc.EngineStub) -> None:
        endless = dict(max_tokens=1000, ignore_eos=True)
        found = await outputs(stub, [command("a", [0, 5], **endless), command("a", [0, 5]), pb.Command(abort=pb.AbortRequest(request_id="a"))])
        assert sorted(o.error.message[:10] or o.finished.reason for o in found["a"] if o.WhichOneof("end")) == ["abort", "request_id"]
        async def left_open() -> AsyncIterator[pb.Command]:
            for name in "bc": yield command(name, [0, 5], **endless)
            await asyncio.sleep(60)
        call = stub.Generate(left_open())
        await call.read()
        assert (await stub.Abort(pb.AbortRequest(request_id="b"))).found
        assert not (await stub.Abort(pb.AbortRequest(request_id="b"))).found
        assert (await stub.GetLoad(pb.GetLoadRequest())).kv_cache_usage > 0
        call.cancel()
        for _ in range(5):
            await asyncio.sleep(0.02)
            if not (load := await stub.GetLoad(pb.GetLoadRequest())).running: break
        assert (load.running, load.waiting) == (0, 0), "within 100 ms"
    served(ask)


def test_a_full_queue_and_a_server_that_drains() -> None:
    async def ask(server: ModelServer, stub: pb_grpc.EngineStub) -> None:
        found = await outputs(stub, [command("a", [0, 5])])
        assert found["a"][-1].error.code == pb.Error.CODE_RESOURCE_EXHAUSTED
        server.service.draining = True
        found = await outputs(stub, [command("b", [0, 5])])
        assert found["b"][-1].error.code == pb.Error.CODE_UNAVAILABLE
    served(ask, max_waiting=0)


def test_an_engine_that_fails_takes_the_server_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(server: ModelServer, stub: pb_grpc.EngineStub) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="dispatch.v1.Engine"))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        def launch(batch: object) -> None: raise RuntimeError("the GPU is gone")
        monkeypatch.setattr(server.service.engine.engine.runner, "launch", launch)
        found = await outputs(stub, [command("a", [0, 5])])
        assert found["a"][-1].error.code == pb.Error.CODE_UNAVAILABLE
        assert "the GPU is gone" in found["a"][-1].error.message
    served(ask)
