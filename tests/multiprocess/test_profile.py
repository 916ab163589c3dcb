"""`roundtable profile`: real steps of two ranks by part, and the same step estimated for a GPU that is not there."""

import gzip
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launcher.cli import main
from modeling.config import ModelConfig
from modeling.counts import flops_per_token
from modeling.moe_config import MoEConfig
from small_disk import small_disk

pytestmark = pytest.mark.xdist_group("profile")  # what its tests share takes long to make

CONFIG = """
name: small
model: {family: mixtral, vocab_size: 512, d_model: 64, n_layers: 2, n_heads: 4, n_kv_heads: 2,
        moe: {n_experts: 4, top_k: 2, d_ff: 64}}
data: {seq_len: 64, sources: [{path: none.txt}]}
train: {global_batch_size: 8, micro_batch_size: 2, precision: bf16}
parallel: {ep: 2, zero: 1}
"""
MODEL = ModelConfig(
    family="mixtral",
    vocab_size=512,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    moe=MoEConfig(n_experts=4, top_k=2, d_ff=64),
)


def profile(folder: Path, *arguments: str) -> tuple[dict, Path]:
    """The report, and the folder that was written, by the command in a folder with the config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
            patch.delenv(name, raising=False)
        (folder / "c.yaml").write_text(CONFIG)
        assert main(["profile", "c.yaml", "--out", "out", *arguments]) == 0
    return json.loads((folder / "out" / "profile.json").read_text()), folder / "out"


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[dict, Path]:
    return profile(tmp_path_factory.mktemp("measured"), "--ranks", "2", "--steps", "2", "--warmup", "1")


@pytest.fixture(scope="module")
def estimated(tmp_path_factory) -> tuple[dict, Path]:
    return profile(tmp_path_factory.mktemp("estimated"), "--as", "H200", "slurm.gpus_per_node=2")


def parts_of(report: dict) -> dict[str, dict]:
    return {row["part"]: row for row in report["parts"]}


def test_the_parts_add_up_to_the_step_on_each_rank(measured):
    report, _ = measured
    assert sum(row["seconds"] for row in report["parts"]) == pytest.approx(report["seconds"], rel=1e-6)
    assert sum(row["share"] for row in report["parts"]) == pytest.approx(1)
    for rank in report["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(rank["seconds"], rel=1e-6)
    assert parts_of(report).get("other", {"share": 0})["share"] < 0.05
    assert [rank["place"] for rank in report["ranks"]] == ["rank 0 (dp 0, ep 0)", "rank 1 (dp 1, ep 1)"]
    assert not report["own_tokens"] and report["tokens"] <= 8 * 64


def test_work_and_time_of_a_part_meet(measured):
    """Each part that launches operations in the counted step takes time in the timed ones, and has a least time."""
    parts = parts_of(measured[0])
    for name in ("attention: products", "experts: products", "router", "head and loss", "optimizer"):
        assert parts[name]["seconds"] > 0 and parts[name]["launches"] > 0 and parts[name]["least_seconds"] > 0, name
    for axis in ("ep", "ZeRO", "metrics"):
        row = parts[f"communication: {axis}"]
        assert row["seconds"] > 0 and row["sent_bytes"] > 0 and row["launches"] > 0, axis
    for name in ("attention: products", "experts: products"):
        assert parts[name]["forward_seconds"] > 0 and parts[name]["backward_seconds"] > 0


def test_perfetto_gets_a_trace_of_each_rank_with_its_name(measured):
    _, out = measured
    for rank in range(2):
        trace = json.loads(gzip.decompress((out / f"trace-rank-{rank}.json.gz").read_bytes()))
        names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
        assert names and all(name.startswith(f"rank {rank} (") for name in names)
        marks = {event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"}
        assert {"roundtable: attention forward", "roundtable: optimizer update"} <= marks


def is_picture(path: Path) -> bool:
    data = path.read_bytes()
    return data[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", data[16:24])) > 500


@pytest.mark.slow
def test_memory_is_a_picture_whose_peak_has_holders(measured, estimated):
    for report, out in (measured, estimated):
        assert is_picture(out / "memory.png")
        memory = report["memory"]
        assert memory["peak_bytes"] == sum(memory["at_peak_bytes"].values())
        assert {"weights", "masters", "optimizer state", "activations"} <= memory["at_peak_bytes"].keys()
    states = [report["memory"]["at_peak_bytes"]["weights"] for report, _ in (measured, estimated)]
    assert states[0] == pytest.approx(states[1], rel=0.01)  # the padding of flat tensors


def test_nothing_is_written_but_the_folder(measured, estimated):
    for _, out in (measured, estimated):
        assert sorted(path.name for path in out.parent.iterdir()) == ["c.yaml", "out"]


def test_a_full_disk_is_told_in_a_line_and_nothing_stays(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    with small_disk(tmp_path / "disk", mib=1) as disk:
        (disk / "filler").write_bytes(bytes(1000 << 10))
        assert main(["profile", "c.yaml", "--out", "disk/out", "--ranks", "2", "--steps", "1", "--warmup", "1"]) == 1
        assert [path.name for path in disk.iterdir()] == ["filler"]
    told = "a file or stream: No space left on device; free some space, or choose another disk"
    assert capfd.readouterr().err.splitlines()[-1] == told


def test_a_full_tmpdir_is_told_in_a_line_and_nothing_stays(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    with tempfile.TemporaryDirectory(dir="/tmp") as short, small_disk(Path(short) / "disk", mib=1) as disk:
        (disk / "filler").write_bytes(bytes(900 << 10))
        words = ["profile", "c.yaml", "--out", "out", "--ranks", "2", "--steps", "1", "--warmup", "1"]
        command = [sys.executable, "-m", "launcher", *words]
        environment = os.environ | {"TMPDIR": str(disk)}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert not list(disk.glob("roundtable-*"))
    told = f"TMPDIR={disk}: torch could not write a trace there; free some space, or choose another disk"
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, told)
    assert not (tmp_path / "out").exists()


def test_an_estimate_says_that_it_is_one_and_adds_up(estimated):
    report, out = estimated
    assert report["kind"] == "estimated" and report["says"][0].startswith("ESTIMATE, no measurement")
    assert sum(row["seconds"] for row in report["parts"]) == pytest.approx(report["seconds"])
    assert report["world_size"] == 2
    mfu = report["model_flops"] / report["seconds"] / (2 * 989.5e12)
    assert report["mfu"] == pytest.approx(mfu) and report["model_flops"] == 8 * 64 * flops_per_token(MODEL, 64)
    parts = parts_of(report)
    assert parts["communication: ep"]["bound"] in ("wire", "launches")
    assert parts.get("other", {"share": 0})["share"] < 0.01
    events = json.loads(gzip.decompress((out / "trace-estimate.json.gz").read_bytes()))["traceEvents"]
    assert "no measurement" in events[0]["args"]["name"]


def test_both_count_the_same_model(measured, estimated):
    """The products' FLOPs: on a CPU each expert's rows are rounded up, on CUDA they are not."""
    here, there = (parts_of(report) for report, _ in (measured, estimated))
    for name in ("attention: products", "head and loss"):
        assert here[name]["flops"] == there[name]["flops"]
    assert here["experts: products"]["flops"] >= there["experts: products"]["flops"]
    assert here["communication: ZeRO"]["sent_bytes"] >= there["communication: ZeRO"]["sent_bytes"] > 0


HYBRID = (
    *("model.family=none", "model.full_attention_layers=[1]"),
    "model.linear_attention={n_k_heads: 2, n_v_heads: 4, d_k: 16, d_v: 16}",
)


def test_linear_attention_is_planned_by_the_kernels_that_will_run(tmp_path, capfd):
    """Its package's; under train.deterministic torch's operations. A plan is no run: it misses no package."""
    parts, launches = [], []
    for deterministic in ("false", "true"):
        (folder := tmp_path / deterministic).mkdir()
        more = (*HYBRID, f"train.deterministic={deterministic}", "parallel.ep=1", "slurm.gpus_per_node=1")
        report, _ = profile(folder, "--as", "H200", *more)
        parts.append(parts_of(report))
        launches.append(sum(row["launches"] for row in report["parts"]))
        assert parts[-1].keys() >= {"linear attention: products", "linear attention: rest", "attention: scores"}
    assert [("linear attention: rule" in each) for each in parts] == [True, False]
    assert parts[0]["linear attention: rule"]["launches"] == 4 * (8 + 18)  # a layer's two passes of four micro-batches
    assert launches[1] > launches[0] + 100
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "true")
        capfd.readouterr()
        assert main(["plan", "c.yaml", "--gpu", "H200", *HYBRID, "parallel.ep=1", "slurm.gpus_per_node=1"]) == 0
    assert "fla-core" not in "".join(capfd.readouterr())
