"""Without a GPU the Triton kernels run in the interpreter, and `gpu` tests are skipped: nothing else ever is."""
import os
from pathlib import Path

import pytest
import torch

CUDA_DEVICES = torch.cuda.device_count()
if not CUDA_DEVICES: os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: before dispatch is imported

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, need in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(mark) and need > CUDA_DEVICES:
                item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA GPU(s), found {CUDA_DEVICES}"))


@pytest.fixture
def root() -> Path:
    return ROOT
