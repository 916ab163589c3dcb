"""The faults that a proof must catch, each with the config under which it shows and what the proof must print."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault. ``check`` must fail (DIES: the processes fail), and ``says`` be in what the proof prints about it."""

    title: str
    check: str
    says: str
    overrides: tuple[str, ...] = ()
    ranks: int = 2
    starves: bool = False  # routers choose none of the second half of the experts, on both sides of the proof
    has_any_family: bool = False  # the model combines blocks that no family has together


HELDOUT, UNCHANGED = "held-out loss", "evaluation changes nothing"
HELDOUT_ALONE = "the held-out loss differs (before the steps"
STEPS = 2  # training steps in the proofs that faults are planted in
ACCUMULATED = "accumulated gradients"
DIES = "the processes come to an end"  # stands for a check where the fault makes processes die or hang
BIAS = ("model.moe.balance={name: bias, rate: 0.01}",)
FP16 = ("train.precision=fp16",)
BF16 = ("train.precision=bf16",)
FP8, FROM_FP32 = ("train.precision=fp8",), "from fp32, one process"
KEPT = "train.fp8_keep_weights=true"
TP, CP, EP, PP = ("parallel.tp=2",), ("parallel.cp=2",), ("parallel.ep=2",), ("parallel.pp=2",)
EP_CHUNKS = (*EP, "parallel.ep_chunks=2")
TP_OVERLAP = (*TP, "parallel.tp_overlap=true")
SELECTIVE = ("train.recompute=selective",)
HEAD_Z = ("model.z_loss=1e-4",)
MUON, OF_MUON = ("optimizer={name: muon}", "parallel.zero=0"), "muon of these gradients"
MUON_ZERO_1, MUON_ZERO_3 = (MUON[0], "parallel.zero=1"), (MUON[0], "parallel.zero=3")
GROWING = ("train.global_batch_size=32", "train.batch_ramp.start=8", "train.batch_ramp.increment=8")
RING = ("parallel.cp=2", "parallel.cp_attention=ring")
MQA_CP = ("parallel.cp=2", "model.n_kv_heads=1")
GATES, HEAD_GATES = ("model.attention_gate=elementwise",), ("model.attention_gate=headwise",)
LINEAR = (
    *("model.linear_attention.n_k_heads=8", "model.linear_attention.n_v_heads=16"),
    "model.full_attention_layers=[3,7]",
)
ALIBI, SINKS = ("model.positions=alibi",), ("model.sinks=true",)
GPT_OSS = (
    *("model.family=gpt_oss", "model.qk_norm=false", "model.qkv_bias=true", "model.o_bias=true", "model.sinks=true"),
    *("model.moe.n_dense_layers=0", "model.moe.n_shared_experts=0", "model.moe.score=softmax"),
    *("model.moe.routed_scale=1", "model.moe.expert_bias=true", "model.moe.logit_bias=true"),
    *("model.moe.swiglu_limit=7", "model.sliding_window=512", "model.full_attention_layers=[1,3,5,7]"),
)
T5, BIAS_OF_T5 = ("model.positions=t5",), "attention.distance_bias"
SCORE_CAP, LOGIT_CAP = ("model.score_cap=0.5",), ("model.logit_cap=0.5",)
OLMO2 = (  # with biases, and norms over all heads
    *("model.family=olmo2", "model.moe=null", "model.norm_placement=post", "model.qk_norm_over=all_heads"),
    *("model.qkv_bias=true", "model.o_bias=true"),
)
LATENT = ("model.family=deepseek_v3", "model.qk_norm=false", "model.n_kv_heads=8", "model.mla.kv_lora_rank=128")
MUP, HE = ("model.init={name: mup, base_d_model: 128}", "model.tie_embeddings=false"), "model.init={name: he}"
QUERY_GROWTH = ("model.rope_scaling={name: yarn, query_growth: 0.1}",)
OUTPUTS, FIRST_ATTENTION = "modules' outputs", "layers.0.attention, sample"
LAYER_NORM = ("model.norm=layer", "model.embedding_norm=true")
LEARNED = ("model.positions=learned", "model.max_positions=1024")
DROPS = ("model.embedding_dropout=0.1", "model.residual_dropout=0.1")
DROPS_WEIGHTS = ("model.attention_dropout=0.1",)
EVERY_GRADIENT = "gradients differ; the first in execution order is embed.weight"
MTP, FURTHER = ("model.mtp.depth=1",), "loss of tokens 2 ahead"
FAULTS = [
    Fault("mean of means: loss divided by the rank's own count", "gradients", EVERY_GRADIENT),
    Fault("loss not scaled by dp", "gradients", "the token loss x 0.5000 (= 1/dp)"),
    Fault("gradients not reduced", "gradients", EVERY_GRADIENT),
    Fault("router's gradient from one rank only", "gradients", "layers.1.feed_forward.router.weight"),
    Fault("expert gradients times dp", "gradients", "experts.gate: 2.0000 x one process's gradient, which is dp"),
    Fault("balance loss times micro-batches", "gradients", "the balance loss x 3.0000 (= micro-batches of a rank"),
    Fault("z-loss times dp", "gradients", "the z-loss x 2.0000 (= dp"),
    Fault("padding counted as tokens", "gradients", "the z-loss x"),
    Fault("tied embedding: the head's gradient lost", "gradients", "embed.weight"),
    Fault("norm counts the embedding twice", "gradient norm", "embed.weight counted 2 times", ("parallel.zero=0",)),
    Fault("norm omits the experts", "gradient norm", "the experts counted 0 times", ("parallel.zero=0",)),
    Fault("norm of the rank's own part", "ranks agree", "grad_norm on rank 1 (dp 1)"),
    Fault("ranks initialized differently", "weights at step 0", "on rank 1 (dp 1) is not the tensor of (seed, name)"),
    Fault("last micro-batch dropped", "samples read", "is read by 0 ranks of dp"),
    Fault("every rank reads the same samples", "samples read", "is read by 2 ranks of dp"),
    Fault("labels shifted", "loss", "the head, the loss, its targets or its divisor differ"),
    Fault("attention across documents", "modules' outputs", "layers.0.attention, sample"),
    Fault("positions doubled", "modules' outputs", "layers.0.attention, sample"),
    Fault("router computed in bf16", "router choices", "layer 1"),
    Fault("tokens dropped at an expert's capacity", "modules' outputs", "layers.1.feed_forward, sample"),
    Fault("router bias from local counts", "router biases", "layers.1.feed_forward.router.bias", BIAS),
    Fault("weight decay on norms", "adamw of these gradients", "norm.weight"),
    Fault("an overflow that one rank does not see", "overflow on one rank", "rank 1 (dp 1) did not skip", FP16),
    Fault(
        "stale low-precision weights after a load", "one -> layout: next loss", "from fp32, one process at most", BF16
    ),
    Fault("Adam's step not restored", "next weights", "layers."),
    Fault("a moment restored at half its size", "next weights", "embed.weight"),
    Fault("experts swapped in the checkpoint", "weights as saved", "experts.gate"),
    Fault("router's gradient not summed over tp", "gradients", "1.feed_forward.router.weight", TP),
    Fault("norms' gradients not summed over tp", "gradients", "layers.0.attention_norm.weight", TP),
    Fault("balance loss times tp", "gradients", "the balance loss x 2.0000 (= tp", TP),
    Fault("norm counts what tp replicates on every rank", "gradient norm", "what no axis cuts counted 2 times", TP),
    Fault(
        "one rank of tp moves its copy of the norms",
        "gradients",
        "copies alone: a copy of layers.0.attention_norm.weight",
        TP,
    ),
    Fault(
        "expert gradients times ep", "gradients", "experts.gate: 2.0000 x one process's gradient, which is dp or ep", EP
    ),
    Fault("a rank of ep takes its neighbor's experts", "modules' outputs", "layers.1.feed_forward, sample", EP),
    Fault(
        "rows that ep has brought stay in the order in which they came",
        "modules' outputs",
        "layers.1.feed_forward, sample",
        EP,
    ),
    Fault("tokens are read before ep has brought them", "modules' outputs", "layers.1.feed_forward, sample", EP),
    Fault("gradients are read before ep has brought them", "gradients", "the last is layers.2", EP),
    Fault(
        "chunks of ep: outputs are read before they have come back",
        "modules' outputs",
        "layers.1.feed_forward, sample",
        EP_CHUNKS,
    ),
    Fault(
        "chunks of ep: the outputs' gradients are read before they are there",
        "gradients",
        "the last is layers.2.feed_forward",
        EP_CHUNKS,
    ),
    Fault(
        "chunks of ep: the first and the last one's outputs are swapped",
        "modules' outputs",
        "layers.1.feed_forward, sample",
        EP_CHUNKS,
    ),
    Fault("chunks of ep: rows lie as without chunks", "modules' outputs", "layers.1.feed_forward, sample", EP_CHUNKS),
    Fault(
        "chunks of ep: the first and the last one's weights take each other's gradients",
        "gradients",
        "feed_forward.experts.",
        EP_CHUNKS,
    ),
    Fault("attention across documents under cp (all-to-all)", "modules' outputs", "layers.0.attention, sample", CP),
    Fault("attention across documents under cp (ring)", "modules' outputs", "layers.0.attention, sample", RING),
    Fault("positions of the wrong chunk under cp", "modules' outputs", "layers.0.attention, sample", CP),
    Fault(
        "balance loss of the rank's own positions under cp",
        "balance loss",
        "the last is layers.2.feed_forward.router.weight",
        CP,
    ),
    Fault("tied embedding not summed over the stages", "gradients", "1 of 43 gradients differ; the first", PP),
    Fault("a stage initialized like another", "weights at step 0", "layers.2.attention.q.weight on rank 1 (pp 1)", PP),
    Fault("keys' and values' gradients not summed over tp", "gradients", "layers.2.attention", TP),
    Fault("grouped queries: keys' gradient of one query head", "gradients", "layers.2.attention", TP),
    Fault("replicated key-value heads: gradient of one copy", "gradients", "layers.2.attention", MQA_CP),
    Fault("keys' and values' gradients not brought home (ring)", "gradients", "layers.2.attention", RING),
    Fault("experts without tokens: gradient not set", "gradients", ".feed_forward.experts.", EP, starves=True),
    Fault("a rank whose experts get no tokens leaves the graph", DIES, "rank", EP, starves=True),
    Fault("router bias not restored", "router biases", "layers.1.feed_forward.router.bias on rank 0", BIAS),
    Fault("gradients scaled up to the clipping norm", "adamw of these gradients", "", ("parallel.zero=0",)),
    Fault("a group of weights keeps the first learning rate", f"weights after {STEPS} steps", "embed.weight"),
    Fault("masters rounded to bf16 (ZeRO 2)", "adamw of these gradients", "", (*BF16, "parallel.zero=2")),
    Fault("ring: tiles beyond the 16th left out", "modules' outputs", "layers.0.attention, sample", RING),
    Fault("attention: pieces of a document see no earlier ones", "modules' outputs", "layers.0.attention, sample"),
    Fault("loss: gradient of the second chunk lost", "gradients", EVERY_GRADIENT),
    Fault("loss: gradient of the second chunk lost under tp", "gradients", EVERY_GRADIENT, TP),
    Fault("experts: last unit of rows left out", "modules' outputs", "layers.1.feed_forward, sample"),
    Fault("second bucket of gradients not reduced (ZeRO 1)", "gradients", "43 gradients differ"),
    Fault("second bucket of gradients not reduced (ZeRO 2)", "gradients", "43 gradients differ", ("parallel.zero=2",)),
    Fault("second bucket of gradients not reduced (ZeRO 1, bf16)", "gradients", "from fp32, one process", BF16),
    Fault("a gathered weight is shifted (ZeRO 3)", "modules' outputs", "embed, sample", ("parallel.zero=3",)),
    Fault(
        "the first group of weights alone is updated (ZeRO 3)", f"weights after {STEPS} steps", "", ("parallel.zero=3",)
    ),
    Fault("accumulation in bf16 (ZeRO 1)", ACCUMULATED, "", BF16),
    Fault("accumulation in bf16 (ZeRO 2)", ACCUMULATED, "", (*BF16, "parallel.zero=2")),
    Fault("accumulation in bf16 (ZeRO 3)", ACCUMULATED, "", (*BF16, "parallel.zero=3")),
    Fault("accumulation in bf16 under pp (ZeRO 2)", ACCUMULATED, "", (*BF16, *PP, "parallel.zero=2")),
    Fault("accumulation in fp16 (ZeRO 2)", ACCUMULATED, "", (*FP16, "parallel.zero=2")),
    Fault("evaluation: filler samples counted", HELDOUT, HELDOUT_ALONE),
    Fault("evaluation: filler samples counted under pp", HELDOUT, HELDOUT_ALONE, PP),
    Fault("evaluation: a rank's share dropped", HELDOUT, HELDOUT_ALONE),
    Fault("evaluation: a sequence read twice, another not", HELDOUT, HELDOUT_ALONE),
    Fault("evaluation: a stage takes micro-batches in another order", HELDOUT, HELDOUT_ALONE, PP),
    Fault("evaluation: attention across documents", HELDOUT, HELDOUT_ALONE),
    Fault("evaluation: weights as at the first one (ZeRO 3)", HELDOUT, "after the steps", ("parallel.zero=3",)),
    Fault("evaluation: a gradient left behind", UNCHANGED, "gradient of final_norm.weight, before the steps"),
    Fault("evaluation: router counts left behind", "router counts", "layer 1 (step 1)"),
    Fault("evaluation: router biases moved", UNCHANGED, "layers.1.feed_forward.router.bias, before the steps", BIAS),
    Fault("latent projections' gradients not summed over tp", "gradients", "layers.0.attention.kv_a", (*TP, *LATENT)),
    Fault("a bias added on every rank of tp", "gradients", "layers.0.attention.o_bias.bias", (*TP, *OLMO2)),
    Fault("a norm over the heads of one rank", "modules' outputs", "layers.0.attention, sample", (*TP, *OLMO2)),
    Fault("a norm over all heads: gradient of one rank", "gradients", EVERY_GRADIENT, (*TP, *OLMO2)),
    Fault("head's z-loss times dp", "gradients", "the head's z-loss x 2.0000 (= dp", HEAD_Z),
    Fault("head's z-loss of the rank's own part of the vocabulary", "gradients", EVERY_GRADIENT, (*HEAD_Z, *TP)),
    Fault("head's z-loss over targets that do not count", "head's z-loss", "step 1", HEAD_Z),
    Fault("Muon: a rank's experts taken as one matrix", OF_MUON, "feed_forward.experts.", (*MUON, *EP)),
    Fault("Muon: each rank of tp orthogonalizes its own part", OF_MUON, "layers.", (*MUON, *TP)),
    Fault("Muon: a matrix's momentum not restored", "next weights", "layers.", MUON),
    Fault("Muon: a rank's partition taken as one matrix (ZeRO 1)", OF_MUON, "layers.", MUON_ZERO_1),
    Fault("Muon: rows taken for columns (ZeRO 3)", OF_MUON, "layers.", MUON_ZERO_3),
    Fault("Muon: an owner keeps what it computed (ZeRO 3)", OF_MUON, "layers.", MUON_ZERO_3),
    Fault("batch ramp: the whole batch from the first update on", "samples read", "(step 1) is another", GROWING),
    Fault("sinks' gradient forgotten", "gradients", "attention.sinks", (*TP, *SINKS), has_any_family=True),
    Fault("sinks' gradient forgotten (ring)", "gradients", "attention.sinks", (*RING, *SINKS), has_any_family=True),
    Fault("sinks of the first heads (all-to-all)", OUTPUTS, FIRST_ATTENTION, (*CP, *SINKS), has_any_family=True),
    Fault(
        "slopes of the first heads on every rank of tp", OUTPUTS, FIRST_ATTENTION, (*TP, *ALIBI), has_any_family=True
    ),
    Fault("slopes of the first heads (all-to-all)", OUTPUTS, FIRST_ATTENTION, (*CP, *ALIBI), has_any_family=True),
    Fault(
        "LayerNorms' biases not summed over tp", "gradients", "embed_norm.bias", (*TP, *LAYER_NORM), has_any_family=True
    ),
    Fault(
        "learned positions not summed over tp",
        "gradients",
        "1 of 44 gradients differ; the first in execution order is embed_positions.weight",
        (*TP, *LEARNED),
        has_any_family=True,
    ),
    Fault(
        "learned positions of one rank of cp",
        "gradients",
        "1 of 44 gradients differ; the first in execution order is embed_positions.weight",
        (*CP, *LEARNED),
        has_any_family=True,
    ),
    Fault(
        "learned positions of the first part on every rank of tp",
        OUTPUTS,
        "embed_positions, sample",
        (*TP, *LEARNED),
        has_any_family=True,
    ),
    Fault(
        "recomputation makes a parallel block a sequential one",
        OUTPUTS,
        "layers.0.feed_forward, sample",
        ("model.parallel_block=true", "train.recompute=selective"),
        has_any_family=True,
    ),
    Fault("router's trained bias not summed over tp", "gradients", "0.feed_forward.router.logit_bias", (*TP, *GPT_OSS)),
    Fault("distances' biases: gradient forgotten", "gradients", BIAS_OF_T5, (*TP, *T5), has_any_family=True),
    Fault("distances' biases: whole tiles left out (ring)", "gradients", BIAS_OF_T5, (*RING, *T5), has_any_family=True),
    Fault(
        "distances' biases of the first heads (all-to-all)", OUTPUTS, FIRST_ATTENTION, (*CP, *T5), has_any_family=True
    ),
    Fault("capped scores: slope forgotten", "gradients", EVERY_GRADIENT, (*TP, *SCORE_CAP), has_any_family=True),
    Fault(
        "capped logits: slope forgotten (cut vocabulary)",
        "gradients",
        EVERY_GRADIENT,
        (*TP, *LOGIT_CAP),
        has_any_family=True,
    ),
    Fault("muP: a rank of tp learns by its own part's fan-in", "adamw of these gradients", "layers.", (*TP, *MUP)),
    Fault("muP: every weight learns at the base model's rate", "weights after 2 steps", "head.weight", MUP),
    Fault("He: a rank of tp draws by its own part's fan-in", "weights at step 0", "is not the tensor of", (*TP, HE)),
    Fault("dropout: a rank's positions counted from its own first one (tp)", OUTPUTS, "sample", (*TP, *DROPS)),
    Fault("dropout: a rank's positions counted from its own first one (ring)", OUTPUTS, "sample", (*RING, *DROPS)),
    Fault("dropout: samples counted in the micro-batch", OUTPUTS, "layers.0.attention, sample", DROPS),
    Fault("dropout: every layer drops the same", OUTPUTS, "layers.1.feed_forward, sample", DROPS),
    Fault("dropout: every step drops the same", "loss", "step 2: the loss is", DROPS),
    Fault("dropout: steps counted from the process's start", "next loss", "step 3", DROPS),
    Fault("dropout: recomputation draws anew", "gradients", EVERY_GRADIENT, ("train.recompute=full", *DROPS)),
    Fault("dropout: numbers dropped in evaluation", HELDOUT, HELDOUT_ALONE, DROPS),
    Fault("dropout of weights: heads of the first rank (tp)", OUTPUTS, FIRST_ATTENTION, (*TP, *DROPS_WEIGHTS)),
    Fault("dropout of weights: heads of the first rank (all-to-all)", OUTPUTS, FIRST_ATTENTION, (*CP, *DROPS_WEIGHTS)),
    Fault("dropout of weights: keys counted in their tile (ring)", OUTPUTS, FIRST_ATTENTION, (*RING, *DROPS_WEIGHTS)),
    Fault("dropout of weights: gradients of what was dropped", "gradients", EVERY_GRADIENT, DROPS_WEIGHTS),
    Fault(
        "dropout of weights: gradients of what was dropped (ring)", "gradients", EVERY_GRADIENT, (*RING, *DROPS_WEIGHTS)
    ),
    Fault("further tokens looked for after cp's cut", FURTHER, EVERY_GRADIENT, (*CP, *MTP)),
    Fault("further tokens predicted one too near", FURTHER, EVERY_GRADIENT, MTP),
    Fault("further tokens of other documents", FURTHER, EVERY_GRADIENT, MTP),
    Fault("further tokens divided by the rank's own count", "gradients", EVERY_GRADIENT, MTP),
    Fault(
        "further tokens' embedding not summed over the stages",
        "gradients",
        "1 of 63 gradients differ; the first in execution order is embed.weight",
        (*PP, *MTP, "model.tie_embeddings=false"),
    ),
    Fault("further tokens' projection not summed over tp", "gradients", "mtp.3.project.weight", (*TP, *MTP)),
    Fault("products of 8 bits left in 16", "8 bits are used", "the layout lies", FP8),
    Fault("gradients of 8 bits put back at twice their size", "gradients", FROM_FP32, (*TP, *FP8)),
    Fault("rows of 8 bits put back by their neighbours' scales", "loss", FROM_FP32, FP8),
    Fault("weights' gradients of 8 bits put back by their neighbours' scales", "gradients", FROM_FP32, FP8),
    Fault("kept weights of 8 bits not cut again after an update", "loss", FROM_FP32, (*FP8, KEPT)),
    Fault("ring: pieces of documents begin one token later", OUTPUTS, "layers.1.attention, sample", RING),
    Fault("tp_overlap: gradients are read before tp has summed them", "gradients", EVERY_GRADIENT, TP_OVERLAP),
    Fault("tp_overlap: weights' gradients dropped", "gradients", "layers.0.attention.q.weight", TP_OVERLAP),
    Fault("tp_overlap: weights' gradients taken twice", "gradients", "2.0000 x one process's gradient", TP_OVERLAP),
    Fault("recomputation: experts are not multiplied again", "gradients", EVERY_GRADIENT, SELECTIVE),
    Fault(
        "recomputation: rows picked for others' tokens the second time",
        "gradients",
        "layers.0.feed_forward.experts.gate",
        (*SELECTIVE, *GPT_OSS),
    ),
    Fault("a layer's metric divided by the rank's own tokens", "other metrics", "moe/layer_01/entropy (step 1)"),
    Fault(
        "attention's gates: gradients not summed over tp", "gradients", "layers.", (*TP, *GATES), has_any_family=True
    ),
    Fault("attention's gates: those of other heads", OUTPUTS, FIRST_ATTENTION, (*CP, *HEAD_GATES), has_any_family=True),
    Fault("loss in 16 bits: divided by one target too many", "loss", FROM_FP32, BF16),
    Fault("evaluation in 16 bits: divided by one target too many", HELDOUT, FROM_FP32, BF16),
    Fault(
        "linear attention: a matrix goes on into the next document",
        OUTPUTS,
        FIRST_ATTENTION,
        LINEAR,
        has_any_family=True,
    ),
    Fault(
        "linear attention: rates of other heads (all-to-all)",
        OUTPUTS,
        FIRST_ATTENTION,
        (*CP, *LINEAR),
        has_any_family=True,
    ),
    Fault(
        "linear attention: key heads' taps not summed over cp",
        "gradients",
        "layers.0.attention.k_taps.weight",
        (*CP, *LINEAR),
        has_any_family=True,
    ),
    Fault(
        "queries grow by places in the rank's share under cp (all-to-all)",
        OUTPUTS,
        FIRST_ATTENTION,
        (*CP, *QUERY_GROWTH),
        has_any_family=True,
    ),
    Fault(
        "queries grow by places in the rank's share under cp (ring)",
        OUTPUTS,
        FIRST_ATTENTION,
        (*RING, *QUERY_GROWTH),
        has_any_family=True,
    ),
    Fault(
        "queries and keys normed before they turn",
        "gradients",
        "attention.q_norm.weight",
        (*TP, "model.qk_norm_after_rope=true"),
        has_any_family=True,
    ),
]
