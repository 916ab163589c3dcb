"""`roundtable prove --matrix`: pairs and triples of axes at degree 2, with every legal ZeRO stage and schedule."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.commands.prove import PREFIX, prove_in, stay_on_cpu
from launcher.config.layout_rules import with_switches
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.console import open_console, say
from launcher.errors import UserError
from launcher.prove.report import Outcome, layout_words
from launcher.prove.shrink import shrink
from launcher.scratch import scratch_folder
from parallel.config import ParallelConfig
from parallel.pipeline.config import SCHEDULES, splits_backward

AXES = ("tp", "cp", "pp", "ep", "dp")
LARGEST_SET = 3  # axes above degree one at once


@dataclass(frozen=True)
class Layout:
    """One layout of the matrix that `make prove` goes through."""

    parallel: ParallelConfig
    n_ranks: int


def layouts() -> Iterator[Layout]:
    """The table: one to three axes at degree 2, every ZeRO stage, every schedule where there is a pipeline.

    ep folds over the ranks of a stage, so it comes with an axis that gives a stage two ranks. Ring attention runs
    beside ulysses at ZeRO 1.
    """
    for size in range(1, LARGEST_SET + 1):
        for chosen in itertools.combinations(AXES, size):
            degrees = {axis: 2 if axis in chosen else 1 for axis in AXES}
            n_ranks = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"]
            if n_ranks == 1 or (degrees["ep"] == 2 and n_ranks == degrees["pp"]):
                continue
            tp, cp, pp, ep = (degrees[axis] for axis in ("tp", "cp", "pp", "ep"))
            for zero, schedule in itertools.product(range(4), SCHEDULES if pp == 2 else SCHEDULES[:1]):
                if zero == 3 and splits_backward(schedule):
                    continue  # refused by the config's rules: a split backward pass needs the weights twice
                parallel = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, pipeline=schedule)
                yield Layout(parallel, n_ranks)
                if cp == 2 and zero == 1:
                    yield Layout(replace(parallel, cp_attention="ring"), n_ranks)


def fit(config: RunConfig, layout: Layout) -> tuple[RunConfig, list[str]]:
    """The config, shrunk, under the layout, and the rules that it breaks there; one that breaks any must not be run."""
    precision = "fp32" if layout.parallel.zero == 0 else config.train.precision
    train = replace(config.train, global_batch_size=32, batch_ramp=None, micro_batch_size=1, precision=precision)
    if precision != "fp8" or layout.parallel.zero == 3:
        train = replace(train, fp8_keep_weights=False)
    parallel = with_switches(layout.parallel, config.parallel, config.model.moe)
    wanted = replace(config, parallel=parallel, train=train)
    problems = check(without_budget(wanted), layout.n_ranks)
    if problems:
        return wanted, problems
    small = shrink(wanted, layout.n_ranks)
    return small, check(small, layout.n_ranks, is_small=True)


def without_budget(config: RunConfig) -> RunConfig:
    """The config without its budget of activation memory, which was chosen for its own layout."""
    return replace(config, train=replace(config.train, activation_gib=None))


def prove_matrix(path: Path, overrides: Sequence[str], steps: int, as_json: bool) -> int:
    """Proves the config's model under every layout of the table, one line each. Returns 0 where none differs, else 1.

    Layouts that the model does not fit (a dense model has no ep) are listed with the rule they break; that is no
    failure. Raises UserError where the config breaks a rule without any parallelism.
    """
    config = load_config(path, overrides)
    problems = check(without_budget(replace(config, parallel=ParallelConfig())), 1)
    if problems:
        raise UserError(problems)
    stay_on_cpu()
    console = open_console(stderr=as_json)
    rows = list(layouts())
    results = []
    for number, layout in enumerate(rows, 1):
        small, refused = fit(config, layout)
        words = layout_words(small, layout.n_ranks)
        if refused:
            verdict, detail = "not legal", refused[0]
        else:
            with scratch_folder(PREFIX) as folder:
                outcome = prove_in(folder, small, layout.n_ranks, steps)
            verdict, detail = ("proven" if outcome.proven else "DIFFERS"), describe(outcome)
        results.append({"layout": words, "verdict": verdict, "detail": detail})
        console.print(f"{number}/{len(rows)}  {verdict:9}  {words}  {detail}", soft_wrap=True)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in results) for verdict in ("proven", "DIFFERS", "not legal")
    }
    if as_json:
        say(json.dumps({**counts, "layouts": results}))
    else:
        console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["DIFFERS"] else 0


def describe(outcome: Outcome) -> str:
    """The last line of the ranks' failure, or the first check that failed, or how long the proof took."""
    if outcome.died is not None:
        return outcome.died.strip().splitlines()[-1]
    failed = [check for check in outcome.checks if not check.passed]
    return f"{failed[0].phase}: {failed[0].name}, {failed[0].worst}" if failed else f"{outcome.seconds:.0f} s"
