"""`roundtable`, with one rank that dies, hangs or lags on purpose: hang_job.py FAULT RANK STEP ARGUMENTS-OF-ROUNDTABLE.

Works for `train --ranks N` as well as for ranks that torchrun, srun or a test starts. The fault happens in the given
rank before the given step. "FAULT recorded" turns torch's flight recorder on. "FAULT once FILE" happens only if the
file does not exist, and creates it.
"""

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

STOPPED_FOR_SECONDS = 3600


def plant(fault: str, rank: int, step: int) -> None:
    """Breaks this process's training loop so that the fault happens before ``step`` if it is that rank."""
    import launcher.training.loop as loop

    original = loop.run_step
    fault, _, marker = fault.partition(" once ")
    if fault.endswith(" recorded"):
        fault = fault.removesuffix(" recorded")
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"

    if fault.startswith("long phases"):
        lengthen_phases(loop, float(fault.split()[-1]), rank)

    def run_step(config: Any, engine: Any, dataset: Any, state: Any, *rest: Any) -> Any:
        if (
            engine.mesh.rank == rank
            and (state.step + 1 == step or fault == "slow")
            and not fault.startswith("long")
            and not happened(marker)
        ):
            if fault == "disk hangs":
                hang_disk(dataset)
            elif fault == "tokens cut":
                cut_tokens(config.data.sources[0].path)
            else:
                strike(fault, engine)
        return original(config, engine, dataset, state, *rest)

    loop.run_step = run_step


def hang_disk(samples: Any) -> None:
    """Makes every further read of the data hang; samples that were read ahead are still delivered."""
    samples.dataset.read = lambda indices: time.sleep(STOPPED_FOR_SECONDS)


def cut_tokens(prefix: str) -> None:
    """Truncates the token file, which the ranks have mapped into memory, to no bytes."""
    os.truncate(prefix + ".bin", 0)


def lengthen_phases(loop: Any, seconds: float, rank: int) -> None:
    """Makes opening the data, restoring, the first step and each save take ``seconds`` longer on this rank."""
    from parallel.checkpoint.saver import Saver

    for owner, name in ((loop, "open_dataset"), (loop, "restore"), (loop, "run_step"), (Saver, "save")):
        original, calls = getattr(owner, name), []

        def longer(*given: Any, original: Any = original, calls: list = calls, name: str = name, **options: Any) -> Any:
            if int(os.environ["RANK"]) == rank and (name != "run_step" or not calls):
                time.sleep(seconds)
            calls.append(name)
            return original(*given, **options)

        setattr(owner, name, longer)


def happened(marker: str) -> bool:
    """Whether the marker file exists, so that the fault has happened already; creates it. False for no marker."""
    if not marker:
        return False
    before = Path(marker).exists()
    Path(marker).touch()
    return before


def strike(fault: str, engine: Any) -> None:
    if fault in ("killed", "raises"):  # waits for a save in progress, so that it is known where the next start begins
        for thread in threading.enumerate():
            if thread.name == "checkpoint writer":
                thread.join()
    match fault:
        case "none":
            return
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises":
            raise ValueError("a planted fault")
        case "user error":
            from data.errors import DataError

            raise DataError("data.sources=planted must be right; mend it")
        case "exits":
            os._exit(7)
        case "sleeps":
            time.sleep(STOPPED_FOR_SECONDS)
        case "slow":
            time.sleep(1.5)
        case "holds the lock":
            hold_the_lock()
        case "other collective":
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(1), group=engine.mesh.control)
        case _:
            raise AssertionError(fault)


def hold_the_lock() -> None:
    """Holds the global interpreter lock forever, so that no other thread of this process can run Python code."""
    import ctypes

    assert threading.current_thread() is threading.main_thread()
    ctypes.PyDLL(None).sleep(STOPPED_FOR_SECONDS)


def train_rank(fault: str, rank: int, step: int, *arguments: Any) -> Any:
    """The function that `train --ranks N` runs in each process, with the fault planted."""
    from launcher.training.start import train_rank as original

    plant(fault, rank, step)
    return original(*arguments)


def main() -> int:
    fault, rank, step, *arguments = sys.argv[1:]
    import launcher.training.start as start
    from launcher.cli import main as roundtable

    if "RANK" in os.environ:
        plant(fault, int(rank), int(step))
    else:
        import hang_job  # by its name as a module, so that the ranks can find it

        vars(start)["train_rank"] = partial(hang_job.train_rank, fault, int(rank), int(step))
    return roundtable(arguments)


if __name__ == "__main__":
    sys.exit(main())
