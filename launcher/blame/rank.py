"""One rank's part in blaming a step: compares the gradient of each document's loss with that of the whole batch.

For each document the samples that contain it take a forward and a backward pass in which only its targets count, with
the weight that they have in the whole batch. So the documents' gradients, and that of the auxiliary losses, add up to
the batch's. Shape letters: N samples, S positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import IGNORED
from data.dataset import Dataset
from launcher.blame.aim import AimedDataset, Document, Part, documents_of
from launcher.prove.rank import note_progress
from launcher.replay.plan import Plan
from launcher.replay.rank import Found, replay_rank
from launcher.replay.seen import StepWatch, WatchedEngine, gather_seen
from launcher.training.step import Weights, accumulate_gradients, weights_of
from parallel.mesh import sum_over_ranks
from parallel.pipeline.rules import runs_micro_batches
from parallel.processes.stop import StopRequest

TOLD_TIMES = 10  # how often progress is told while documents are measured
TOKEN_DOCUMENTS = 3  # the number of worst documents whose tokens are measured one by one
TOKENS_EACH = 8  # the tokens of highest loss that are measured in each of these


@dataclass(frozen=True)
class Measured:
    """The loss of some targets and its gradient."""

    loss: float  # summed over the targets
    dot: float  # the dot product of the gradient with the batch's
    grad_norm: float

    def share_of(self, square: float) -> float:
        """The share of this gradient in the batch's, whose squared norm is ``square``; all shares add up to 1."""
        return self.dot / square if square else float("nan")


@dataclass(frozen=True)
class DocumentBlamed:
    """What one document contributed to the step."""

    document: Document
    n_targets: int
    measured: Measured


@dataclass(frozen=True)
class TokenBlamed:
    """What the prediction of one token contributed to the step."""

    document: str
    sample: int
    position: int  # in the sample, of the token before the predicted one
    token: int  # the predicted token's id
    before: int  # the id of the token before it
    measured: Measured


@dataclass
class Blamed:
    """The measurements on one step, which rank 0 returns to the command."""

    whole: Measured  # of the whole batch
    documents: list[DocumentBlamed]  # the worst first
    auxiliary: Measured | None  # None where the model has no router
    tokens: list[TokenBlamed]


def loss_without(each: DocumentBlamed, whole: Measured, n_targets: int) -> float:
    """The step's loss, a mean over ``n_targets`` targets, without this document's; NaN where there are no others."""
    n_rest = n_targets - each.n_targets
    return (whole.loss - each.measured.loss) / n_rest if n_rest else float("nan")


def grad_norm_without(each: DocumentBlamed, whole: Measured, n_targets: int) -> float:
    """The norm of the step's gradient without this document, for the mean loss over the remaining targets.

    Follows from |g - d|^2 = |g|^2 - 2 g.d + |d|^2. The routers' auxiliary losses are only rescaled with that mean. NaN
    where there are no other targets.
    """
    n_rest = n_targets - each.n_targets
    square = whole.dot - 2 * each.measured.dot + each.measured.grad_norm**2
    return math.sqrt(max(square, 0.0)) * n_targets / n_rest if n_rest and math.isfinite(square) else float("nan")


def blame_of(each: DocumentBlamed, whole: Measured, n_targets: int) -> float:
    """The larger of the relative reductions of the step's loss and gradient norm that leaving out the document gives.

    Negative where both would have grown. A long document with the same loss a token as the others gets about zero,
    whatever its share of the batch. The larger is taken rather than the mean, since noise has a high loss but may
    have hardly any gradient in a run that has learned that it is noise.
    """
    if n_targets == each.n_targets:
        return 1.0
    loss, norm = whole.loss / n_targets, math.sqrt(max(whole.dot, 0.0))
    of_loss = 1 - loss_without(each, whole, n_targets) / loss if loss else 0.0
    return max(of_loss, 1 - grad_norm_without(each, whole, n_targets) / norm if norm else 0.0)


def rank_documents(documents: Sequence[DocumentBlamed], whole: Measured) -> list[DocumentBlamed]:
    """The documents, the worst first: those with a loss or gradient that is not finite, then by ``blame_of``."""
    n_targets = sum(each.n_targets for each in documents)

    def badness(each: DocumentBlamed) -> tuple[bool, float]:
        is_finite = bool(np.isfinite([each.measured.loss, each.measured.grad_norm]).all())
        part = blame_of(each, whole, n_targets)
        return not is_finite, part if np.isfinite(part) else -np.inf

    return sorted(documents, key=badness, reverse=True)


class Blame:
    """Measures the documents of the next step with the weights before it; the engine's state stays unchanged."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.blamed: Blamed | None = None

    def look(self, engine: WatchedEngine, dataset: Dataset, indices: np.ndarray) -> None:
        """Measures all documents of the batch and the tokens of the worst ones; the result is in ``blamed``.

        A ``launcher.replay.rank.Look``, called before the step. All ranks must call it.
        """
        passes = Passes(self.plan, engine, dataset, indices)
        documents, batch = documents_of(dataset, indices), dataset.read(indices)
        rows = {int(sample): row for row, sample in enumerate(indices)}
        found = []
        for number, document in enumerate(documents):
            if number % max(1, len(documents) // TOLD_TIMES) == 0:
                passes.tell(f"document {number + 1} of {len(documents)}")
            targets = [batch.targets_BS[rows[part.sample], part.first : part.stop] for part in document.parts]
            n_targets = sum(int((each != IGNORED).sum()) for each in targets)
            found.append(DocumentBlamed(document, n_targets, passes.measure(document.parts)))
        auxiliary = passes.measure_auxiliary() if engine.model_config.moe is not None else None
        ranked = rank_documents([each for each in found if each.n_targets], passes.whole)
        tokens = []
        passes.tell("the tokens of the highest loss")
        for document, part in passes.highest_losses([each.document for each in ranked[:TOKEN_DOCUMENTS]]):
            row = rows[part.sample]
            pair = int(batch.targets_BS[row, part.first]), int(batch.tokens_BS[row, part.first])
            measured = passes.measure([part], further=False)
            tokens.append(TokenBlamed(document.name, part.sample, part.first, *pair, measured))
        self.blamed = Blamed(passes.whole, ranked, auxiliary, tokens)


class Passes:
    """Forward and backward passes over parts of one batch, with the weights before its update."""

    def __init__(self, plan: Plan, engine: WatchedEngine, dataset: Dataset, indices: np.ndarray) -> None:
        self.plan, self.engine, self.dataset, self.indices = plan, engine, dataset, indices
        self.tell("the whole batch")
        config = plan.config
        self.weights = weights_of(engine, dataset, indices)
        watch = StepWatch(engine, indices, config.train.micro_batch_size)
        self.gradient: list[Tensor] = []
        self.whole = self.run(dataset, indices, self.weights)
        seen = gather_seen(watch.seen(config.data.seq_len, len(self.weights.further)), engine)
        watch.close()
        self.losses_NS = seen.losses_of(indices, config.data.seq_len) if seen is not None else None

    def tell(self, what: str) -> None:
        """Records on rank 0 what begins, for the launching process to show."""
        if self.engine.mesh.rank == 0:
            note_progress(self.plan.config.run_path, what)

    def measure(self, parts: Sequence[Part], *, further: bool = True) -> Measured:
        """The loss of the targets at these positions and its gradient; all ranks must call it.

        With ``further`` the losses of multi-token prediction are included; the routers' auxiliary losses never are.
        """
        aimed, samples = AimedDataset(self.dataset, parts), {part.sample for part in parts}
        weights = replace(self.weights, balance=0.0, z=0.0)
        if not further:
            weights = replace(weights, further=tuple(0.0 for _ in weights.further))
        return self.run(aimed, self.rows_with(samples), weights)

    def measure_auxiliary(self) -> Measured:
        """The gradient of the routers' auxiliary losses alone, which whole sequences have: no target counts."""
        return self.run(AimedDataset(self.dataset, []), self.indices, self.weights)

    def rows_with(self, samples: set[int]) -> np.ndarray:
        """These samples, followed by as many others of the batch as the layout needs for a pass."""
        train, mesh, parallel = self.plan.config.train, self.engine.mesh, self.plan.config.parallel
        share, pp = train.micro_batch_size * mesh.dp.degree, mesh.pp.degree
        wanted = [sample for sample in self.indices.tolist() if sample in samples]
        rest = [sample for sample in self.indices.tolist() if sample not in samples]
        n, n_all = -(-len(wanted) // share), len(self.indices) // share
        while pp > 1 and n < n_all and not runs_micro_batches(parallel.pipeline, pp, n):
            n += 1
        return np.array([*wanted, *rest[: n * share - len(wanted)]], np.int64)

    def run(self, dataset: Dataset, indices: np.ndarray, weights: Weights) -> Measured:
        """One forward and backward pass, whose gradient is measured and discarded. All ranks must call it.

        The first call's gradient is kept as the batch's, with which those of later calls are compared.
        """
        engine, config = self.engine, self.plan.config
        drawn_from = (config.seed, self.plan.step)
        size = config.train.micro_batch_size
        totals = accumulate_gradients(engine, dataset, indices, size, StopRequest(), drawn_from, weights)
        held = [(part, share) for _, part, share in engine.gradients()]
        if not self.gradient:
            self.gradient = [part.detach().clone() for part, _ in held]
        dot = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
        for (part, share), whole in zip(held, self.gradient, strict=True):
            dot += torch.dot(part.flatten().double(), whole.flatten().double()) * share
        total = float(sum_over_ranks(dot, engine.mesh)) / engine.gradient_scale**2
        return Measured(totals.loss, total, engine.discard().grad_norm)

    def highest_losses(self, documents: Sequence[Document]) -> list[tuple[Document, Part]]:
        """The targets with the highest losses of each document, broadcast from rank 0. All ranks must call it."""
        found: list[Any] = [self.highest_losses_seen(documents)] if self.losses_NS is not None else [None]
        dist.broadcast_object_list(found, src=0, group=self.engine.mesh.control)
        return found[0]

    def highest_losses_seen(self, documents: Sequence[Document]) -> list[tuple[Document, Part]]:
        """The targets with the highest losses of each document, not finite ones first. For rank 0 alone."""
        assert self.losses_NS is not None
        rows = {int(sample): row for row, sample in enumerate(self.indices)}
        targets_NS, chosen = self.dataset.read(self.indices).targets_BS, []
        for document in documents:
            places = [
                (float(self.losses_NS[rows[part.sample], place]), Part(part.sample, place, place + 1))
                for part in document.parts
                for place in range(part.first, part.stop)
                if targets_NS[rows[part.sample], place] != IGNORED
            ]
            places.sort(key=lambda pair: (np.isfinite(pair[0]), -pair[0] if np.isfinite(pair[0]) else 0.0))
            chosen += [(document, part) for _, part in places[:TOKENS_EACH]]
        return chosen


def blame_rank(plan: Plan) -> tuple[Found, Blamed] | None:
    """Executes the plan; before its last step, measures what that step's documents contribute.

    All ranks must call it. Returns what was executed and the measurements on rank 0, None on the others.
    """
    blame = Blame(plan)
    found = replay_rank(plan, blame.look)
    if found is None:
        return None
    assert blame.blamed is not None
    return found, blame.blamed
