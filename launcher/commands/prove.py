"""`roundtable prove`: compares the user's layout, on a shrunk model and local processes, with one plain process."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from launcher.config.layout_rules import least_ranks
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.console import open_console, say
from launcher.errors import UserError
from launcher.limits import check_local_ranks
from launcher.prove.diagnose import diagnose
from launcher.prove.judge import judge
from launcher.prove.progress import ProofProgress
from launcher.prove.proof import SGD, run_proof
from launcher.prove.report import TABLE_WIDTH, Outcome, print_outcome, to_json
from launcher.prove.shrink import default_ranks, shrink
from launcher.prove.tokens import write_documents
from launcher.scratch import scratch_folder
from parallel.processes.start import RankError

PREFIX = "roundtable-prove-"  # of the name of a proof's folder

TIMEOUT_SECONDS = 600  # for all ranks together; a collective that waits as long ends its rank


def prove_config(path: Path, overrides: Sequence[str], ranks: int | None, steps: int, keep: bool, as_json: bool) -> int:
    """Proves the config's layout on ``ranks`` local CPU processes (None: the fewest that hold its axes).

    Returns 0 where everything is equal, else 1; raises UserError where the config or ``ranks`` are wrong.
    """
    config, n_ranks = load_small(path, overrides, ranks)
    stay_on_cpu()
    console = open_console(width=None if open_console().is_terminal else TABLE_WIDTH)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)) if keep else stack.enter_context(scratch_folder(PREFIX))
        progress = stack.enter_context(ProofProgress(folder))
        outcome = prove_in(folder, config, n_ranks, steps, keep=keep, tell=progress.tell)
    if as_json:
        say(to_json(outcome))
    else:
        print_outcome(outcome, console)
    return 0 if outcome.proven else 1


def load_small(path: Path, overrides: Sequence[str], ranks: int | None) -> tuple[RunConfig, int]:
    """The config with a shrunk model, and the number of processes. Raises UserError with every problem."""
    check_local_ranks(ranks)
    config = load_config(path, overrides)
    problems = check(config, least_ranks(config.parallel))
    if problems:
        raise UserError(problems)
    n_ranks = default_ranks(config) if ranks is None else ranks
    small = shrink(config, n_ranks)
    problems = check(small, n_ranks, is_small=True)
    if problems:
        raise UserError(problems)
    return small, n_ranks


def stay_on_cpu() -> None:
    """Hides GPUs from this process and those that it starts; must be called before any of them looks for one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DS_ACCELERATOR"] = "cpu"


def prove_in(
    folder: Path,
    config: RunConfig,
    n_ranks: int,
    steps: int,
    *,
    keep: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    before: Callable[[], None] | None = None,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> Outcome:
    """The outcome of proving a shrunk config; ``folder`` gets its files. ``before`` runs first in each rank (tests)."""
    started = time.monotonic()
    n_samples = (steps + 3) * config.train.global_batch_size
    config = replace(config, data=write_documents(folder, config, n_samples))
    kept = folder if keep else None
    try:
        proof = run_proof(config, n_ranks, steps, folder, tell, timeout_seconds=timeout_seconds, before=before)
    except RankError as error:
        return Outcome(config, n_ranks, steps, [], 0, [], time.monotonic() - started, kept, died=str(error))
    tell("compare")
    checks = judge(proof)
    diagnosis = [] if all(check.passed for check in checks) else diagnose(proof)
    ties = sum(rank.phases[SGD].replayed.ties for rank in proof.ranks)
    return Outcome(config, n_ranks, steps, checks, ties, diagnosis, time.monotonic() - started, kept)
