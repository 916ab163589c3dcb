"""One proof from end to end: the plain side, the ranks, and the comparison of what both saw."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from data.dataset import Dataset, open_dataset
from launcher.config.tree import RunConfig
from launcher.prove.checkpoints import write_plain_checkpoint
from launcher.prove.compare.routing import TIE_GAP
from launcher.prove.kinks import clear_of_kinks
from launcher.prove.plain import PlainRun, PlainState, PlainTrainer, first_loss_scale, run_plain, samples_of_step
from launcher.prove.rank import (
    AFTER_LOAD,
    AFTER_STEPS,
    BEFORE_STEPS,
    PLAIN_CHECKPOINT,
    PhasePlan,
    Plan,
    RankSeen,
    prove_rank,
)
from launcher.prove.reference import ReferenceStep
from launcher.prove.rounding import DRAWS, round_anew, run_nudged
from launcher.prove.shrink import SAVING_SIZES, SMALL_SIZES, nonlinear_for, sgd_for
from modeling.logical import logical_parameters
from modeling.optimizers.config import OptimizerConfig
from modeling.precision_config import Precision
from parallel.mesh import Degrees
from parallel.processes.start import run_ranks

SGD = "fp32 sgd"  # a phase; the others are named by nonlinear_phase and own_phase
PRELOAD = ("launcher.training.loop", "launcher.prove.rank")


@dataclass
class PlainSide:
    """One process's run of each phase. ``own_*`` are None where the run's own precision is fp32."""

    sgd: PlainRun
    nonlinear: PlainRun  # one step more than sgd: the one after the checkpoint
    own_exact: PlainRun | None = None  # the run's own optimizer, in fp32; the last step follows the checkpoint
    own_low: PlainRun | None = None  # the same steps in the run's own precision, with own_exact's choices of experts


@dataclass
class Losses:
    """The training losses of some steps, and the held-out losses by moment (BEFORE_STEPS, AFTER_STEPS)."""

    steps: list[float]
    heldout: dict[str, float]


@dataclass
class Proof:
    """The results of both sides, and methods that repeat one process's steps with other roundings.

    ``config`` is the shrunk one, in the run's own precision.
    """

    config: RunConfig
    n_ranks: int
    steps: int
    folder: Path
    dataset: Dataset
    heldout: Dataset
    plain: PlainSide
    ranks: list[RankSeen] = field(default_factory=list)

    def trainer(self, optimizer: OptimizerConfig, done: int = 0) -> PlainTrainer:
        """A plain process in fp32 with the weights of step 0, whose learning rate goes on after ``done`` steps."""
        return plain_trainer(self.config, self.dataset, optimizer, done=done)

    @property
    def cancelled(self) -> frozenset[str]:
        """The names of weights whose gradients are zero but for rounding, which is all that can be checked of them."""
        tensors = logical_parameters(self.config.model)
        return frozenset(name for name, tensor in tensors.items() if tensor.weight.cancels)

    @functools.cached_property
    def nudged(self) -> list[PlainRun]:
        """DRAWS runs of the SGD phase on one process whose weights are nudged before each step."""
        return self.repeated(self.plain.sgd, sgd_for(self.config.optimizer))

    @functools.cached_property
    def nudged_nonlinear(self) -> list[PlainRun]:
        """DRAWS runs of the nonlinear phase on one process whose weights are nudged before each step."""
        return self.repeated(self.plain.nonlinear, nonlinear_for(self.config.optimizer))

    def repeated(self, run: PlainRun, optimizer: OptimizerConfig) -> list[PlainRun]:
        """DRAWS repetitions of the first ``steps`` of ``run``, with weights nudged before each step."""
        samples = (samples_of_step(step, self.config.train.batches) for step in range(self.steps))
        steps = list(zip(samples, run.choices, strict=False))
        return [run_nudged(self.trainer(optimizer), run.states[0], steps, draw) for draw in range(DRAWS)]

    def nudged_gradients(self, step: int) -> list[dict[str, Tensor]]:
        """The gradients of one step of the SGD phase in each draw of ``nudged``."""
        return [run.steps[step].gradients for run in self.nudged]

    def nudged_after(self, state: PlainState) -> list[dict[str, Tensor]]:
        """The gradients in DRAWS repetitions of the step after a checkpoint with ``state``, its weights nudged."""
        rule = nonlinear_for(self.config.optimizer)
        step = samples_of_step(self.steps, self.config.train.batches), self.plain.nonlinear.choices[self.steps]
        runs = (run_nudged(self.trainer(rule, self.steps), state, [step], draw) for draw in range(DRAWS))
        return [run.steps[0].gradients for run in runs]

    def rounded_anew(self, step: int, state: PlainState) -> list[ReferenceStep]:
        """DRAWS repetitions of a step in the run's own precision, from ``state``, its weights rounded anew."""
        found = []
        for draw in range(DRAWS):
            trainer = self.own_trainer(step, state)
            round_anew(trainer.trainer.model, trainer.trainer.masters, draw)
            found.append(self.own_step(trainer, step))
        return found

    @functools.cached_property
    def loaded_anew(self) -> list[ReferenceStep]:
        """DRAWS repetitions of the step after the checkpoint in the run's own precision, its weights rounded anew."""
        return self.rounded_anew(self.steps, self.checkpoint_state)

    @functools.cached_property
    def losses_anew(self) -> list[Losses]:
        """DRAWS times one process's losses in the run's own precision, its weights rounded anew before each step.

        Each draw takes all steps, since a loss after the first depends on the updates before it.
        """
        return [self.run_rounded(draw) for draw in range(DRAWS)]

    def run_rounded(self, draw: int) -> Losses:
        """The losses of one draw. Where it skips a step that the run made, or the reverse, it takes the run's state."""
        exact, low = self.own_runs
        trainer, n_sequences = self.own_trainer(0, low.states[0]), self.config.train.eval_sequences
        losses = Losses([], {})
        for step in range(self.steps + 1):
            round_anew(trainer.trainer.model, trainer.trainer.masters, draw + DRAWS * step)
            if (moment := {0: BEFORE_STEPS, self.steps: AFTER_STEPS}.get(step)) is not None:
                seen = trainer.evaluate(self.heldout, n_sequences, exact.heldout[step].choices)
                losses.heldout[moment] = seen.loss
            if step < self.steps:
                seen = self.own_step(trainer, step)
                losses.steps.append(seen.loss)
                if seen.skipped != low.steps[step].skipped:
                    trainer.load(low.states[step + 1])
        return losses

    @property
    def own_runs(self) -> tuple[PlainRun, PlainRun]:
        """The run's own optimizer on one process in fp32, and in the run's own precision."""
        assert self.plain.own_exact is not None and self.plain.own_low is not None
        return self.plain.own_exact, self.plain.own_low

    def own_trainer(self, done: int, state: PlainState) -> PlainTrainer:
        """A plain process in the run's own precision, which goes on from ``state`` after ``done`` steps."""
        config = self.config
        trainer = plain_trainer(config, self.dataset, config.optimizer, config.train.precision, done)
        trainer.load(state)
        return trainer

    def own_step(self, trainer: PlainTrainer, step: int) -> ReferenceStep:
        """Step ``step`` of an ``own_trainer`` at the run's loss scale, with the experts chosen as in fp32."""
        exact, low = self.own_runs
        skipped = sum(seen.skipped and seen.has_targets for seen in low.steps[:step])
        trainer.trainer.loss_scale = first_loss_scale(self.config.train.precision) / 2**skipped
        return trainer.step(samples_of_step(step, self.config.train.batches), exact.choices[step])

    @property
    def checkpoint_state(self) -> PlainState:
        """What the plain side saved: the nonlinear phase's state after ``steps`` updates."""
        return self.plain.nonlinear.states[self.steps]

    @property
    def samples_after(self) -> Sequence[int]:
        """The samples of the step after the checkpoint."""
        return samples_of_step(self.steps, self.config.train.batches).tolist()


def nonlinear_phase(config: RunConfig) -> str:
    """The name of the phase in fp32 with the run's own update rule, or AdamW where that is SGD."""
    return f"fp32 {nonlinear_for(config.optimizer).name}"


def own_phase(config: RunConfig) -> str:
    """The name of the phase in the run's own precision."""
    return f"{config.train.precision} {config.optimizer.name}"


def plain_trainer(
    config: RunConfig, dataset: Dataset, optimizer: OptimizerConfig, precision: Precision = "fp32", done: int = 0
) -> PlainTrainer:
    """A plain process with the weights of step 0."""
    more = {"precision": precision, "schedule": config.schedule, "done": done}
    return PlainTrainer(config.model, optimizer, dataset, seed=config.seed, **more)


def run_fp32(
    config: RunConfig, dataset: Dataset, heldout: Dataset, steps: int, tell: Callable[[str], None]
) -> PlainSide:
    """The plain side's runs in fp32: SGD, and the nonlinear rule."""
    batches, n_sequences = config.train.batches, config.train.eval_sequences
    tell("one process: fp32, SGD")
    trainer = plain_trainer(config, dataset, sgd_for(config.optimizer))
    sgd = run_plain(trainer, steps, batches, heldout, n_sequences, (0, steps))
    tell(f"one process: {nonlinear_phase(config)}")
    trainer = plain_trainer(config, dataset, nonlinear_for(config.optimizer))
    return PlainSide(sgd, run_plain(trainer, steps + 1, batches, heldout, n_sequences, (steps,)))


def open_datasets(config: RunConfig) -> tuple[Dataset, Dataset]:
    """The training samples and the held-out ones, in the order of the config's seed."""
    opened = {"seed": config.seed, "vocab_size": config.model.vocab_size}
    return open_dataset(config.data, split="train", **opened), open_dataset(config.data, split="heldout", **opened)


def run_plain_side(config: RunConfig, steps: int, tell: Callable[[str], None]) -> tuple[RunConfig, PlainSide]:
    """The config for both sides, with a seed that keeps values clear of kinks, and all of the plain side's runs."""
    cleared = clear_of_kinks(config, lambda tried: run_fp32(tried, *open_datasets(tried), steps, tell))
    config, side = cleared.config, cleared.seen
    if config.train.precision != "fp32":
        tell(f"one process: {config.train.precision}")
        saved = side.nonlinear.states[steps]
        side.own_exact, side.own_low = run_own_precision(config, *open_datasets(config), steps, saved)
    return config, side


def run_own_precision(
    config: RunConfig, dataset: Dataset, heldout: Dataset, steps: int, saved: PlainState
) -> tuple[PlainRun, PlainRun]:
    """The run's own optimizer in fp32 and in its own precision, in lockstep; then one step of both from ``saved``.

    The second run takes the first one's choices of experts. Where the second skips a step for overflow, the first takes
    its step back, so that both always have the same number of updates. Both evaluate before and after the steps.
    """
    batches, n_sequences = config.train.batches, config.train.eval_sequences
    exact = plain_trainer(config, dataset, config.optimizer.exact())
    low = plain_trainer(config, dataset, config.optimizer, config.train.precision)
    for step in range(steps + 1):
        if step in (0, steps):
            low.evaluate(heldout, n_sequences, exact.evaluate(heldout, n_sequences).choices)
        if step == steps:
            exact.load(saved)
            low.load(saved)
        before = exact.state()
        exact.step(samples_of_step(step, batches))
        if low.step(samples_of_step(step, batches), exact.run.choices[step]).skipped:
            exact.load(before)
    return exact.run, low.run


def plan_phases(config: RunConfig, side: PlainSide, steps: int) -> list[PhasePlan]:
    """The phases that the ranks go through: SGD and the nonlinear rule in fp32, then the run's own precision.

    The nonlinear phase alone has a run's real sizes, so that the ways of computing below them are checked as well.
    """

    def fp32(optimizer: OptimizerConfig) -> RunConfig:
        return replace(config, train=replace(config.train, precision="fp32", steps=steps), optimizer=optimizer)

    phases = [
        PhasePlan(
            SGD,
            fp32(sgd_for(config.optimizer)),
            steps,
            side.sgd.choices,
            {BEFORE_STEPS: side.sgd.heldout[0].choices, AFTER_STEPS: side.sgd.heldout[steps].choices},
            tie_bound=TIE_GAP,
            sizes=SMALL_SIZES,
            watches=True,
        ),
        PhasePlan(
            nonlinear_phase(config),
            fp32(nonlinear_for(config.optimizer)),
            steps,
            side.nonlinear.choices,
            {AFTER_STEPS: side.nonlinear.heldout[steps].choices, AFTER_LOAD: side.nonlinear.heldout[steps].choices},
            tie_bound=math.inf,  # the weights drift, so choices may differ; SGD's phase checks them
            sizes=SAVING_SIZES,
            saves=True,
            loads=True,
        ),
    ]
    if side.own_exact is not None:
        phases.append(
            PhasePlan(
                own_phase(config),
                replace(config, train=replace(config.train, steps=steps)),
                steps,
                side.own_exact.choices,
                {BEFORE_STEPS: side.own_exact.heldout[0].choices, AFTER_STEPS: side.own_exact.heldout[steps].choices},
                tie_bound=math.inf,  # in 16 bits routers choose otherwise; with equal choices only rounding differs
                tie_bound_after_load=math.inf,
                loads=True,
                sizes=SMALL_SIZES,
                repeats=True,
                overflows=config.train.precision == "fp16",
            )
        )
    return phases


def run_proof(
    config: RunConfig,
    n_ranks: int,
    steps: int,
    folder: Path,
    tell: Callable[[str], None],
    *,
    timeout_seconds: int,
    before: Callable[[], None] | None = None,
) -> Proof:
    """Runs both sides of the proof of a shrunk config whose token files are in ``folder``: one process, then the ranks.

    Raises parallel.processes.start.RankError where a rank fails or exceeds the timeout. ``before`` runs first in every
    rank; tests plant faults with it.
    """
    torch.set_num_threads(1)  # sums in the same order on both sides where they can be
    config, plain = run_plain_side(config, steps, tell)
    dataset, heldout = open_datasets(config)
    proof = Proof(config, n_ranks, steps, folder, dataset, heldout, plain)
    scalars = {
        "consumed": config.train.batches.samples_in(steps),
        "skipped": [],
        "tokens": 0,
        "loss_scaler": {},
    }
    write_plain_checkpoint(folder / PLAIN_CHECKPOINT, steps, proof.checkpoint_state, scalars)
    plan = Plan(plan_phases(config, proof.plain, steps), folder, timeout_seconds)
    tell(f"{n_ranks} processes: start")
    places = Degrees.of(config.parallel, n_ranks).places()
    options = {"timeout_seconds": timeout_seconds, "threads": 1, "preload": PRELOAD, "places": places}
    proof.ranks = run_ranks(prove_rank, n_ranks, plan, before, **options)
    return proof
