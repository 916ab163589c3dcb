"""Experts in chunks: what is computed while rows of others travel, in both passes; none is read before it came."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import parallel.expert as expert
from arriving import AXIS, Arriving
from launcher.estimate.pass_over import even, shares
from modeling.kernels.experts import ExpertBiases, Ways, count_pairs, experts_grouped
from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.fuse import plainly
from modeling.kernels.products import AS_THEY_ARE, Products
from parallel.expert import WeightChunks, chunks_of, make_dispatch, rows_by_chunk, sizes_on_host

FEW = settings(max_examples=50, deadline=None, derandomize=True)
N_EXPERTS, HELD, TOP_K, D_MODEL, D_FF = 8, 4, 2, 16, 32
Given = dict[str, Tensor]
TOKENS = ("hidden", "indices", "weights")


def inputs(n_tokens: int, *, biases: bool = False, starves: bool = False, dtype: torch.dtype = torch.float32) -> Given:
    """Tokens, what the router chose, and this rank's experts. ``starves``: no token goes to the last ones of a rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (n_tokens, D_MODEL), "weights": (n_tokens, TOP_K)}
    shapes |= {"gate": (HELD, D_FF, D_MODEL), "up": (HELD, D_FF, D_MODEL), "down": (HELD, D_MODEL, D_FF)}
    if biases:
        shapes |= {"gate_bias": (HELD, D_FF), "up_bias": (HELD, D_FF), "down_bias": (HELD, D_MODEL)}
    made = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    scores_TE = torch.rand(n_tokens, N_EXPERTS, generator=generator)
    if starves:
        scores_TE.view(n_tokens, 2, HELD)[..., 2:] = -1
    return made | {"indices": scores_TE.topk(TOP_K).indices}


def passes(
    given: Given, chunks: int, events: list[str], limit: float | None = None, products: Products = AS_THEY_ARE
) -> list[Tensor]:
    """What a dispatch and its experts make, and every gradient."""
    leaves = {name: each.clone().requires_grad_() for name, each in given.items() if name != "indices"}
    dispatch = make_dispatch(AXIS, chunks=chunks)
    rows_RD, compute = dispatch(leaves["hidden"], given["indices"], count_pairs(given["indices"], N_EXPERTS), plainly)
    events.append("between")
    biases = [leaves[name] for name in leaves if name.endswith("bias")]
    matrices = (leaves[name] for name in ("gate", "up", "down"))
    added = ExpertBiases(*biases) if biases else None
    out_TD = compute(rows_RD, leaves["weights"], *matrices, added, limit, Ways(products=products))
    events.append("forward ends")
    out_TD.square().sum().backward()
    grads = [each.grad for each in leaves.values()]
    assert all(grad is not None for grad in grads)
    return [out_TD.detach(), *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(
    ("n_tokens", "changes", "ways"),
    [
        (37, {}, {}),
        (37, {"starves": True}, {}),
        (0, {}, {}),
        (37, {"biases": True, "starves": True}, {"limit": 0.7}),
        (37, {"dtype": torch.bfloat16}, {}),
        (37, {"dtype": torch.bfloat16, "starves": True}, {"products": Fp8Products()}),
    ],
    ids=["fp32", "starved", "no tokens", "biases, limit", "bf16", "fp8"],
)
def test_chunks_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, chunks: int, n_tokens: int, changes: dict[str, Any], ways: dict[str, Any]
) -> None:
    """Of the output and of each gradient; what comes out is what one device makes."""
    there = Arriving(monkeypatch)
    given = inputs(n_tokens, **changes)
    found, wanted = passes(given, chunks, there.events, **ways), passes(given, 1, there.events, **ways)
    assert len(found) == len(given)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    if given["hidden"].dtype == torch.float32:
        stacked = [torch.cat([each, each]) for name, each in given.items() if name not in TOKENS]
        biases = ExpertBiases(*stacked[3:]) if stacked[3:] else None
        tokens = (given["hidden"], given["indices"], given["weights"])
        alone_TD = experts_grouped(*tokens, *stacked[:3], biases, ways.get("limit"))
        assert (found[0] - alone_TD).norm() <= 1e-6 * alone_TD.norm()  # weights multiply elsewhere


def watch_experts(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Tells when the experts of a chunk are computed, and differentiated."""
    over_rows, numbers = expert.experts_over_rows, iter(range(1, 100))

    def watched(*arguments: Any) -> Tensor:
        name = f"experts {next(numbers)}"
        events.append(name)
        out_RD = over_rows(*arguments)
        out_RD.register_hook(lambda _: events.append(name))
        return out_RD

    monkeypatch.setattr(expert, "experts_over_rows", watched)


def test_each_chunk_travels_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All begin at once; each goes home while the next one is computed. In the backward pass the last one is first."""
    there = Arriving(monkeypatch)
    watch_experts(monkeypatch, there.events)
    passes(inputs(37), 2, there.events)
    forward = ["begin 1", "begin 2", "between", "wait 1", "experts 1", "begin 3", "wait 2", "experts 2", "begin 4"]
    backward = ["begin 5", "begin 6", "wait 5", "experts 2", "begin 7", "wait 6", "experts 1", "begin 8"]
    assert there.events == [*forward, "wait 3", "wait 4", "forward ends", *backward, "wait 8", "wait 7"]


@pytest.mark.parametrize("never", range(1, 13))
def test_planted_reading_without_a_wait(monkeypatch: pytest.MonkeyPatch, never: int) -> None:
    """Whichever of the waits is left out, of three chunks in both passes: what is read too early is no number."""
    there = Arriving(monkeypatch, never=never)
    out_TD, grad_TD, *_ = passes(inputs(37), 3, there.events)
    assert bool(out_TD.isfinite().all()) == (never > 6)
    assert not grad_TD.isfinite().all()


@FEW
@given(
    n_ranks=st.integers(1, 4),
    held=st.integers(1, 5),
    chunks=st.integers(1, 5),
    n_tokens=st.integers(0, 20),
    seed=st.integers(0, 9),
)
def test_rows_to_send_lie_chunk_by_chunk(n_ranks: int, held: int, chunks: int, n_tokens: int, seed: int) -> None:
    """And there rank by rank, expert by expert, in the order of the tokens; the sizes told to all-to-all are theirs."""
    parts, n_experts = chunks_of(held, min(chunks, held)), n_ranks * held
    assert sum(parts) == held and max(parts) - min(parts) <= 1
    indices_TK = torch.rand(n_tokens, n_experts, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :2]
    counts_E = count_pairs(indices_TK, n_experts)
    rows = rows_by_chunk(indices_TK, counts_E, n_ranks, parts)
    of_chunk = [chunk for chunk, n in enumerate(parts) for _ in range(n)]
    experts_P, tokens_P = (
        indices_TK.flatten().tolist(),
        [t for t in range(n_tokens) for _ in range(indices_TK.shape[1])],
    )
    pairs = sorted((of_chunk[e % held], e // held, e, t) for e, t in zip(experts_P, tokens_P, strict=True))
    assert rows.tokens_R.tolist() == [token for *_, token in pairs]
    assert torch.equal(rows.tokens_R[rows.rows_TK.flatten()], torch.tensor(tokens_P, dtype=torch.int64))
    sent, _ = sizes_on_host(counts_E, counts_E.view(n_ranks, held), parts)
    wanted = [[sum(p[:2] == (chunk, rank) for p in pairs) for rank in range(n_ranks)] for chunk in range(len(parts))]
    assert sent == wanted


def test_a_weights_gradient_is_written_once() -> None:
    """It is the sum of the slices' gradients, whole with the last of them; a graph may be gone through again."""
    weight_EX = torch.randn(5, 3, requires_grad=True)
    parts = [2, 2, 1]
    chunks = WeightChunks(weight_EX, parts)
    taken = [chunks.take(chunk) for chunk in range(3)]
    assert torch.equal(torch.cat(taken), weight_EX)
    loss = torch.stack([(factor * each.sin()).sum() for factor, each in enumerate(taken, 1)]).sum()
    (wanted,) = torch.autograd.grad(
        sum((factor * each.sin()).sum() for factor, each in enumerate(weight_EX.split(parts), 1)), weight_EX
    )
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, weight_EX, retain_graph=True)
        assert torch.equal(found, wanted)


def test_rows_of_a_plan_are_dealt_by_experts() -> None:
    """A chunk of more experts has more rows, and all together are those that there are."""
    assert shares(10, [2, 1, 1]) == [5, 2, 3]
    sent, received = even(11)(torch.zeros(8), torch.zeros(2, 4), [2, 2])
    assert sent == received == [[3, 2], [3, 3]]
