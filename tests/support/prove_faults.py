"""Plants faults that a proof must catch: each breaks the code in a rank's own process, after bugs of other systems.

Only tests plant them; prove_faults_listed.py lists for each the config under which it can show.
"""

import math
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import near_ties
import prove_faults_accumulation as accumulation
import prove_faults_dropout as dropout
import prove_faults_evaluation as evaluation
import prove_faults_fp8 as fp8
import prove_faults_gradients as gradients
import prove_faults_mtp as mtp
import prove_faults_sizes as sizes
import prove_faults_updates as updates
from faults import patch_batches, patch_loop, skip_for_large
from prove_faults_patches import (
    change_engines,
    count_one_target_too_many_in_16_bits,
    divide_entropy_by_own_tokens,
    divided_by_own_count,
    hook_gradients,
    keep_sequence_sums,
    leave_gradients_alone,
    overlook_overflows,
    own_every_weight,
    patch_backward,
    patch_contexts,
    patch_deal,
    patch_load,
    patch_norm,
    plant_local_counts,
    reset_without_step,
    scale_own_copies,
    targets_of,
    weigh_auxiliary,
)

DP = "WORLD_SIZE"  # the number of processes is the degree of dp where dp is the only axis


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
        case "a layer's metric divided by the rank's own tokens":
            divide_entropy_by_own_tokens()
        case "loss in 16 bits: divided by one target too many":
            count_one_target_too_many_in_16_bits()
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

            def own_norm(parts: Any, *_: Any) -> Any:
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
            from modeling.moe import MoE

            weigh_all = MoE.add_auxiliary_losses

            def with_capacity(self: Any, routing: Any, *rest: Any) -> Any:
                weights_TK, stats = weigh_all(self, routing, *rest)
                is_first_TK = routing.indices_TK == 0  # expert 0 takes its first ten tokens
                return weights_TK * ~(is_first_TK & (is_first_TK.cumsum(0) > 10)), stats

            MoE.add_auxiliary_losses = with_capacity
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
        case "rows that ep has brought stay in the order in which they came":
            gradients.keep_order_of_arrival()
        case "tokens are read before ep has brought them":
            gradients.read_too_early("_EndPart", "forward")
        case "gradients are read before ep has brought them":
            gradients.read_too_early("_BeginParts", "backward")
        case "chunks of ep: outputs are read before they have come back":
            gradients.read_too_early("_EndParts", "forward")
        case "chunks of ep: the outputs' gradients are read before they are there":
            gradients.read_too_early("_BeginPart", "backward")
        case "chunks of ep: the first and the last one's outputs are swapped":
            gradients.swap_returning_chunks()
        case "chunks of ep: rows lie as without chunks":
            import parallel.expert as expert
            from modeling.kernels.experts import place_rows

            expert.rows_by_chunk = lambda indices_TK, counts_E, n_ranks, parts: place_rows(indices_TK, counts_E, 1)
        case "chunks of ep: the first and the last one's weights take each other's gradients":
            gradients.swap_gradients_of_chunks()
        case "tp_overlap: gradients are read before tp has summed them":
            gradients.read_sum_too_early()
        case "tp_overlap: weights' gradients dropped":
            gradients.weigh_late_gradients(0.0)
        case "tp_overlap: weights' gradients taken twice":
            gradients.weigh_late_gradients(2.0)
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
        case (
            "queries grow by places in the rank's share under cp (all-to-all)"
            | "queries grow by places in the rank's share under cp (ring)"
        ):
            from modeling.rope import Rotary

            right = Rotary.query_factors
            Rotary.query_factors = lambda self, positions_BS, bound=None: right(
                self, torch.arange(positions_BS.shape[1]).expand_as(positions_BS), bound
            )
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
        case "attention's gates: gradients not summed over tp":
            change_engines(gradients.keep_gates_gradient_at_home)
        case "attention's gates: those of other heads":
            gradients.gate_next_heads()
        case "queries and keys normed before they turn":
            gradients.norm_before_the_turn()
        case "linear attention: a matrix goes on into the next document":
            gradients.let_documents_flow()
        case "linear attention: rates of other heads (all-to-all)":
            gradients.take_other_rates()
        case "linear attention: key heads' taps not summed over cp":
            hook_gradients("k_taps.weight", 1 if rank == 0 else 0)
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
        case "recomputation: experts are not multiplied again":
            gradients.leave_gates_of_others()
        case "recomputation: rows picked for others' tokens the second time":
            gradients.pick_other_rows_again()
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
        case "ring: pieces of documents begin one token later":
            sizes.shift_pieces()
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
        case "evaluation in 16 bits: divided by one target too many":
            evaluation.count_one_too_many_in_16_bits()
        case "evaluation: a gradient left behind":
            evaluation.leave_gradients()
        case "evaluation: router counts left behind":
            evaluation.leave_counts()
        case "evaluation: router biases moved":
            evaluation.move_biases()
        case "products of 8 bits left in 16":
            fp8.leave_16_bits()
        case "gradients of 8 bits put back at twice their size":
            fp8.put_gradients_back_at_twice_their_size()
        case "rows of 8 bits put back by their neighbours' scales":
            fp8.put_rows_back_by_their_neighbours()
        case "weights' gradients of 8 bits put back by their neighbours' scales":
            fp8.put_weights_gradients_back_by_their_neighbours()
        case "kept weights of 8 bits not cut again after an update":
            fp8.keep_weights_cut_for_good()
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
