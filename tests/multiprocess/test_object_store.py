"""Checkpoints on an object store: a real S3 server on this machine, through s3fs, from saving to export."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from launcher.cli import main
from launcher.commands.trained import open_trained
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, WandbConfig
from launcher.errors import UserError
from launcher.training.run_dir import check_run_dir, claim
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.optimizers.config import AdamWConfig
from object_store import s3_bucket
from parallel.checkpoint.places import open_store
from parallel.checkpoint.store import Store
from parallel.checkpoint.verify import problems_of


@pytest.fixture(scope="module")
def denied() -> list[str]:
    """Words in the names of objects that the server does not give and does not delete."""
    return []


@pytest.fixture(scope="module")
def bucket(tmp_path_factory, denied) -> Iterator[str]:
    """The URL of an empty bucket."""
    with s3_bucket(tmp_path_factory.mktemp("aws"), "roundtable", denied) as url:
        yield url


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def write_config(folder: Path, tokens: str, name: str, url: str | None) -> Path:
    config = run_config(tokens, model=MOE_MODEL, optimizer=AdamWConfig(lr=1e-3), steps=6)
    config = dataclasses.replace(
        config,
        name=name,
        run_dir=str(folder / name),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=2, dir=url),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config))
    return path


def numbers(config: Path) -> list[tuple]:
    rows = read_metrics(config.with_suffix("") / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def test_a_run_saves_resumes_keeps_verifies_and_exports_there(bucket, tokens, tmp_path, capsys):
    """The last checkpoint is then damaged on the store: it is set aside there, and the one before it used."""
    url = f"{bucket}/runs/a"
    whole, parts = write_config(tmp_path, tokens, "whole", None), write_config(tmp_path, tokens, "parts", url)
    assert start_training(whole, [], 2) == 0
    assert start_training(parts, ["train.steps=4"], 2) == 0
    store = open_store(url)
    assert store.names() == ["step-00000002", "step-00000004"]
    assert not (tmp_path / "parts" / "checkpoints" / "step-00000004").exists()
    damage(f"{url}/step-00000004")
    assert "shard-00001" in problems_of(store.folder("step-00000004"))[0]
    assert start_training(parts, [], 2) == 0
    assert numbers(parts) == numbers(whole)
    events = read_metrics(tmp_path / "parts" / "metrics.jsonl")
    (event,) = [row for row in events if row.get("event") == "damaged_checkpoint"]
    assert f"{url}/step-00000004/" in event["message"]
    assert store.names() == ["step-00000004", "step-00000006"]
    assert open_trained(url).checkpoint.step == open_trained(tmp_path / "parts").checkpoint.step == 6
    shutil.rmtree(tmp_path / "parts")
    capsys.readouterr()
    assert main(["checkpoint", "verify", url, "--json"]) == 0
    assert [Path(row["checkpoint"]).name for row in json.loads(capsys.readouterr().out)["checkpoints"]] == store.names()
    local, remote = tmp_path / "local", tmp_path / "remote"
    assert main(["export", str(tmp_path / "whole"), str(local)]) == 0
    assert main(["export", f"{url}/step-00000006", str(remote)]) == 0
    assert (local / "model.safetensors").read_bytes() == (remote / "model.safetensors").read_bytes()


def test_a_prefix_is_one_run_s(bucket, tokens, tmp_path):
    """A second run is refused before the first one has saved; so is a put past the look that came before it."""
    first, second = (load_config(write_config(tmp_path, tokens, name, f"{bucket}/one")) for name in ("one", "two"))
    claim(first).close()
    with pytest.raises(UserError) as refused:
        check_run_dir(second)
    assert refused.value.problems[0].startswith(f"checkpoint.dir={bucket}/one must be this run's alone, and is kept by")
    store = open_store(f"{bucket}/one")
    store.root.size = lambda file: None  # as another run's put comes just after
    assert not store.own(b"two", instead=False)


def damage(url: str) -> None:
    """Flips a bit in the middle of the second rank's shard."""
    fs, root = fsspec.core.url_to_fs(url)
    path = next(path for path in fs.find(root) if path.endswith("shard-00001.safetensors"))
    content = bytearray(fs.cat_file(path))
    content[len(content) // 2] ^= 1
    fs.pipe_file(path, bytes(content))


@pytest.mark.parametrize("file", ["manifest.json", "shard-00001.safetensors"])
def test_an_object_that_the_store_does_not_give_is_named_in_a_line(bucket, denied, tokens, tmp_path, capfd, file):
    """By each command that reads it, and by the start of a run; it is no damage, so nothing is set aside."""
    url = f"{bucket}/denied-{file[0]}"
    config = write_config(tmp_path, tokens, "run", url)
    assert start_training(config, ["train.steps=2"], 2) == 0
    capfd.readouterr()
    denied.append(file)
    try:
        for command in (["checkpoint", "verify", url], ["eval", url], ["train", str(config), "--ranks", "2"]):
            assert main(command) == 1
            (line,) = capfd.readouterr().err.splitlines()
            assert f"{url}/step-00000002/" in line and f"/{file}: " in line and line.endswith("keys that lead to it")
    finally:
        denied.clear()
    assert open_store(url).names() == ["step-00000002"]


def test_what_a_store_does_not_delete_is_named_and_never_half_a_checkpoint(bucket, denied):
    """S3 says it of each object, in an answer that is none of failure. A manifest that stays keeps its shards."""
    store = open_store(f"{bucket}/kept")
    put(store, 1, "1-1", commits=True)
    denied.append("manifest.json")
    try:
        with pytest.raises(OSError, match=r"kept/step-00000001/manifest\.json: the store did not delete it"):
            store.remove("step-00000001")
    finally:
        denied.clear()
    assert store.names() == ["step-00000001"]
    assert store.folder("step-00000001").files() == ["1-1/shard", "manifest.json"]


def test_signs_of_a_pattern_in_a_prefix_are_letters(bucket):
    """fsspec's deletion and copy of ``exp[1]`` would find ``exp1``: another run's."""
    one, other = open_store(f"{bucket}/exp[1]"), open_store(f"{bucket}/exp1")
    for store in (one, other):
        put(store, 1, "1-1", commits=True)
        put(store, 2, "1-2", commits=True)
    one.remove("step-00000001")
    one.set_aside("step-00000002")
    assert one.names() == [] and len(one.set_aside_ones()) == 1 and one.leftovers() == []
    assert other.names() == ["step-00000001", "step-00000002"]


def put(store: Store, step: int, attempt: str, *, commits: bool) -> None:
    """An attempt with one file."""
    folder, prefix = store.begin(f"step-{step:08d}", attempt)
    with folder.create(f"{prefix}shard") as out:
        out.write(b"0123456789")
    if commits:
        store.commit(f"step-{step:08d}", attempt, json.dumps({"files": {f"{prefix}shard": {}}}).encode())


def test_what_another_process_has_put_is_seen(bucket):
    """s3fs remembers listings, and would answer by them."""
    folder = open_store(f"{bucket}/shared").folder("step-00000001")
    other, buffer = fsspec.filesystem("s3", skip_instance_cache=True), bytearray(10)
    other.pipe_file(f"{folder.root}/first", b"one")
    assert folder.files() == ["first"]
    other.pipe_file(f"{folder.root}/first", b"longer")
    assert folder.size("first") == 6
    assert folder.files() == ["first"]
    other.pipe_file(f"{folder.root}/second", b"two")
    with folder.open("second") as opened:
        assert buffer[: opened.readinto(buffer)] == b"two"
    assert folder.files() == ["first", "second"]
    other.rm_file(f"{folder.root}/first")
    assert folder.size("first") is None


@pytest.mark.parametrize("kind", ["local", "object"])
def test_both_kinds_of_store_act_alike(bucket, tmp_path, kind):
    """Nothing is there before the commit; removing, setting aside and sweeping leave what they should."""
    store = open_store(str(tmp_path / "checkpoints") if kind == "local" else f"{bucket}/acts")
    assert store.names() == [] and store.owner() is None
    assert store.own(b"one", instead=False) and not store.own(b"two", instead=False)
    assert store.owner() == b"one" and store.own(b"two", instead=True) and store.owner() == b"two"
    put(store, 1, "1-1", commits=True)
    put(store, 2, "1-2", commits=False)
    assert store.names() == ["step-00000001"]
    assert [folder.files() for folder in store.leftovers()] == [["shard"] if kind == "local" else ["1-2/shard"]]
    put(store, 2, "2-1", commits=True)
    put(store, 10, "2-2", commits=True)
    assert store.names() == ["step-00000001", "step-00000002", "step-00000010"]
    store.set_aside("step-00000002")
    assert store.names() == ["step-00000001", "step-00000010"]
    assert len(store.set_aside_ones()) == 1
    put(store, 2, "3-1", commits=True)  # the step can be saved again
    store.remove("step-00000001")
    put(store, 3, "3-2", commits=False)
    store.discard("step-00000003", "3-2")
    store.sweep()
    assert store.names() == ["step-00000002", "step-00000010"]
    assert store.leftovers() == [] and len(store.set_aside_ones()) == 1
    store.remove("step-00000002")
    store.sweep()
    assert store.names() == ["step-00000010"]
    (damaged,) = store.set_aside_ones()  # only the user deletes it
    kept = {"manifest.json", "shard"} if kind == "local" else {"2-1/shard", "manifest.damaged.json"}
    assert kept <= set(damaged.files()) and "3-1/shard" not in damaged.files()
