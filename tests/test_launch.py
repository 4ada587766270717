"""The short way to launch a kernel, with a compiled kernel that only takes notes."""
from types import SimpleNamespace

import pytest
import torch
import triton

from dispatch.core import launch as module
from dispatch.core.launch import aligned, launch, on_device


class Kernel(triton.runtime.JITFunction):
    "Stands in for a @triton.jit function: notes each launch of either way."
    def __init__(self) -> None: self.long: list = []; self.short: list = []

    def __getitem__(self, grid: tuple[int]):
        def run(*args, **options):
            self.long.append((grid, args, options))
            return SimpleNamespace(function=7, packed_metadata=(4, 1, 0), run=lambda *a: self.short.append(a))
        return run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 42, raising=False)


@pytest.mark.usefixtures("no_gpu")
def test_the_second_call_of_a_kind_goes_the_short_way() -> None:
    kernel, x, y = Kernel(), torch.zeros(4), torch.zeros(4)
    launch(kernel, "key", 3, (x,), (5, True), num_warps=4)
    launch(kernel, "key", 9, (y,), (6, True), num_warps=4)
    assert kernel.long == [((3,), (x, 5, True), {"num_warps": 4})]
    assert kernel.short == [(9, 1, 1, 42, 7, (4, 1, 0), None, None, None, y.data_ptr(), 6, True)]
    launch(kernel, "another key", 3, (x,), (5, True))
    other = Kernel()
    launch(other, "key", 3, (x,), (5, True))
    assert (len(kernel.long), len(other.long), len(kernel.short)) == (2, 1, 1)


@pytest.mark.usefixtures("no_gpu")
def test_a_profilers_hook_sees_every_launch() -> None:
    kernel, x, hook = Kernel(), torch.zeros(4), lambda *a: None
    hooks = triton.knobs.runtime.launch_enter_hook
    launch(kernel, "key", 1, (x,), ())
    hooks.add(hook)
    try: launch(kernel, "key", 1, (x,), ())
    finally: hooks.remove(hook)
    assert (len(kernel.long), len(kernel.short)) == (2, 0)


def test_alignment_is_part_of_a_key() -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert aligned(x) == 1
    assert aligned(x[1:]) == aligned(x[4:]) == aligned(None) == 0
    assert aligned(x, x[1:], x[8:]) == 0b101


def test_a_cpu_needs_no_current_device() -> None:
    with on_device(torch.zeros(1)): pass


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 16, 100])
def test_misaligned_and_aligned_calls_do_not_mix(tokens: int, shared: bool) -> None:
    "The same sizes again and again, while addresses, strides and dtypes change: each call must get code that fits it."
    from dispatch.core.timing import check_agreement
    from dispatch.kernels.fused_moe import fused_moe
    from dispatch.kernels.reference import example_inputs, random_experts, reference_moe
    for dtype in (torch.bfloat16, torch.float16):
        x, w13, w2, tw, ti = example_inputs(tokens, 16, 4, 256, 128, dtype, "cuda")
        more = dict(zip(("shared_gate_up_proj", "shared_down_proj"), (w[0] for w in random_experts(1, 256, 256, dtype, "cuda")), strict=True)) if shared else {}
        want = reference_moe(x, w13, w2, tw, ti, **more)
        odd = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view_as(x).copy_(x)
        odd13 = torch.empty(w13.numel() + 1, dtype=dtype, device="cuda")[1:].view_as(w13).copy_(w13)
        wide = torch.empty(tokens, 512, dtype=dtype, device="cuda")[:, :256].copy_(x)
        turned = w13.mT.contiguous().mT
        for _ in range(2):
            for rows, weights, index in ((x, w13, ti), (odd, w13, ti), (x, odd13, ti.int()), (wide, w13, ti), (x, turned, ti), (x, w13, ti.int())):
                check_agreement(fused_moe(rows, weights, w2, tw, index, **more), want, "fused_moe")
