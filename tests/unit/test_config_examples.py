"""Every file in configs/ does what its `Run:` line says: loaded, checked for its processes, shrunk, and (slow) proven."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from data.rules import check_data
from launcher.commands.prove import load_small, prove_in, stay_on_cpu
from launcher.config.checked import load_checked
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.prove.shrink import FEW_RANKS
from launcher.slurm.profile import read_profile
from launcher.slurm.sweep import load_sweep
from modeling.config import FAMILIES
from modeling.counts import count_parameters
from modeling.families.family import family_of

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MODELS = {path.stem: path for path in sorted((ROOT / "configs" / "models").glob("*.yaml"))}
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
RUN = re.compile(r"^# Run: roundtable (train|submit) (configs/\S+)(.*)$", re.MULTILINE)


def command_of(path: Path) -> tuple[str, str, list[str]]:
    """The command, the config and the other arguments of the file's `Run:` line."""
    (found,) = RUN.findall(path.read_text())
    return found[0], found[1], found[2].split()


def world_size_of(path: Path) -> int:
    """The processes that the `Run:` line starts: --ranks, or those of the job."""
    command, _, arguments = command_of(path)
    if command == "submit":
        profile = read_profile(arguments[arguments.index("--cluster") + 1])
        return load_config(path, base={"slurm": profile}).slurm.world_size
    return int(arguments[arguments.index("--ranks") + 1]) if "--ranks" in arguments else 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_can_run_as_it_says(path):
    assert command_of(path)[1] == f"configs/{path.name}"
    world_size = world_size_of(path)
    assert load_checked(path, world_size=world_size, data=False).name.replace("-", "_") == path.stem


@pytest.mark.parametrize("ranks", [1, 2])
def test_quickstart_runs_on_one_process_or_two(ranks):
    assert check(load_config(ROOT / "configs" / "quickstart.yaml"), ranks) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_can_be_made_small_enough_to_prove(path):
    config, n_ranks = load_small(path, (), None)
    assert n_ranks <= FEW_RANKS
    assert config.model.family == load_config(path).model.family


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_proven(path, tmp_path):
    stay_on_cpu()
    config, n_ranks = load_small(path, (), None)
    outcome = prove_in(tmp_path, config, n_ranks, 2, timeout_seconds=600)
    assert outcome.proven


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_can_be_submitted_as_it_says(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, base, (option, file, *overrides) = command_of(path)
    assert (command, option, file) == ("submit", "--sweep", str(path.relative_to(ROOT)))
    sweep = load_sweep(path, Path(base), overrides, read_profile("generic"))
    assert len(sweep.runs) == 6
    assert all(check(run, run.slurm.world_size) == [] for run in sweep.runs.values())


def test_own_jsonl_reads_the_files_that_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "corpus" / "deep" / "a.jsonl").write_text(json.dumps({"body": "text"}) + "\n")
    (tmp_path / "notes" / "a.txt").write_text("text")
    config = load_config(ROOT / "configs" / "own_jsonl.yaml")
    assert check_data(config.data, config.model.vocab_size) == []


def test_the_sizes_that_the_comments_name():
    dense = count_parameters(load_config(ROOT / "configs" / "dense.yaml").model)
    moe = count_parameters(load_config(ROOT / "configs" / "moe_four_nodes.yaml").model)
    assert round(dense.total / 1e6) == 101
    assert (round(moe.total / 1e9), round(moe.active / 1e9, 1)) == (10, 1.6)


def missing_files(published: Iterable[str]) -> list[str]:
    """One line for each size in a family's table of which there is no config."""
    return [f"configs/models/{stem}.yaml is missing" for stem in published if stem not in MODELS]


def test_planted_size_without_a_file_is_named():
    assert missing_files(["llama-3-8b", "gated-7b"]) == ["configs/models/gated-7b.yaml is missing"]


def test_each_published_size_has_its_file():
    """Its model is the one that its family's table has, and the comment has its counts."""
    published = {
        name.lower().replace(".", "-"): (name, model)
        for family in FAMILIES
        for name, model in family_of(family).published.items()
    }
    assert missing_files(published) == []
    assert MODELS.keys() <= published.keys()
    for stem, path in MODELS.items():
        name, model = published[stem]
        config, counts = load_config(path), count_parameters(model)
        assert config.name == stem and config.model == model
        assert check(config, 1) == []
        active = "" if counts.active == counts.total else f", {counts.active:,} active"
        assert path.read_text().startswith(f"# {name}: {counts.total:,} parameters{active}.\n")
