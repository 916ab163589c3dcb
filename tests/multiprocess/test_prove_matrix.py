"""The whole table of layouts, each proven for the quickstart's model: what `roundtable prove --matrix` runs.

Bounds: launcher/prove/checks.py: losses to 1e-6, every gradient to 1e-5 of its norm (fp32, SGD), and others.
"""

import dataclasses
import functools

import pytest

from launcher.commands.prove import prove_in, stay_on_cpu
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.prove.matrix import Layout, fit, layouts
from launcher.prove.report import layout_words
from prove_runs import failures

QUICKSTART = "configs/quickstart.yaml"
STEPS = 2


@functools.cache
def quickstart() -> RunConfig:
    return load_config(QUICKSTART)


def words(layout: Layout) -> str:
    """The layout, nearly as the matrix prints it: shrinking the model 215 times would take each worker seconds."""
    return layout_words(dataclasses.replace(quickstart(), parallel=layout.parallel), layout.n_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(layouts()), ids=words)
def test_layout_is_proven(tmp_path, layout):
    stay_on_cpu()
    small, refused = fit(quickstart(), layout)
    assert not refused
    outcome = prove_in(tmp_path, small, layout.n_ranks, STEPS, timeout_seconds=300)
    assert outcome.proven, failures(outcome)
