"""Models and layouts that nobody chose, proven as the matrix is: sizes that are no powers of two, three and six
processes, fewer experts than ranks, sequences of a few tokens, accumulation of any length; switches and blocks in any
company.

A seed that fails names itself: ``random_run(seed)`` in tests/support/random_layouts.py is its config, or
``random_switched_run(seed)``, ``random_free_run(seed)`` and ``random_further_run(seed)`` in
tests/support/random_switches.py.
"""

from typing import Any

import pytest

from launcher.commands.prove import prove_in, stay_on_cpu
from launcher.prove.report import layout_words
from prove_runs import failures
from random_layouts import first_run, random_family_run, random_run
from random_switches import random_free_run, random_further_run, random_switched_run

STEPS = 2
N_SEEDS, N_FAMILY_SEEDS, N_SWITCHED_SEEDS = 120, 60, 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_random_layout_is_proven(tmp_path, seed):
    stay_on_cpu()
    config, n_ranks = random_run(seed)
    outcome = prove_in(tmp_path, config, n_ranks, STEPS, timeout_seconds=300)
    assert outcome.proven, f"{layout_words(config, n_ranks)}\n{failures(outcome)}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(N_FAMILY_SEEDS))
def test_random_family_is_proven(tmp_path, seed):
    stay_on_cpu()
    config, n_ranks = random_family_run(seed)
    outcome = prove_in(tmp_path, config, n_ranks, STEPS, timeout_seconds=300)
    assert outcome.proven, f"{config.model.family}, {layout_words(config, n_ranks)}\n{failures(outcome)}"


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [random_switched_run, random_free_run, random_further_run])
@pytest.mark.parametrize("seed", range(N_SWITCHED_SEEDS))
def test_random_switches_are_proven(tmp_path, seed, drawn):
    stay_on_cpu()
    config, n_ranks = drawn(seed)
    outcome = prove_in(tmp_path, config, n_ranks, STEPS, timeout_seconds=300)
    assert outcome.proven, f"{config.model.family}, {layout_words(config, n_ranks)}\n{failures(outcome)}"


def fill_padding_with_nan() -> None:
    """What lies behind the last element of a cut weight is memory as it was found: here not a number."""
    from parallel.zero.fragments import even_share
    from parallel.zero.zero3 import Zero3

    adopt = Zero3.adopt

    def adopt_and_fill(self: Any, parameter: Any, place: Any) -> None:
        adopt(self, parameter, place)
        _, numel = even_share(parameter.ds_numel, place.replicas(self.mesh))
        parameter.ds_tensor.data[max(0, numel) :] = float("nan")

    Zero3.adopt = adopt_and_fill


@pytest.mark.slow
def test_padding_of_cut_weights_may_hold_anything(tmp_path):
    """Six ranks share weights of a few elements under ZeRO 3."""
    stay_on_cpu()
    config, n_ranks = first_run(lambda config, n_ranks: config.parallel.zero == 3 and n_ranks == 6)
    outcome = prove_in(tmp_path, config, n_ranks, STEPS, timeout_seconds=300, before=fill_padding_with_nan)
    assert outcome.proven, failures(outcome)


def depend_on_own_padding() -> None:
    """A rank takes the way around padding only where it has some."""
    import launcher.training.step as step

    original = step.read_micro_batch

    def read_micro_batch(*arguments: Any, expects_padding: bool = False, **options: Any) -> Any:
        return original(*arguments, **options)

    step.read_micro_batch = read_micro_batch


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "told"), [(238, "no answer within 60 s from rank 0"), (31, "SIGABRT")])
def test_planted_graph_of_one_rank_alone_ends_and_is_told(tmp_path, seed, told):
    """Under ZeRO 3 one rank, which alone has padding, gathers what others do not: they wait for each other, or gloo
    meets two gathers of unlike sizes and aborts, as the order of layers has it.
    """
    stay_on_cpu()
    config, n_ranks = random_run(seed)
    assert config.parallel.zero == 3, "the rules have made this seed another config: look for one that has it"
    outcome = prove_in(tmp_path, config, n_ranks, STEPS, timeout_seconds=60, before=depend_on_own_padding)
    assert outcome.died is not None and told in outcome.died
