"""NVIDIA's compute-sanitizer finds no bad access and no race in one small call of each kernel."""
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPT = """
from dataclasses import replace
import torch
from dispatch.kernels.fused_moe import fused_moe
from dispatch.kernels.persistent import persistent_config, persistent_moe
from dispatch.kernels.reference import example_inputs, random_experts
from dispatch.kernels.swap_ab import swap_ab_moe, swap_config
for H, I in ((128, 64), (50, 33)):
    args = example_inputs(5, 8, 2, H, I, torch.bfloat16, "cuda")
    shared = dict(zip(("shared_gate_up_proj", "shared_down_proj"), (w[0] for w in random_experts(1, H, 2 * I, torch.bfloat16, "cuda")), strict=True))
    args[4][0, 0], args[4][1, 1] = -1, 8
    c = swap_config(5, 4, 10, 2, torch.cuda.get_device_capability())
    for kw in ({}, shared):
        for backend in ("naive", "gemv", "swap_ab"): fused_moe(*args, **kw, skip_invalid=True, backend=backend)
        for persistent in (True, False):
            how = replace(persistent_config(20, 10, 2, torch.cuda.get_device_capability()), persistent=persistent)
            persistent_moe(*args, **kw, skip_invalid=True, config=how)
        for find in (True, False): swap_ab_moe(*args, **kw, skip_invalid=True, config=replace(c, find=find))
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(tool: str) -> None:
    assert shutil.which("compute-sanitizer"), "compute-sanitizer is missing: it comes with the CUDA toolkit (apt-get install cuda-sanitizer-12-8 or newer)"
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "done" in done.stdout
