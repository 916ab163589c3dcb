"""Part 1: kernels and small models on the device, against formulas in fp32 on the CPU.

Shape letters: B batch, S sequence, H heads, G key-value heads, C d_head; T tokens, K top_k, E experts, D d_model,
F d_ff, V vocab_size.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import gpu_8_bits
from fake_cuda.cases import fitting
from gpu_compare import BOUNDS, compare
from gpu_part import Check, Place
from gpu_report import ROOT
from gpu_ring import ring_on_one_device
from kernel_references import attend_reference, experts_reference, like_flash
from modeling.config import FAMILIES, ModelConfig
from modeling.context import PADDING, Context
from modeling.decoder import Decoder
from modeling.dropout import Draws, Dropout, ScoreDropout
from modeling.dtypes import DTYPES
from modeling.kernels.attention import attend, row_formula
from modeling.kernels.experts import ExpertBiases, experts_grouped
from modeling.kernels.varlen import FLASH, NO_LIMIT, PLAIN, Pieces
from modeling.loss import IGNORE, Head
from modeling.router import Router
from modeling.score_terms import Alibi, ScoreTerms
from small_models import Rows, build, example_config, next_tokens, packed_rows

CLAMP = 1.5  # of experts in fp32: in 16 bits a rounded value may lie beyond it, where its gradient is another
MODEL_LOSS_BOUND = 2e-2  # relative, of a small model's loss in bf16


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Heads, and documents by row; ``padding`` tokens end the first row."""

    name: str
    n_heads: int = 8
    n_kv_heads: int = 8
    d_head: int = 64
    lengths: Sequence[Sequence[int]] = ((100, 1, 155), (256,))
    window: int | None = None
    padding: int = 0
    has_sinks: bool = False
    has_slopes: bool = False
    cap: float | None = None
    row_block: int | None = None  # queries of a piece of rows, where scores are made in such


LONG = ((700, 1, 323), (1024,))  # chunks of 128 over four ranks
ATTENTION = (
    AttentionCase("plain"),
    AttentionCase("grouped heads", n_kv_heads=2),
    AttentionCase("one key-value head, 128 channels", n_kv_heads=1, d_head=128),
    AttentionCase("256 channels", n_heads=2, n_kv_heads=1, d_head=256),
    AttentionCase("window", n_kv_heads=4, window=17),
    AttentionCase("window of one", window=1),
    AttentionCase("one-token documents", n_kv_heads=4, lengths=((1,) * 256, (1, 254, 1))),
    AttentionCase("padding", n_kv_heads=4, padding=37),
    AttentionCase("padding and window", n_kv_heads=2, padding=37, window=40),
    AttentionCase("100 channels", d_head=100, n_kv_heads=2),
    AttentionCase("36 channels", d_head=36),
    AttentionCase("whole rows", lengths=((256,), (256,))),
    AttentionCase("whole rows, grouped heads", n_kv_heads=2, d_head=128, lengths=((1000,), (1000,))),
    AttentionCase("whole rows, one key-value head, window of all", n_kv_heads=1, lengths=((77,),), window=77),
    AttentionCase("sinks", n_kv_heads=2, has_sinks=True),
    AttentionCase("sinks and window", n_kv_heads=2, has_sinks=True, window=33),
    AttentionCase("slopes", has_slopes=True),
    AttentionCase("slopes and padding", n_kv_heads=4, has_slopes=True, padding=20),
    AttentionCase("slopes of long documents, window", 6, 2, d_head=100, lengths=LONG, window=333, has_slopes=True),
    AttentionCase("slopes of whole rows", n_kv_heads=2, lengths=((1024,), (1024,)), has_slopes=True),
    AttentionCase("cap", n_kv_heads=2, cap=5.0),
    AttentionCase(
        "cap, sinks, window, padding, by pieces", 8, 2, window=33, padding=20, has_sinks=True, cap=5.0, row_block=48
    ),
    AttentionCase("cap and slopes by pieces", has_slopes=True, cap=5.0, row_block=100),
)

RING = (
    AttentionCase("plain"),
    AttentionCase("grouped heads", n_kv_heads=2),
    AttentionCase("one key-value head, 128 channels", n_kv_heads=1, d_head=128, lengths=LONG),
    AttentionCase("256 channels", n_heads=2, n_kv_heads=1, d_head=256),
    AttentionCase("window", n_kv_heads=4, window=17),
    AttentionCase("window over two chunks", n_kv_heads=4, window=300, lengths=LONG),
    AttentionCase("window of one", window=1),
    AttentionCase("one-token documents", n_kv_heads=4, lengths=((1,) * 256, (1, 254, 1))),
    AttentionCase("one query of a document", n_kv_heads=2, lengths=((33, 64, 64, 95), (97, 159))),
    AttentionCase("padding and window", n_kv_heads=2, padding=37, window=40),
    AttentionCase("100 channels", d_head=100, n_kv_heads=2),
    AttentionCase("sinks and window", n_kv_heads=2, has_sinks=True, window=33),
)
RING_CP = 4


class PiecesCase(NamedTuple):
    """Lengths of pieces, and what they see of each other: ``modeling.kernels.varlen.Pieces``."""

    name: str
    queries: Sequence[int]
    keys: Sequence[int]
    left: int = NO_LIMIT
    right: int = NO_LIMIT


OWN = (5, 1, 9, 200)
PIECES = (
    PiecesCase("all keys", OWN, (3, 7, 130, 64)),
    PiecesCase("single queries", (1, 1, 1), (3, 40, 7)),
    PiecesCase("causal", OWN, OWN, right=0),
    PiecesCase("window", OWN, OWN, 16, 0),
    PiecesCase("window of earlier keys", (9, 30, 1, 150), (9, 2, 5, 140), 12),
)


@dataclasses.dataclass(frozen=True)
class ExpertCase:
    """How tokens are spread over experts."""

    name: str
    chosen: Callable[[int, int, int], Tensor]  # (n_tokens, top_k, n_experts) -> indices_TK
    n_tokens: int = 333
    biases: bool = False


def spread(n_tokens: int, top_k: int, n_experts: int) -> Tensor:
    """Different experts for each token, at random."""
    draws_TE = torch.rand(n_tokens, n_experts, generator=torch.Generator().manual_seed(7))
    return draws_TE.topk(top_k, dim=-1).indices


EXPERTS = (
    ExpertCase("spread", spread),
    ExpertCase("empty ones", lambda n, k, e: 2 * spread(n, k, e // 2) + 1),
    ExpertCase("all rows on one", lambda n, k, e: torch.full((n, 1), e - 1)),
    ExpertCase("all rows on the first", lambda n, k, e: torch.zeros(n, 1, dtype=torch.int64)),
    ExpertCase("one row", spread, n_tokens=1),
    ExpertCase("no rows at all", spread, n_tokens=0),
    ExpertCase("biases, in fp32 clamps", spread, biases=True),
    ExpertCase("biases, empty ones", lambda n, k, e: 2 * spread(n, k, e // 2), biases=True),
)


def checks(n_devices: int, *, dry: bool) -> list[Check]:
    """The part's checks."""
    found = [Check("doctor", check_doctor, 180)]
    for dtype in ("bf16", "fp16"):
        found += [Check(f"attention {dtype}: {case.name}", partial(check_attention, case, dtype)) for case in ATTENTION]
        found += [Check(f"pieces {dtype}: {case.name}", partial(check_pieces, case, dtype)) for case in PIECES]
        ring = partial(ring_on_one_device, cp=RING_CP)
        found += [
            Check(f"ring {dtype}: {case.name}", partial(check_attention, case, dtype, kernel=ring)) for case in RING
        ]
    for dtype in ("bf16", "fp16", "fp32"):
        cases = [case for case in EXPERTS if case is EXPERTS[0] or dtype == "bf16" or (case.biases and dtype == "fp32")]
        found += [Check(f"experts {dtype}: {case.name}", partial(check_experts, case, dtype)) for case in cases]
    found += [
        *gpu_8_bits.checks(),
        Check("loss chunks", check_loss_chunks),
        Check("router", check_router),
        Check("dropout: the same masks as on a CPU", check_dropout),
    ]
    for recompute_name in ("dense", "moe"):
        found.append(Check(f"deterministic twice, bitwise: {recompute_name}", partial(check_twice, recompute_name)))
    found += [Check(f"model: {family}", partial(check_family, family)) for family in FAMILIES]
    return found


def check_doctor(place: Place) -> None:
    """`roundtable doctor` finds nothing that fails, and the GPU."""
    command = [sys.executable, "-m", "launcher", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT, check=False)
    answer = json.loads(done.stdout)
    wrong = [row for row in answer["findings"] if row["verdict"] == "fails"]
    assert answer["can_train"] and not wrong, wrong
    gpus = [row for row in answer["findings"] if row["topic"] == "gpu" and row["verdict"] == "ok"]
    assert place.dry or gpus, answer["findings"]


def check_attention(case: AttentionCase, dtype: str, place: Place, kernel: Callable[..., Tensor] = attend) -> None:
    """Outputs and gradients of queries, keys, values and sinks. ``kernel``: what tests put in its place."""
    tensors = drawn_heads(case, DTYPES[dtype])
    context = packed_context(case)
    there = [each.detach().to(place.device).requires_grad_() for each in tensors]
    here = [each.detach().float().requires_grad_() for each in tensors]
    if case.row_block is not None:
        kernel = partial(row_formula_of, case.row_block)
    results = [
        run_attention(kernel, there, context.to(place.device), case),
        run_attention(attend_reference, here, context, case),
    ]
    valid_T = (context.documents_BS != PADDING).flatten()
    ours, theirs = (result.detach().cpu().float().flatten(0, 1)[valid_T] for result in results)
    compare("output", ours, theirs, BOUNDS[dtype])
    names = ("queries", "keys", "values", "sinks")
    for name, mine, reference in zip(names, there, here, strict=False):
        # A query that sees one key has no gradient, and neither has that key: differences of rounded numbers are left.
        floor = case.d_head**0.5 if not gradient(reference).any() else 0.0
        floor = cancelled(here, context, case) if name == "queries" else floor
        compare(f"gradient of {name}", gradient(mine), gradient(reference), BOUNDS[dtype], floor)


def row_formula_of(block: int, *given: Any) -> Tensor:
    """``row_formula`` in such pieces."""
    return row_formula(*given, block)


@torch.no_grad()
def cancelled(heads: list[Tensor], context: Context, case: AttentionCase) -> Tensor:
    """The norm of what is taken off in each row of the queries' gradient, whose rounding stays where little is left.

    The gradient is scale * (sum of weight * its gradient * key - (gradient * output) * sum of weight * key)
    (FlashAttention-2, arXiv:2307.08691, section 3.1), and the output is rounded. Of four ranks' blocks in fp16, with a
    kernel's roundings done on a CPU, one row differs by 2.6e-3 to 3.5e-3 of its own norm (as FlashAttention did on an
    H200: 2.59e-3), and by 1.3e-3 of it and this one (ten draws).
    """
    terms = terms_of(heads, case)
    out_BSHC, mean_key_BSHC = (
        attend_reference(heads[0], heads[1], seen, context, case.window, terms) for seen in (heads[2], heads[1])
    )
    per_query_BSH = (fixed_weights(out_BSHC, context) * out_BSHC).sum(-1)
    return (per_query_BSH.abs() * mean_key_BSHC.norm(dim=-1)).flatten() * case.d_head**-0.5


def check_pieces(case: PiecesCase, dtype: str, place: Place) -> None:
    """A block's outputs and log-sum-exp, and its part in the gradients where queries see more keys than the block's."""
    kernel = FLASH if place.device.type == "cuda" else like_flash()
    bounds = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (case.queries, case.keys)]
    pieces = Pieces(bounds[0], bounds[1], max(case.queries), max(case.keys), case.left, case.right)
    there = dataclasses.replace(pieces, query_bounds=bounds[0].to(place.device), key_bounds=bounds[1].to(place.device))
    generator = torch.Generator().manual_seed(8)
    shapes = [(sum(case.queries), 8, 64), (sum(case.queries), 8, 64), *[(sum(case.keys), 2, 64)] * 2]
    grad_THC, *heads = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in shapes)
    ours = kernel.forward(*(each.to(place.device) for each in heads), there)
    theirs = PLAIN.forward(*(each.float() for each in heads), pieces)
    whole_THC = (theirs[0] + torch.randn(theirs[0].shape, generator=generator)).to(DTYPES[dtype])
    whole = (whole_THC, theirs[1] + 1.5)
    given = [each.to(place.device) for each in (grad_THC, *heads, *whole)]
    exact = [each.float() for each in (grad_THC, *heads, *whole)]
    ours += kernel.backward(*given, there)
    theirs += PLAIN.backward(*exact, pieces)
    names = ("output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values")
    for name, mine, reference in zip(names, ours, theirs, strict=True):
        compare(name, mine.cpu().float(), reference, BOUNDS[dtype])


def drawn_heads(case: AttentionCase, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and sinks (fp32) where the case has them."""
    generator = torch.Generator().manual_seed(5)
    batch, seq_len = len(case.lengths), sum(case.lengths[0])
    widths = (case.n_heads, case.n_kv_heads, case.n_kv_heads)
    found = [torch.randn(batch, seq_len, n, case.d_head, generator=generator).to(dtype) for n in widths]
    return [*found, torch.randn(case.n_heads, generator=generator)] if case.has_sinks else found


def packed_context(case: AttentionCase) -> Context:
    """The documents' places, on the CPU."""
    rows = packed_rows(8, 0, [list(row) for row in case.lengths])
    if case.padding:
        rows.documents_BS[0, -case.padding :] = PADDING
        rows.positions_BS[0, -case.padding :] = 0
    return Context(rows.positions_BS, rows.documents_BS, has_padding=case.padding > 0)


def run_attention(
    kernel: Callable[..., Tensor], tensors: list[Tensor], context: Context, case: AttentionCase
) -> Tensor:
    """The output; gradients are those of its sum with fixed weights over the tokens that are no padding."""
    out_BSHC = kernel(*tensors[:3], context, case.window, terms_of(tensors, case))
    out_BSHC.backward(fixed_weights(out_BSHC, context).to(out_BSHC))
    return out_BSHC


def terms_of(tensors: list[Tensor], case: AttentionCase) -> ScoreTerms:
    """Slopes, sinks and a cap, where the case has them."""
    sinks_H = tensors[3] if case.has_sinks else None
    return ScoreTerms(Alibi(case.n_heads, range(case.n_heads)) if case.has_slopes else None, sinks_H, cap=case.cap)


def fixed_weights(out_BSHC: Tensor, context: Context) -> Tensor:
    """The output's gradient, on the CPU: always the same, and zero in padding."""
    weights = torch.randn(out_BSHC.shape, generator=torch.Generator().manual_seed(6))
    return weights * (context.documents_BS != PADDING).cpu()[..., None, None]


def check_experts(case: ExpertCase, dtype: str, place: Place) -> None:
    """Outputs, and gradients of hidden states, weights, matrices and biases."""
    d_model, d_ff, n_experts = place.small((256, 128, 16), (64, 32, 8))
    indices_TK = case.chosen(case.n_tokens, 2, n_experts)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(DTYPES[dtype])

    tensors = [drawn(case.n_tokens, d_model), torch.rand(indices_TK.shape, generator=generator)]
    tensors += [drawn(n_experts, d_ff, d_model, scale=d_model**-0.5) for _ in range(2)]
    tensors += [drawn(n_experts, d_model, d_ff, scale=d_ff**-0.5)]
    if case.biases:
        tensors += [drawn(n_experts, width) for width in (d_ff, d_ff, d_model)]
    there = [each.clone().to(place.device).requires_grad_() for each in tensors]
    here = [each.float().clone().requires_grad_() for each in tensors]
    limit = CLAMP if case.biases and dtype == "fp32" else None
    outs = []
    for held, kernel in ((there, experts_grouped), (here, experts_reference)):
        biases = ExpertBiases(*held[5:]) if case.biases else None
        out_TD = kernel(held[0], indices_TK.to(held[0].device), *held[1:5], biases, limit)
        out_TD.backward(drawn_like(out_TD))
        outs.append(out_TD.detach().cpu().float())
    compare("output", *outs, BOUNDS[dtype])
    names = ("hidden states", "weights", "gates", "ups", "downs", "gate biases", "up biases", "down biases")
    for name, mine, reference in zip(names, there, here, strict=False):
        compare(f"gradient of {name}", gradient(mine), gradient(reference), BOUNDS[dtype])


def check_loss_chunks(place: Place) -> None:
    """Whatever the chunks, the loss and its gradients are those of torch's own cross-entropy."""
    n_tokens, d_model, vocab_size = place.small((2048, 512, 32000), (96, 32, 320))
    generator = torch.Generator().manual_seed(4)
    hidden_TD = torch.randn(n_tokens, d_model, generator=generator).bfloat16()
    weight_VD = (torch.randn(vocab_size, d_model, generator=generator) * d_model**-0.5).bfloat16()
    targets_T = torch.randint(vocab_size, (n_tokens,), generator=generator)
    targets_T[::7] = IGNORE
    exact = [each.float().requires_grad_() for each in (hidden_TD, weight_VD)]
    loss = F.cross_entropy(exact[0] @ exact[1].T, targets_T, ignore_index=IGNORE, reduction="sum")
    loss.backward()
    for rows in (1, 17, n_tokens // 2, n_tokens):
        head = Head(vocab_size, d_model).to(place.device, torch.bfloat16)
        with torch.no_grad():
            head.weight.copy_(weight_VD)
        head.chunk_logits = rows * vocab_size
        held_TD = hidden_TD.clone().to(place.device).requires_grad_()
        ours, _ = head(held_TD[None], targets_T[None].to(place.device))
        ours.backward()
        found, wanted = float(ours.detach()), float(loss.detach())
        assert abs(found / wanted - 1) < 1e-3, f"chunks of {rows} tokens: loss {found} instead of {wanted}"
        compare(f"hidden states, chunks of {rows}", gradient(held_TD), gradient(exact[0]), BOUNDS["bf16"])
        compare(f"weight, chunks of {rows}", gradient(head.weight), gradient(exact[1]), BOUNDS["bf16"])


def check_router(place: Place) -> None:
    """The same choices as on a CPU wherever no tie is near, and the same weights, with and without groups."""
    for n_groups, score in ((1, "softmax"), (4, "sigmoid")):
        d_model, n_experts = place.small((1024, 128), (32, 16))
        router = Router(
            d_model=d_model,
            n_experts=n_experts,
            top_k=8 if n_groups == 1 else 4,
            n_groups=n_groups,
            top_k_groups=max(1, n_groups // 2),
            n_best=2,
            score=score,
            normalize_top_k=True,
            routed_scale=1.0,
            has_bias=True,
        )
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator) * d_model**-0.5)
            assert router.bias is not None
            router.bias.copy_(torch.randn(n_experts, generator=generator) * 0.01)
        hidden_TD = torch.randn(4096, d_model, generator=generator).bfloat16()
        theirs = router(hidden_TD)
        clear_T = router.gap(theirs.logits_TE.softmax(-1) if score == "softmax" else theirs.logits_TE.sigmoid()) > 1e-5
        ours = router.to(place.device)(hidden_TD.to(place.device))
        sides = [side.indices_TK.cpu()[clear_T].sort(-1).values for side in (ours, theirs)]
        assert clear_T.float().mean() > 0.9
        assert torch.equal(*sides), f"{score}: other experts are chosen"
        weights = [side.weights_TK.detach().cpu()[clear_T].sort(-1).values for side in (ours, theirs)]
        torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def check_dropout(place: Place) -> None:
    """Masks of channels and of attention's weights, bit for bit."""
    draws = Draws(3, 5, torch.tensor([4, 2**40 + 11]), torch.arange(200))
    ones_BSD = torch.ones(2, 200, 514)
    for probability in (0.1, 0.5):
        dropout = Dropout(probability, 3, 2)
        here, there = dropout(ones_BSD, draws), dropout(ones_BSD.to(place.device), draws.to(place.device))
        assert torch.equal(here, there.cpu()), f"channels, {probability}"
        assert 0.5 * probability < float((here == 0).float().mean()) < 1.5 * probability
        seeds_B, places_Q = draws.of_samples(1, 1), torch.arange(40, 90)
        seen = [
            ScoreDropout(probability, seeds_B.to(device), range(3, 9)).factors(places_Q.to(device), 7, 150).cpu()
            for device in ("cpu", place.device)
        ]
        assert torch.equal(*seen), f"scores, {probability}"


def check_twice(kind: str, place: Place) -> None:
    """A model's loss and gradients, computed twice with deterministic kernels: the same bits."""
    changes: dict[str, Any] = place.small({"d_model": 512, "d_ff": 1024}, {})
    config = dataclasses.replace(fitting(example_config("qwen3_moe" if kind == "moe" else "llama")), **changes)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # only here: torch parses it anew for each matrix product
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (passed(config, place.device, torch.bfloat16) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    assert first[0] == second[0], f"losses {first[0]!r} and {second[0]!r}"
    different = [name for name, grad in first[1].items() if not torch.equal(grad, second[1][name])]
    assert not different, f"other gradients of {different}"


def check_family(family: str, place: Place) -> None:
    """A small model's loss in bf16 on the device, against fp32 on the CPU; every gradient is finite."""
    config = fitting(example_config(family))  # type: ignore[arg-type]
    ours, gradients = passed(config, place.device, torch.bfloat16)
    theirs, _ = passed(config, torch.device("cpu"), torch.float32)
    infinite = [name for name, grad in gradients.items() if not torch.isfinite(grad).all()]
    assert not infinite, f"gradients of {infinite} are not finite"
    assert abs(ours / theirs - 1) < MODEL_LOSS_BOUND, f"loss {ours} instead of {theirs}"


def passed(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """The loss of packed rows, and the gradients, on the CPU."""
    model = build(config, 0)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(device, dtype)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(device)  # routers' biases stay fp32
    loss = loss_of(model, packed_rows(config.vocab_size, 1, [[50, 1, 39], [90]]), device)
    loss.backward()
    return float(loss.detach()), {
        name: gradient(weight) for name, weight in model.named_parameters() if weight.grad is not None
    }


def loss_of(model: Decoder, rows: Rows, device: torch.device) -> Tensor:
    """The summed loss of the rows' next tokens, over their number."""
    targets_BS = next_tokens(rows)
    context = Context(rows.positions_BS, rows.documents_BS).to(device)
    output = model(rows.tokens_BS.to(device), context, targets_BS.to(device))
    assert output.loss is not None
    return output.loss / int((targets_BS != IGNORE).sum())


def gradient(tensor: Tensor) -> Tensor:
    """On the CPU, fp32."""
    assert tensor.grad is not None, "no gradient"
    return tensor.grad.detach().cpu().float()


def drawn_like(tensor: Tensor) -> Tensor:
    """Random numbers of its shape, dtype and device, always the same."""
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)).to(tensor)
