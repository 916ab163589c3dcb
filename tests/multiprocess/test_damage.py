"""The damage drill: whatever happens to any file of the newest checkpoint, it is refused by name and set aside, and the
one before it is used."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from damage import BEFORE, VICTIM, Flip, all_damages, drill, save_two_steps
from layout_runs import DENSE_MODEL, run_config, write_tokens
from modeling.optimizers.config import AdamWConfig
from parallel.checkpoint.manifest import DamagedCheckpoint
from parallel.checkpoint.read import open_checkpoint
from parallel.checkpoint.verify import problems_of
from parallel.processes.start import run_ranks

RANKS = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    tokens = write_tokens(tmp_path_factory.mktemp("tokens"))
    return run_config(tokens, model=DENSE_MODEL, optimizer=AdamWConfig(lr=1e-3))


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory) -> Path:
    """Checkpoints of two runs."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(save_two_steps, RANKS, config, folder, timeout_seconds=900, threads=1)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n_flips", [6, 300])
def test_planted_damage_of_any_kind_is_refused_and_the_one_before_is_used(config, folder, n_flips):
    damages = list(all_damages(folder, n_flips))
    assert len(damages) >= 3 * (n_flips + 10)
    assert drill(config, RANKS, folder, damages) == []


def test_planted_loading_without_hashes_is_seen(config, folder):
    """The drill itself: a loader that trusts sizes passes the truncated files, and not a flipped bit."""
    damages = [damage for damage in all_damages(folder, 1) if damage.name.startswith("shard-00001")]
    found = drill(config, RANKS, folder, damages, skip_hashes=True)
    flips = [damage.name for damage in damages if "flipped" in damage.name]
    assert {line.partition(" was loaded")[0] for line in found} >= {f"{name}: step 2" for name in flips}
    assert not [line for line in found if "deleted" in line or "cut to" in line]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), of=st.integers(0, 2))
def test_planted_flip_of_any_bit_is_seen_by_verify_and_by_every_reader(folder, tmp_path, place, of):
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "own", copy)
    assert problems_of(copy / VICTIM) == []
    files = sorted(path for path in (copy / VICTIM).rglob("*") if path.is_file())
    file = files[of % len(files)]
    Flip(file.relative_to(copy / VICTIM).as_posix(), int(place * 8 * file.stat().st_size))(copy)
    (problem,) = problems_of(copy / VICTIM)
    assert str(file) in problem
    with pytest.raises(DamagedCheckpoint, match=file.name):
        open_checkpoint(copy / VICTIM)
    assert problems_of(copy / BEFORE) == []
