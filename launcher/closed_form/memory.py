"""The peak of a rank's memory by closed forms: training state, activations, logits, and memory outside of tensors.

Activations are those of Korthikanti et al. 2022 (arXiv 2205.05198), with grouped keys, gates and experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.closed_form.own_memory import Layers
from launcher.closed_form.rows import GIB, Job

HALF = 2
FULL = 4
CUT = 2  # bytes of a weight that is kept in 8 bits: one copy for forward products, one for activations' gradients
MOMENTS_AND_MASTER = 12
SCORES = 5  # bytes of a score that are kept for the backward pass: softmax, dropout and its mask
LOGIT_BYTES = 10  # of a logit: in 16 bits, in fp32, and its gradient
LOGIT_BYTES_EAGER = 12  # without a fused kernel for the loss
SELECTIVE = 0.42  # share of activations kept: attention's output and every other product (torchtitan, arXiv 2410.06511)
# name -> (initial value in the fit, standard deviation of its logarithm, meaning)
MEMORY_CONSTANTS: dict[str, tuple[float, float, str]] = {
    "reserved": (1.03, 0.03, "what the allocator takes, over what tensors hold"),
    "outside": (2.0, 0.30, "GiB of CUDA's context, the libraries' work space and NCCL's buffers"),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's memory by part, at the worst moment of a step."""

    state: float  # weights, gradients, optimizer
    activations: float
    logits: float
    buffers: float  # through which gradients are reduced over the replicas

    @property
    def tensors(self) -> float:
        """Bytes of the tensors that torch's allocator hands out."""
        return self.state + self.activations + self.logits

    def peak(self, constants: Mapping[str, float]) -> float:
        """Bytes of the GPU's memory in use at the peak."""
        return self.tensors * constants["reserved"] + self.buffers + constants["outside"] * GIB


def memory_of(job: Job) -> Memory:
    """The memory of the pipeline position that holds the most."""
    return max((position_memory(job, each) for each in unlike_positions(job)), key=lambda each: each.tensors)


def unlike_positions(job: Job) -> list[int]:
    """The pipeline positions among which the fullest one must be.

    For a config of Roundtable they are the fullest position of each kind (``Ours.stand_ins``); for a published row,
    whose layers are taken to be alike, the first, the second and the last.
    """
    if job.ours is not None:
        return sorted(set(job.ours.stand_ins()))
    return list(range(job.pp)) if job.pp <= 2 else [0, 1, job.pp - 1]


def position_memory(job: Job, position: int) -> Memory:
    """The memory of one pipeline position's rank."""
    layers = layers_of(job, position)
    if job.ours is not None:
        n_weights, n_updated = weights_of(job, position, layers)
        state, buffers = job.ours.state(n_weights, n_updated), job.ours.buffers(n_weights, layers.total)
        state += CUT * sum(product_weights(job, layers)) if job.keeps_cut_weights else 0.0
        held, (gradient, chunk) = own_activations(job, position), own_head(job, position)
        left = job.ours.left(n_weights, gradient / FULL)
        reduces = left * (held + gradient) + buffers
        return Memory(state, held, max(gradient + chunk, reduces - held, job.ours.update - held), 0.0)
    return Memory(
        state_bytes(job, position, layers),
        activation_bytes(job, position, layers.total),
        logit_bytes(job, position),
        job.system.buffer_elements * HALF,
    )


def layers_of(job: Job, position: int) -> Layers:
    """The layers of a position; in a published row each position has the model's share of layers with experts."""
    if job.ours is not None:
        return job.ours.layers[position]
    n_layers, share_moe = inferred_layers(job, position), job.architecture.n_moe_layers / job.architecture.n_layers
    return Layers(n_layers, n_layers * share_moe)


def inferred_layers(job: Job, position: int) -> float:
    """The layers of a position in a published row: equal numbers if pp divides them, else fewer at the ends.

    The embedding and the head stand in for layers there. Modules of multi-token prediction count at the last position.
    """
    n_layers, pp = job.architecture.n_layers, job.pp
    further = job.system.n_further if position == pp - 1 else 0
    if n_layers % pp == 0:
        return n_layers / pp + further
    if (n_layers + 2) % pp == 0:
        return (n_layers + 2) // pp - (position in (0, pp - 1)) + further
    return n_layers // pp + (0 < position <= n_layers % pp) + further


def own_activations(job: Job, position: int) -> float:
    """Bytes of activations kept for backward passes at a position of a Roundtable config."""
    assert job.ours is not None
    tokens = job.micro_batch_size * job.seq_len / job.cp
    return job.ours.activations(tokens, position)


def own_head(job: Job, position: int) -> tuple[float, float]:
    """Bytes of the gradient of the head's weights, and of its working memory; 0 at positions without the head."""
    assert job.ours is not None
    if position != job.ours.head_at:
        return 0.0, 0.0
    vocab_size = job.architecture.vocab_size / job.tp
    tokens = job.micro_batch_size * job.seq_len / job.cp
    return job.ours.head(tokens, vocab_size * job.architecture.d_model, vocab_size, is_cut=job.tp > 1)


def weights_of(job: Job, position: int, layers: Layers) -> tuple[float, float]:
    """The number of weights of a position's rank, and of those that it updates where ZeRO shards them."""
    dense, experts = own_weights(job, position, layers)
    return dense + experts, dense / job.shard + experts / job.expert_shard


def product_weights(job: Job, layers: Layers) -> tuple[float, float]:
    """The number of matrix elements in so many layers on one rank: without experts, and in experts."""
    arch = job.architecture
    dense = layers.total * arch.attention_parameters / job.tp + layers.dense * arch.dense_parameters / job.tp
    dense += layers.moe * arch.n_shared_experts * arch.expert_parameters / job.tp
    return dense, layers.moe * arch.n_experts / job.ep * arch.expert_parameters


def own_weights(job: Job, position: int, layers: Layers) -> tuple[float, float]:
    """The number of weights of a position's rank before ZeRO shards them: without experts, and in experts."""
    arch = job.architecture
    dense, experts = product_weights(job, layers)
    dense += layers.moe * arch.n_experts * arch.d_model  # routers
    dense += own_further(job, position) * 2 * arch.d_model**2  # the projection of hidden state and embedding joined
    dense += vocabulary_matrices(job, position) * arch.embedding_parameters / job.tp
    return dense, experts


def own_further(job: Job, position: int) -> int:
    """Modules of multi-token prediction at a position of a Roundtable config; 0 for published rows."""
    return job.system.n_further if job.ours is not None and position == job.ours.head_at else 0


def vocabulary_matrices(job: Job, position: int) -> int:
    """The number of vocabulary matrices at a position: the embedding, the head, and a copy of the embedding.

    The copy is for modules of multi-token prediction beside the head. Tied matrices at one position count once.
    """
    tied, last = job.architecture.tied, job.pp - 1 if job.ours is None else job.ours.head_at
    if position == 0:
        return 1 + (last == 0 and not tied)
    return 1 + (own_further(job, position) > 0 and not tied) if position == last else 0


def state_bytes(job: Job, position: int, layers: Layers) -> float:
    """Bytes of weights, gradients and optimizer state of a position's rank, for a published row."""
    arch, expert_ranks = job.architecture, job.expert_shard
    dense, experts = own_weights(job, position, layers)
    ends = vocabulary_matrices(job, position)
    if job.zero == 3:
        one = (dense + experts) / max(1.0, layers.total)  # one layer is in use while the next one is gathered
        state = (FULL + FULL + MOMENTS_AND_MASTER - FULL) * (dense / job.shard + experts / expert_ranks)
        return state + one * (2 * HALF + FULL) + ends * arch.embedding_parameters / job.tp * (HALF + FULL)
    cut = job.shard if job.zero else 1
    sums = HALF if job.system.half_sums else FULL
    grads = sums if job.system.fused_sums else HALF if job.scaled_fp16 else HALF + FULL
    if not job.zero:
        grads = HALF
    held = (HALF + grads) * (dense + experts)
    if job.zero == 2:
        held = HALF * (dense + experts) + grads * (dense / cut + experts / expert_ranks)
    states = MOMENTS_AND_MASTER + (0 if job.system.fused_sums else FULL)
    return held + states * (dense / cut + experts / (expert_ranks if job.zero else 1))


def activation_bytes(job: Job, position: int, layers: float) -> float:
    """Bytes of activations of all micro-batches in flight, and of one layer's working memory, for a published row."""
    tokens = job.micro_batch_size * job.seq_len / job.cp
    one = layer_bytes(job) * tokens
    count = in_flight(job, position)
    edge = HALF * job.architecture.d_model * tokens / (job.tp if job.system.sequence_parallel else 1)
    if job.recompute == "full":
        pipes = 0 if job.system.scatters else 2  # DeepSpeed's pipeline keeps a stage's input and output
        kept = edge * (layers + pipes) * count
        return kept + one * 1.5  # a layer computed again, and its gradients
    kept = one * (SELECTIVE if job.recompute == "selective" and job.system.flash else 1.0)
    return kept * layers * count + 0.5 * one


def in_flight(job: Job, position: int) -> float:
    """The most micro-batches whose activations a position holds at once; parts of its layers count as fractions."""
    match job.schedule:
        case "zb-2p":
            most = 2 * job.pp - 1.0
        case "dualpipe":
            most = job.pp + 1.0
        case "interleaved":
            vpp = max(2, job.vpp)
            most = job.pp - position + (job.pp - 1) / vpp - position / vpp
        case _:
            most = float(job.pp - position)
    return min(job.n_micro_batches, most) if job.pp > 1 else 1.0


def layer_bytes(job: Job) -> float:
    """Bytes of activations that one token keeps in one layer for the backward pass, on one rank."""
    arch, tp = job.architecture, job.tp
    own = tp if job.system.sequence_parallel else 1
    width = sum(outputs for _, outputs, cuts in arch.attention_matrices if cuts) / tp
    heads_out = arch.n_heads * (arch.latent.d_value if arch.latent else arch.d_head) / tp
    found = 8.0 * arch.d_model / own + 2 * width + 2 * heads_out
    if not job.system.flash:
        found += 2.0 * arch.d_model / own  # masks of dropout
        if job.recompute != "selective":
            found += SCORES * arch.n_heads / tp * job.seq_len
    share_moe = arch.n_moe_layers / arch.n_layers
    found += (1 - share_moe) * 2 * arch.ff_matrices * arch.d_ff / tp
    rows = arch.top_k / tp
    experts = job.imbalance * rows * (2 * arch.expert_matrices * arch.expert_d_ff + 4 * arch.d_model)
    shared = arch.n_shared_experts * 2 * arch.expert_matrices * arch.expert_d_ff / tp
    return found + share_moe * (experts + shared)


def logit_bytes(job: Job, position: int) -> float:
    """Bytes of a micro-batch's logits; 0 at positions without the head."""
    if position != job.pp - 1:
        return 0.0
    tokens = job.micro_batch_size * job.seq_len / job.cp
    each = LOGIT_BYTES if job.system.fused else LOGIT_BYTES_EAGER
    return tokens * job.architecture.vocab_size / job.tp * each
