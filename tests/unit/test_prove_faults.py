"""What a planted fault puts in the place of a function takes every call that the function takes.

Else its own TypeError would be all that is seen, and `make test` plants few of the faults that `make prove` plants.
"""

import re
from pathlib import Path

import pytest

import cp_faults
import faults
import prove_faults
from launcher.training import step
from parallel.processes.start import run_ranks
from prove_faults_listed import FAULTS
from stand_ins import misfits


def titles_in(module):
    return re.findall(r'^        case "(.+?)":', Path(module.__file__).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("module", "titles"),
    [
        (prove_faults, [fault.title for fault in FAULTS]),
        (cp_faults, titles_in(cp_faults)),
        (faults, titles_in(faults)),
    ],
    ids=lambda of: of.__name__ if hasattr(of, "__name__") else len(of),
)
def test_stand_ins_take_the_calls_of_what_they_stand_for(module, titles):
    for seen in run_ranks(misfits, 2, module.plant, titles, timeout_seconds=240, threads=1):
        assert list(seen) == titles
        assert not any(seen.values()), {title: names for title, names in seen.items() if names}


def refuse_a_call(_: str) -> None:
    """Stands for two functions, for one of them not as it should."""
    step.share_of_batch = lambda indices, micro_batch_size, mesh: None
    step.accumulate_gradients = lambda engine, dataset, indices: None


def test_a_stand_in_that_refuses_a_call_is_found():
    original = step.accumulate_gradients
    assert misfits(refuse_a_call, ["anything"]) == {"anything": ["launcher.training.step.accumulate_gradients"]}
    assert step.accumulate_gradients is original
