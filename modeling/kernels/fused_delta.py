"""The gated delta rule by flash-linear-attention's kernels (package fla-core), on CUDA, where it is installed.

Shape letters: B batch, S sequence, G key heads, H value heads, C channels of a key, W of a value, T all tokens.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from modeling.context import Context
from modeling.kernels.direct import REAL

PACKAGE, LEAST = "fla-core", (0, 6)
BROKEN = (ImportError, OSError, RuntimeError, AttributeError)  # what importing it may raise if a part is missing
CHUNK = 64  # tokens of a chunk, in its kernels and in Roundtable's own rule
FUNCTION = "ChunkGatedDeltaRuleFunction"  # its autograd function's name in a profile


@functools.cache
def fused_rule() -> Callable[..., Any] | None:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``; None where the package is not installed, or is broken."""
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        return None
    try:
        if tuple(int(part) for part in installed.split(".")[:2]) < LEAST:
            raise ImportError(f"version {installed} is older than {LEAST[0]}.{LEAST[1]}")
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (*BROKEN, ValueError) as error:
        warnings.warn(f"linear attention goes by torch's operations: {error} (package {PACKAGE})", stacklevel=2)
        return None


def is_expected() -> bool:
    """Whether a run on a GPU will have the package, as far as this process can tell.

    Without CUDA the answer is yes: a machine that only plans a run says nothing about the one that trains.
    """
    return torch.version.cuda is None or fused_rule() is not None


def takes_fused(v_BSHW: Tensor) -> bool:
    """Whether the package's kernels compute the rule: in 16 bits on CUDA, unless results must be deterministic.

    The kernels multiply fp32 in TF32, and are tuned anew at each start. Tensors without values, with which a run is
    planned on any machine, take the operators of ``told_alone``, which have the kernels' shapes, memory and work.
    """
    is_half = v_BSHW.dtype in (torch.bfloat16, torch.float16)
    if v_BSHW.device.type != "cuda" or not is_half or torch.are_deterministic_algorithms_enabled():
        return False
    return fused_rule() is not None if type(v_BSHW) in REAL else is_expected()


def fused_delta(
    q_BSGC: Tensor, k_BSGC: Tensor, v_BSHW: Tensor, fading_BSH: Tensor, writing_BSH: Tensor, context: Context
) -> Tensor:
    """The gated delta rule's output (B, S, H, W) by the package's kernels, which respect the documents' boundaries."""
    rows = [each.flatten(0, 1)[None] for each in (q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH)]
    if type(v_BSHW) not in REAL:
        return told_alone(*rows).view(v_BSHW.shape)
    rule = fused_rule()
    assert rule is not None
    boundaries, on_host = context.wide_boundaries  # it counts chunks: from a device's tensor it would have to wait
    out_1THW, _ = rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=boundaries, cu_seqlens_cpu=on_host)
    return out_1THW[0].view(v_BSHW.shape)


class RuleWork(NamedTuple):
    """The kernels' work in one pass over all tokens: FLOPs, elements moved, and launches (read in fla-core 0.6).

    ``room`` is the number of elements that the kernels allocate for themselves at once.
    """

    flops: float
    elements: float
    launches: int
    room: int

    @classmethod
    def forward(cls, n_tokens: int, n_keys: int, n_values: int, n_channels: int, width: int) -> "RuleWork":
        """The work of the forward pass.

        It computes unit lengths, each chunk's system with w and u, the states between chunks (h, and the new v), and
        outputs.
        """
        keys, values, between = n_values * n_channels, n_values * width, n_values * n_channels * width / CHUNK
        flops = 6.0 * CHUNK * between + CHUNK * (6.0 * keys + 4.0 * values)
        elements = 4.0 * n_keys * n_channels + 6.0 * keys + 6.0 * values + n_values * CHUNK + 2.0 * between
        return cls(n_tokens * flops, n_tokens * elements, 8, int(n_tokens * (keys + 2 * values + between)))

    @classmethod
    def backward(cls, n_tokens: int, n_keys: int, n_values: int, n_channels: int, width: int) -> "RuleWork":
        """The work of the backward pass.

        It computes w, u, h and the new v again, then the gradients by values, by h, by scores and by the system.
        """
        keys, values, between = n_values * n_channels, n_values * width, n_values * n_channels * width / CHUNK
        flops = 16.0 * CHUNK * between + CHUNK * (18.0 * keys + 10.0 * values)
        elements = 8.0 * n_keys * n_channels + 22.0 * keys + 15.0 * values + 2.0 * n_values * CHUNK + 4.0 * between
        return cls(n_tokens * flops, n_tokens * elements, 18, int(n_tokens * (5 * keys + 4 * values + 2 * between)))


def work_of_rule(q_1TGC: Tensor, v_1THW: Tensor, *, is_backward: bool) -> RuleWork:
    """The work of one pass over queries and values of these shapes."""
    _, n_tokens, n_keys, n_channels = q_1TGC.shape
    make = RuleWork.backward if is_backward else RuleWork.forward
    return make(n_tokens, n_keys, v_1THW.shape[2], n_channels, v_1THW.shape[3])


def told_alone(q_1TGC: Tensor, k_1TGC: Tensor, v_1THW: Tensor, fading_1TH: Tensor, writing_1TH: Tensor) -> Tensor:
    """The rule's output (1, T, H, W) for tensors without values.

    It saves for the backward pass what the package saves.
    """
    _library()
    return _Told.apply(q_1TGC, k_1TGC, v_1THW, fading_1TH, writing_1TH)


class _Told(Function):
    """(q, k, v, fading, writing) -> out, by operators that give shapes and compute nothing."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        out_1THW, *kept, _ = torch.ops.roundtable.gated_delta(*given)
        _, _, v_1THW, _, writing_1TH = given
        ctx.save_for_backward(*kept, v_1THW, writing_1TH)
        return out_1THW

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        *grads, _ = torch.ops.roundtable.gated_delta_backward(grad, *ctx.saved_tensors)
        return tuple(grads)


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, fading: Tensor, writing: Tensor) -> list[Tensor]:
    """The output; unit queries and keys, their lengths, sums of fading, the solved systems; and the room."""
    room = q.new_empty(work_of_rule(q, v, is_backward=False).room)
    lengths = [each.new_empty(each.shape[:-1], dtype=torch.float32) for each in (q, k)]
    kept = [torch.empty_like(q), torch.empty_like(k), *lengths, torch.empty_like(fading)]
    return [torch.empty_like(v), *kept, v.new_empty(*v.shape[:-1], CHUNK), room]


def _backward_shapes(grad: Tensor, *kept: Tensor) -> list[Tensor]:
    """The gradients by the forward pass's arguments, and the room."""
    q, k, _, _, sums, _, v, writing = kept
    room = q.new_empty(work_of_rule(q, v, is_backward=True).room)
    return [*(torch.empty_like(each) for each in (q, k, v, sums, writing)), room]


@functools.cache
def _library() -> torch.library.Library:
    """The operators, defined when a plan first needs them."""
    library = torch.library.Library("roundtable", "FRAGMENT")
    given = "Tensor q, Tensor k, Tensor v, Tensor fading, Tensor writing"
    library.define(f"gated_delta({given}) -> Tensor[]")
    kept = "Tensor q, Tensor k, Tensor q_length, Tensor k_length, Tensor sums, Tensor solved, Tensor v, Tensor writing"
    library.define(f"gated_delta_backward(Tensor grad, {kept}) -> Tensor[]")
    torch.library.register_fake("roundtable::gated_delta", _forward_shapes, lib=library)
    torch.library.register_fake("roundtable::gated_delta_backward", _backward_shapes, lib=library)
    return library
