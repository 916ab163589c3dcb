"""Bytes that one training step sends over tp, cp, ep and pp and for bookkeeping. docs/traffic.md has the table."""

from fractions import Fraction

from launcher.traffic.matrices import matrices_traffic
from launcher.traffic.step import FP32_BYTES, Collective, Step, Traffic, around_ring
from launcher.traffic.zero import PARTITION_UNIT, elements_summed_over_tp, padded, zero_traffic
from modeling.metrics import metrics_of
from modeling.moe import RoutingStats
from parallel.pipeline.volume import sent_bytes
from parallel.processes.stop import STOP_SIGNALS

FP64_BYTES, INT64_BYTES = 8, 8
FLAGGED = {("fp16", 1), ("fp16", 2), ("fp16", 3), ("bf16", 2)}  # (precision, ZeRO) with DeepSpeed's overflow check


def step_traffic(step: Step) -> list[Traffic]:
    """All terms of the bytes that the rank sends in one training step; terms that send nothing are left out."""
    terms = [
        *tp_traffic(step),
        *cp_traffic(step),
        *ep_traffic(step),
        *pp_traffic(step),
        *zero_traffic(step),
        *matrices_traffic(step),
        *bookkeeping_traffic(step),
    ]
    return [term for term in terms if term.sent_bytes]


def tp_traffic(step: Step) -> list[Traffic]:
    """Terms over tp: sequence parallelism, sharded vocabulary, and gradient sums of weights that tp does not cut."""
    n, micro = step.parallel.tp, step.n_micro_batches
    blocks = repeated = 0  # a block gathers positions, computes with cut weights, reduce-scatters; some are recomputed
    last_sums = 0  # recomputation stops before a layer's last reduce-scatter, which the backward pass does not need
    for layer in step.layers:
        has_cut_half = layer not in step.moe_layers or bool(step.model.moe and step.model.moe.n_shared_experts)
        blocks += 1 + has_cut_half
        again = step.forwards("feed_forward", layer) - 1
        repeated += step.forwards("attention", layer) - 1 + has_cut_half * again
        last_sums += has_cut_half and again > 0 and step.model.norm_placement == "pre"
    embedding, head = int(step.has_embedding) + step.n_further, int(step.has_head) + step.n_further
    # Backward, a gather is a reduce-scatter and the other way round.
    gathers = blocks + repeated + head + blocks + embedding
    scatters = blocks + repeated - last_sums + embedding + blocks + head
    tokens = step.micro_batch_size * step.positions
    cut_norms = 2 if step.model.qk_norm and step.model.qk_norm_over == "all_heads" else 0  # of a layer
    normed = [layer for layer in step.layers if not step.model.is_linear_layer(layer)]
    norm_passes = cut_norms * (step.all_forwards("attention", normed) + len(normed))

    def term(what: str, collective: Collective, n_bytes: int) -> Traffic:
        return Traffic("tp", what, collective, micro * around_ring(collective, n_bytes, n))

    summed = around_ring("all-reduce", FP32_BYTES * elements_summed_over_tp(step), n)  # once a step
    return [
        Traffic("tp", "gradients of what tp does not cut", "all-reduce", summed),
        term("positions", "all-gather", gathers * step.hidden_bytes),
        term("positions", "reduce-scatter", scatters * step.hidden_bytes),
        term("loss over the vocabulary", "all-reduce", 3 * FP32_BYTES * tokens * head),
        term("balance sums", "all-reduce", balance_bytes(step)),
        term("means of cut norms", "all-reduce", norm_passes * FP32_BYTES * tokens),
    ]


def balance_bytes(step: Step) -> int:
    """Bytes of one micro-batch's balance-loss sums: fp32, two per expert and a count, for each sequence and pass."""
    if step.model.moe is None:
        return 0
    sums = FP32_BYTES * step.micro_batch_size * (2 * step.model.moe.n_experts + 1)
    return step.all_forwards("feed_forward", step.moe_layers) * sums


def cp_traffic(step: Step) -> list[Traffic]:
    """Terms over cp: attention by all-to-all over heads or around the ring, and the sums of balance losses."""
    cp, tp, model = step.parallel.cp, step.parallel.tp, step.model
    heads, kv_heads = model.n_heads // tp, model.n_kv_heads // tp
    to_keys = [layer for layer in step.layers if not model.is_linear_layer(layer)]
    forwards, backwards, size = step.all_forwards("attention", to_keys), len(to_keys), step.element_bytes
    numbers = step.n_micro_batches * step.micro_batch_size * step.positions  # of a layer
    qk, v = model.qk_head_dim, model.v_head_dim
    balance = step.n_micro_batches * around_ring("all-reduce", balance_bytes(step), cp)
    terms = [Traffic("cp", "balance sums", "all-reduce", balance)]
    is_ulysses = step.parallel.cp_attention == "ulysses"
    exchanged = numbers * (heads + max(kv_heads, cp)) * (qk + v) * size * (forwards + backwards) if is_ulysses else 0
    linear = model.linear_attention
    if linear is not None:  # linear attention exchanges heads even where attention runs around the ring
        others = [layer for layer in step.layers if layer not in to_keys]
        width = 2 * max(linear.n_k_heads // tp, cp) * linear.d_k + linear.n_v_heads // tp * (2 * linear.d_v + 2)
        exchanged += numbers * width * size * (step.all_forwards("attention", others) + len(others))
    terms.append(Traffic("cp", "heads", "all-to-all", around_ring("all-to-all", exchanged, cp)))
    if not is_ulysses:
        moved = (cp - 1) * 2 * numbers * kv_heads * qk * (forwards * size + backwards * (size + FP32_BYTES))
        terms.append(Traffic("cp", "keys and values", "send", Fraction(moved)))
    return terms


def ep_traffic(step: Step) -> list[Traffic]:
    """Terms over ep: token rows in dispatch and combine, and the counts of rows.

    The rank sends the rows that leave it, and sends back the results of those that arrive. Raises ValueError where
    ``step.routed`` is needed and missing.
    """
    ep, moe = step.parallel.ep, step.model.moe
    if ep == 1 or moe is None or not step.moe_layers:
        return []
    if step.routed is None:
        raise ValueError("bytes over ep depend on the routing: give Step.routed")
    n_local = moe.n_experts // ep
    own = range(step.ep_rank * n_local, (step.ep_rank + 1) * n_local)
    rows = 0
    for layer in step.moe_layers:
        counts = step.routed[layer]
        travelling = sum(counts[step.ep_rank]) - sum(counts[step.ep_rank][expert] for expert in own)
        travelling += sum(row[expert] for rank, row in enumerate(counts) if rank != step.ep_rank for expert in own)
        rows += (step.forwards("feed_forward", layer) + 1) * travelling * step.model.d_model * step.element_bytes
    n_passes = step.all_forwards("feed_forward", step.moe_layers) * step.n_micro_batches
    counted = n_passes * INT64_BYTES * moe.n_experts
    return [
        Traffic("ep", "tokens", "all-to-all", Fraction(rows)),
        Traffic("ep", "counts", "all-to-all", around_ring("all-to-all", counted, ep)),
    ]


def pp_traffic(step: Step) -> list[Traffic]:
    """Terms over pp: hidden states and their gradients, and a tied embedding's gradients between the two ends."""
    parallel = step.parallel
    if parallel.pp == 1:
        return []
    tied = step.model.vocab_size * step.model.d_model // parallel.tp if step.model.embeds_at_end else 0
    if step.in_buckets:  # this rank's part of it, once the replicas' gradients are added up
        n = step.degrees.dp * step.degrees.cp
        tied = padded(tied, PARTITION_UNIT * n) // n
    arguments = (parallel.pipeline, parallel.pp, step.pp_rank, step.n_micro_batches, step.hidden_bytes // parallel.tp)
    hidden = sent_bytes(*arguments)
    return [
        Traffic("pp", "hidden states", "send", Fraction(hidden)),
        Traffic("pp", "tied embedding", "send", Fraction(sent_bytes(*arguments, tied) - hidden)),
    ]


def bookkeeping_traffic(step: Step) -> list[Traffic]:
    """Terms of bookkeeping: the metrics' sums, the gradient norm, and in 16 bits DeepSpeed's overflow check."""
    moe, degrees = step.model.moe, step.degrees
    n_layers = sum(step.model.is_moe_layer(layer) for layer in step.model.all_layers)
    n_summed, n_largest = (len(metrics_of(RoutingStats, reduce)) for reduce in ("sum", "max"))
    losses = 2 + len(step.model.mtp_layers)
    sums = losses + len(STOP_SIGNALS) + (0 if moe is None else n_layers * (n_summed + moe.n_experts))

    def term(axis: str, what: str, n_bytes: int, degree: int) -> Traffic:
        return Traffic(axis, what, "all-reduce", around_ring("all-reduce", n_bytes, degree))

    terms = [
        term("world", "metrics", FP64_BYTES * (sums + n_layers * n_largest), step.world_size),
        term("world", "gradient norm", FP64_BYTES, step.world_size),
    ]
    if (step.precision, step.parallel.zero) in FLAGGED and not step.in_buckets:
        terms += [
            term("replicas", "overflow", 1, degrees.dp * degrees.cp),
            term("model", "overflow", 1, degrees.pp * degrees.tp),
        ]
    return terms
