"""Compile every Triton kernel of the package for the architectures it claims, without a GPU: python tests/aot.py.

Run in a process of its own, without TRITON_INTERPRET. Prints one JSON line a compilation: kernel, arch, case, shared memory in
bytes, the limit of that arch, the matrix instructions found in the PTX, and for kernels written to the registers' limit what they spill.
"""
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

import dispatch
from dispatch.kernels.gemv import _piece
from dispatch.kernels.grouped_gemm import naive_config
from dispatch.kernels.hopper_bytes import bytes_sizes, bytes_stages
from dispatch.kernels.persistent import persistent_config
from dispatch.kernels.swap_ab import swap_config

SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}  # bytes a block can opt in to, CUDA C++ programming guide
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


def sum_cases(arch: int):
    for dtype in TYPES:
        yield dtype, dict(y=f"*{dtype}", out=f"*{dtype}", index="*i64", stride_oh="constexpr:1"), dict(K=6, BLOCK=1024), (4, 3)


def read_cases(arch: int):
    yield "int32", dict(x="*i32", out="*i32"), dict(BLOCK=2048, STEPS=8), (4, 3)


def variants(arch: int):
    "Few, telling: name, dtype, (E, K, S, H, I), the index's type, and argument types of its own."
    narrow = dict.fromkeys(("up_offset", "stride_xt", "stride_we", "stride_wn", "shared_offset"), "i32")
    unit = dict(stride_xh="constexpr:1", stride_wh="constexpr:1", stride_wi="constexpr:1", stride_oh="constexpr:1")
    turned = dict(stride_wn="constexpr:1", stride_wh="i64", stride_wi="i64")
    yield "deepseek", "bf16", (64, 6, 2, 2048, 1408), "i64", unit | narrow
    yield "deepseek v3", "bf16", (256, 8, 0, 7168, 2048), "i32", unit
    if arch in (86, 89): return  # one code path; the rest is compiled for 80 and 90
    yield "odd", "fp16", (60, 4, 2, 50, 33), "i64", unit | dict.fromkeys(("stride_xt", "stride_we", "stride_wn", "shared_offset"), "i64!")
    yield "turned weights", "bf16", (8, 2, 2, 1000, 344), "i32", unit | turned


def swap_cases(arch: int, down: bool):
    "Every configuration that swap_config can give on that architecture; sizes, strides and index take turns."
    capability, seen = divmod(arch, 10), set()
    kinds, turn = list(variants(arch)), 0
    calls = [(T, 8, E) for E in (64, 384) for T in (1, 20, 32, 33, 40, 64, 100, 200, 1000)]
    for size, quantized in ((2, None), (4, None), (2, "i8"), (2, "fp8e4nv"), (4, "i8")):
        if quantized == "fp8e4nv" and arch < 89: continue
        for T, slots, E in calls:
            c = swap_config(T, slots, E, size, capability, quantized is not None)
            if (c, quantized) in seen: continue
            seen.add((c, quantized))
            name, dtype, (experts, K, S, H, I), index, types = kinds[turn % len(kinds)]
            turn += 1
            if size == 4: dtype = "fp32"
            product = c.down if down else c.gate_up
            meta = dict(E=experts, K=K, S=S, H=H, I=I, BINS=max(32, triton.next_power_of_2(experts + S)), FIND=256 if c.find else 0, SMALL=c.small,
                        BIG=c.big, BLOCK_N=product.block_n, BLOCK_K=product.block_k, STAGES_SMALL=product.stages_small,
                        STAGES_BIG=product.stages_big, PDL=c.pdl)
            tables = dict.fromkeys(("order", "tile_expert", "tile_row", "tile_rows"), f"*{index}" if c.find else "*i32")  # with find the index stands in
            pointers = dict.fromkeys(("x", "w", "h", "y", "scales"), f"*{dtype}") | dict(top_k_weights="*fp32", index=f"*{index}")
            if quantized: pointers |= dict(w=f"*{quantized}", scales="*fp32", scale_offset="i64")
            case = f"{dtype}, weights {quantized or dtype}, {name}, find {c.find}, {c.small}/{c.big}, {T} tokens"
            yield case, types | pointers | tables, meta, (product.num_warps, 3)


def persistent_cases(arch: int, down: bool):
    "Every configuration that persistent_config can give on that architecture, persistent and not; odd sizes and strides with large tiles."
    for (name, own, (E, K, S, H, I), _, types), (dtype, size), rows, persistent in itertools.product(
            variants(arch), TYPES.items(), (10, 100), (True, False)):
        if name != "deepseek" and (dtype != own or rows == 10): continue
        c = replace(persistent_config(rows * (E + S), E + S, size, divmod(arch, 10)), persistent=persistent)
        blocks = c.down if down else c.gate_up
        meta = dict(E=E, K=K, S=S, H=H, I=I, BINS=triton.next_power_of_2(E + S), BLOCK_M=c.block_m, BLOCK_N=blocks.block_n,
                    BLOCK_K=blocks.block_k, GROUP=c.group, PERSISTENT=persistent, PDL=c.pdl)
        tables = dict.fromkeys(("order", "ends", "tile_expert", "tile_row"), "*i32!")  # pieces of one tensor
        pointers = dict.fromkeys(("x", "w", "h", "y"), f"*{dtype}") | dict(top_k_weights="*fp32")
        case = f"{dtype}, {name}, {rows} rows an expert, {'persistent' if persistent else 'a program a unit'}"
        yield case, types | tables | pointers, meta, (blocks.num_warps, blocks.num_stages)


def gemv_cases(arch: int, down: bool):
    for name, dtype, (E, K, S, H, I), index, types in [*variants(arch), ("small", "fp32", (64, 6, 2, 2048, 1408), "i64", {})]:
        meta = dict(E=E, K=K, S=S, H=H, I=I, PDL=arch >= 90)
        for weights in [dtype, *(["i8", "fp8e4nv"] if arch >= 89 and name != "small" else ["i8"])]:
            pointers = dict(x=f"*{dtype}", w=f"*{weights}", out=f"*{dtype}", h="*fp32", top_k_weights="*fp32", index=f"*{index}",
                            scales=f"*{weights}" if weights == dtype else "*fp32")
            meta["FAST"] = weights == "i8"
            if weights == dtype: cuts = [(4, 512, 4), (2, 512, 1)] if down else [(1, _piece(H, 2048), 1)]
            else: cuts = [(8, 512, 4)] if down else [(2, _piece(H, 2048), 1)]
            for block_n, block_k, warps in cuts:
                if down: meta["EARLY"], block_k = 1, min(block_k, triton.next_power_of_2(I))
                yield f"{dtype}, {weights}, {name}, {block_n} rows", types | pointers, meta | dict(BLOCK_N=block_n, BLOCK_K=block_k), (warps, 3)
    if down and arch in (80, 90):
        yield "bf16, I of 14336", types | pointers, dict(E=8, K=2, S=0, H=4096, I=14336, BLOCK_N=2, BLOCK_K=2048, EARLY=1, FAST=False, PDL=arch >= 90), (4, 3)


def sort_cases(arch: int):
    tables = dict.fromkeys(("order", "ends", "tile_expert", "tile_row", "tile_rows", "position", "count", "counts"), "*i32!")  # pieces of one tensor
    for index, E, S, chunk, several in (("i64", 64, 2, 2048, 32), ("i64", 512, 1, 2048, 4), ("i32", 256, 0, 128, 0)):
        for pad in (1, 64):
            meta = dict(E=E, K=6, S=S, BINS=triton.next_power_of_2(E + S), BLOCK=64, CHUNK=chunk, LINES=several, PAD=pad, PDL=arch >= 90)
            yield f"{index}, E={E}, pad {pad}", dict(index=f"*{index}") | tables, meta, (4, 3)


def count_cases(arch: int):
    for index, E, S in (("i64", 64, 2), ("i32", 256, 0)):
        meta = dict(E=E, K=6, S=S, BINS=triton.next_power_of_2(E + S), CHUNK=2048, PDL=arch >= 90)
        yield f"{index}, E={E}", dict(index=f"*{index}", counts="*i32!"), meta, (4, 3)


def sum_rows_cases(arch: int):
    for name, dtype, (E, K, S, H, _), index, types in variants(arch):
        meta = dict(E=E, K=K, S=S, H=H, BLOCK=1024, PDL=arch >= 90)
        yield f"{dtype}, {name}", types | dict(y=f"*{dtype}", out=f"*{dtype}", index=f"*{index}"), meta, (4, 3)


def described(dtype: str, block: list[int]) -> str:
    "The type of a copy engine's descriptor, whose rows fill their swizzle."
    size = 2 if dtype in TYPES else 1
    return f"tensordesc<{dtype}{block},{NVMMASharedLayout(size * block[-1], 8 * size, len(block))!r}>"


def hopper_cases(down: bool):
    "With and without shared experts, in either order."
    tables = dict.fromkeys(("order", "tile_expert", "tile_row", "tile_rows", "tiles"), "*i32!")
    cases = (("bf16", "bf16", (64, 6, 0, 2048, 1408)), ("fp16", "fp16", (60, 4, 2, 2048, 1408)), ("bf16", "bf16", (8, 2, 0, 4096, 14336)),
             ("bf16", "fp8e4nv", (64, 6, 0, 2048, 1408)), ("fp16", "fp8e4nv", (60, 4, 2, 1984, 320)))
    for dtype, kind, (E, K, S, H, I) in cases:
        depth, fp8 = (128, True) if kind == "fp8e4nv" else (64, False)
        rows, w = described(dtype, [64, 64]), described(kind, [1, 256, depth] if down else [1, 16, 2, 8, depth])
        scales = dict.fromkeys(("x_scales", "h_scales", "scales", "shared_scales"), "*fp32" if fp8 else f"*{dtype}")
        types = tables | scales | dict(x=f"*{kind}", w_desc=w, shared_desc=w, y_desc=rows, stride_x="i32!")
        types["h_desc"] = described(kind, [64, depth]) if down else rows
        meta = dict(DEPTH=depth, E=E, S=S, H=H, I=I, STAGES=4, GROUP=16 if E == 8 else 1, PDL=True) | ({} if down else dict(SLOTS=K + S))
        yield f"{dtype}, {kind}, E={E}, S={S}", types, meta, (4, 3)


def hopper_bytes_cases(down: bool):
    tables = dict.fromkeys(("order", "tile_expert", "tile_row", "tile_rows", "tiles"), "*i32!")
    for dtype, kind, rows, (K, S, H, I) in (("bf16", "i8", 1, (6, 2, 2048, 1408)), ("fp16", "fp8e4nv", 20, (4, 0, 1984, 320)),
                                            ("bf16", "i8", 100, (6, 0, 2048, 1408)), ("bf16", "fp8e4nv", 100, (2, 1, 4096, 14336))):
        w, sizes = described(kind, [1, 64, 128] if down else [1, 4, 2, 8, 128]), bytes_sizes(rows)
        types = tables | dict(x="*i32", h="*i32" if down else f"*{dtype}", y=f"*{dtype}", scales="*fp32", shared_scales="*fp32", w_desc=w, shared_desc=w)
        types |= {f"{of}{octet}": w for of in "ws" for octet in range(4)}
        meta = dict(E=8, S=S, H=H, I=I, SIZES=sizes, STAGES=bytes_stages(sizes), GROUP=16 if K == 2 else 1, PDL=True, x_layout=NVMMASharedLayout(128, 16, 2))
        yield f"{dtype}, {kind}, K={K}, {rows} rows an expert", types, meta | ({} if down else dict(SLOTS=K + S)), (4, 3)


def interleave_cases(arch: int):
    for H in (2048, 1984): yield f"H={H}", dict(x="*i32", out="*i32"), dict(WORDS=H // 2, PADDED=1024, BLOCK=1024, PDL=True), (4, 3)


def quantize_rows_cases(arch: int):
    for dtype, N in (("bf16", 2048), ("fp16", 1408)):
        yield f"{dtype}, {N}", dict(x=f"*{dtype}", values="*fp8e4nv", scales="*fp32"), dict(N=N, BLOCK=2048, PDL=True), (4, 3)


def fused_cases(which: str):
    "The small kernels around attention and experts, at DeepSeekMoE-16B's sizes."
    pointers = {"add_norm": "x y weight out", "rope": "qkv q keys values", "scores": "x router", "linear": "x w out", "embed": "table x", "best": "logits"}
    meta = {"add_norm": dict(ADD=True, SOME=True, H=2048), "embed": dict(H=2048), "best": dict(V=102400, BLOCKS=25, BLOCK=4096),
            "keep": dict(BLOCKS=25, BLOCK=32), "rope": dict(HEADS=16, KV=16, D=128, BLOCK=16), "scores": dict(E=64, H=2048),
            "topk": dict(E=64, K=6, NORM=False, BLOCK=64), "linear": dict(N=6144, K=2048, ROWS=2)}[which]
    others = {"rope": dict(positions="*i32!", places="*i32!", cos="*fp32", sin="*fp32"), "scores": dict(scores="*fp32", T="i32"),
              "topk": dict(scores="*fp32", places="*i32!", weights="*fp32", index="*i32!", scale="fp32"), "linear": dict(T="i32"),
              "add_norm": dict(eps="fp32", rows="*i32!"), "embed": dict(ids="*i32!", last="*i64"), "best": dict(values="*fp32", index="*i32"),
              "keep": dict(values="*fp32", index="*i32", slots="*i32!", tokens="*i64", last="*i64")}[which]
    def cases(arch: int):
        for dtype in ("bf16", "fp16"):
            types = dict.fromkeys(pointers.get(which, "").split(), f"*{dtype}") | others
            yield dtype, types, dict(BLOCK=2048) | meta | ({} if which in ("embed", "best", "keep") else dict(PDL=arch >= 90)), (
                1 if which in ("linear", "topk", "keep") else 4, 3)
    return cases


def combine_cases(arch: int):
    for name, dtype, (E, K, S, H, _), index, types in variants(arch):
        pointers = dict(y=f"*{dtype}", out=f"*{dtype}", index=f"*{index}", position="*i32!", top_k_weights="*fp32")
        yield f"{dtype}, {name}", types | pointers, dict(E=E, K=K, S=S, H=H, BLOCK_N=2048, PDL=arch >= 90), (8, 3)


# kernel → (architectures it claims, its cases there); an argument that a case doesn't type is a 64-bit stride or a 32-bit size
KERNELS = {
    "_gate_up_kernel": (FALLBACK, lambda arch: naive_cases("x", "w", "h", K=6)),
    "_down_kernel": (FALLBACK, lambda arch: naive_cases("h", "w", "y")),
    "_sum_kernel": (FALLBACK, sum_cases),
    "_sort_kernel": (FALLBACK, sort_cases),
    "_count_kernel": (FALLBACK, count_cases),
    "_gemv_gate_up_kernel": (FALLBACK, lambda arch: gemv_cases(arch, down=False)),
    "_gemv_down_kernel": (FALLBACK, lambda arch: gemv_cases(arch, down=True)),
    "_swap_gate_up_kernel": (FALLBACK, lambda arch: swap_cases(arch, down=False)),
    "_swap_down_kernel": (FALLBACK, lambda arch: swap_cases(arch, down=True)),
    "_persistent_gate_up_kernel": ((*FALLBACK, 120), lambda arch: persistent_cases(arch, down=False)),
    "_persistent_down_kernel": ((*FALLBACK, 120), lambda arch: persistent_cases(arch, down=True)),
    "_sum_rows_kernel": (FALLBACK, sum_rows_cases),
    "_hopper_gate_up_kernel": ((90,), lambda arch: hopper_cases(down=False)),
    "_hopper_down_kernel": ((90,), lambda arch: hopper_cases(down=True)),
    "_hopper_bytes_gate_up_kernel": ((90,), lambda arch: hopper_bytes_cases(down=False)),
    "_hopper_bytes_down_kernel": ((90,), lambda arch: hopper_bytes_cases(down=True)),
    "_interleave_kernel": ((90,), interleave_cases),
    "_quantize_rows_kernel": ((90,), quantize_rows_cases),
    "_add_norm_kernel": (FALLBACK, fused_cases("add_norm")),
    "_rope_to_cache_kernel": (FALLBACK, fused_cases("rope")),
    "_scores_kernel": (FALLBACK, fused_cases("scores")),
    "_topk_kernel": (FALLBACK, fused_cases("topk")),
    "_linear_kernel": (FALLBACK, fused_cases("linear")),
    "_embed_kernel": (FALLBACK, fused_cases("embed")),
    "_best_kernel": (FALLBACK, fused_cases("best")),
    "_keep_kernel": (FALLBACK, fused_cases("keep")),
    "_combine_kernel": ((90,), combine_cases),
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
    "One kernel for one architecture, with every pointer, stride and size divisible by 16 but those whose type ends in `!`."
    constants, signature, attrs = dict(meta), {}, {}
    for i, name in enumerate(fn.arg_names):
        kind = types.get(name, "i64" if name.startswith("stride") else "i32")
        if kind.startswith("constexpr:"): constants[name] = int(kind.split(":")[1])
        signature[name] = "constexpr" if name in constants else kind.removesuffix("!")
        even = kind.startswith(("*", "i64")) or name in ("H", "I") or name.startswith("stride") or name.endswith("offset")
        if even and not kind.endswith("!") and name not in constants and not kind.startswith("tensordesc"): attrs[(i,)] = [["tt.divisibility", 16]]
    options = dict(num_warps=launch[0], num_stages=launch[1])
    if isinstance(fn, GluonJITFunction):
        source, options = GluonASTSource(fn, signature, constants, attrs), dict(num_warps=launch[0], maxnreg=80 if "bytes" in fn.fn.__name__ else 168)
    else: source = ASTSource(fn, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def spilled(cubin: bytes) -> int:
    "Bytes of a thread's stack and local memory, by cuobjdump."
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        report = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"\b(?:STACK|LOCAL):(\d+)", report))


def compile_one(job: tuple[str, int, int]) -> str:
    "The JSON line of one compilation: kernel, arch, number of its case."
    name, arch, i = job
    case, types, meta, launch = list(KERNELS[name][1](arch))[i]
    done = compile_case(kernels_of_the_package()[name], arch, types, meta, launch)
    mma = sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)", done.asm["ptx"])))
    spills = spilled(done.asm["cubin"]) if name.startswith("_hopper") else None
    return json.dumps(dict(kernel=name, arch=arch, case=case, shared=done.metadata.shared, limit=SHARED_LIMIT[arch], mma=mma, spilled=spills))


def main() -> None:
    if missing := kernels_of_the_package().keys() - KERNELS.keys(): sys.exit(f"no compile cases for {', '.join(sorted(missing))}; add them to tests/aot.py")
    jobs = [(name, arch, i) for name, (archs, cases) in KERNELS.items() for arch in archs
            for i in range(1 if arch == 89 else len(list(cases(arch))))]  # 89 takes the path of 86: one case shows that it compiles
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for line in pool.map(compile_one, jobs, chunksize=4): print(line, flush=True)


if __name__ == "__main__": main()
