"""The amounts of work of one step on the busiest GPU: products, bytes, launches and messages, before any fitted rate.

Amounts are seconds at the rates of the data sheet, so that a fitted constant is a share of such a rate. Those of a
micro-batch are of the slowest pipeline position.
"""

import math
from dataclasses import dataclass, fields

from launcher.closed_form import linear
from launcher.closed_form.bubble import waits_of
from launcher.closed_form.gpus import Gpu
from launcher.closed_form.own_memory import Ours
from launcher.closed_form.products import Product, depth_of, product_seconds
from launcher.closed_form.rows import Job, Recompute

HALF = 2  # bytes of an element in 16 bits
FULL = 4
ATTENTION_BACKWARD = 2.5  # products of attention's backward pass for each of its forward pass
SCORE_BYTES = 13  # unfused, forward: write, scale and mask, softmax, dropout and its mask, read
SCORE_BYTES_BACKWARD = 16
OWN_SCORE_BYTES = 100  # Roundtable's, in fp32, capped: of a trace's 330 both ways
OWN_SCORE_BYTES_BACKWARD = 230
FIRST_FLASH_SLOWER = (
    1.7  # Dao 2023, "FlashAttention-2" (arXiv 2307.08691), section 4.1: 1.7 to 3 times, Triton 1.3 to 2.5
)
LOSS_BYTES = 20  # of a logit, forward and backward
# recomputation -> forward passes of attention's half and of the other; add_core counts attention's core by itself
FORWARDS: dict[Recompute, tuple[float, float]] = {
    "none": (1, 1),
    "selective": (1, 1),
    "elementwise": (1, 1),
    "feed_forward": (1, 2),
    "full": (2, 2),
}
LOW_ATTENTION = 2  # speed-up of attention's products in 8 bits; its exponentials are as slow as before
TILE = 128  # queries and keys that attention's kernels take at a time
# Rough actual seconds over seconds at stated rates for each amount, to compare pipeline positions.
ROUGHLY = {
    "products": 1.4,
    "low_products": 1.8,
    "grouped": 1.7,
    "low_grouped": 2.2,
    "attention": 2.0,
    "memory": 1.3,
    "expert_memory": 1.3,
    "casts": 1.3,
    "ep_near": 1.6,
    "ep_far": 1.5,
    "layers": 60e-6,
    "moe_layers": 300e-6,
    "experts": 15e-6,
}
FUSED_BYTES = 0.5  # share of the bytes between experts' products that remains where their kernels are fused
# Of a row's element, forward and backward, where experts' biases are added by kernels of their own: a product with the
# router's weight in 32 bits, the sum, and the experts' rows joined (Megatron Core, `TEGroupedMLP._apply_bias`).
BIAS_BYTES = 64
BIAS_LAUNCHES = (
    2  # of an expert, over those without a bias: six kernels for it, forward and backward, beside six products
)
# Launches of a layer with experts, over those where DeepEP or HybridEP prepare the dispatch: 31 kernels of router and
# preparation instead of 17 (Megatron-LM, docs/discussions/deepseek-v3-gb200-optimization, 2.1.4 and 2.2.1), counts that
# the host waits for, and sorting rows before they travel.
ALL_TO_ALL_LAUNCHES = 2.0
STEP_BYTES = 38  # of an element that the optimizer updates: gradient, two moments and master, and the weight


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds at stated rates; down to ``shard_hops`` of one micro-batch on the slowest pipeline position."""

    products: float = 0.0  # in 16 bits
    low_products: float = 0.0  # in 8 or 4 bits
    grouped: float = 0.0  # of experts, 16 bits
    low_grouped: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # bytes of norms, activations, sums
    eager_memory: float = 0.0  # the same, in a system whose kernels are not fused
    expert_memory: float = 0.0  # rows sorted to experts and back
    casts: float = 0.0  # bytes of casting to 8 or 4 bits
    layers: float = 0.0  # passes over layers
    moe_layers: float = 0.0
    experts: float = 0.0  # passes over a rank's experts
    tp: float = 0.0
    ep_near: float = 0.0
    ep_far: float = 0.0
    cp: float = 0.0
    pp: float = 0.0  # of one hop
    host: float = 0.0  # activations copied to the host; the copy back takes as long
    shards: float = 0.0  # under ZeRO 3, all-gathers of weights and reduce-scatters of gradients
    shard_hops: float = 0.0  # ranks that a message passes, times messages
    # of a step
    passes: float = 1.0  # micro-batches, plus the pipeline's idle time in micro-batches
    replicas: float = 0.0  # reduction of gradients over the replicas
    replica_hops: float = 0.0
    update: float = 0.0  # the optimizer
    nodes: float = 0.0  # log2 of the nodes, above one


AMOUNTS = [each.name for each in fields(Work)]


@dataclass(frozen=True)
class Links:
    """The stated rates of the links among GPUs: within a node, and between nodes."""

    near: float  # bytes/s
    far: float
    gpu_nodes: int  # ranks that the fast links join

    def rate(self, degree: int, stride: int) -> float:
        """Bytes/s of a rank in a ring of ``degree`` ranks, ``stride`` apart; those in a node pool their links."""
        if degree * stride <= self.gpu_nodes:
            return self.near
        inside = max(1, min(degree, self.gpu_nodes // stride)) if stride < self.gpu_nodes else 1
        return min(self.near, self.far * inside)


def work_of(job: Job, gpu: Gpu) -> Work:
    """The amounts of a job's step. Raises CannotPlan where the GPU lacks the job's precision."""
    return Step(job, gpu).work()


class Step:
    """Computes the amounts of a job's step, part by part; holds the sizes that the parts share."""

    def __init__(self, job: Job, gpu: Gpu) -> None:
        self.job, self.gpu, self.arch = job, gpu, job.architecture
        self.tokens = job.micro_batch_size * job.seq_len / job.cp  # of a micro-batch on a rank, before tp cuts them
        self.own = self.tokens / job.tp if job.system.sequence_parallel else self.tokens
        self.bandwidth = gpu.hardware.memory_bytes_per_second
        self.links = Links(gpu.hardware.node_bytes_per_second, gpu.network_bytes_per_second, gpu.node_gpus)
        self.of_attention, self.of_feed_forward = FORWARDS[job.recompute]
        is_chain = job.recompute == "elementwise" or bool(job.system.again & {"norms", "activations"})
        self.chains = 1.0 if is_chain else 0.0  # further passes of elementwise work
        if job.ours is not None:
            again = job.ours.again
            self.of_attention, self.of_feed_forward = 1 + again.attention, 1 + again.feed_forward
            self.chains = again.chains
        self.of_up_projection = self.of_attention  # of a latent attention
        if job.recompute == "none" and "up projection" in job.system.again:
            self.of_up_projection += 1
        self.forwards = self.of_attention  # of what is being added
        self.low = job.precision in ("fp8", "mxfp8", "fp4")
        is_half = job.system.half_sums or (job.zero == 3 and not job.system.fp32_sums)
        self.grad_bytes = HALF if is_half else FULL
        self.sum_bytes = 2 * self.grad_bytes + (0 if job.system.fused_sums else 2 * HALF)

    def work(self) -> Work:
        """All amounts of the step."""
        arch, job = self.arch, self.job
        dense = self.layer(moe=False)
        moe = self.layer(moe=True) if arch.n_moe_layers else {}
        seconds = cost(dense), cost(moe) if moe else 0.0, cost(self.head())
        n_dense, n_moe, has_head = self.slowest(*seconds)
        amounts = dict.fromkeys(AMOUNTS, 0.0)
        for part, times in ((dense, n_dense), (moe, n_moe), (self.head(), has_head)):
            for name, value in part.items():
                amounts[name] += times * value
        if not job.system.fused:
            amounts["eager_memory"] = amounts["memory"]
        left = 1 - job.system.graphed
        amounts.update(layers=left * amounts["layers"], moe_layers=left * amounts["moe_layers"])
        if not left:
            amounts["experts"] = 0.0
        if job.schedule == "dualpipe":  # which computes one micro-batch while another one's rows travel
            amounts.update(ep_near=0.0, ep_far=0.0)
        amounts["pp"] = self.hop() if job.pp > 1 else 0.0
        amounts["host"] = self.host()
        amounts["passes"] = job.n_micro_batches + job.n_flushes * self.waits(*seconds)
        amounts.update(self.of_step(n_dense, n_moe, has_head))
        return Work(**amounts)

    def slowest(self, dense: float, moe: float, head: float) -> tuple[float, float, float]:
        """(dense layers, layers with experts, heads) of the slowest position, given the seconds of one of each.

        A Roundtable config states its layers by position; a published row has equal parts, or else the best split. A
        module of multi-token prediction counts as a layer and one more head, at the head's position.
        """
        arch, pp, n_further = self.arch, self.job.pp, self.job.system.n_further
        n_layers, heads = arch.n_layers + n_further, 1.0 + n_further
        if self.job.ours is not None:
            found = self.positions(self.job.ours)
            return max(found, key=lambda each: each[0] * dense + each[1] * moe + each[2] * head)
        share_moe = (arch.n_moe_layers + (n_further if arch.n_experts else 0)) / n_layers
        one = (1 - share_moe) * dense + share_moe * moe
        if pp == 1:
            return n_layers * (1 - share_moe), n_layers * share_moe, heads
        if n_layers % pp == 0:
            count, has_head = n_layers / pp, heads
        else:
            last = best_last(n_layers, pp, heads * head / one)
            others = math.ceil((n_layers - last) / (pp - 1))
            count, has_head = (last, heads) if last * one + heads * head >= others * one else (others, 0.0)
        return count * (1 - share_moe), count * share_moe, has_head

    def positions(self, own: Ours) -> list[tuple[float, float, float]]:
        """(dense layers, layers with experts, passes of the head) of each position of a Roundtable config."""
        heads = 1.0 + self.job.system.n_further
        return [(n.dense, n.moe, heads * (place == own.head_at)) for place, n in enumerate(own.layers)]

    def layer(self, *, moe: bool) -> dict[str, float]:
        """The amounts of one layer: forward pass, recomputation and backward pass."""
        found = dict.fromkeys(AMOUNTS, 0.0)
        self.add_attention(found)
        self.forwards = self.of_feed_forward
        if moe:
            self.add_experts(found)
        else:
            self.add_dense(found, self.arch.d_ff, self.arch.ff_matrices)
        launches = ALL_TO_ALL_LAUNCHES if moe and self.job.ep > 1 and self.job.system.dispatch == "all-to-all" else 1
        found["moe_layers" if moe else "layers"] += launches * (1 + self.forwards)
        return found

    def add_products(self, found: dict[str, float], shapes: list[Product], into: str = "products") -> None:
        """Adds products of a forward pass, their recomputation, and both products of the backward pass."""
        job, gpu = self.job, self.gpu
        peak = gpu.peak(job.precision if self.low else "bf16")
        weights_low = self.low and not (job.is_own_fp8 and into == "grouped")
        weights_peak = peak if weights_low else gpu.peak("bf16")
        sms = int(gpu.hardware.multiprocessors)
        rest = self.bandwidth, sms, depth_of(gpu.hardware.peak_flops["bf16"], sms)
        for shape in shapes:
            if not shape.empty:
                by_input, by_weight = shape.backward()
                seconds = self.forwards * product_seconds(shape, peak, *rest)
                seconds += product_seconds(by_input, peak, *rest)
                found[f"low_{into}" if self.low else into] += seconds
                last = product_seconds(by_weight, weights_peak, *rest)
                found[f"low_{into}" if weights_low else into] += last
                if self.low:
                    found["casts"] += self.cast(shape, weights_too=weights_low) / self.bandwidth
                found["memory"] += shape.count * shape.k * shape.n * self.sum_bytes / self.bandwidth  # summed gradients

    def cast(self, shape: Product, *, weights_too: bool) -> float:
        """Bytes of casting a product's factors to 8 or 4 bits; ``weights_too``: those of its weight's gradient too."""
        if not self.job.is_own_fp8:
            return shape.cast_bytes(self.forwards)
        kept_for = self.job.n_micro_batches if self.job.keeps_cut_weights else None
        return shape.cut_bytes(self.forwards, weights_too=weights_too, kept_for=kept_for)

    def add_attention(self, found: dict[str, float]) -> None:
        """Adds attention's half of a layer; the mean over the layers, where some have linear attention."""
        share = self.arch.linear_share
        for add, times in ((self.add_attention_to_keys, 1 - share), (self.add_linear_attention, share)):
            if times:
                own = dict.fromkeys(AMOUNTS, 0.0)
                self.forwards = self.of_attention
                add(own)
                for name, amount in own.items():
                    found[name] += times * amount

    def add_linear_attention(self, found: dict[str, float]) -> None:
        """Adds linear attention: projections, the rule, norms, residual sums, and messages of tp and cp.

        In 16 bits the rule runs in its own kernels; in 32 bits its backward pass recomputes it first, and then has
        twice as many products.
        """
        arch, job = self.arch, self.job
        assert arch.linear is not None
        for inputs, outputs, cuts_outputs in linear.matrices(arch.linear, arch.d_model):
            out, within = (outputs / job.tp, inputs) if cuts_outputs else (outputs, inputs / job.tp)
            self.add_products(found, [Product.of(self.tokens, out, within)])
        n_bytes = self.tokens * HALF * linear.elements(arch.linear) / job.tp + self.own * 20 * arch.d_model
        if job.ours is not None and job.ours.element == HALF:
            for times, is_backward in ((self.forwards, False), (1, True)):
                rule = linear.rule_work(arch.linear, is_backward=is_backward)
                found["attention"] += times * self.tokens * rule.flops / job.tp / self.gpu.peak("bf16")
                found["memory"] += times * self.tokens * HALF * rule.elements / job.tp / self.bandwidth
        else:
            flops = self.tokens * linear.rule_flops(arch.linear) / job.tp
            found["attention"] += flops * (self.forwards + 3) / self.gpu.peak("fp32")
            n_bytes += self.tokens * linear.working_bytes(arch.linear, job.tp, linear.FP32)
        found["memory"] += n_bytes * (self.forwards + self.chains + 2) / self.bandwidth
        self.add_tp_sums(found)
        if job.cp > 1:
            moved = linear.projected_width(arch.linear) * self.tokens * HALF * (job.cp - 1) / job.cp / job.tp
            found["cp"] += moved * (self.forwards + 1) / self.links.rate(job.cp, job.tp)

    def add_tp_sums(self, found: dict[str, float]) -> None:
        """Adds the messages of tp in a layer, for attention and feed-forward together."""
        job = self.job
        if job.tp > 1:
            sent = 2 * self.tokens * self.arch.d_model * HALF * (job.tp - 1) / job.tp
            found["tp"] += sent * (2 + self.of_attention + self.of_feed_forward) / self.links.rate(job.tp, 1)

    def add_attention_to_keys(self, found: dict[str, float]) -> None:
        """Adds softmax attention: projections, the core, norms, residual sums, and messages of tp and cp."""
        arch, job = self.arch, self.job
        for inputs, outputs, cuts_outputs in arch.attention_matrices:
            is_latent = arch.latent is not None and (inputs, outputs) == (arch.d_model, arch.latent.down_width)
            cut = 1 if is_latent else job.tp  # latent down-projections are whole on each rank
            shape = Product.of(
                self.tokens, outputs / cut if cuts_outputs else outputs, inputs if cuts_outputs else inputs / cut
            )
            is_up = arch.latent is not None and inputs in (arch.latent.query_rank, arch.latent.kv_rank)
            self.forwards = self.of_up_projection if is_up else self.of_attention
            self.add_products(found, [shape])
        self.forwards = self.of_attention
        self.add_core(found)
        wide = sum(outputs for _, outputs, cuts in arch.attention_matrices if cuts) / job.tp
        n_bytes = self.tokens * 4 * wide + self.own * 20 * arch.d_model
        found["memory"] += n_bytes * (self.forwards + self.chains + 2) / self.bandwidth
        self.add_tp_sums(found)
        if job.cp > 1:
            keys = 2 * arch.n_kv_heads * arch.d_head / job.tp if arch.latent is None else arch.attention_width
            rows = self.tokens * keys * HALF * (job.cp - 1)
            found["cp"] += rows * (self.forwards + 2) / self.links.rate(job.cp, job.tp)

    def add_core(self, found: dict[str, float]) -> None:
        """Adds attention's core: one kernel that skips masked keys, or scores that are written to memory."""
        arch, job = self.arch, self.job
        peak = self.gpu.peak("bf16")
        width = arch.attention_width / job.tp
        again = self.of_attention if job.recompute != "selective" else 2
        if job.system.flash:
            keys = self.tokens * arch.attended(job.seq_len, TILE)
            slower = FIRST_FLASH_SLOWER if job.system.first_flash else 1.0
            faster = LOW_ATTENTION if job.system.low_attention and self.low else 1
            products = 4 * keys * width * (again + ATTENTION_BACKWARD) / faster
            exponentials = keys * arch.n_heads / job.tp * (again + 1) * self.gpu.hardware.flops_of_exponential
            found["attention"] += (products + exponentials) * slower / peak
            return
        heads = arch.n_heads / job.tp
        if job.ours is not None:
            keys = self.tokens * arch.attended(job.seq_len, TILE)
            found["products"] += 4 * keys * width * (again + ATTENTION_BACKWARD) / peak
            found["memory"] += keys * heads * (again * OWN_SCORE_BYTES + OWN_SCORE_BYTES_BACKWARD) / self.bandwidth
            return
        flops = 4 * self.tokens * job.seq_len * width
        # Tensor cores need multiples of 8; other heads are computed at the rate of fp32.
        slow = 1.0 if arch.d_head % 8 == 0 else peak / self.gpu.peak("fp32")
        found["products"] += flops * (again + 2) * slow / peak
        scores = self.tokens * job.seq_len * heads
        found["memory"] += scores * (again * SCORE_BYTES + SCORE_BYTES_BACKWARD) / self.bandwidth

    def add_dense(self, found: dict[str, float], d_ff: float, n_matrices: int) -> None:
        """Adds the work of a feed-forward block without experts to ``found``."""
        arch, tp = self.arch, self.job.tp
        width, ups = d_ff / tp, n_matrices - 1
        self.add_products(
            found, [Product.of(self.tokens, ups * width, arch.d_model), Product.of(self.tokens, arch.d_model, width)]
        )
        found["memory"] += self.tokens * (2 * ups + 2) * width * (self.forwards + self.chains + 2) / self.bandwidth

    def add_experts(self, found: dict[str, float]) -> None:
        """Adds the work of a feed-forward block with experts: dispatch, experts, combine, shared experts."""
        arch, job = self.arch, self.job
        own = self.tokens / job.tp
        rows = own * arch.top_k * job.imbalance
        each = rows * job.ep / arch.n_experts
        local = arch.n_experts / job.ep
        ups = arch.expert_matrices - 1
        shapes = [
            Product.of(each, ups * arch.expert_d_ff, arch.d_model, local),
            Product.of(each, arch.d_model, arch.expert_d_ff, local),
        ]
        casts = found["casts"]
        self.add_products(found, shapes, "grouped")
        passes = self.forwards + 2
        has_biases = arch.has_expert_biases and not job.system.fused_experts
        found["experts"] += local * passes * (BIAS_LAUNCHES if has_biases else 1)
        between = rows * (2 * ups + 2) * arch.expert_d_ff * (passes + self.chains)
        if job.system.fused_experts:
            found["casts"], between = casts, FUSED_BYTES * between
        found["memory"] += between / self.bandwidth
        if has_biases:
            found["expert_memory"] += rows * arch.d_model * BIAS_BYTES / self.bandwidth
        sorts = 2 if job.system.dispatch == "all-to-all" else 1  # before rows travel and after, or while they do
        found["expert_memory"] += (sorts * rows * 8 + own * 4) * arch.d_model * passes / self.bandwidth
        if arch.n_shared_experts:
            self.add_dense(found, arch.n_shared_experts * arch.expert_d_ff, arch.expert_matrices)
        self.add_dispatch(found, own * job.imbalance)

    def add_dispatch(self, found: dict[str, float], own: float) -> None:
        """Adds the messages of ep: tokens to their experts' ranks and back, forward and backward.

        By all-to-all each copy of a token is sent to its expert. By "nodes" a token is sent once to each node with some
        of its experts, over the network, and from there once to each such rank.
        """
        arch, job = self.arch, self.job
        if job.ep == 1:
            return
        sent = 2 * (1 + self.forwards) * own * arch.d_model * HALF
        n_nodes = max(1.0, job.ep / self.links.gpu_nodes)
        far = (n_nodes - 1) / n_nodes
        if job.system.dispatch == "nodes":
            near, copies = self.met(job.ep) * (job.ep - 1) / job.ep, self.met(n_nodes)
        else:
            near, copies = arch.top_k * ((job.ep - 1) / job.ep - far), float(arch.top_k)
        found["ep_near"] += sent * near / self.links.near
        found["ep_far"] += sent * copies * far / self.links.far

    def met(self, places: float) -> float:
        """The mean number of places with experts of one token, where ``places`` share the experts evenly."""
        top_k = self.arch.top_k
        if self.job.system.neighbours:
            return max(1.0, top_k * places / self.arch.n_experts)
        if self.arch.expert_groups is not None:
            n_groups, most = self.arch.expert_groups
            of_place = max(1.0, n_groups / places)  # groups that have experts there
            missed = math.prod(max(0.0, n_groups - of_place - i) / (n_groups - i) for i in range(most))
            places = max(1.0, places * (1 - missed))
        return places * (1 - (1 - 1 / places) ** top_k)

    def head(self) -> dict[str, float]:
        """The amounts of the head and the loss, which are not recomputed and mostly compute in 16 bits."""
        found = dict.fromkeys(AMOUNTS, 0.0)
        arch, tp = self.arch, self.job.tp
        low, forwards = self.low, self.forwards
        self.low, self.forwards = low and self.job.system.low_head, 1
        self.add_products(found, [Product.of(self.tokens, arch.vocab_size / tp, arch.d_model)])
        self.low, self.forwards = low, forwards
        found["memory"] += self.tokens * arch.vocab_size / tp * LOSS_BYTES / self.bandwidth
        return found

    def hop(self) -> float:
        """Seconds to send hidden states to the next position and their gradients back, for all its stages."""
        cut = self.job.tp if self.job.system.scatters else 1
        rows = self.tokens / cut * self.arch.d_model * HALF * 2 * self.job.vpp
        stride = self.job.tp * self.job.cp * self.job.dp
        return rows / self.links.rate(self.job.pp, min(stride, self.links.gpu_nodes * 8))

    def host(self) -> float:
        """Seconds to copy activations to the host in a forward pass; 0 where the GPU's file has no rate for it."""
        ours, rate = self.job.ours, self.gpu.hardware.host_bytes_per_second
        return 0.0 if ours is None or rate is None else self.tokens * ours.element * max(ours.sent) / rate

    def of_step(self, n_dense: float, n_moe: float, has_head: float) -> dict[str, float]:
        """The amounts of a whole step: messages over the replicas or of ZeRO 3, and the optimizer's update."""
        job, arch = self.job, self.arch
        replicas = job.dp * job.cp
        dense = (n_dense + n_moe) * arch.attention_parameters / job.tp + n_dense * arch.dense_parameters / job.tp
        dense += n_moe * arch.n_shared_experts * arch.expert_parameters / job.tp + n_moe * arch.n_experts * arch.d_model
        dense += arch.embedding_parameters / job.tp * (min(1.0, has_head) if job.pp > 1 or arch.tied else 2)
        experts = n_moe * arch.n_experts / job.ep * arch.expert_parameters
        edp = max(1.0, replicas * job.tp / job.ep)
        rate = self.links.rate(replicas, job.tp)
        far = self.links.rate(int(edp), job.ep)
        moved = dense * (replicas - 1) / replicas / rate + experts * (edp - 1) / edp / far
        n_nodes = max(1.0, job.n_gpus / self.links.gpu_nodes)
        found = {"nodes": math.log2(n_nodes)}
        layers = n_dense + n_moe
        if job.zero == 3:
            found["shards"] = moved * 3 * HALF
            found["shard_hops"] = 3 * layers * job.shard
            updated = dense / job.shard + experts / job.expert_shard
        else:
            cut = job.shard if job.zero else 1
            found["replicas"] = moved * (self.grad_bytes + (HALF if job.zero else self.grad_bytes))
            found["replica_hops"] = float(replicas if replicas > 1 else 0)
            updated = dense / cut + experts / (job.expert_shard if job.zero else 1)
        found["update"] = self.update(updated)
        return found

    def update(self, updated: float) -> float:
        """Seconds of the optimizer's update; on the host, whose cores have no rate here, only those of the copies."""
        ours, rate = self.job.ours, self.gpu.hardware.host_bytes_per_second
        if ours is None or not ours.updates_on_host:
            flops, peaks = ours.matrix_flops if ours is not None else (), self.gpu.hardware.peak_flops
            return updated * (STEP_BYTES / self.bandwidth + sum(each / peaks[dtype] for dtype, each in flops))
        return 0.0 if rate is None else updated * (FULL + ours.element) / rate

    def waits(self, dense: float, moe: float, head: float) -> float:
        """The pipeline's idle time, in micro-batches of the slowest position, given the seconds of each part.

        For a Roundtable config it is simulated with the order of passes, for a published row by a closed form.
        """
        job = self.job
        if job.ours is not None:
            seconds = [each[0] * dense + each[1] * moe + each[2] * head for each in self.positions(job.ours)]
            return waits_of(job.ours.pipeline, int(job.n_micro_batches), seconds)
        match job.schedule:
            case "zb-2p":
                return 0.0
            case "zb-1p":
                return (job.pp - 1) / 3
            case "dualpipe":  # DeepSeek-V3, table 2: (pp / 2 - 1) (F&B + B - 3 W), with a whole pass of three parts
                return max(0.0, job.pp / 2 - 1) * 2 / 3
            case "interleaved":
                return (job.pp - 1) / max(2, job.vpp)
            case _:
                return float(job.pp - 1)


def best_last(n_layers: int, pp: int, head: float) -> int:
    """The number of layers of the last position that makes the slowest one fastest; a head costs ``head`` layers."""

    def slowest(last: int) -> float:
        return max(last + head, math.ceil((n_layers - last) / (pp - 1)))

    return min(range(1, n_layers - pp + 2), key=slowest)


def cost(part: dict[str, float]) -> float:
    """Roughly how many seconds a part takes, to compare pipeline positions."""
    return sum(part[name] * times for name, times in ROUGHLY.items()) or 1e-9
