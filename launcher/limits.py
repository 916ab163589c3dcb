"""Checks of the shell's resource limits against what training needs, made before anything is created."""

import os
import resource

from launcher.errors import UserError

OPEN_FILES = 128  # of a process, beside those for each rank
OPEN_FILES_OF_A_RANK = 4  # of the process that hosts the others' connections
TASKS = 16  # processes and threads of a user, beside those of each rank
TASKS_OF_A_RANK = 20  # threads of torch, gloo and Roundtable
MOST_LOCAL_RANKS = 1024  # processes that one machine is asked for; each is a whole Python with torch
ADDRESS_SPACE_GIB = 4  # torch and its threads reserve far more than they use


def check_limits(n_ranks: int = 1, n_here: int | None = None) -> None:
    """Raises this process's soft limits to the hard ones; raises UserError where ``n_ranks`` ranks need more.

    ``n_here`` of the ranks are on this machine (None: all of them). The limits are those of ``ulimit -n`` (open files),
    ``-v`` (address space) and ``-u`` (processes and threads, from which the kernel exempts root). Processes that are
    started from here inherit them.
    """
    needed = OPEN_FILES + OPEN_FILES_OF_A_RANK * n_ranks
    problems = []
    _raised(resource.RLIMIT_MEMLOCK)  # what InfiniBand locks; `submit` hands the shell's limits on to the job
    files = _raised(resource.RLIMIT_NOFILE)
    if files is not None and files < needed:
        remedy = f"run `ulimit -n {needed}` before, or raise the hard limit (limits.conf, or the service's LimitNOFILE)"
        problems.append(f"ulimit -n={files} (open files of a process) must be at least {needed}; {remedy}")
    space = _raised(resource.RLIMIT_AS)
    if space is not None and space < ADDRESS_SPACE_GIB << 30:
        remedy = "run `ulimit -v unlimited` before, and limit memory by Slurm's --mem or systemd's MemoryMax"
        rule = f"must be at least {ADDRESS_SPACE_GIB << 20}, since torch reserves far more than it uses"
        problems.append(f"ulimit -v={space >> 10} (KiB of a process's address space) {rule}; {remedy}")
    tasks, needed = _raised(resource.RLIMIT_NPROC), TASKS + TASKS_OF_A_RANK * (n_ranks if n_here is None else n_here)
    if tasks is not None and tasks < needed and os.geteuid() != 0:
        remedy = f"run `ulimit -u {max(4096, needed)}` before, or raise the hard limit (limits.conf, or LimitNPROC)"
        problems.append(f"ulimit -u={tasks} (all processes and threads of a user) must be at least {needed}; {remedy}")
    if problems:
        raise UserError(problems)


def check_current_folder() -> None:
    """Raises UserError where the current folder was removed: libraries would crash, and relative paths lead nowhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError(["the current folder was removed; cd into one that is there"]) from None


def check_local_ranks(ranks: int | None) -> None:
    """Raises UserError above MOST_LOCAL_RANKS processes on this machine: all would be started before one fails."""
    if ranks is not None and ranks > MOST_LOCAL_RANKS:
        rule = f"must be at most {MOST_LOCAL_RANKS}, since all are processes of this machine"
        raise UserError([f"--ranks={ranks} {rule}; lower it, or use several machines (`submit`, srun or torchrun)"])


def keep_others_from_writing() -> None:
    """Tightens the umask so that no file or folder created from here on is writable by everybody."""
    os.umask(os.umask(0o077) | 0o002)


def _raised(limit: int) -> int | None:
    """The soft limit, after raising it to the hard one; None where it is unlimited."""
    soft, hard = resource.getrlimit(limit)
    if soft != hard and soft != resource.RLIM_INFINITY:
        try:
            resource.setrlimit(limit, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS has a lower one of its own
            pass
    return None if soft == resource.RLIM_INFINITY else soft
