"""Runs that begin at once in one checkpoint.dir, each in a process of its own."""

import os
import shutil
from pathlib import Path

import pytest

from launcher.guard.fence import StaleRun, raise_fence
from launcher.training.owner import keeping, owner_of
from owners import at_once, config_of, start

N_RUNS = 8


def test_of_runs_that_begin_at_once_one_has_the_place(tmp_path: Path) -> None:
    """The others are refused in a line, and leave nothing."""
    for attempt in range(3):
        folder, place = tmp_path / f"runs-{attempt}", tmp_path / f"kept-{attempt}"
        configs = [config_of(folder, f"run-{number}", place) for number in range(N_RUNS)]
        began, refused = at_once(configs, tmp_path / f"meeting-{attempt}")
        assert len(began) == 1 and os.listdir(folder) == began
        assert len(refused) == N_RUNS - 1 and all("must be this run's alone" in line for line in refused), refused
        found = owner_of(place)
        assert found is not None and found.run_dir == str(folder / began[0])


def test_of_runs_that_take_a_removed_one_s_place_at_once_one_keeps_it(tmp_path: Path) -> None:
    """Several may begin; what any but one of them saves is not committed."""
    folder, place = tmp_path / "runs", tmp_path / "kept"
    start(config_of(folder, "removed", place))
    shutil.rmtree(folder / "removed")
    configs = [config_of(folder, f"run-{number}", place) for number in range(N_RUNS)]
    began, _ = at_once(configs, tmp_path / "meeting")
    found = owner_of(place)
    assert found is not None and Path(found.run_dir).name in began
    for config in configs:
        if config.name in began and str(config.run_path) != found.run_dir:
            with pytest.raises(StaleRun), keeping(config, raise_fence(config.run_path)):
                raise AssertionError("the place is another run's")
