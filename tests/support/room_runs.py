"""Runs small engines, one for each way in which DeepSpeed holds state, and records which patches DeepSpeed calls.

The patches are those of parallel.zero.patches.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from launcher.config.tree import RunConfig

Kind = tuple[int, str] | tuple[int, str, str]  # ZeRO stage, precision, parallel.grad_reduce
PATCHES: dict[Kind, set[str]] = {  # what DeepSpeed must call in two steps, by the names in parallel.zero.patches
    (0, "fp32"): {"ExpertsAreHere.set_deepspeed_parallelism"},
    (1, "fp32"): {"ZeroOptimizer12.scaled_global_norm", "ZeroOptimizer12._update_scale"},
    (1, "bf16"): {
        "ExpertsAreHere.set_deepspeed_parallelism",
        "Bf16Optimizer.step",
        "Bf16Optimizer.clear_hp_grads",
        "Bf16Optimizer.norm_of_dense",
        "Bf16Optimizer.norm_with_experts",
        "bf16_optimizer.see_memory_usage",
    },
    (1, "bf16", "micro_batch"): {
        "ZeroOptimizer1GivenSums.create_gradient_handling_hooks",
        "ZeroOptimizer1GivenSums.check_overflow",
        "ZeroOptimizer12.scaled_global_norm",
    },
    (2, "fp16"): {
        "ZeroOptimizer12.scaled_global_norm",
        "ZeroOptimizer12._update_scale",
        "SlowFp16.is_fp16_supported",
    },
    (3, "bf16"): {
        "ZeroOptimizer3._get_norm_groups",
        "ZeroOptimizer3._update_scale",
        "partitioned_param_coordinator.assert_ints_same_as_other_ranks",
        "OrderedGathers._PartitionedParameterCoordinator__all_gather_params",
    },
}
ONCE = "deepspeed.ops.__compatible_ops__"  # read in the first engine of a process
called: Counter[str] = Counter()


def called_in_rank(configs: list[RunConfig], fault: str | None) -> list[set[str]]:
    """Trains two steps of an engine for each config; returns the patches called in each. All ranks call it.

    ``fault`` names a function of DeepSpeed to ``rename``.
    """
    from data.dataset import open_dataset
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from parallel.mesh import close_mesh, open_mesh

    if fault is not None:
        rename(fault)
    count_calls()
    mesh = open_mesh(configs[0].parallel, 120)
    seen = []
    for config in configs:
        called.clear()
        dataset = open_dataset(config.data, seed=0, vocab_size=config.model.vocab_size, split="train")
        engine = build_engine(config, mesh)
        engine.initialize_weights(0)
        state = TrainState()
        for _ in range(2):
            assert not run_step(config, engine, dataset, state).row.get("skipped")
        seen.append(set(called))
    close_mesh()
    return seen


def count_calls() -> None:
    """Makes calls of every patch be counted in ``called``."""
    import deepspeed.ops

    import parallel.zero.patches as patches

    for name in set().union(*PATCHES.values()):
        owner, function = name.split(".")
        setattr(getattr(patches, owner), function, counted(name, getattr(getattr(patches, owner), function)))

    class Read(dict):
        def get(self, *arguments: Any) -> Any:
            called[ONCE] += arguments[0] == "deepspeed_shm_comm"
            return super().get(*arguments)

    deepspeed.ops.__compatible_ops__ = Read(deepspeed.ops.__compatible_ops__)


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*arguments: Any, **options: Any) -> Any:
        called[name] += 1
        return function(*arguments, **options)

    return counting


def rename(name: str) -> None:
    """Renames a function within DeepSpeed, as a later version might, so that Roundtable's patch of it is not called."""
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    owner, caller = {
        "scaled_global_norm": (stage_1_and_2.DeepSpeedZeroOptimizer, stage_1_and_2.DeepSpeedZeroOptimizer.step),
        "_get_norm_groups": (stage3.DeepSpeedZeroOptimizer_Stage3, stage3.DeepSpeedZeroOptimizer_Stage3.step),
        "_update_scale": (stage_1_and_2.DeepSpeedZeroOptimizer, stage_1_and_2.DeepSpeedZeroOptimizer.step),
        "get_global_norm_of_tensors": (bf16_optimizer, bf16_optimizer.BF16_Optimizer.step),
        "assert_ints_same_as_other_ranks": (coordinator, coordinator.PartitionedParameterCoordinator.reset_step),
    }[name]
    setattr(owner, f"{name}_renamed", getattr(owner, name))
    callers: list[Any] = [caller]
    while name not in callers[0].__code__.co_names:  # a decorator's wrapper has the wrapped function in its closure
        inside = [cell.cell_contents for cell in callers.pop(0).__closure__ or ()]
        callers += [each for each in inside if hasattr(each, "__code__")]
    caller = callers[0]
    names = tuple(f"{each}_renamed" if each == name else each for each in caller.__code__.co_names)
    caller.__code__ = caller.__code__.replace(co_names=names)
