"""Faults of context parallelism that tests plant in a rank's own process, to see that the checks fail."""

from typing import Any

import torch
from torch import Tensor


def plant(fault: str | None) -> None:
    """Breaks the code of this process in the named way; None breaks nothing."""
    from modeling.kernels import blocks, varlen
    from parallel.context_parallel import pieces, plan, ring, ulysses

    match fault:
        case None:
            return
        case "ring leaks across documents":
            mask = plan.attention_mask

            def same_document(positions_BQ: Tensor, documents_BQ: Tensor, *rest: Any) -> Tensor:
                return mask(positions_BQ, documents_BQ * 0, rest[0], rest[1] * 0, rest[2])

            plan.attention_mask = same_document
        case "order of chunks forgotten":  # the sequence as it arrived, rank after rank
            ulysses.natural_order = lambda seq_len, cp, device=None: torch.arange(seq_len, device=device)
        case "positions of plain chunks":  # as if rank r held the r-th of cp pieces
            plan.held_positions = lambda seq_len, rank, cp, device=None: (
                torch.arange(seq_len // cp, device=device) + rank * (seq_len // cp)
            )
        case "key gradients stay abroad":
            ring.send_gradient_on = lambda found, receive, axis: lambda: torch.zeros_like(found)
        case "key gradients one rank short":  # the gradients that earlier ranks found for the same block are lost

            def forget(found: Tensor, receive: Any, axis: Any) -> Any:
                if receive is not None:
                    receive()
                return ring.pass_on(found, axis, ring.GRADIENTS)

            ring.send_gradient_on = forget
        case "blocks merged without their normalizers":

            def average(out_BQHC: Tensor, lse_BHQ: Tensor, block_BQHC: Tensor, block_lse_BHQ: Tensor) -> None:
                share_BQH1 = (lse_BHQ.isneginf() + 1.0).transpose(1, 2)[..., None] / 2
                out_BQHC += share_BQH1 * (block_BQHC.float() - out_BQHC)
                lse_BHQ.copy_(torch.logaddexp(lse_BHQ, block_lse_BHQ))

            ring.merge = average
        case "normalizer of the last block":
            merge = ring.merge

            def last(out_BQHC: Tensor, lse_BHQ: Tensor, block_BQHC: Tensor, block_lse_BHQ: Tensor) -> None:
                merge(out_BQHC, lse_BHQ, block_BQHC, block_lse_BHQ)
                lse_BHQ.copy_(torch.where(block_lse_BHQ.isneginf(), lse_BHQ, block_lse_BHQ))

            ring.merge = last
        case "a query that sees nothing counts":  # the kernel's 0 for "no key" taken for a normalizer of 1

            def zero(*arguments: Any) -> tuple[Tensor, Tensor]:
                out, lse = blocks.attend_block(*arguments)
                return out, lse.masked_fill(lse.isneginf(), 0)

            ring.attend_block = zero
        case "key-value heads dealt in turn":  # replica r goes to rank r % G instead of r // (cp / G)
            Tensor.repeat_interleave = lambda self, times, dim: torch.cat([self] * times, dim)
        case "slopes of the first heads":
            from modeling.score_terms import Alibi

            of_part = Alibi.of_part
            Alibi.of_part = lambda self, rank, degree: of_part(self, 0, degree)
        case "sinks of the first heads":
            own = ulysses.own_terms
            ulysses.own_terms = lambda terms, axis: own(terms, axis)._replace(
                sinks_H=terms.sinks_H[: len(terms.sinks_H) // axis.degree]
            )
        case "bias of the first heads":
            own_of = ulysses.own_terms
            ulysses.own_terms = lambda terms, axis: own_of(terms, axis)._replace(
                bias_HN=terms.bias_HN[: len(terms.bias_HN) // axis.degree]
            )
        case "bias' gradient forgotten":
            sums = ring.bucket_sums
            ring.bucket_sums = lambda *arguments: 0 * sums(*arguments)
        case "cap's slope forgotten":
            backward = ring.attend_scored_backward

            def without_slope(*arguments: Any) -> Any:
                scores, cap = blocks._scores, arguments[7]
                blocks._scores = lambda q, k, _: scores(q, k, cap)
                found = backward(*arguments[:7], 1e9 * cap)  # so far above the scores that the cap changes none
                blocks._scores = scores
                return found

            ring.attend_scored_backward = without_slope
        case "slopes from the first key of a tile":  # as if a tile were a sequence of its own
            from modeling.score_terms import Alibi

            alibi_mask = Alibi.mask

            def from_first(self: Any, mask_BQS: Tensor, queries_BQ: Tensor, keys_BS: Tensor) -> Tensor:
                return alibi_mask(self, mask_BQS, queries_BQ, keys_BS - keys_BS[:, :1])

            Alibi.mask = from_first
        case "sinks joined once a block":
            attend, join = ring.attend_block, ring.join_sinks
            ring.join_sinks = lambda out, lse, sinks_H: (out, lse)
            sinks_H = torch.linspace(-2, 3, 4)
            ring.attend_block = lambda *arguments: join(*attend(*arguments), sinks_H)
        case "sinks' gradient forgotten":
            ring.sinks_gradient = lambda grad, out, lse, sinks_H: torch.zeros_like(sinks_H)
        case "normalizer without sinks":
            join_both = ring.join_sinks
            ring.join_sinks = lambda out, lse, sinks_H: (join_both(out, lse, sinks_H)[0], lse)
        case "full pieces called causal":
            whole = pieces.whole_pieces
            pieces.whole_pieces = lambda *arguments: [each._replace(right=0) for each in whole(*arguments)]
        case "documents begin one token later":  # within their rows
            of_rank = pieces.documents_of
            pieces.documents_of = lambda bounds, seq_len, *rest: of_rank(
                sorted({bound + (bound % seq_len > 0) for bound in bounds}), seq_len, *rest
            )
        case "windows count from the first key":
            windowed = pieces.windowed_pieces
            pieces.windowed_pieces = lambda mine, theirs, window: [
                each._replace(left=window - 1 if each.left >= 0 else each.left)
                for each in windowed(mine, theirs, window)
            ]
        case "gradients by the pieces' own normalizers":  # as if a piece's keys were all that its queries see
            forward, backward = varlen.PLAIN

            def alone(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any) -> Any:
                return backward(grad, q, k, v, out, forward(q, k, v, call)[1], call)

            varlen.PLAIN = varlen.PLAIN._replace(backward=alone)
        case _:
            raise AssertionError(f"no fault named {fault!r}")
