"""Seconds of a step under ten layouts on this machine's processor, planned and measured. One JSON line.

    python benchmarks/plan_cpu.py [--rounds 3] [--steps 4]

The model and the batch are quickstart's. The layouts were chosen and written down before any figure of them was seen:
one, two and four processes over gloo, every axis, each stage of ZeRO, each way to recompute, micro-batches of 1 to 8
sequences, both precisions; where a processor has no products for bf16, and a step in it takes minutes, all are in fp32
(``precision`` says so), as the demo is. The traces are made first. Then, in each round, rates are measured apart from
the layouts, as by ``roundtable plan --as cpu``, and each layout's steps run in processes of its own, one thread each,
so that whatever else the machine does hits rates and steps alike; the first step of a run is not counted. The plans are
of the median of each rate. ``spearman`` is the correlation of the ranks of the planned and of the measured seconds,
medians over all steps of all rounds; ``spearman_processor`` that of a process's processor seconds in a step, the mean
over the processes, which other work on the machine moves less. ``shares_of_a_core``: what each of so many processes got
of a core while rates were measured; far below 1, or below a half with four processes on two cores, the machine was busy
with other work, and wall seconds say little.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
TIMEOUT_SECONDS = 600

Layout = tuple[int, tuple[str, ...]]  # processes, overrides
LAYOUTS: dict[str, Layout] = {
    "alone": (1, ("parallel.zero=1", "train.micro_batch_size=8")),
    "alone_full": (1, ("parallel.zero=1", "train.micro_batch_size=4", "train.recompute=full")),
    "alone_fp32": (1, ("parallel.zero=0", "train.micro_batch_size=2", "train.precision=fp32")),
    "zero2_selective": (2, ("parallel.zero=2", "train.micro_batch_size=8", "train.recompute=selective")),
    "tp2": (2, ("parallel.zero=1", "parallel.tp=2", "train.micro_batch_size=4")),
    "ep2_feed_forward": (
        2,
        ("parallel.zero=1", "parallel.ep=2", "train.micro_batch_size=8", "train.recompute=feed_forward"),
    ),
    "pp2": (2, ("parallel.zero=1", "parallel.pp=2", "train.micro_batch_size=2")),
    "cp2_zero3": (2, ("parallel.zero=3", "parallel.cp=2", "parallel.cp_attention=ring", "train.micro_batch_size=4")),
    "tp2_dp2": (4, ("parallel.zero=1", "parallel.tp=2", "train.micro_batch_size=2", "train.recompute=selective")),
    "pp2_ep2_full": (
        4,
        ("parallel.zero=1", "parallel.pp=2", "parallel.ep=2", "train.micro_batch_size=1", "train.recompute=full"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    from launcher.processor.narrow import SLOW, narrow_cost

    precision = ("train.precision=fp32",) if narrow_cost() >= SLOW else ()
    layouts = {name: (n_ranks, (*overrides, *precision)) for name, (n_ranks, overrides) in LAYOUTS.items()}
    planner = Planner(layouts)
    measured: dict[str, list[float]] = {name: [] for name in layouts}
    used: dict[str, list[float]] = {name: [] for name in layouts}
    for _ in range(arguments.rounds):
        planner.measure()
        for name, layout in layouts.items():
            ranks = measure_steps(layout, arguments.steps)
            measured[name] += ranks[0][0]
            used[name] += [seconds for _, rank in ranks for seconds in rank]
    plans = planner.plans()
    rows: dict[str, dict[str, Any]] = {
        name: {"processes": layouts[name][0], "overrides": layouts[name][1], "planned": plans[name]}
        | {"measured_seconds": median(seconds), "all_seconds": [round(each, 4) for each in seconds]}
        | {"processor_seconds": median(used[name])}
        for name, seconds in measured.items()
    }
    found = {
        key: ([plans[name][key] for name in rows], [row[measure] for row in rows.values()])
        for key, measure in (("step_seconds", "measured_seconds"), ("processor_seconds", "processor_seconds"))
    }
    planned, real = found["step_seconds"]
    answer = {
        "benchmark": "plan_cpu",
        "precision": "fp32 in all" if precision else "as each layout has it",
        "spearman": spearman(planned, real),
        "spearman_processor": spearman(*found["processor_seconds"]),
        "shares_of_a_core": {plan["processes"]: plan["share_of_a_core"] for plan in plans.values()},
        "errors": {name: one / other - 1 for name, one, other in zip(rows, planned, real, strict=True)},
        "layouts": rows,
    }
    print(json.dumps(answer))


class Planner:
    """The layouts' traces, and rates of the machine, which are measured in rounds, once for each number of processes.

    Rounds make changes of the machine's speed affect the rates of all layouts alike, as their steps.
    """

    def __init__(self, layouts: dict[str, Layout]) -> None:
        from launcher.config.checked import load_checked
        from launcher.processor.plan import trace

        self.layouts, self.configs, self.traces = layouts, {}, {}
        for name, (n_ranks, overrides) in layouts.items():
            self.configs[name] = load_checked(CONFIG, overrides, world_size=n_ranks, data=False)
            self.traces[name] = trace(CONFIG, overrides, n_ranks)
            assert self.traces[name] is not None, name
        self.machines: dict[int, list[Any]] = {n_ranks: [] for n_ranks, _ in layouts.values()}
        self.calls: dict[str, list[Any]] = {name: [] for name in layouts}

    def measure(self) -> None:
        """Measures all rates once."""
        from launcher.processor.plan import measure, measure_host

        for n_ranks, found in self.machines.items():
            traces = [self.traces[name] for name, (each, _) in self.layouts.items() if each == n_ranks]
            found.append(measure(traces, n_ranks))
        for name, (n_ranks, _) in self.layouts.items():
            self.calls[name].append(measure_host(self.configs[name], n_ranks))

    def plans(self) -> dict[str, dict[str, Any]]:
        """Each layout's plan, by the median of each rate."""
        from launcher.processor.plan import as_json
        from launcher.processor.rates import typical, typical_call

        return {
            name: as_json(config, n, self.traces[name], typical(self.machines[n]), typical_call(self.calls[name]))
            for (name, config), (n, _) in zip(self.configs.items(), self.layouts.values(), strict=True)
        }


def measure_steps(layout: Layout, steps: int) -> list[tuple[list[float], list[float]]]:
    """For each rank, seconds and processor seconds of each of ``steps`` steps of a layout, in new processes."""
    from launcher.config.checked import load_checked
    from parallel.processes.start import run_ranks

    n_ranks, overrides = layout
    config = load_checked(CONFIG, overrides, world_size=n_ranks, data=False)
    return run_ranks(run_steps, n_ranks, config, steps, timeout_seconds=TIMEOUT_SECONDS, threads=1)


def run_steps(config: Any, steps: int) -> tuple[list[float], list[float]]:
    """One rank's seconds and processor seconds of each step but the first; all ranks start each step together."""
    from launcher.estimate.samples import WholeSequences
    from launcher.training.loop import build_engine, prepare_process, run_step
    from launcher.training.state import TrainState
    from parallel.mesh import close_mesh, open_mesh, wait_for_all

    prepare_process(config)
    mesh = open_mesh(config.parallel, TIMEOUT_SECONDS)
    engine, samples, state, found = build_engine(config, mesh), WholeSequences(config), TrainState(), list[float]()
    used: list[float] = []
    engine.initialize_weights(config.seed)
    for _ in range(1 + steps):
        wait_for_all(mesh)
        began, before = time.perf_counter(), time.process_time()
        run_step(config, engine, samples, state)  # type: ignore[arg-type]
        used.append(time.process_time() - before)
        wait_for_all(mesh)
        found.append(time.perf_counter() - began)
    close_mesh()
    return found[1:], used[1:]


def spearman(left: list[float], right: list[float]) -> float:
    """Spearman's rank correlation of two lists of equal length, each with distinct values."""
    one, other = ({value: place for place, value in enumerate(sorted(each))} for each in (left, right))
    n = len(left)
    return 1 - 6 * sum((one[a] - other[b]) ** 2 for a, b in zip(left, right, strict=True)) / (n * (n * n - 1))


if __name__ == "__main__":
    main()
