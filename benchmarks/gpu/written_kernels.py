"""What a GPU's compiler would be given for each compiled chain of a model, and how wide it reads and writes; no GPU.

    python benchmarks/gpu/written_kernels.py CONFIG [KEY=VALUE...] [--out FOLDER]

One micro-batch of the job's first rank is traced at its true size on a device that is not there, with train.compile=on.
For each chain that it calls, inductor writes
its Triton kernels as for an H200, with tile sizes as its heuristics begin with, and Triton compiles them to PTX. One
JSON line a kernel: the chain, the tiles, and how many instructions of a thread load and store how many bytes. A chain
whose rows are not aligned, or whose sizes a compiler knows too little of, shows by stores of one or two bytes.

Triton is not among the project's dependencies: `make bench-peers` brings it into build/peers. Times are not told:
`make gpu PART=3 CHECK=kernels` measures them, on a GPU.
"""

import argparse
import ast
import importlib.util
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2] / "build" / "peers"))

H200 = SimpleNamespace(  # what inductor asks a driver for
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    warp_size=32,
    total_memory=141 * 10**9,
    L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    gcnArchName="",
)
CAPABILITY = 90
HEAD = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

@triton.jit
"""
KERNEL = re.compile(r"@triton_heuristics\.(\w+)\((.*?)@triton\.jit\n(def (triton_\w+)\(.*?)\n'''", re.DOTALL)
ACCESS = re.compile(r"\b(ld|st)\.global[\w:.]*?(?:\.v(\d))?\.[bfus](\d+)\b")
Shaped = tuple[tuple[int, ...], tuple[int, ...], Any]  # shape, strides, dtype


@dataclass
class Kernel:
    """One kernel of a chain. ``loads`` and ``stores``: bytes of an instruction -> how many of a thread."""

    chain: str
    kernel: str
    kind: str  # as inductor names it: pointwise, reduction, persistent_reduction
    sizes: dict[str, int]
    tiles: dict[str, int]
    loads: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="write the Triton sources into this folder")
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        print("written_kernels: needs triton; `make bench-peers` brings it into build/peers", file=sys.stderr)
        return 2
    from launcher.errors import UserError
    from launcher.estimate.device import NoShim, open_device

    try:
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
        open_device()  # before torch is imported
        found = chains_of(arguments.config, arguments.overrides)
    except OSError as error:
        print(
            f"written_kernels: --out={arguments.out} cannot be a folder ({error.strerror}); name a new one",
            file=sys.stderr,
        )
        return 2
    except (NoShim, UserError) as error:
        print(f"written_kernels: {error}", file=sys.stderr)
        return 2
    for name, function, tensors, rows_vary in found:
        source = written(function, tensors, rows_vary=rows_vary)
        if arguments.out is not None:
            (arguments.out / f"{name.replace(' ', '_')}.py").write_text(source)
        for kernel in kernels_in(name, source):
            print(json.dumps(asdict(kernel)), flush=True)
    return 0


def chains_of(config_path: Path, overrides: Sequence[str]) -> list[tuple[str, Callable[..., Any], list[Shaped], bool]]:
    """Every chain that one micro-batch of a config calls: its name, function, tensors, and whether its rows vary."""
    from launcher.commands.profile import load_for_job
    from launcher.estimate.pass_over import trace_rank
    from modeling.kernels import fuse

    config, world_size = load_for_job(config_path, [*overrides, "train.compile=on"])
    seen: dict[str, list[Shaped]] = {}
    run = fuse.run

    def run_and_keep(name: str, tensors: Sequence[Any]) -> Any:
        seen.setdefault(name, [(tuple(each.shape), tuple(each.stride()), each.dtype) for each in tensors])
        return run(name, tensors)

    with patch.object(fuse, "run", run_and_keep):
        trace_rank(config, world_size, 0)
    chains = {name: fuse.chain_named(name) for name in seen}
    return [(name, chain.function, seen[name], chain.rows_vary) for name, chain in chains.items()]


def written(function: Callable[..., Any], tensors: Sequence[Shaped], *, rows_vary: bool) -> str:
    """The module that inductor writes for a function of such tensors, whose first dims vary if ``rows_vary``."""
    import torch
    from torch._dynamo.source import ConstantSource
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

    def made(number: int, given: Shaped) -> torch.Tensor:
        shape, stride, dtype = given
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
        if not rows_vary:
            return tensor
        dims = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)]
        sizes, strides, _ = shapes.create_symbolic_sizes_strides_storage_offset(
            tensor, ConstantSource(f"tensor_{number}"), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)
        )
        return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")

    for passes in (joint_graph, post_grad):
        passes.lazy_init()  # patterns are traced on the device that there is
    with torch.no_grad(), absent_h200(), config.patch(joint_graph_constant_folding=False):  # which computes there
        with mode:
            inputs = [made(number, given) for number, given in enumerate(tensors)]
        trace = make_fx(function, select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True)
        module = _recursive_joint_graph_passes(trace(*inputs))
        with V.set_fake_mode(mode):
            _recursive_post_grad_passes(module, is_inference=True)
        graph = GraphLowering(module, shape_env=shapes)
        handlers = V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext())
        with handlers[0], handlers[1], handlers[2], mode:
            graph.run(*inputs)
            source, _ = graph.codegen()
    return source.value


def absent_h200() -> Any:
    """What inductor asks of torch.cuda and of Triton's driver, answered as for an H200."""
    import contextlib

    import torch
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._dynamo.device_interface import CudaInterface
    from torch.utils import _triton

    answers: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "is_available": lambda: True,
                "device_count": lambda: 1,
                "current_device": lambda: 0,
                "get_device_properties": lambda *_: H200,
                "get_device_capability": lambda *_: (H200.major, H200.minor),
            },
        ),
        (
            CudaInterface,
            {
                "is_available": staticmethod(lambda: True),
                "current_device": staticmethod(lambda: 0),
                "get_device_properties": staticmethod(lambda *_: H200),
                "get_compute_capability": staticmethod(lambda *_: CAPABILITY),
                "is_triton_capable": staticmethod(lambda *_: True),
                "raise_if_triton_unavailable": staticmethod(lambda *_: None),
            },
        ),
        (CudaInterface.Worker, {"get_device_properties": staticmethod(lambda *_: H200)}),
        (_triton, {"triton_hash_with_backend": lambda: "none"}),
        (fake_tensor, {"init_gpu_context": lambda device: None}),
    ]
    stack = contextlib.ExitStack()
    for where, named in answers:
        stack.enter_context(patch.multiple(where, create=True, **named))
    return stack


def kernels_in(chain: str, source: str) -> Iterator[Kernel]:
    """The Triton kernels of a module that inductor wrote, and what their PTX loads and stores."""
    for kind, options, body, name in KERNEL.findall(source):
        sizes = literal(options, r"size_hints=(\{[^}]*\})")
        signature = literal(options, r"'signature': (\{[^}]*\})")
        aligned = literal(options, r"'configs': \[(\{[^}]*\})\]")
        hint = re.search(r"ReductionHint\.(\w+)", options)
        tiles = tiles_for(kind, hint[1] if hint else "", sizes)
        tiles = {block: tiles.get(block, 1) for block, dtype in signature.items() if dtype == "constexpr"}
        counts = Counter(
            (way, int(vector or 1) * int(bits) // 8)
            for way, vector, bits in ACCESS.findall(ptx_of(name, body, signature, tiles, aligned))
        )
        ways = ({width: count for (way, width), count in sorted(counts.items()) if way == one} for one in ("ld", "st"))
        yield Kernel(chain, name, kind, sizes, tiles, *ways)


def literal(text: str, pattern: str) -> Any:
    """The Python literal that a pattern's group finds."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return ast.literal_eval(found[1])


def tiles_for(kind: str, hint: str, sizes: dict[str, int]) -> dict[str, int]:
    """Tile sizes as inductor's heuristics begin with, before it times others on the device."""
    if kind == "pointwise":
        return {"XBLOCK": 64, "YBLOCK": 64} if "y" in sizes else {"XBLOCK": 1024}
    if kind == "persistent_reduction":
        return {"XBLOCK": 8 if hint.startswith("OUTER") else max(1, 1024 // sizes["r0_"])}
    if hint == "INNER":
        return {"XBLOCK": 1, "R0_BLOCK": min(2048, sizes["r0_"])}
    return {"XBLOCK": 64, "R0_BLOCK": 16 if hint.startswith("OUTER") else 64}


def ptx_of(name: str, body: str, signature: dict[str, str], tiles: dict[str, int], aligned: dict[Any, Any]) -> str:
    """A kernel's PTX for an H200. ``aligned``: which arguments inductor knows to be whole multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(HEAD + body)  # Triton reads a function's source from its file
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        places = {(list(signature).index(block),): size for block, size in tiles.items()}
        kernel = ASTSource(getattr(module, name), signature, places, aligned)
        return triton.compile(kernel, target=GPUTarget("cuda", CAPABILITY, H200.warp_size)).asm["ptx"]


if __name__ == "__main__":
    sys.exit(main())
