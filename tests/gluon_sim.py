"""Run a Gluon kernel in Python threads, where there is no GPU: Triton has an interpreter for its own language, and none for Gluon.

What is asynchronous on a GPU happens here as late, or as early, as it may, at random: a copy into shared memory is made either at once or
just before its barrier hears of it; a warp group's product reads its operands when it is waited for; a store reads its stage when it is
waited for. So a buffer that is handed back too early gives a wrong result, and a barrier that nobody completes raises `Deadlock`.
What it can't show: the order of accesses between the warps of one partition, and what a layout costs.
"""
from __future__ import annotations

import random
import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonJITFunction

PATIENCE_S = 20.0


class Deadlock(RuntimeError): "A barrier that was not completed in time."


class Values(torch.Tensor):
    "A tensor in registers, with Gluon's `split`."
    def split(self) -> tuple[Any, Any]: return self[..., 0], self[..., 1]  # type: ignore[override]


class Address:
    "A pointer, or a block of them: a flat tensor and offsets in elements."
    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None: self.flat, self.offset = flat, offset
    def __add__(self, more: Any) -> Address: return Address(self.flat, self.offset + more)
    @property
    def dtype(self) -> Any: return types.SimpleNamespace(element_ty=self.flat.dtype)
    __radd__ = __add__


class Shared:
    "A view of shared memory."
    def __init__(self, data: torch.Tensor, layout: Any) -> None: self.data, self.layout = data, layout
    @property
    def shape(self) -> Sequence[int]: return list(self.data.shape)
    @property
    def dtype(self) -> torch.dtype: return self.data.dtype
    def index(self, i: int) -> Shared: return Shared(self.data[i], self.layout)
    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert start + length <= self.data.shape[dim]
        return Shared(self.data.narrow(dim, start, length), self.layout)
    def reshape(self, shape: Sequence[int]) -> Shared: return Shared(self.data.view(*shape), self.layout)
    def permute(self, order: Sequence[int]) -> Shared: return Shared(self.data.permute(*order), self.layout)
    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        view = Shared(self.data.view(dtype), layout)
        assert view.shape == list(shape)
        return view
    def store(self, values: torch.Tensor) -> None: self.data.copy_(values)
    def load(self, layout: Any) -> Any: return self.data.clone().as_subclass(Values)


class Barrier:
    "An mbarrier: a phase ends when all arrivals are in and all announced bytes have come."
    def __init__(self, block: Block) -> None: self.block, self.count, self.pending, self.bytes, self.phase = block, 0, 0, 0, 0
    def change(self, arrivals: int = 0, announced: int = 0) -> None:
        with self.block.changed:
            self.pending, self.bytes = self.pending - arrivals, self.bytes + announced
            assert self.pending >= 0, "more arrivals than the barrier was initialised for"
            if not self.pending and not self.bytes: self.pending, self.phase = self.count, self.phase ^ 1
            self.block.changed.notify_all()


class Block:
    "What the partitions of one program share."
    def __init__(self, program: int, programs: int, rng: random.Random) -> None:
        self.program, self.programs, self.rng = program, programs, rng
        self.changed = threading.Condition(threading.RLock())
        self.shared_bytes, self.errors = 0, list[BaseException]()

    def fail(self, error: BaseException) -> None:
        "Wake everybody; the first error is the program's."
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def later(self, act: Callable[[], None]) -> None:
        "Do something within two milliseconds, beside the partitions."
        def safely() -> None:
            try: act()
            except BaseException as e: self.fail(e)
        threading.Timer(self.rng.random() * 2e-3, safely).start()


class Partition(threading.local):
    block: Block
    warps: int = 0
    products: list[Callable[[], None]]
    stores: list[Callable[[], None]]  # that haven't read their stage yet
    writes: list[Callable[[], None]]  # that have, and nobody else may see them yet
    copies: list[Callable[[], None]]


here = Partition()


def _enter(block: Block, warps: int) -> None: here.block, here.warps, here.products, here.stores, here.writes, here.copies = block, warps, [], [], [], []


def _load(pointer: Address, mask: Any = True, other: Any = 0) -> Any:
    if isinstance(pointer.offset, int): return int(pointer.flat[pointer.offset]) if mask else other
    inside = torch.as_tensor(mask).expand(pointer.offset.shape)
    return torch.where(inside, pointer.flat[torch.where(inside, pointer.offset, 0)], other).as_subclass(Values)


def _store(pointer: Address, values: torch.Tensor, mask: Any = True) -> None:
    inside = torch.as_tensor(mask).expand(pointer.offset.shape)
    pointer.flat[pointer.offset[inside]] = values.to(pointer.flat.dtype)[inside]


def _where(condition: Any, a: Any, b: Any) -> Any: return torch.where(condition, a, b).as_subclass(Values)


ATOMIC = threading.Lock()


def _atomic_add(pointer: Address, more: int) -> int:
    with ATOMIC:
        old = int(pointer.flat[pointer.offset])
        pointer.flat[pointer.offset] = old + more
    return old


def _nothing(dtype: torch.dtype) -> float: return float("nan") if dtype.is_floating_point else -77


def _copy_in(values: Callable[[], torch.Tensor], result: Shared) -> Callable[[], None]:
    "Now or later."
    if here.block.rng.random() < 0.5: result.data.copy_(values()); return lambda: None
    result.data.fill_(_nothing(result.dtype))
    return lambda: result.data.copy_(values())


def _tile(desc: Any, coord: Sequence[int], write: torch.Tensor | None = None) -> torch.Tensor:
    "The block at `coord`; zero where it is outside; written where it is inside."
    block = torch.zeros(desc.block_shape, dtype=desc.base.dtype)
    whole = torch.as_strided(desc.base, desc.shape, desc.strides, desc.base.storage_offset())
    assert all(c >= 0 for c in coord)
    ends = [max(c, min(c + b, n)) for c, b, n in zip(coord, desc.block_shape, desc.shape, strict=True)]
    if any(c >= n for c, n in zip(coord, desc.shape, strict=True)): return block
    outside, inside = tuple(slice(c, e) for c, e in zip(coord, ends, strict=True)), tuple(slice(0, e - c) for c, e in zip(coord, ends, strict=True))
    if write is None: block[inside] = whole[outside]
    else: whole[outside] = write.view(desc.block_shape)[inside]
    return block


def _tma_load(desc: Any, coord: Sequence[int], barrier: Barrier, result: Shared, pred: bool = True) -> None:
    if not pred: return
    assert result.data.is_contiguous()
    assert list(result.shape) == list(desc.block_shape)
    finish = _copy_in(lambda: _tile(desc, coord), result)
    size = result.data.numel() * result.data.element_size()
    def arrive() -> None:
        finish()
        barrier.change(announced=-size)
    here.block.later(arrive)


def _tma_store(desc: Any, coord: Sequence[int], source: Shared) -> None:
    def read() -> None:
        data = source.data.clone()
        here.writes.append(lambda: (_tile(desc, coord, data), None)[1])
    here.stores.append(read)


def _store_wait(left: int) -> None:
    "All but so many stores have read their stage; whether others can see them already is another matter."
    _run(here.stores, left)
    if here.block.rng.random() < 0.5: _run(here.writes, 0)


def _run(queue: list[Callable[[], None]], left: int) -> None:
    while len(queue) > left: queue.pop(0)()


def _async_copy(result: Shared, pointer: Address, mask: Any = True) -> None:
    here.copies.append(_copy_in(lambda: _load(pointer, mask), result))


def _copies_arrive(barrier: Barrier, increment_count: bool = True) -> None:
    assert not increment_count
    copies, here.copies, threads = here.copies, [], here.warps * 32
    def arrive() -> None:
        _run(copies, 0)
        barrier.change(arrivals=threads)
    here.block.later(arrive)


def _wait(barrier: Barrier, phase: int, pred: bool = True) -> None:
    with barrier.block.changed:
        if pred and not barrier.block.changed.wait_for(lambda: barrier.phase != phase or barrier.block.errors, PATIENCE_S):
            raise Deadlock(f"phase {phase}: {barrier.pending} arrivals and {barrier.bytes} bytes are missing")
        if barrier.block.errors: raise RuntimeError("another partition failed")


def _init(barrier: Barrier, count: int) -> None: barrier.count = barrier.pending = count


def _expect(barrier: Barrier, size: int, pred: bool = True) -> None:
    if pred: barrier.change(arrivals=1, announced=size)


def _arrive(barrier: Barrier, *, count: int = 1, pred: bool = True) -> None:
    if not pred: return
    barrier.change(arrivals=count)
    if here.block.rng.random() < 0.2: time.sleep(3e-3)  # let the others use what was just given


def _mma(a: Shared, b: Shared, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
    assert is_async
    assert here.warps == 4, "a warp group multiplies"
    def multiply() -> None:
        product = a.data.float() @ b.data.float()
        acc.copy_(acc + product if use_acc else product)
    here.products.append(multiply)
    return acc


def _mma_wait(outstanding: int = 0, deps: Sequence[torch.Tensor] = ()) -> Any:
    _run(here.products, outstanding)
    return deps[0] if len(deps) == 1 else tuple(deps)


def _specialize(functions: Sequence[tuple[Callable[..., None], Sequence[Any]]], warps: Sequence[int], registers: Sequence[int]) -> None:
    "One thread a partition; the first has the kernel's own warps."
    block = here.block
    assert len(functions) == len(warps) + 1 == len(registers) + 1
    def work(function: Callable[..., None], args: Sequence[Any], n: int) -> None:
        _enter(block, n)
        try:
            function(*args)
            assert not here.products
            assert not here.copies
            assert not here.stores, "a store was not waited for"
            _run(here.writes, 0)
        except BaseException as e: block.fail(e)
    threads = [threading.Thread(target=work, args=(f, a, n)) for (f, a), n in zip(functions, (here.warps, *warps), strict=True)]
    for t in threads: t.start()
    for t in threads: t.join()
    if block.errors: raise block.errors[0]


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if dtype is torch.int64: return types.SimpleNamespace(index=[Barrier(here.block) for _ in range(shape[0])].__getitem__, shape=shape)
    data = torch.full(list(shape), _nothing(dtype), dtype=dtype)
    here.block.shared_bytes += data.numel() * data.element_size()
    return Shared(data, layout)


def _language(real: Any) -> Any:
    "Gluon's names that a kernel uses."
    return types.SimpleNamespace(
        constexpr=lambda value: value, int32=torch.int32, int64=torch.int64, where=_where, sum=lambda values, axis: int(values.sum(axis)),
        num_warps=lambda: here.warps, atomic_add=_atomic_add, store=_store, convert_layout=lambda values, layout: values,
        float32=torch.float32, static_range=range, cdiv=lambda a, b: -(-a // b), load=_load, exp=torch.exp,
        arange=lambda start, end, layout=None: torch.arange(start, end).as_subclass(Values),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype).as_subclass(Values),
        inline_asm_elementwise=lambda asm, constraints, args, dtype, is_pure, pack: args[0].to(dtype),  # all there is are conversions
        float8e4nv=torch.float8_e4m3fn, bfloat16=torch.bfloat16,
        program_id=lambda axis: here.block.program, num_programs=lambda axis: here.block.programs,
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
        **{n: getattr(real, n) for n in ("BlockedLayout", "SliceLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMASharedLayout",
                                         "NVMMADistributedLayout", "SwizzledSharedLayout")})


def _simulated(module: Any) -> dict[str, Any]:
    "The module's globals, in which each Gluon function is a plain one and the language is this file's."
    names = dict(vars(module))
    names |= dict(
        gl=_language(names["gl"]), gdc_wait=lambda: None, gdc_launch_dependents=lambda: None, fence_async_shared=lambda: None,
        libdevice=types.SimpleNamespace(fast_dividef=torch.div), warpgroup_mma=_mma, warpgroup_mma_wait=_mma_wait,
        tma=types.SimpleNamespace(async_copy_global_to_shared=_tma_load, async_copy_shared_to_global=_tma_store, store_wait=_store_wait),
        mbarrier=types.SimpleNamespace(init=_init, wait=_wait, expect=_expect, arrive=_arrive, MBarrierLayout=lambda: None),
        async_copy=types.SimpleNamespace(async_copy_global_to_shared=_async_copy, mbarrier_arrive=_copies_arrive))
    for name, f in list(names.items()):
        if isinstance(f, GluonJITFunction):
            names[name] = types.FunctionType(f.fn.__code__, names, name, f.fn.__defaults__, f.fn.__closure__)
    return names


def simulate(kernel: GluonJITFunction[Any], module: Any, programs: int, *args: Any, warps: int = 4, seed: int = 0) -> int:
    "Run all programs at once; tensors are pointers. Returns the bytes of shared memory of one."
    function = _simulated(module)[kernel.fn.__name__]
    def described(a: Any) -> Any:
        if isinstance(a, torch.Tensor): return Address(a.as_strided((a.untyped_storage().nbytes() // a.element_size(),), (1,), 0), a.storage_offset())
        if hasattr(a, "block_shape"): return types.SimpleNamespace(**vars(a), dtype=a.base.dtype)
        return a
    def run(program: int) -> int:
        _enter(Block(program, programs, random.Random(seed * 1000 + program)), warps)
        function(*[described(a) for a in args])
        return here.block.shared_bytes
    with ThreadPoolExecutor(programs) as pool: return max(pool.map(run, range(programs)))
