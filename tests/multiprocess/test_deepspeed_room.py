"""That DeepSpeed calls what we put in the place of its own, under each way in which it holds state.

An assignment to a name that DeepSpeed no longer looks up fails silently: so every patch is seen to be called.
"""

import pytest

from layout_runs import run_config, write_tokens
from parallel.config import ParallelConfig
from parallel.processes.start import RankError, run_ranks
from room_runs import ONCE, PATCHES, called_in_rank


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def missed(tokens, kinds, fault=None) -> set[str]:
    """What of our patches DeepSpeed did not come to, on some rank."""
    configs = [
        run_config(
            tokens, parallel=ParallelConfig(zero=zero, ep=2, grad_reduce="".join(when) or "step"), precision=precision
        )
        for zero, precision, *when in kinds
    ]
    expected = [PATCHES[kind] | ({ONCE} if number == 0 else set()) for number, kind in enumerate(kinds)]
    ranks = run_ranks(called_in_rank, 2, configs, fault, timeout_seconds=280, threads=1)
    return {name for seen in ranks for wanted, called in zip(expected, seen, strict=True) for name in wanted - called}


def test_deepspeed_calls_every_patch(tokens):
    assert missed(tokens, list(PATCHES)) == set()


@pytest.mark.parametrize(
    ("name", "kind", "seen"),
    [
        ("scaled_global_norm", (1, "fp32"), RankError),
        ("_get_norm_groups", (3, "bf16"), RankError),
        ("get_global_norm_of_tensors", (1, "bf16"), RankError),
        ("_update_scale", (2, "fp16"), "ZeroOptimizer12._update_scale"),
        (
            "assert_ints_same_as_other_ranks",
            (3, "bf16"),
            "partitioned_param_coordinator.assert_ints_same_as_other_ranks",
        ),
    ],
)
def test_planted_a_name_that_deepspeed_no_longer_calls_is_seen(tokens, name, kind, seen):
    if seen is RankError:
        with pytest.raises(RankError, match="DeepSpeed did not take the norm that was given to it"):
            missed(tokens, [kind], name)
    else:
        assert missed(tokens, [kind], name) == {seen}
