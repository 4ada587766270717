"""Compile every Triton kernel of the package for the architectures it claims, without a GPU: python tests/aot.py.

Run in a process of its own, without TRITON_INTERPRET. Prints one JSON line a compilation: kernel, arch, case, shared memory in
bytes, the limit of that arch, and the matrix instructions found in the PTX.
"""
import importlib
import json
import pkgutil
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import dispatch
from dispatch.kernels.grouped_gemm import naive_config

SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448}  # bytes a block can opt in to, CUDA C++ programming guide
FALLBACK = (80, 86, 89, 90)
TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
GEMM = dict(pairs="*i32", ends="*i32", tile_expert="*i32", tile_row="*i32", top_k_weights="*fp32", H="i32", I="i32",
            stride_xh="constexpr:1", stride_wh="constexpr:1", stride_wi="constexpr:1")


def naive_cases(*pointers: str, **fixed: int):
    "The naive kernels under each tile configuration that naive_config can give."
    for dtype, size in TYPES.items():
        for rows in (1, 24, 48, 1000):
            c = naive_config(rows * 64, 64, size)
            meta = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, **fixed)
            types = GEMM | dict.fromkeys(pointers, f"*{dtype}")
            yield f"{dtype}, {rows} rows an expert", types, meta, (c.num_warps, c.num_stages)
    # a size of 1 reaches a kernel as a constant, which has no methods
    yield "fp32, H and I of 1", types | dict(H="constexpr:1", I="constexpr:1"), meta, (c.num_warps, c.num_stages)


def sum_cases():
    for dtype in TYPES:
        yield dtype, dict(y=f"*{dtype}", out=f"*{dtype}", index="*i64", stride_oh="constexpr:1"), dict(K=6, BLOCK=1024), (4, 3)


def read_cases():
    yield "int32", dict(x="*i32", out="*i32"), dict(BLOCK=2048, STEPS=8), (4, 3)


# kernel → (architectures it claims, its cases); an argument that a case doesn't type is a 64-bit stride or a 32-bit size
KERNELS = {
    "_gate_up_kernel": (FALLBACK, lambda: naive_cases("x", "w", "h", K=6)),
    "_down_kernel": (FALLBACK, lambda: naive_cases("h", "w", "y")),
    "_sum_kernel": (FALLBACK, sum_cases),
    "_read_kernel": (FALLBACK, read_cases),
}


def kernels_of_the_package() -> dict[str, triton.runtime.JITFunction]:
    "Every `_name_kernel` in dispatch, by name."
    found = {}
    for module in pkgutil.walk_packages(dispatch.__path__, "dispatch."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, triton.runtime.JITFunction) and name.endswith("_kernel"): found[name] = value
    return found


def compile_case(fn, arch: int, types: dict, meta: dict, launch: tuple[int, int]):
    "One kernel for one architecture, with every pointer and size divisible by 16."
    constants, signature, attrs = dict(meta), {}, {}
    for i, name in enumerate(fn.arg_names):
        kind = types.get(name, "i64" if name.startswith("stride") else "i32")
        if kind.startswith("constexpr:"): constants[name] = int(kind.split(":")[1])
        signature[name] = "constexpr" if name in constants else kind
        if name not in constants and (kind.startswith(("*", "i64")) or name in ("H", "I")): attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=launch[0], num_stages=launch[1]))


def main() -> None:
    kernels = kernels_of_the_package()
    if missing := kernels.keys() - KERNELS.keys(): sys.exit(f"no compile cases for {', '.join(sorted(missing))}; add them to tests/aot.py")
    for name, (archs, cases) in KERNELS.items():
        for arch in archs:
            for case, types, meta, launch in cases():
                done = compile_case(kernels[name], arch, types, meta, launch)
                mma = sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)", done.asm["ptx"])))
                row = dict(kernel=name, arch=arch, case=case, shared=done.metadata.shared, limit=SHARED_LIMIT[arch], mma=mma)
                print(json.dumps(row), flush=True)


if __name__ == "__main__": main()
