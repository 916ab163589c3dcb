"""What a step costs the host over 500 of them: no memory from step 10 on, and of its watchdog under 1% of a core."""

import pytest

from command_runs import write_config
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from layout_runs import MOE_MODEL, write_tokens
from long_run import run_measured

RANKS = 2
LARGEST_SHARE = 0.01  # of a core
# Noise, in bytes: the heap's pieces lie otherwise after each collection, and lists of the last losses, steps and events
# fill up to their bounds. Seen without a leak: 0.05 MB in 490 steps (two busy cores, 2026-11-23).
MOST_GROWTH = 1 << 20


def small_run(tmp_path, steps: int) -> RunConfig:
    """Two ranks of a MoE model under ZeRO 1, no evaluation, one checkpoint, at the end."""
    path = write_config(tmp_path, write_tokens(tmp_path), "long", model=MOE_MODEL, steps=steps, global_batch_size=4)
    return load_config(path, ["checkpoint.every_steps=null"])


@pytest.mark.slow  # half a minute on two idle cores
def test_500_steps_take_no_memory_and_little_of_a_core(tmp_path):
    for rank, measured in enumerate(run_measured(small_run(tmp_path, 500), RANKS)):
        share = measured.watchdog / measured.seconds
        print(f"rank {rank}: {measured.growth} bytes, watchdog {share:.4%} of a core, {measured.seconds:.1f} s")
        assert len(measured.resident) == 500
        assert measured.growth < MOST_GROWTH, measured.resident[::50]
        assert 0 < share < LARGEST_SHARE


@pytest.mark.slow
def test_planted_list_that_keeps_each_steps_tensors_is_seen(tmp_path):
    for measured in run_measured(small_run(tmp_path, 220), RANKS, leaks=True):
        assert measured.growth > MOST_GROWTH
