"""Memory of a process that trains on a CPU: what it needs beside its tensors, and what the machine has for it."""

import os
from dataclasses import replace
from pathlib import Path

from launcher.config.tree import RunConfig
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.memory import rank_memory
from launcher.plan.quick import Room
from launcher.training.cpp_kernels import experts_suit
from launcher.training.heap import MMAP_THRESHOLD_BYTES
from modeling.dtypes import DTYPES
from modeling.kernels import attention_passes, expert_passes
from modeling.kernels.expert_turns import is_built_by_rows
from modeling.kernels.experts import narrow_row_multiple
from modeling.kernels.row_counts import row_counts
from modeling.loss import cpu_chunk_tokens
from parallel.mesh import Mesh

# Fitted to runs of the quickstart and of changes of it (AMD EPYC with AVX-512, docs/plan.md).
SCATTERED = 1.7  # glibc's heap at its largest, over the tensors in it that come and go within a step
SCATTERED_IN_BF16 = 1.3  # the same where attention and experts multiply bf16 in C++, without tensors between products
LATER_BYTES = 80 << 20  # what the first steps load and build beside experts' products: code, dense products, buffers
PRODUCT_BYTES = 600_000  # that oneDNN caches for one matrix product in 16 bits; measured there (2026-11-25)
PRODUCTS = 6  # matrix products of an expert: gate and up together, down, and two gradients of each
BUSIEST = 2  # the busiest expert is assumed to have this many times the mean number of rows


def cpu_room(config: RunConfig, mesh: Mesh) -> Room:
    """This rank's share of the machine's free memory, and what its process holds beside the training state.

    Call it right before training: then the process holds Python, libraries and the copy that checkpoints are written
    from.
    """
    held, free = resident_bytes(), available_bytes()
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or mesh.world_size)
    step = step_of_rank(config, mesh.world_size, mesh.pp.rank)
    before = rank_memory(replace(step, keeps_cut_weights=False)).total  # no pass has cut any yet
    outside = max(0.0, held - before) + LATER_BYTES + product_bytes(config)
    vocab_size = max(1, config.model.vocab_size // config.parallel.tp)
    chunk = cpu_chunk_tokens(vocab_size, is_wide=config.train.stored == "fp32")
    tokens = config.train.micro_batch_size * step.positions // config.parallel.tp
    has_pieces = tokens * config.model.d_model * step.element_bytes < MMAP_THRESHOLD_BYTES  # larger ones are mapped
    scattered = scattered_of(config) if has_pieces else 1.0
    return Room(held + free / max(1, local), outside, 1.0, scattered, chunk * vocab_size)


def scattered_of(config: RunConfig) -> float:
    """The heap of glibc at its largest, over the tensors of such a run that come and go within a step."""
    is_in_cpp = config.train.stored == "bf16" and attention_passes.why_not_tiles() is None
    return SCATTERED_IN_BF16 if is_in_cpp else SCATTERED


def product_bytes(config: RunConfig) -> float:
    """Bytes that oneDNN caches for the experts' products where it builds one for each number of rows; else 0.

    The numbers of rows are those of ``modeling.kernels.row_counts``.
    """
    moe, train, parallel = config.model.moe, config.train, config.parallel
    if moe is None or not config.model.has_experts or moe.expert_bias or moe.swiglu_limit is not None:
        return 0.0
    if train.precision not in ("bf16", "fp16") or not is_built_by_rows(DTYPES[train.precision]):
        return 0.0
    if experts_suit(config) and expert_passes.why_not(DTYPES[train.precision]) is None:
        return 0.0
    tokens = train.micro_batch_size * config.data.seq_len // parallel.cp * parallel.ep
    mean = tokens * moe.top_k // moe.n_experts
    return float(PRODUCT_BYTES * PRODUCTS * len(row_counts(narrow_row_multiple(mean), BUSIEST * mean, tokens)))


def resident_bytes() -> float:
    """This process's resident memory in bytes; 0 where /proc does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0.0


def available_bytes() -> float:
    """Memory in bytes that the machine has for new work (MemAvailable); infinite where /proc does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((line for line in lines if line.startswith("MemAvailable")), None)
    return int(found.split()[1]) * 1024.0 if found is not None else float("inf")
