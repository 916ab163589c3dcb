"""The hour with a GPU: five parts, each under ten minutes, each writing one JSON file as it goes.

    python benchmarks/gpu/hour.py [--part N] [--dry] [--out build/gpu] [--minutes M] [--check TEXT]

`make gpu`, `make gpu PART=1` and `make gpu DRY=1` call it. A part runs in a process of its own, which is begun again
after a crash with the checks that are left; a check that takes too long is ended and told as failed. Exit code 0: all
passed or were skipped with a reason; 1: something failed; 2: it could not begin.
"""

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (HERE, ROOT / "tests" / "support", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import gpu_turn  # noqa: E402
from gpu_part import DRY_PATIENCE, PARTS, Check, Part, Place  # noqa: E402
from gpu_report import Report, Skipped, versions  # noqa: E402

WORKER = str(HERE / "hour.py")  # what a worker runs
SPENT = 3  # a worker's exit code: the device no longer answers in this process
MOST_WORKERS = 12  # processes of one part, so that crashes come to an end
POLL_SECONDS = 0.2


def main() -> int:
    """The command."""
    arguments = parsed()
    if arguments.worker:
        return work(arguments)
    if (problem := why_not(arguments)) is not None:
        print(problem, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left over
    arguments.out.mkdir(parents=True, exist_ok=True)
    return max(run_part(part, arguments) for part in chosen_parts(arguments))


def parsed() -> argparse.Namespace:
    """The arguments, checked."""
    numbers = [part.number for part in PARTS]
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=None, choices=numbers)
    parser.add_argument(
        "--dry", action="store_true", help="run on the CPU with small sizes; the figures measure nothing"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--minutes", type=float, default=None, help="time limit of each part (default: its own)")
    parser.add_argument("--check", default="", help="only checks whose names contain this, or one of these|several")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


class Arguments(argparse.ArgumentParser):
    """A parser that tells a wrong argument in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        told = " ".join(message.split())
        print(f"make gpu: {told}; try PART=1 to {PARTS[-1].number}, DRY=1, OUT=folder, MINUTES=8", file=sys.stderr)
        raise SystemExit(2)


def why_not(arguments: argparse.Namespace) -> str | None:
    """Why nothing can begin, in one line."""
    if arguments.minutes is not None and not 0 < arguments.minutes <= 1440:
        return f"make gpu: MINUTES={arguments.minutes:g} must be above 0 and at most 1440; try MINUTES=8"
    turn = os.environ.get(gpu_turn.TURN)
    if turn is not None and (not Path(turn).parent.is_dir() or Path(turn).is_dir()):
        return f"make gpu: GPU_TURN={turn} must be a file in a folder that is there; try GPU_TURN=/tmp/turn"
    if not arguments.dry and (problem := no_gpu()) is not None:
        return f"make gpu needs a GPU, and {problem}; `make gpu DRY=1` runs all parts on the CPU, with small sizes"
    if not chosen_parts(arguments):
        where = "a part has" if arguments.part is None else f"part {arguments.part} has"
        return f"make gpu: CHECK={arguments.check} must be in the name of a check that {where}; try CHECK=kernels"
    return None


def chosen_parts(arguments: argparse.Namespace) -> list[Part]:
    """The part that is asked for, or all; of these, where checks are chosen by name, those that have such."""
    parts = [part for part in PARTS if arguments.part in (None, part.number)]
    text = arguments.check
    return [part for part in parts if not text or chosen_checks(part, 1, dry=arguments.dry, text=text)]


def no_gpu() -> str | None:
    """Why torch finds no GPU, asked in a process of its own: one that has begun CUDA cannot be forked from."""
    asked = "import torch; print(torch.cuda.is_available(), torch.__version__, torch.version.cuda)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        return f"torch cannot be imported ({(done.stderr.strip().splitlines() or ['no reason given'])[-1]})"
    answer = done.stdout.split()
    return None if answer[-3] == "True" else f"torch {answer[-2]} (CUDA {answer[-1]}) finds none"


def run_part(part: Part, arguments: argparse.Namespace) -> int:
    """One part, to its end or its limit; 1 where something failed. Nothing that it started is left over."""
    minutes = part.minutes if arguments.minutes is None else arguments.minutes
    path = arguments.out / f"part-{part.number}.json"
    report = Report.begin(path, part.number, part.title, dry=arguments.dry)
    print(f"part {part.number}, {part.title}: at most {minutes:g} minutes, {path}", flush=True)
    deadline = time.monotonic() + 60 * minutes
    with open(arguments.out / "log.txt", "a") as log, tempfile.TemporaryDirectory(prefix="hour-") as scratch:
        log.write(f"== part {part.number} {report.content['date']}\n")
        log.flush()
        for _ in range(MOST_WORKERS):
            if run_worker(part, arguments, path, Path(scratch), log, deadline):
                break
    report = Report.read(path)
    report.tell(finished=True, running=None)
    print_end(report)
    is_empty = not report.content["checks"]
    return 1 if report.count("failed") or is_empty else 0


def run_worker(part: Part, arguments: argparse.Namespace, path: Path, scratch: Path, log, deadline: float) -> bool:
    """One worker process; whether the part has come to its end. A check at which it dies is told as failed."""
    command = [sys.executable, WORKER, "--worker", str(path), "--part", str(part.number)]
    command += ["--check", arguments.check, *(["--dry"] if arguments.dry else [])]
    environment = worker_environment(scratch, dry=arguments.dry)
    environment[gpu_turn.OWNER] = owner = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
    )
    try:
        told, problem = 0, None
        while process.poll() is None and problem is None:
            time.sleep(POLL_SECONDS)
            report = Report.read(path)
            told = print_news(report, told)
            problem = too_long(report, deadline)
    finally:
        end_all(process)
        gpu_turn.wake_others(owner)
    report = Report.read(path)
    running = report.content["running"]
    if running is not None:
        seconds = time.time() - running["since"]
        report.end(running["check"], "failed", problem or f"the process ended: {ending(process.returncode)}", seconds)
    elif process.returncode not in (0, SPENT) and problem is None:
        report.end("start", "failed", f"the process ended: {ending(process.returncode)}; see log.txt", 0.0)
        print_news(report, told)
        return True
    print_news(report, told)
    is_over = time.monotonic() >= deadline
    if is_over and process.returncode != 0:
        left = [check for check in report.content.get("planned", []) if check not in report.ended]
        for check in left:
            report.end(check, "skipped", "not begun: the part's minutes were over", 0.0)
    return process.returncode == 0 or is_over


def worker_environment(scratch: Path, *, dry: bool) -> dict[str, str]:
    """A worker's variables: no network, and in a dry run no GPU."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TMPDIR": str(scratch),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if dry:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return environment


def too_long(report: Report, deadline: float) -> str | None:
    """Why the worker has to end now."""
    if time.monotonic() >= deadline:
        return "ended: the part's minutes were over"
    running = report.content["running"]
    limit = None if running is None else report.content["limits"][running["check"]]
    return f"ended: no end within {limit} s" if limit and time.time() - running["since"] > limit else None


def end_all(process: subprocess.Popen) -> None:
    """Kills the worker and all that it started, those in sessions of their own as well."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def print_news(report: Report, told: int) -> int:
    """A line for each check that has ended since; returns how many are told of."""
    rows = report.content["checks"]
    for row in rows[told:]:
        first = next(iter(row["message"].strip().splitlines()[-1:]), "")
        print(f"  {row['status']:7} {row['seconds']:7.1f} s  {row['check']}{': ' + first if first else ''}", flush=True)
    return len(rows)


def print_end(report: Report) -> None:
    """The part's sums."""
    counts = ", ".join(f"{report.count(status)} {status}" for status in ("passed", "failed", "skipped"))
    print(f"part {report.content['part']}: {counts}, {len(report.content['figures'])} figures", flush=True)


def work(arguments: argparse.Namespace) -> int:
    """In a worker: the part's checks that have not ended, one after another."""
    from gpu_device import hardware, is_usable, the_device
    from parallel.processes.lifeline import end_with_parent

    end_with_parent()
    report = Report.read(arguments.worker)
    device = the_device(dry=arguments.dry)
    found = hardware(device)
    report.tell(hardware=found, versions=versions())
    part = next(part for part in PARTS if part.number == arguments.part)
    checks = chosen_checks(part, found["count"], dry=arguments.dry, text=arguments.check)
    patience = DRY_PATIENCE if arguments.dry else 1
    limits = {check.name: patience * check.limit_seconds for check in checks}
    report.tell(planned=[check.name for check in checks], limits=limits)
    for check in checks:
        if check.name in report.ended:
            continue
        passed = run_check(check, report, Place(device, arguments.dry, Path(), max(1, found["count"])))
        if not passed and not is_usable(device):
            return SPENT
    return 0


def chosen_checks(part: Part, n_devices: int, *, dry: bool, text: str = "") -> Sequence[Check]:
    """The part's checks whose names contain the text, or one of several with | between them."""
    module = importlib.import_module(part.module)
    wanted = [each for each in text.split("|") if each] or [""]
    return [check for check in module.checks(n_devices, dry=dry) if any(each in check.name for each in wanted)]


def run_check(check: Check, report: Report, place: Place) -> bool:
    """One check in a folder of its own; whether it did not fail."""
    started = time.monotonic()
    report.start(check.name)
    folder = Path(tempfile.mkdtemp(prefix="check-"))
    try:
        check.run(Place(place.device, place.dry, folder, place.n_devices, report, check.name))
        status, message = "passed", ""
    except Skipped as reason:
        status, message = "skipped", str(reason)
    except (Exception, SystemExit):
        status, message = "failed", traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.end(check.name, status, message, time.monotonic() - started)
    return status != "failed"


if __name__ == "__main__":
    sys.exit(main())
