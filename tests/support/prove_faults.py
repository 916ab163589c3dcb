"""Faults that a proof must catch: each breaks the code in a rank's own process, as other systems were seen to break.

``FAULTS`` says of each under which config it can show, and what the proof has to say. Only tests plant them.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import near_ties
import prove_faults_accumulation as accumulation
import prove_faults_dropout as dropout
import prove_faults_evaluation as evaluation
import prove_faults_gradients as gradients
import prove_faults_mtp as mtp
import prove_faults_sizes as sizes
import prove_faults_updates as updates
from faults import patch_batches, patch_loop, skip_for_large

DP = "WORLD_SIZE"  # while dp is the only axis


@dataclass(frozen=True)
class Fault:
    """``check`` is a check that must fail (DIES: the ranks); ``says`` must be in what the proof prints about it."""

    title: str
    check: str
    says: str
    overrides: tuple[str, ...] = ()
    ranks: int = 2
    starves: bool = False  # no router of either side chooses the second half of the experts
    has_any_family: bool = False  # the model is of blocks that no family has together


HELDOUT, UNCHANGED = "held-out loss", "evaluation changes nothing"
HELDOUT_ALONE = "the held-out loss differs (before the steps"
STEPS = 2  # of the proofs that faults are planted in
ACCUMULATED = "accumulated gradients"
DIES = "the processes come to an end"  # instead of a check: they do not
BIAS = ("model.moe.balance={name: bias, rate: 0.01}",)
FP16 = ("train.precision=fp16",)
BF16 = ("train.precision=bf16",)
TP, CP, EP, PP = ("parallel.tp=2",), ("parallel.cp=2",), ("parallel.ep=2",), ("parallel.pp=2",)
HEAD_Z = ("model.z_loss=1e-4",)
MUON, OF_MUON = ("optimizer={name: muon}", "parallel.zero=0"), "muon of these gradients"
MUON_ZERO_1, MUON_ZERO_3 = (MUON[0], "parallel.zero=1"), (MUON[0], "parallel.zero=3")
GROWING = ("train.global_batch_size=32", "train.batch_ramp.start=8", "train.batch_ramp.increment=8")
RING = ("parallel.cp=2", "parallel.cp_attention=ring")
MQA_CP = ("parallel.cp=2", "model.n_kv_heads=1")
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
]


def plant(title: str) -> None:
    """Breaks the code of this process in the named way."""
    rank, dp = int(os.environ["RANK"]), int(os.environ[DP])
    match title:
        case "mean of means: loss divided by the rank's own count":
            patch_loop("accumulate_gradients", divided_by_own_count(dp))
        case "loss not scaled by dp":
            patch_backward(lambda engine, loss: loss / dp)
        case "gradients not reduced":
            import deepspeed.comm as comm

            dist.all_reduce = skip_for_large(dist.all_reduce)
            comm.all_reduce = skip_for_large(comm.all_reduce)
        case "router's gradient from one rank only":
            hook_gradients("layers.1.feed_forward.router.weight", dp if rank == 0 else 0)
        case "expert gradients times dp":
            hook_gradients(".experts.", dp)
        case "balance loss times micro-batches":
            weigh_auxiliary("balance_coefficient", 3)
        case "z-loss times dp":
            weigh_auxiliary("z_loss", dp)
        case "padding counted as tokens":
            from launcher.prove.tokens import WatchedDataset

            count = WatchedDataset.count
            WatchedDataset.count = lambda self, indices: (count(self, indices)[0], len(indices) * self.seq_len)
        case "tied embedding: the head's gradient lost":
            from modeling.loss import ChunkedCrossEntropy, Head

            def forward(self: Any, hidden_BSD: Any, targets_BS: Any = None) -> Any:
                rows = (hidden_BSD.flatten(0, 1), self.weight.detach(), targets_BS.flatten())
                return ChunkedCrossEntropy.apply(*rows, self.chunk_logits, self.chunk_losses)

            Head.forward = forward
        case "norm counts the embedding twice":
            patch_norm(lambda parts: [parts[0], *parts])
        case "norm omits the experts":
            patch_norm(lambda parts: [part for part in parts if part[0].ndim < 3])
        case "norm of the rank's own part":
            import parallel.zero.engine as engine_module

            def own_norm(parts: Any, device: Any) -> Any:
                total = sum(torch.linalg.vector_norm(part, dtype=torch.float64) ** 2 * share for part, share in parts)
                return torch.as_tensor(math.sqrt(total), dtype=torch.float32)

            engine_module.global_norm = own_norm
        case "ranks initialized differently":
            import parallel.zero.engine as engine_module

            draw = engine_module.initial_box
            engine_module.initial_box = lambda config, seed, *rest: draw(config, seed + rank, *rest)
        case "last micro-batch dropped":
            patch_deal(lambda deal, indices, size, mesh: deal(indices, size, mesh)[:-1])
        case "every rank reads the same samples":
            patch_deal(lambda deal, indices, size, mesh: indices.reshape(-1, size)[:: mesh.dp.degree])
        case "labels shifted":
            patch_batches(lambda batch: setattr(batch, "targets_BS", batch.targets_BS.roll(1, dims=1)))
        case "attention across documents":
            patch_contexts(lambda context: setattr(context, "documents_BS", context.documents_BS.clamp(max=0)))
        case "positions doubled":
            patch_contexts(lambda context: setattr(context, "positions_BS", context.positions_BS * 2))
        case "router computed in bf16":
            from modeling.router import Router

            choose = Router.choose
            Router.choose = lambda self, scores_TE: choose(self, scores_TE.bfloat16())
        case "tokens dropped at an expert's capacity":
            from modeling.moe import Experts

            forward_all = Experts.forward

            def with_capacity(self: Any, hidden_TD: Any, indices_TK: Any, weights_TK: Any) -> Any:
                order = (indices_TK == 0).cumsum(0)  # expert 0 takes its first ten tokens
                return forward_all(self, hidden_TD, indices_TK, weights_TK * ~((indices_TK == 0) & (order > 10)))

            Experts.forward = with_capacity
        case "router bias from local counts":
            plant_local_counts()
        case "weight decay on norms":
            from modeling.optimizers.rule import UpdateRule

            decays = UpdateRule.decays
            UpdateRule.decays = lambda self, weight: len(weight.dims) == 1 or decays(self, weight)
        case "an overflow that one rank does not see":
            if rank > 0:
                overlook_overflows()
        case "stale low-precision weights after a load":
            patch_load(lambda engine: setattr(engine, "publish_weights", lambda: None))
        case "Adam's step not restored":
            patch_load(reset_without_step)
        case "a moment restored at half its size":
            from parallel.checkpoint.read import Checkpoint

            fill = Checkpoint.fill

            def mixed_up(self: Any, wanted: Any, hashed: Any = ()) -> Any:
                problems = fill(self, wanted, hashed)
                for target in targets_of(wanted, lambda piece: (piece.kind, piece.name) == ("exp_avg", "embed.weight")):
                    target.values.mul_(0.5)
                return problems

            Checkpoint.fill = mixed_up
        case "experts swapped in the checkpoint":
            import parallel.checkpoint.write as write

            collect = write.collect_owned

            def swapped(*arguments: Any) -> Any:
                owned, tensors = collect(*arguments)
                for key, tensor in tensors.items():
                    if key.startswith("weight/") and ".experts.gate/" in key and tensor.shape[0] > 1:
                        tensors[key] = tensor.flip(0).contiguous()
                return owned, tensors

            write.collect_owned = swapped
        case "router bias not restored":
            from parallel.checkpoint.read import Checkpoint

            fill_all = Checkpoint.fill

            def without_biases(self: Any, wanted: Any, hashed: Any = ()) -> Any:
                problems = fill_all(self, wanted, hashed)
                for target in targets_of(wanted, lambda piece: piece.kind == "buffer"):
                    target.values.zero_()
                return problems

            Checkpoint.fill = without_biases
        case "further tokens looked for after cp's cut":
            mtp.find_in_chunks()
        case "further tokens predicted one too near":
            mtp.predict_one_too_near()
        case "further tokens of other documents":
            mtp.look_beyond_documents()
        case "further tokens divided by the rank's own count":
            mtp.count_own_targets()
        case "further tokens' projection not summed over tp":
            change_engines(lambda engine: leave_gradients_alone(engine, ("d_model", "token_and_hidden")))
        case "tied embedding not summed over the stages" | "further tokens' embedding not summed over the stages":
            from parallel.zero.engine import Engine

            Engine.add_tied_gradient = lambda self: None
        case "a stage initialized like another":
            import parallel.zero.engine as engine_module

            draw_own = engine_module.initial_box
            engine_module.initial_box = lambda config, seed, name, *rest: draw_own(
                config, seed, name.replace("layers.2.", "layers.1."), *rest
            )
        case "a rank dies":
            if rank == 1:
                os._exit(7)
        case "router's gradient not summed over tp":
            change_engines(lambda engine: leave_gradients_alone(engine, ("scores", "d_model")))
        case "norms' gradients not summed over tp":
            change_engines(lambda engine: leave_gradients_alone(engine, ("d_model",)))
        case "latent projections' gradients not summed over tp":
            for dims in (("kv_latent_rope", "d_model"), ("q_latent", "d_model")):
                change_engines(lambda engine, dims=dims: leave_gradients_alone(engine, dims))
        case "a bias added on every rank of tp":
            gradients.add_biases_before_sums()
        case "a norm over the heads of one rank":
            gradients.norm_own_heads()
        case "a norm over all heads: gradient of one rank":
            gradients.keep_norms_gradient_at_home()
        case "balance loss times tp":
            weigh_auxiliary("balance_coefficient", 2)
        case "norm counts what tp replicates on every rank":
            change_engines(own_every_weight)
        case "one rank of tp moves its copy of the norms":
            change_engines(lambda engine: scale_own_copies(engine, 1.001 if rank == 1 else 1.0))
        case "expert gradients times ep":
            hook_gradients(".experts.", 2)
        case "a rank of ep takes its neighbor's experts":
            import parallel.expert as expert

            exchange = expert.exchange_counts
            expert.exchange_counts = lambda counts_E, axis: exchange(counts_E, axis).flip(1)
        case "attention across documents under cp (all-to-all)" | "attention across documents under cp (ring)":
            import parallel.batch as batch

            split = batch.split_context
            batch.split_context = lambda whole, axis: split(
                replace(whole, documents_BS=whole.documents_BS.clamp(max=0)), axis
            )
        case "positions of the wrong chunk under cp":
            import parallel.batch as batch

            split_right = batch.split_context

            def split_wrong(whole: Any, axis: Any) -> Any:
                context = split_right(whole, axis)
                context.positions_BS = whole.positions_BS.chunk(axis.degree, 1)[axis.rank]
                return context

            batch.split_context = split_wrong
        case "keys' and values' gradients not summed over tp":
            change_engines(gradients.keep_gradient_at_home)
        case "grouped queries: keys' gradient of one query head":
            gradients.first_query_head_only()
        case "replicated key-value heads: gradient of one copy":
            gradients.first_replica_only()
        case "keys' and values' gradients not brought home (ring)":
            gradients.lose_travelling_gradients()
        case "experts without tokens: gradient not set":
            change_engines(gradients.leave_gradients_unset)
        case "a rank whose experts get no tokens leaves the graph":
            gradients.leave_the_graph()
        case "gradients scaled up to the clipping norm":
            updates.scale_to_clip_norm()
        case "a group of weights keeps the first learning rate":
            updates.keep_first_lr()
        case "head's z-loss times dp":
            gradients.weigh_head_z_loss(dp)
        case "head's z-loss of the rank's own part of the vocabulary":
            gradients.take_own_logsumexp()
        case "head's z-loss over targets that do not count":
            gradients.count_every_logsumexp()
        case "Muon: a rank's experts taken as one matrix":
            updates.join_experts()
        case "Muon: each rank of tp orthogonalizes its own part":
            updates.leave_parts()
        case "Muon: a rank's partition taken as one matrix (ZeRO 1)":
            updates.join_partition()
        case "Muon: rows taken for columns (ZeRO 3)":
            updates.swap_rows_and_columns()
        case "Muon: an owner keeps what it computed (ZeRO 3)":
            updates.keep_results()
        case "Muon: a matrix's momentum not restored":
            from parallel.checkpoint.read import Checkpoint

            fill_momentum = Checkpoint.fill

            def forgetful(self: Any, wanted: Any, hashed: Any = ()) -> Any:
                problems = fill_momentum(self, wanted, hashed)
                for target in targets_of(wanted, lambda piece: piece.kind == "momentum_buffer"):
                    target.values.zero_()
                return problems

            Checkpoint.fill = forgetful
        case "router's trained bias not summed over tp":
            change_engines(lambda engine: leave_gradients_alone(engine, ("scores",)))
        case "batch ramp: the whole batch from the first update on":
            from launcher.training.batch_ramp import Batches

            Batches.size_at = lambda self, step: self.sizes[-1]
        case "sinks' gradient forgotten":
            gradients.forget_sinks()
        case "sinks' gradient forgotten (ring)":
            gradients.forget_sinks_in_ring()
        case "sinks of the first heads (all-to-all)":
            gradients.take_first_sinks()
        case "slopes of the first heads on every rank of tp" | "slopes of the first heads (all-to-all)":
            gradients.take_first_slopes()
        case "LayerNorms' biases not summed over tp":
            change_engines(gradients.keep_norms_biases)
        case "learned positions not summed over tp":
            change_engines(lambda engine: leave_gradients_alone(engine, ("positions", "d_model")))
        case "learned positions of one rank of cp":
            hook_gradients("embed_positions.weight", 1 if rank == 0 else 0)
        case "learned positions of the first part on every rank of tp":
            gradients.look_up_first_positions()
        case "recomputation makes a parallel block a sequential one":
            gradients.forget_parallel_blocks()
        case "distances' biases: gradient forgotten":
            gradients.forget_bias()
        case "distances' biases: whole tiles left out (ring)":
            gradients.sum_small_tiles()
        case "distances' biases of the first heads (all-to-all)":
            gradients.take_first_bias()
        case "capped scores: slope forgotten":
            gradients.forget_score_slope()
        case "muP: a rank of tp learns by its own part's fan-in":
            updates.learn_by_own_widths()
        case "muP: every weight learns at the base model's rate":
            updates.learn_alike()
        case "He: a rank of tp draws by its own part's fan-in":
            updates.draw_by_own_fans()
        case "capped logits: slope forgotten (cut vocabulary)":
            gradients.forget_logit_slope()
        case "dropout: a rank's positions counted from its own first one (tp)":
            dropout.draw_by_own_positions()
        case "dropout: a rank's positions counted from its own first one (ring)":
            dropout.draw_by_own_positions()
        case "dropout: samples counted in the micro-batch":
            dropout.draw_by_own_rows()
        case "dropout: every layer drops the same":
            dropout.draw_alike_in_layers()
        case "dropout: every step drops the same":
            dropout.draw_as_in_the_first_step()
        case "dropout: steps counted from the process's start":
            dropout.count_steps_of_the_process()
        case "dropout: recomputation draws anew":
            dropout.draw_anew_in_recomputation()
        case "dropout: numbers dropped in evaluation":
            dropout.drop_in_evaluation()
        case "dropout of weights: heads of the first rank (tp)":
            dropout.drop_for_the_first_heads()
        case "dropout of weights: heads of the first rank (all-to-all)":
            dropout.drop_for_the_first_heads()
        case "dropout of weights: keys counted in their tile (ring)":
            dropout.count_keys_of_a_tile()
        case "dropout of weights: gradients of what was dropped":
            import modeling.kernels.terms as terms

            dropout.forget_factors(terms)
        case "dropout of weights: gradients of what was dropped (ring)":
            import parallel.context_parallel.ring as ring

            dropout.forget_factors(ring)
        case "masters rounded to bf16 (ZeRO 2)":
            updates.round_masters()
        case "ring: tiles beyond the 16th left out":
            sizes.drop_tiles(16)
        case "attention: pieces of a document see no earlier ones":
            sizes.forget_earlier_pieces()
        case "loss: gradient of the second chunk lost":
            sizes.lose_second_chunk_of_one_device()
        case "loss: gradient of the second chunk lost under tp":
            sizes.lose_second_chunk_under_tp()
        case "experts: last unit of rows left out":
            sizes.pad_rows_short()
        case "second bucket of gradients not reduced (ZeRO 1)" | "second bucket of gradients not reduced (ZeRO 2)":
            sizes.skip_second_zero_bucket()
        case "second bucket of gradients not reduced (ZeRO 1, bf16)":
            sizes.skip_second_bf16_bucket()
        case "a gathered weight is shifted (ZeRO 3)":
            change_engines(sizes.shift_gathered)
        case "the first group of weights alone is updated (ZeRO 3)":
            change_engines(sizes.forget_update_group)
        case "accumulation in bf16 (ZeRO 1)":
            accumulation.let_autograd_accumulate()
        case "accumulation in bf16 (ZeRO 2)" | "accumulation in bf16 (ZeRO 3)":
            accumulation.let_deepspeed_accumulate("bf16")
        case "accumulation in fp16 (ZeRO 2)":
            accumulation.let_deepspeed_accumulate("fp16")
        case "accumulation in bf16 under pp (ZeRO 2)":
            accumulation.keep_sums_in_bf16()
        case "evaluation: filler samples counted" | "evaluation: filler samples counted under pp":
            evaluation.count_fillers()
        case "evaluation: a rank's share dropped":
            evaluation.drop_share()
        case "evaluation: a sequence read twice, another not":
            evaluation.read_others()
        case "evaluation: a stage takes micro-batches in another order":
            evaluation.reverse_stages()
        case "evaluation: attention across documents":
            evaluation.see_all_documents()
        case "evaluation: weights as at the first one (ZeRO 3)":
            evaluation.see_first_weights()
        case "evaluation: a gradient left behind":
            evaluation.leave_gradients()
        case "evaluation: router counts left behind":
            evaluation.leave_counts()
        case "evaluation: router biases moved":
            evaluation.move_biases()
        case "the next expert at gaps below a tie's":
            near_ties.choose_otherwise(0.0, 5e-6)
        case "the next expert at gaps above a tie's":
            near_ties.choose_otherwise(2e-5, 1e-2)
        case "ties are not replayed":
            near_ties.leave_ties()
        case "balance loss of the rank's own positions under cp":
            change_engines(keep_sequence_sums)
        case _:
            raise AssertionError(f"no fault named {title!r}")


def divided_by_own_count(dp: int) -> Callable[..., Any]:
    import launcher.training.step as step

    original = step.accumulate_gradients

    def accumulate(engine: Any, dataset: Any, indices: Any, micro_batch_size: int, *rest: Any) -> Any:
        mine = step.share_of_batch(indices, micro_batch_size, engine.mesh).reshape(-1)
        n_targets, n_tokens = dataset.count(mine)
        dataset.count = lambda _: (n_targets * dp, n_tokens * dp)
        try:
            return original(engine, dataset, indices, micro_batch_size, *rest)
        finally:
            del dataset.count

    return accumulate


def patch_contexts(change: Callable[[Any], None]) -> None:
    patch_batches(lambda batch: change(batch.context))


def patch_backward(change: Callable[[Any, Any], Any]) -> None:
    from parallel.zero.engine import Engine

    original = Engine.backward
    Engine.backward = lambda self, loss, *rest, **last: original(self, change(self, loss), *rest, **last)


def change_engines(change: Callable[[Any], object]) -> None:
    """Changes every engine once it is built."""
    import launcher.prove.rank as rank_module

    build = rank_module.build_engine

    def changed(*arguments: Any) -> Any:
        engine = build(*arguments)
        change(engine)
        return engine

    rank_module.build_engine = changed


def hook_gradients(names: str, factor: float) -> None:
    """Multiplies the gradients of the weights with ``names`` in their name."""

    def hook(engine: Any) -> None:
        for name, weight in engine.model.named_parameters():
            if names in name:
                weight.register_hook(lambda gradient: gradient * factor)

    change_engines(hook)


def scale_own_copies(engine: Any, factor: float) -> None:
    """This rank changes the norms' gradients after their sum over tp, so that its copies go their own way."""
    add_over_tp = engine.add_over_tp

    def add_and_scale() -> None:
        add_over_tp()
        for parameter, part, _ in engine.gradients():
            if engine.weights[parameter].weight.dims == ("d_model",):
                part.mul_(factor)

    engine.add_over_tp = add_and_scale


def leave_gradients_alone(engine: Any, dims: tuple[str, ...]) -> None:
    """The ranks of tp keep their own gradients of the weights with these dims."""
    for parameter, weight in engine.weights.items():
        if weight.weight.dims == dims:
            engine.weights[parameter] = replace(weight, place=replace(weight.place, axis="tp"))


def own_every_weight(engine: Any) -> None:
    engine.weights = {weight: replace(layout, is_owner=True) for weight, layout in engine.weights.items()}


def keep_sequence_sums(engine: Any) -> None:
    for module in engine.model.modules():
        if hasattr(module, "add_sequence_sums"):
            module.add_sequence_sums = lambda sums_BX: sums_BX


def weigh_auxiliary(coefficient: str, factor: float) -> None:
    from modeling.moe import MoE

    original = MoE.add_auxiliary_losses

    def weighed(self: Any, *arguments: Any) -> Any:
        true = getattr(self, coefficient)
        setattr(self, coefficient, true * factor)
        try:
            return original(self, *arguments)
        finally:
            setattr(self, coefficient, true)

    MoE.add_auxiliary_losses = weighed


def patch_norm(change: Callable[[list[Any]], list[Any]]) -> None:
    import parallel.zero.engine as engine_module

    original = engine_module.global_norm
    engine_module.global_norm = lambda parts, *rest: original(change(list(parts)), *rest)


def patch_deal(change: Callable[..., Any]) -> None:
    import launcher.training.step as step

    deal = step.share_of_batch
    step.share_of_batch = lambda indices, size, mesh: change(deal, indices, size, mesh)


def plant_local_counts() -> None:
    import launcher.training.loop as loop
    import launcher.training.step as step

    local: dict[int, torch.Tensor] = {}
    over_ranks, move = step.Sums.over_ranks, loop.move_router_biases

    def remembering(self: Any, *rest: Any) -> Any:
        local.update({layer: row[3:].to(torch.int64) for layer, row in self.layers.items()})
        return over_ranks(self, *rest)

    step.Sums.over_ranks = remembering
    loop.move_router_biases = lambda model, config, counts: move(model, config, local)


def overlook_overflows() -> None:
    from parallel.zero.engine import Engine

    original = Engine.step

    def overlooking(self: Any, lr: float) -> Any:
        result = original(self, lr)
        if result.skipped:
            self.sharding.loss_scale.scaler.cur_scale *= 2
        return replace(result, skipped=False)

    Engine.step = overlooking


def targets_of(wanted: Any, is_meant: Callable[[Any], bool]) -> list[Any]:
    """What is filled from pieces that are meant, each once: of what ``Checkpoint.wanted`` gives."""
    return list({id(each): each for pairs in wanted.values() for piece, each in pairs if is_meant(piece)}.values())


def patch_load(change: Callable[[Any], None]) -> None:
    """Changes the engine just before a checkpoint is loaded into it."""
    import launcher.prove.rank as rank_module

    load = rank_module.load_state

    def changed(engine: Any, checkpoint: Any) -> None:
        change(engine)
        load(engine, checkpoint)

    rank_module.load_state = changed


def reset_without_step(engine: Any) -> None:
    reset = engine.reset_states
    engine.reset_states = lambda step, kept=(): reset(0, kept)
