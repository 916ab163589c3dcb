"""What grows with the ranks, computed by the code's own functions for 2,048 and 16,384 of them: docs/scale.md's table.

No process is started. Bounds on seconds are of processor time, ten times and more above what was measured.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from launcher.config.tree import RunConfig
from launcher.guard.hangs import Report, Seen, Verdict, explain, judge, runs_of_ranks
from launcher.guard.stragglers import SLOW_RATIO
from launcher.guard.watchdog import WORDS_A_SECOND, Watchdog
from modeling.init import BLOCK_NUMEL
from parallel.checkpoint.boxes import span_within
from parallel.checkpoint.cuts import Owned
from parallel.checkpoint.load import deal_hashing
from parallel.checkpoint.manifest import Manifest, certify, decode_manifest, encode_manifest
from parallel.checkpoint.read import Checkpoint
from parallel.checkpoint.scatter import Target
from parallel.config import ParallelConfig
from parallel.mesh import APART, AXES, Degrees, Mesh, neighbours_lines
from parallel.processes.heartbeat import encoded
from parallel.zero.fragments import Fragment
from simulated_mesh import Job, deepseek_v3, meshes

LARGE = (2048, 16384)
LAYERS = 61  # DeepSeek-V3's; what grows with the layers is computed for FEW of them in `make test`
FEW = 5  # of which three are dense


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


LAYOUTS = [
    Degrees(2048, pp=16, ep=64),
    Degrees(2048, ep=64),
    Degrees(2048, tp=4, cp=2, pp=8, ep=32),
    Degrees(16384, tp=8, cp=2, pp=16, ep=64),
    Degrees(16384, ep=256),
]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_rank_is_in_few_groups_and_all_make_them_in_one_order(degrees):
    """NCCL splits one communicator for them, by colours that must differ among groups made at once."""
    began = time.process_time()
    made: set[tuple[int, ...]] = set()
    per_rank: list[list[str]] = [[] for _ in range(degrees.world_size)]
    rounds = [(axis, degrees.lines(axis)) for axis in AXES]
    rounds += [(f"neighbours {number}", lines) for number, lines in enumerate(neighbours_lines(degrees))]
    for name, lines in rounds:
        is_apart = name not in AXES or (name in APART and len(lines[0]) > 1)
        new = [line for line in lines if is_apart or line not in made]
        made |= set() if is_apart else set(new)
        colours = {distributed_c10d._process_group_color(list(line)) for line in new}
        assert len(colours) == len(new), name
        for line in new:
            for rank in line:
                per_rank[rank].append(name)
    assert {tuple(each) for each in per_rank} == {tuple(per_rank[0])}
    assert len(per_rank[0]) <= 10
    assert time.process_time() - began < 10


@pytest.mark.parametrize("world_size", LARGE)
def test_the_watchdogs_turn_at_rank_0(world_size, tmp_path):
    """Beats of all ranks taken, stragglers looked for and a verdict sought: at most every ``interval`` seconds."""
    parallel = ParallelConfig(pp=1)
    watchdog = Watchdog(RunConfig(run_dir=str(tmp_path), parallel=parallel), next(meshes(Degrees(world_size))))
    beat = {"step": 10, "phase": "step", "age": 1.0, "limit": 600.0, "key": "train.timeout_seconds", "own": 1.25}
    slow = {**beat, "own": 1.25 * SLOW_RATIO}
    for rank in range(world_size):
        watchdog.take(rank, {"beat": slow if rank == world_size - 1 else beat}, time.monotonic())

    def turn() -> None:
        watchdog.name_stragglers()
        assert judge(watchdog.seen, watchdog.places, time.monotonic()) is None

    spent = seconds(turn)
    assert [row["rank"] for row in watchdog.news] == [world_size - 1]
    assert spent < 0.02 * watchdog.interval, spent  # two hundredths of a core
    assert len(encoded({"beat": beat})) * world_size / watchdog.interval <= 200 * WORDS_A_SECOND  # bytes a second


@pytest.mark.parametrize("world_size", LARGE)
def test_what_ranks_report_of_a_hang(world_size):
    """All wait for one that is late, or in a circle: rank 0 says so within seconds and a page; 2 kB from each."""
    places, late = Degrees(world_size).places(), 5
    states = {rank: Seen(0.0) for rank in range(world_size)}

    where = {"axis": "dp", "ranks": runs_of_ranks(list(range(world_size))), "peer": None, "seconds": 3.0}

    def report(rank: int, group: str | None, dp: int, ep: int) -> Report:
        waits = None if group is None else {"operation": "all_reduce", "group": group, "number": 3, **where}
        return Report(rank, 7, "step", 9.0, "launcher/x.py:1 in f", waits, {"dp": dp, "ep": ep}, {"dp": dp, "ep": ep})

    reports = {rank: report(rank, "dp", 3, 2) for rank in range(world_size)}
    for strayed, words in ((report(late, None, 2, 2), "slowest"), (report(late, "ep", 2, 3), "out of step")):
        reports[late], began = strayed, time.process_time()
        culprit, message = explain(Verdict("hang", "x"), reports, states, places, 5.0)
        assert time.process_time() - began < 5
        assert culprit == late and words in message and len(message) < 4000
    assert len(encoded({"report": asdict(reports[0])})) < 2000
    half = {rank: reports[rank] for rank in range(world_size // 2)}
    _, message = explain(Verdict("hang", "x"), half, states, places, 5.0)
    assert "missing" in message and len(message) < 4000


@cache
def few_layers(degrees: Degrees, zero: int) -> tuple[Manifest, int, bytes]:
    """A manifest of the model's first layers, the bytes sent for it, and its content."""
    manifest, sent = Job(deepseek_v3(FEW), degrees, zero).manifest()
    return manifest, sent, encode_manifest(manifest)


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [
        (Degrees(2048, ep=64), 3),
        (Degrees(2048, ep=64), 1),
        (Degrees(2048, tp=4, ep=32), 3),
        pytest.param(Degrees(16384, ep=256), 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_manifest_of_some_layers(degrees, zero):
    """In proportion to all layers: at most 40 MB, 10 seconds to parse, and 20 for the certificate."""
    manifest, sent, content = few_layers(degrees, zero)
    whole = LAYERS / FEW
    assert len(content) * whole < 40e6
    assert seconds(lambda: decode_manifest(content)) * whole < 10
    assert certify(manifest) == []
    assert seconds(lambda: certify(manifest)) * whole < 20
    assert sent * whole / degrees.world_size < 20e3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "zero"),
    [
        (Degrees(2048, ep=64), 3),
        (Degrees(2048, pp=16, ep=64), 1),
        (Degrees(2048, pp=16, ep=64), 3),
        (Degrees(2048, ep=256), 3),
        (Degrees(16384, pp=16, ep=64), 3),
    ],
    ids=str,
)
def test_the_manifest_of_671_billion_parameters(degrees, zero):
    """Nothing in proportion: DeepSeek-V3 itself. A rank then finds what it is to read."""
    job = Job(deepseek_v3(), degrees, zero)
    manifest, sent = job.manifest()
    content = encode_manifest(manifest)
    parse, certificate = seconds(lambda: decode_manifest(content)), seconds(lambda: certify(manifest))
    find = seconds(lambda: find_own(job, manifest, degrees))
    print(f"{degrees} ZeRO {zero}: {len(content) / 1e6:.1f} MB, {len(manifest.cuts)} cuts, sent {sent / 1e6:.0f} MB;")
    print(f"parsed in {parse:.2f} s, certified in {certificate:.2f} s, own part found in {find:.2f} s")
    assert certify(manifest) == []
    assert len(content) < 20e6
    assert parse < 10 and certificate < 20 and find < 20


def find_own(job: Job, manifest: Manifest, degrees: Degrees) -> None:
    """The last rank looks for what it owns, as a start on the same layout does: in its own shard, and nowhere else."""
    folder: Any = None
    *_, mesh = meshes(degrees)
    checkpoint, targets = Checkpoint(folder, manifest), {}
    for owned in job.owned(mesh):
        for kind in owned.kinds:
            boxes = [Target(box, torch.empty(box.shape, device="meta")) for box in owned.boxes()]
            targets.setdefault((kind, owned.name), []).extend(boxes)
    assert list(checkpoint.wanted(targets)) == [f"shard-{mesh.rank:05d}.safetensors"]


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [(Degrees(2048, ep=64), 3), (Degrees(2048, ep=64), 1), (Degrees(16384, pp=16, ep=64), 3)],
    ids=str,
)
def test_what_a_rank_draws_at_step_0(degrees, zero):
    """Only experts that it holds, and at most one matrix beside the rows that its share begins and ends in."""
    job = Job(deepseek_v3(), degrees, zero)
    last = degrees.world_size - 1
    for mesh in (mesh for mesh in meshes(degrees) if mesh.rank % (last // 15) == 0 or mesh.rank == last):
        drawn = [draw_of(job, owned, mesh) for owned in job.owned(mesh)]
        assert max(peak for peak, _ in drawn) < (300e6 if zero == 1 else 180e6)
        assert sum(count for _, count in drawn) < 20e9


def draw_of(job: Job, owned: Owned, mesh: Mesh) -> tuple[int, int]:
    """The most bytes that a rank holds while it draws what it owns of a tensor, and the elements that it draws."""
    tensor, nothing = job.tensors[owned.name], torch.empty(0)
    share = (owned.held, owned.first, owned.numel, nothing, 0)
    around = Fragment(owned.name, tensor.weight, tensor.shape, *share, is_owner=True).around()
    if tensor.is_expert:
        matrix, here = tensor.numel // tensor.shape[0], tensor.shape[0] // job.degrees.ep
        assert around.start[0] // here == (around.start[0] + around.shape[0] - 1) // here == mesh.ep.rank
        return 4 * (around.numel + matrix), around.shape[0] * matrix
    block = BLOCK_NUMEL if around.numel < tensor.numel else 0
    return 4 * (around.numel + block), min(tensor.numel, span_within(tensor.shape, around)[1])


def test_planted_whole_stack_is_more_than_a_rank_may_draw():
    """What was drawn before: a stack of DeepSeek-V3's experts, fp32."""
    stack = next(tensor for tensor in Job(deepseek_v3(FEW), Degrees(64, ep=64), 3).tensors.values() if tensor.is_expert)
    assert 4 * stack.numel > 15e9


def slowly_dealt(sizes: dict[str, int], read: list[dict[str, int]]) -> dict[str, int]:
    """``deal_hashing`` as one reads it: every rank is asked for every file."""
    loads, found = [0] * len(read), {}
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        rank = min(range(len(read)), key=lambda rank: (-read[rank].get(file, 0), loads[rank], rank))
        found[file], loads[rank] = rank, loads[rank] + sizes[file]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_files_are_dealt_to_those_that_read_them(seed):
    draw = random.Random(seed)
    files = [f"f{number}" for number in range(12)]
    sizes = {file: draw.randrange(4) for file in files}
    read = [{file: draw.randrange(3) for file in draw.sample(files, 3)} for _ in range(draw.randint(1, 6))]
    assert deal_hashing(sizes, read) == slowly_dealt(sizes, read)


@pytest.mark.parametrize("world_size", LARGE)
def test_hashing_is_dealt_out_in_seconds(world_size):
    """Each rank reads the shards of two ranks, as where their number has changed; half of all is read by nobody."""
    sizes = {f"s{rank}": 4 << 30 for rank in range(2 * world_size)}
    read = [{f"s{rank}": 1 << 30, f"s{rank + 1}": 1 << 30} for rank in range(world_size)]
    dealt: dict[str, int] = {}
    assert seconds(lambda: dealt.update(deal_hashing(sizes, read))) < 5
    assert max(Counter(dealt.values()).values()) <= 3
