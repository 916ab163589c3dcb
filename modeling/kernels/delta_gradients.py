"""The gated delta rule's gradients, by hand: half the operations of autograd's, and no graph.

The backward pass goes through the rule's chunks (modeling.kernels.delta_chunks): first the states before each chunk are
computed again, then their gradients, from the last chunk to the first. Whatever does not depend on the previous chunk
is computed for all chunks at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modeling.kernels.delta_chunks import LENGTH_EPS, Chunks, chunks, chunks_of, in_rows, matrices


def gradients_by_chunks(arguments: Sequence[Any], wanted: Sequence[int], grad_BSHW: Tensor) -> tuple[Tensor, ...]:
    """The gradients by those of q, k, v, fading and writing whose numbers are in ``wanted``.

    ``arguments`` are those of ``gated_delta.by_chunks``; ``grad_BSHW`` is the gradient by its output.
    """
    q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH, positions_BS, chunk = arguments
    seq_len, n_keys, n_channels = k_BSGC.shape[1:]
    made = chunks(q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH, positions_BS, chunk)
    found = through_chunks(made, chunks_of(grad_BSHW.float(), made.q.shape[-2], n_keys))
    dq, dk, dv, dfading, dwriting = (in_rows(each, seq_len) for each in found)
    gradients = (
        through_unit(q_BSGC, dq * n_channels**-0.5),
        through_unit(k_BSGC, dk),
        dv.to(v_BSHW.dtype),
        dfading[..., 0].to(fading_BSH.dtype),
        dwriting[..., 0].to(writing_BSH.dtype),
    )
    return tuple(gradients[number] for number in wanted)


def through_chunks(made: Chunks, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients by q, k and v in chunks, and by each token's fading and writing (..., n, 1).

    ``grad`` is the gradient by the rule's output (B, G, R, N, n, W), fp32. In names a leading d stands for a gradient.
    """
    q, k, v, writing, is_earlier, between, seen, met, enters, leaves, _ = made
    states, new = matrices(made)
    states = states[:, :-1].unflatten(0, grad.shape[:3])
    dstates, dnew = matrices_back(made, grad)
    dputting = new @ dstates.mT
    dstays = (dstates * states).sum((-1, -2))
    del dstates  # a row's matrices are twice its values
    dseen = grad @ new.mT
    dasking = grad @ states.mT
    del grad, new
    dsolved = torch.cat([dnew, -(dnew @ states.mT)], dim=-1)
    del states, dnew
    dright, dsystem = through_system(made, dsolved)
    del dsolved
    dright_v, dright_k = dright.split([v.shape[-1], k.shape[-1]], dim=-1)
    of_keys = (dright_k * k).sum(-1)

    # Both (n, n) matrices have the factor exp(f_i - f_j): each one's product with its gradient is added to f_i's
    # gradient and subtracted from f_j's.
    dsystem_met = dsystem * met
    dwriting = dsystem_met.sum(-1) + (dright_v * v).sum(-1) + enters * of_keys
    turned = dsystem_met.mul_(writing[..., None]).addcmul_(dseen, seen)
    dfaded = turned.sum(-1) - turned.sum(-2)
    denters = (dasking * q).sum(-1) + writing * of_keys
    denters[..., -1] += dstays
    dfaded.addcmul_(denters, enters)
    dleft = (dputting * k).sum(-1) * leaves
    dfaded -= dleft
    dfaded[..., -1] += dleft.sum(-1)

    dscores = of_key_heads(dseen.mul_(between), k)
    dmet = of_key_heads(dsystem.mul_(writing[..., None]).mul_(between), k)
    dq = dscores @ k + of_key_heads(dasking * enters[..., None], k)
    by_value_heads = (dputting * leaves[..., None]).addcmul_(dright_k, (writing * enters)[..., None])
    dk = dscores.mT @ q + (dmet + dmet.mT) @ k + of_key_heads(by_value_heads, k)
    dv = dright_v * writing[..., None]
    return dq, dk, dv, (dfaded @ is_earlier.float())[..., None], dwriting[..., None]


def matrices_back(made: Chunks, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by the state after each chunk (B, G, R, N, C, W), and by what each token writes (B, G, R, N, n, W).

    The first is 0 after the last chunk.
    """
    read, putting = made.solved[..., made.v.shape[-1] :].flatten(0, 2), made.putting.flatten(0, 2)
    within, asked = (each.flatten(0, 2) for each in (made.seen.mT @ grad, made.asking.mT @ grad))
    stays, n_chunks = made.stays.flatten(0, 2), made.q.shape[3]
    dstates, dnew = torch.empty_like(asked), torch.empty_like(within)
    dstates[:, -1] = 0
    for here in reversed(range(n_chunks)):
        after, dnew_here = dstates[:, here], dnew[:, here]
        torch.baddbmm(within[:, here], putting[:, here], after, out=dnew_here)
        if here:
            before = torch.addcmul(asked[:, here], after, stays[:, here], out=dstates[:, here - 1])
            before.baddbmm_(read[:, here].mT, dnew_here, alpha=-1)
    heads = grad.shape[:3]
    return dstates.unflatten(0, heads), dnew.unflatten(0, heads)


def through_system(made: Chunks, dsolved: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by the right side and by the matrix T of the system T x = right.

    The solution x is ``made.solved``. Dright = T^-T Dx, and DT = -Dright x^T below the diagonal, which is constantly 1.
    """
    system = made.met * made.writing[..., None]
    dright = torch.linalg.solve_triangular(system.mT, dsolved, upper=True, unitriangular=True)
    return dright, (dright @ made.solved.mT) * -made.is_earlier.float().tril(-1)


def of_key_heads(by_value_heads: Tensor, like: Tensor) -> Tensor:
    """Gradients (B, G, R, ...) summed over the value heads that share a key head, if several do."""
    return by_value_heads if by_value_heads.shape[2] == like.shape[2] else by_value_heads.sum(2, keepdim=True)


def through_unit(heads: Tensor, by_unit: Tensor) -> Tensor:
    """The gradient by vectors, from the gradient by the unit vectors that ``delta_chunks.unit`` made of them."""
    wide = heads.float()
    length = torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS)
    along = (wide * by_unit).sum(-1, keepdim=True) * length.square()
    return ((by_unit - wide * along) * length).to(heads.dtype)
