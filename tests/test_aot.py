"""Every Triton kernel compiles, without a GPU, for each architecture that it claims, and fits its shared memory."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("aot.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, cwd=script.parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_claimed_architecture(compiled: list[dict]) -> None:
    import aot
    for kernel, (archs, _) in aot.KERNELS.items():
        assert {row["arch"] for row in compiled if row["kernel"] == kernel} == set(archs), kernel


def test_shared_memory_fits(compiled: list[dict]) -> None:
    assert not [row for row in compiled if row["shared"] > row["limit"]]


def test_tensor_cores_do_the_products(compiled: list[dict]) -> None:
    products = ("_gate_up_kernel", "_down_kernel", "_swap_gate_up_kernel", "_swap_down_kernel", "_persistent_gate_up_kernel", "_persistent_down_kernel")
    for row in compiled:
        if row["kernel"] in products and not row["case"].startswith("fp32"): assert row["mma"], row


def test_hopper_kernels_use_wgmma(compiled: list[dict]) -> None:
    rows = [row for row in compiled if row["kernel"].startswith(("_swap", "_persistent")) and row["arch"] == 90 and row["case"].startswith("bf16")]
    assert len(rows) > 8
    for row in rows: assert row["mma"] == ["wgmma.mma_async"], row


def test_gluon_kernels_use_wgmma_and_spill_nothing(compiled: list[dict]) -> None:
    rows = [row for row in compiled if row["kernel"].startswith("_hopper")]
    assert {row["kernel"] for row in rows} == {f"_hopper_{bytes_}{product}_kernel" for bytes_ in ("", "bytes_") for product in ("gate_up", "down")}
    assert len(rows) == 2 * 5 + 2 * 4
    for row in rows:  # four of the fetching warps' registers may wait in memory while a tile is fetched; those that multiply have room
        assert row["mma"] == ["wgmma.mma_async"], row
        assert row["spilled"] <= (16 if "bytes" in row["kernel"] else 0), row
