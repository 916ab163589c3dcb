"""Functions that pipeline tests run in each rank without DeepSpeed: plain SGD on the schedule's gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from launcher.prove.reference import PlainBatch as ReferenceBatch
from launcher.prove.reference import ReferenceTrainer
from modeling.config import ModelConfig
from modeling.context import PADDING, Context
from modeling.decoder import Output, build_decoder
from modeling.dtypes import DTYPES
from modeling.init import materialize
from modeling.loss import IGNORE
from modeling.moe_config import BiasBalance, MoEConfig, SequenceAuxBalance
from modeling.optimizers.config import SGDConfig
from modeling.router_biases import move_router_biases
from parallel.pipeline.config import PipelineConfig
from small_models import next_tokens, packed_rows

SEED = 3
LENGTHS = ([7, 1, 12, 4], [24], [3, 9, 8, 4], [1, 1, 20, 2], [12, 12], [5, 6, 13])  # of documents; 24 tokens a sequence
MOE = ModelConfig(
    family="glm4_moe",
    vocab_size=96,
    d_model=32,
    n_layers=5,
    n_heads=4,
    n_kv_heads=2,
    d_ff=48,
    qk_norm=True,
    moe=MoEConfig(
        n_experts=4,
        top_k=2,
        d_ff=24,
        n_shared_experts=1,
        n_dense_layers=1,
        score="sigmoid",
        z_loss=1e-2,
        balance=SequenceAuxBalance(coefficient=0.05),
    ),
)
BIAS = replace(MOE, moe=replace(MOE.moe, balance=BiasBalance(rate=0.01)))
DENSE = ModelConfig(vocab_size=96, d_model=32, n_layers=5, n_heads=4, n_kv_heads=2, d_ff=48)
MODELS = {"moe": MOE, "bias": BIAS, "dense": DENSE}


@dataclass(frozen=True)
class Case:
    """One pipeline run: the model, the schedule, the cut of the batch, and a fault to plant."""

    model: ModelConfig
    pipeline: PipelineConfig
    pp: int = 2
    n_micro: int = 8
    micro_batch_size: int = 2
    steps: int = 2
    lr: float = 0.2
    recompute: Any = "none"  # of all layers, or of each
    offload: bool = False  # activations are offloaded to the host
    padded: bool = False
    fault: str | None = None


@dataclass
class Seen:
    """The results of a run, of one rank or merged over ranks."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # by step
    counts: list[dict[int, Tensor]] = field(default_factory=list)
    balance: list[dict[int, float]] = field(default_factory=list)
    eval_loss: float = 0.0
    orders: list[list[str]] = field(default_factory=list)  # by rank: actions of the last step
    peaks: list[int] = field(default_factory=list)  # by rank: most stage activations alive at once
    sent: list[int] = field(default_factory=list)  # by rank: bytes sent to other ranks in the last step
    pages: list[int] = field(default_factory=list)  # by rank: pages of host memory used for activations
    copies: list[dict[str, Tensor]] = field(default_factory=list)  # by rank: weights at the end


def batch_of(case: Case, step: int) -> list[ReferenceBatch]:
    """A step's global batch, as micro-batches."""
    parts = []
    for number in range(case.n_micro):
        first = step * 7 + number * case.micro_batch_size
        lengths = [LENGTHS[(first + row) % len(LENGTHS)] for row in range(case.micro_batch_size)]
        rows = packed_rows(case.model.vocab_size, 1000 * step + number, lengths)
        targets_BS = next_tokens(rows)
        if case.padded and number % 3 == 1:
            rows.documents_BS[0, -5:] = PADDING
            targets_BS[0, -6:] = IGNORE
        parts.append(ReferenceBatch(rows.tokens_BS, targets_BS, rows.positions_BS, rows.documents_BS))
    return parts


@cache
def reference(case: Case) -> Seen:
    """The results of the case's steps on one plain process."""
    seen = Seen()
    trainer = ReferenceTrainer(case.model, SGDConfig(lr=case.lr, clip_norm=None), seed=SEED)
    for step in range(case.steps):
        result = trainer.step(batch_of(case, step), case.lr)
        seen.losses.append(result.loss)
        seen.gradients.append(result.gradients)
        seen.counts.append(result.counts)
        seen.balance.append(result.balance_loss)
    total, n_targets = 0.0, 0
    with torch.no_grad():
        for part in batch_of(case, 99)[:3]:
            context = Context(
                part.positions_BS, part.documents_BS, has_padding=bool((part.documents_BS == PADDING).any())
            )
            total += float(trainer.model(part.tokens_BS, context, part.targets_BS).loss)
            n_targets += int((part.targets_BS != IGNORE).sum())
    seen.eval_loss = total / n_targets
    return seen


def micro_batches(parts: list[ReferenceBatch], scale: float = 1.0) -> tuple[list[Any], int]:
    """The pipeline's micro-batches with their contexts, and the number of targets. ``scale`` multiplies all losses."""
    from parallel.batch import MicroBatch

    n_targets = sum(int((part.targets_BS != IGNORE).sum()) for part in parts)
    n_tokens = sum(int((part.documents_BS != PADDING).sum()) for part in parts)
    n_sequences = sum(part.tokens_BS.shape[0] for part in parts)
    ready = []
    for part in parts:
        context = Context(
            part.positions_BS,
            part.documents_BS,
            balance_scale=scale / n_sequences,
            z_scale=scale / n_tokens,
            has_padding=bool((part.documents_BS == PADDING).any()),
        )
        ready.append(MicroBatch(part.tokens_BS, part.targets_BS, context))
    return ready, n_targets


def build_pipeline(case: Case, mesh: Any, precision: str = "fp32") -> tuple[Any, Any, list[Any]]:
    """This rank's decoder with its initial weights, its pipeline, and its parts of the model."""
    from launcher.prove.shrink import SMALL_SIZES
    from parallel.offload import copies_for, offloader_of
    from parallel.pipeline.stages import keep_parts, rank_parts
    from parallel.recompute import apply_recompute

    parts = rank_parts(case.model, case.pipeline, mesh.pp.degree, mesh.pp.rank)
    with torch.device("meta"):
        model = build_decoder(case.model)
    keep_parts(model, parts)
    seed = SEED + mesh.pp.rank if case.fault == "stage initialized like another" else SEED
    materialize(model, case.model, seed, "cpu", DTYPES[precision])
    offloader = offloader_of(model, copies_for(mesh.device), SMALL_SIZES) if case.offload else None
    apply_recompute(model, case.recompute, offloader=offloader)
    return model, make_pipeline(case, mesh, model, parts, DTYPES[precision]), parts


def make_pipeline(case: Case, mesh: Any, model: Any, parts: list[Any], dtype: torch.dtype) -> Any:
    """The pipeline over this rank's decoder ``model``."""
    from parallel.pipeline.run import Pipeline

    return Pipeline(
        model,
        parts,
        case.pipeline,
        mesh.pp,
        hidden_shape=(case.micro_batch_size, 24, case.model.d_model),
        dtype=dtype,
        device=mesh.device,
        neighbours=mesh.neighbours,
    )


def run_rank(case: Case) -> Seen:
    """Runs the case's steps on one rank; returns this rank's results. All ranks call it."""
    from parallel.mesh import close_mesh, open_mesh
    from parallel.pipeline.config import stage_ranks
    from parallel.pipeline.stages import is_second_copy, tied_weight
    from parallel.pipeline.tied import add_other_copy
    from parallel.recompute import offloader_in

    mesh = open_mesh(SimpleNamespace(pp=case.pp), 60)
    model, pipeline, parts = build_pipeline(case, mesh)
    ranks = stage_ranks(case.pipeline, case.pp)
    tied = tied_weight(model, case.model, parts, case.pp)
    seen = Seen()
    plant(case, pipeline)
    recorder = Recorder()
    for step in range(case.steps):
        ready, n_targets = micro_batches(batch_of(case, step))
        pipeline.prepare(len(ready))
        recorder.watch(pipeline)
        sent = count_sent()
        outputs = pipeline.train(ready, 1.0 / n_targets)
        if tied is not None and case.fault != "tied gradient not reduced":
            add_other_copy(tied.grad, mesh.pp, ranks[-1] if parts[0].has_embedding else ranks[0])
        collect(seen, outputs, n_targets, model, ready)
        if tied is not None and is_second_copy(parts):
            del seen.gradients[-1]["embed.weight"]
        with torch.no_grad():
            for weight in model.parameters():
                weight -= case.lr * weight.grad
                weight.grad = None
        move_router_biases(model, case.model, seen.counts[-1])
        seen.sent = list(sent)
    ready, n_targets = micro_batches(batch_of(case, 99)[:3])
    seen.eval_loss = sum(float(output.loss or 0.0) for output in pipeline.evaluate(ready)) / n_targets
    seen.orders, seen.peaks = [recorder.order], [recorder.peak]
    offloader = offloader_in(model)
    seen.pages = [0 if offloader is None else offloader.pool.n_pages]
    seen.copies = [{name: weight.detach() for name, weight in model.named_parameters()}]
    close_mesh()
    return seen


def count_sent() -> list[int]:
    """A list of one number, to which every send of floating-point values adds its bytes from now on."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    sent = [0]
    isend = getattr(dist.isend, "uncounted", dist.isend)

    def counted(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        sent[0] += tensor.nbytes if tensor.is_floating_point() and tensor.numel() > 1 else 0  # 1: torch 2.11 connects
        return isend(tensor, *arguments, **named)

    counted.uncounted = isend
    dist.isend = distributed_c10d.isend = counted
    return sent


def collect(seen: Seen, outputs: list[Output], n_targets: int, model: Any, ready: list[Any]) -> None:
    """Adds one step's losses, counts, balance losses and gradients to ``seen``."""
    seen.losses.append(sum(float(output.loss) for output in outputs if output.loss is not None) / n_targets)
    n_sequences = sum(part.tokens_BS.shape[0] for part in ready)
    counts: dict[int, Tensor] = {}
    balance: dict[int, float] = {}
    for output in outputs:
        for layer, stats in output.stats.items():
            counts[layer] = counts.get(layer, 0) + stats.counts_E
            balance[layer] = balance.get(layer, 0.0) + float(stats.balance_loss) / n_sequences
    seen.counts.append(counts)
    seen.balance.append(balance)
    seen.gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})


class Recorder:
    """Records a rank's actions in a step, in order, and the most stage activations that were alive at once."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.peak = 0
        self.stages: list[Any] = []

    def watch(self, pipeline: Any) -> None:
        """Records the next step of the pipeline's schedule, which has been prepared."""
        self.order, self.peak, self.stages = [], 0, pipeline.scheduled
        for stage in self.stages:
            stage.forward_one_chunk = self.recorded(stage, stage.forward_one_chunk, lambda _: "F")
            stage.backward_one_chunk = self.recorded(stage, stage.backward_one_chunk, whole_or_inputs)
            stage.backward_weight_one_chunk = self.recorded(stage, stage.backward_weight_one_chunk, lambda _: "W")

    def recorded(
        self, stage: Any, function: Callable[..., Any], kind: Callable[[dict[str, Any]], str]
    ) -> Callable[..., Any]:
        """The function, wrapped to record the action before it runs and count living activations after it."""

        def run(number: int, *arguments: Any, **named: Any) -> Any:
            self.order.append(f"{stage.stage_index}{kind(named)}{number}")
            result = function(number, *arguments, **named)
            self.peak = max(self.peak, sum(len(one.fwd_cache) + len(one.backward_state) for one in self.stages))
            return result

        return run


def whole_or_inputs(named: dict[str, Any]) -> str:
    """The kind of a call of backward_one_chunk: "B" for the whole backward pass, "I" for inputs' gradients only."""
    return "B" if named.get("full_backward", True) else "I"


def plant(case: Case, pipeline: Any) -> None:
    """Breaks this rank's pipeline in the way that the case names."""
    match case.fault:
        case "last micro-batch dropped":
            whole = pipeline.train
            pipeline.train = lambda ready, scale: whole(ready[:-1], scale)
            prepare = pipeline.prepare
            pipeline.prepare = lambda count: prepare(case.n_micro - 1)
        case "loss scaled per stage":
            scaled = pipeline.scaled_loss
            pipeline.scaled_loss = lambda loss, number: scaled(loss, number) / case.pp
        case "context of another micro-batch":
            for stage in pipeline.stages:
                if stage.part.stage > 0:  # on all stages it would only be another order of micro-batches
                    continue
                opened = stage.open
                stage.open = lambda ready, opened=opened: opened([*ready[1:], ready[0]])


@cache
def run_case(case: Case) -> Seen:
    """The merged results of the case on pp gloo processes; cached, since several tests use the same run."""
    from parallel.processes.start import run_ranks

    results: list[Seen] = run_ranks(run_rank, case.pp, case, timeout_seconds=120, threads=1)
    return merge(results, case.steps)


def merge(results: list[Seen], steps: int) -> Seen:
    """The ranks' results merged; fails where two ranks hold the same tensor."""
    merged = Seen(losses=[sum(result.losses[step] for result in results) for step in range(steps)])
    for step in range(steps):
        for mine, name in ((merged.gradients, "gradients"), (merged.counts, "counts"), (merged.balance, "balance")):
            whole: dict[Any, Any] = {}
            for result in results:
                part = getattr(result, name)[step]
                assert not whole.keys() & part.keys(), "two ranks hold one tensor"
                whole |= part
            mine.append(whole)
    merged.eval_loss = sum(result.eval_loss for result in results)
    for result in results:
        merged.orders += result.orders
        merged.peaks += result.peaks
        merged.sent += result.sent
        merged.pages += result.pages
        merged.copies += result.copies
    return merged


def errors(ours: Seen, theirs: Seen) -> dict[str, float]:
    """The largest relative errors of losses and of gradients (over each tensor's norm), and of counts (absolute)."""
    found = {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)),
        "eval": abs(ours.eval_loss - theirs.eval_loss) / theirs.eval_loss,
        "gradient": 0.0,
        "counts": 0.0,
        "balance": 0.0,
    }
    for mine, reference in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.keys() == reference.keys(), mine.keys() ^ reference.keys()
        for name, gradient in reference.items():
            error = float((mine[name] - gradient).double().norm() / gradient.double().norm())
            found["gradient"] = max(found["gradient"], error)
    for mine, reference in zip(ours.counts, theirs.counts, strict=True):
        assert mine.keys() == reference.keys()
        found["counts"] = max(
            [found["counts"], *(float((mine[layer] - reference[layer]).abs().max()) for layer in mine)]
        )
    for mine, reference in zip(ours.balance, theirs.balance, strict=True):
        found["balance"] = max([found["balance"], *(abs(mine[layer] - reference[layer]) for layer in mine)])
    return found
