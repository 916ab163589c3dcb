"""Who shares a group with whom, and when groups are closed."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import launcher.profile.run as profile_rank
import launcher.replay.rank as replay_rank
from launcher.config.tree import RunConfig, TrainConfig
from launcher.guard.watchdog import Watchdog, nccl_seconds
from launcher.replay.seen import WatchedEngine
from parallel import mesh
from parallel.mesh import AXES, Degrees

CONFIG: Any = SimpleNamespace(
    parallel=None, train=SimpleNamespace(timeout_seconds=1), data=None, seed=0, model=SimpleNamespace(vocab_size=1)
)


@pytest.mark.parametrize(
    "degrees", [Degrees(16, tp=2, cp=2, pp=2, ep=4), Degrees(8, tp=2, ep=8), Degrees(6, pp=3), Degrees(1)]
)
@pytest.mark.parametrize("axis", AXES)
def test_lines_partition_the_world(degrees, axis):
    lines = degrees.lines(axis)
    assert sorted(rank for line in lines for rank in line) == list(range(degrees.world_size))
    sizes = {"replicas": degrees.dp * degrees.cp, "model": degrees.pp * degrees.tp}
    assert {len(line) for line in lines} == {sizes[axis] if axis in sizes else getattr(degrees, axis)}


def test_ranks_of_sixteen():
    degrees = Degrees(16, tp=2, cp=2, pp=2, ep=4)
    assert degrees.dp == 2 and degrees.edp == 2
    assert degrees.lines("tp")[0] == (0, 1)
    assert degrees.lines("cp")[0] == (0, 2)
    assert degrees.lines("dp")[0] == (0, 4)
    assert degrees.lines("pp")[0] == (0, 8)
    assert degrees.lines("ep")[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert degrees.lines("edp")[0] == (0, 4)
    assert degrees.lines("replicas")[0] == (0, 2, 4, 6)
    assert degrees.lines("model")[0] == (0, 1, 8, 9)


@pytest.mark.parametrize("n", range(1, 10))
def test_neighbours_on_a_ring_meet_once_and_nobody_meets_two_at_a_time(n):
    rounds = mesh.pairings(n)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == ({frozenset((one, (one + 1) % n)) for one in range(n)} if n > 2 else set())
    assert all(len({each for pair in pairs for each in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) <= 3 and all(one < other for pairs in rounds for one, other in pairs)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("command", ["replay", "profile"])
def test_a_rank_that_fails_closes_no_group(monkeypatch, command, fails):
    """NCCL's closing waits for ranks that wait for this one: its error would be told when their time is over."""
    module: Any = {"replay": replay_rank, "profile": profile_rank}[command]
    closed = []

    def build_engine(*_, **__):
        if fails:
            raise MemoryError("of the GPU")
        return WatchedEngine.__new__(WatchedEngine)

    monkeypatch.setattr(mesh, "open_mesh", lambda *_: mesh.lone_mesh(torch.device("cpu")))
    monkeypatch.setattr(mesh, "close_mesh", lambda: closed.append("closed"))
    for name, stand_in in {"prepare_process": lambda config: None, "build_engine": build_engine}.items():
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(replay_rank, "open_dataset", lambda *_, **__: None)
    monkeypatch.setattr(replay_rank, "execute", lambda *_: None)
    monkeypatch.setattr(profile_rank, "profiled", lambda *_: build_engine())
    plan: Any = SimpleNamespace(config=CONFIG)
    calls = {"replay": lambda: module.replay_rank(plan), "profile": lambda: module.profile_rank(CONFIG, plan, print)}
    with pytest.raises(MemoryError) if fails else nullcontext():
        calls[command]()
    assert closed == ([] if fails else ["closed"])


@pytest.mark.parametrize("step_timeout", [None, 50, 900])
def test_nccls_own_watchdog_comes_after_ours(monkeypatch, tmp_path, step_timeout):
    """It would end ranks by SIGABRT before any has reported; gloo's limit raises where a rank waits."""
    train = TrainConfig(timeout_seconds=600, step_timeout_seconds=step_timeout)
    config, limits = RunConfig(train=train, run_dir=str(tmp_path)), {}
    store, group = SimpleNamespace(set_timeout=lambda limit: None), cast(Any, dist.ProcessGroup)

    def make(*ranks: Any, **options: Any) -> Any:
        name = options.get("backend") or (f"axis of {len(ranks[0])}" if isinstance(ranks[0], list) else ranks[0])
        limits[name] = options["timeout"].total_seconds()
        return group(0, 1)

    for owner, name, stand_in in (
        (mesh, "own_device", lambda: torch.device("cuda", 0)),
        (mesh, "store_of_next_group", lambda limit: store),
        (torch.cuda, "set_device", lambda device: None),
        (mesh, "_split_if_told_apart", lambda lines: nullcontext()),
        (dist, "init_process_group", make),
        (dist, "new_group", make),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    mesh.open_mesh(config.parallel, train.timeout_seconds, nccl_seconds(config))
    watchdog = Watchdog(config, mesh.lone_mesh(torch.device("cpu")))
    assert watchdog.is_slow() and limits["gloo"] == 600
    assert limits["nccl"] == limits["axis of 1"] > watchdog.limit() + watchdog.interval + watchdog.report_seconds
    watchdog.phase, watchdog.steps_done = "step", 1
    assert limits["nccl"] > watchdog.limit()
    mesh.open_mesh(config.parallel, train.timeout_seconds)
    assert limits["nccl"] == limits["axis of 1"] == 600
