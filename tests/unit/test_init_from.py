"""What ``init_from`` may name, and what is told where it cannot be used."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from byte_tokenizer import save_byte_tokenizer
from data.config import DataConfig, SourceConfig
from launcher.commands.trained import open_trained
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.init_from import with_source
from modeling.moe_config import NoBalance, SequenceAuxBalance
from saved_runs import save_run
from small_models import build, example_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run directory ``source``, of two checkpoints, and texts."""
    folder = tmp_path_factory.mktemp("runs")
    config = RunConfig(model=example_config("glm4_moe", vocab_size=257))
    for step in (5, 10):
        save_run(folder / "source", config, build(config.model, step), step)
    (folder / "text.txt").write_text("a text\n")
    return folder


@pytest.fixture
def config(runs: Path, tmp_path: Path) -> RunConfig:
    """A new run that begins with the source's weights and reads its tokenizer."""
    save_byte_tokenizer(tmp_path / "bytes")
    data = DataConfig(
        sources=(SourceConfig(path=str(runs / "text.txt")),),
        token_dir=str(tmp_path / "tokens"),
        tokenizer=str(tmp_path / "bytes"),
    )
    model = example_config("glm4_moe", vocab_size=257)
    return RunConfig(run_dir=str(tmp_path / "new"), init_from=str(runs / "source"), model=model, data=data)


def lines(config: RunConfig, **changes: object) -> list[str]:
    with pytest.raises(UserError) as refused:
        with_source(dataclasses.replace(config, **changes))
    assert all("\n" not in line for line in refused.value.problems)
    return refused.value.problems


def test_a_run_directory_means_its_newest_checkpoint(config: RunConfig, runs: Path) -> None:
    assert with_source(config).init_from == str(runs / "source/checkpoints/step-00000010")
    older = str(runs / "source/checkpoints/step-00000005")
    assert with_source(dataclasses.replace(config, init_from=older)).init_from == older
    assert with_source(dataclasses.replace(config, init_from=None)).init_from is None
    assert not Path(config.run_path).exists()


def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    config: RunConfig, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "source", tmp_path / "source")
    (tmp_path / "source/checkpoints/step-00000010/manifest.json").write_text("{}")
    taken = with_source(dataclasses.replace(config, init_from=str(tmp_path / "source"))).init_from
    assert taken == str(tmp_path / "source/checkpoints/step-00000005")
    assert len(capsys.readouterr().err.splitlines()) == 1
    newest = str(tmp_path / "source/checkpoints/step-00000010")
    (line,) = lines(config, init_from=newest)
    assert line.startswith(f"init_from={newest} is damaged")


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("nowhere", "is not a folder"),
        ("text.txt", "is not a folder"),
        (".", "holds no checkpoint"),
        ("s4://bucket/run", "must be a place that fsspec can list"),
        ("memory://nowhere", "holds no checkpoint"),
    ],
)
def test_what_is_no_checkpoint(place: str, told: str, config: RunConfig, runs: Path) -> None:
    source = place if "://" in place else str(runs / place)
    (line,) = lines(config, init_from=source)
    assert line.startswith(f"init_from={source} ") and told in line


def test_each_key_of_another_model_has_a_line(config: RunConfig) -> None:
    model = config.model
    assert model.moe is not None
    other = dataclasses.replace(
        model, d_model=64, rope_theta=5.0, moe=dataclasses.replace(model.moe, balance=NoBalance(), top_k=3)
    )
    told = lines(config, model=other)
    assert [line.split("=")[0] for line in told] == [
        "model.d_model",
        "model.rope_theta",
        "model.moe.top_k",
        "model.moe.balance",
    ]
    assert re.match(r"model.d_model=64 must be 32, as in init_from=\S+; set it so", told[0])
    dense = dataclasses.replace(model, moe=None)
    (line,) = lines(config, model=dense)
    assert line.startswith('model.moe=null must be {"n_experts": 6, "top_k": 2')


def test_what_shapes_training_alone_may_differ(config: RunConfig) -> None:
    assert config.model.moe is not None
    moe = dataclasses.replace(config.model.moe, z_loss=0.1)
    model = dataclasses.replace(config.model, moe=moe, init_std=1.0)
    assert with_source(dataclasses.replace(config, model=model)).init_from is not None


def test_a_loss_that_balances_experts_may_begin_and_end(config: RunConfig, tmp_path: Path) -> None:
    """As after `import`, which has none. With a bias, which the source's weights have or lack, it is refused above."""
    for theirs, ours in ((NoBalance(), SequenceAuxBalance()), (SequenceAuxBalance(), NoBalance())):
        source, new = (
            dataclasses.replace(config.model, moe=dataclasses.replace(config.model.moe, balance=each))
            for each in (theirs, ours)
        )
        folder = tmp_path / type(theirs).__name__
        save_run(folder, RunConfig(model=source), build(source, 1), 1)
        changed = dataclasses.replace(config, model=new, init_from=str(folder))
        assert with_source(changed).init_from == str(folder / "checkpoints/step-00000001")


def test_a_model_folder_of_transformers_is_to_be_imported(config: RunConfig, tmp_path: Path) -> None:
    """As downloaded, or as `export` wrote it."""
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    told = f"={folder} is a model folder of transformers, not a run; make a run directory of it by "
    wanted = f"{told}`roundtable import '{folder}' RUN_DIR`"
    assert lines(config, init_from=str(folder)) == [f"init_from{wanted}"]
    with pytest.raises(UserError) as refused:
        open_trained(folder)
    assert refused.value.problems == [f"CHECKPOINT{wanted}"]


@pytest.mark.parametrize("named", [True, False])
def test_another_tokenizer_is_refused(named: bool, config: RunConfig, tmp_path: Path) -> None:
    """One that has other ids, and one that would be trained on the new data; the remedy works."""
    swapped = tmp_path / "bytes/tokenizer.json"
    content = json.loads(swapped.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    swapped.write_text(json.dumps(content))
    data = dataclasses.replace(config.data, tokenizer=config.data.tokenizer if named else None)
    (line,) = lines(config, data=data)
    assert line.startswith(f"data.tokenizer={data.tokenizer or 'null'} ")
    remedy = line.partition("; set data.tokenizer to ")[2]
    data = dataclasses.replace(config.data, tokenizer=remedy)
    assert with_source(dataclasses.replace(config, data=data)).init_from is not None
    assert not (tmp_path / "tokens").exists()
