"""Groups whose colours NCCL could not tell apart are not split off one communicator; all are bound to the device."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from parallel import mesh
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks

# Each group that was made: its ranks, the device whose communicator is split, and the one that it is bound to.
Seen = list[tuple[tuple[int, ...], str | None, str | None]]


def make_groups(bound: bool, colours: int | None) -> Seen:
    """In a rank: the groups of ep = 2 on four ranks, with so many colours at most (None: torch's own)."""
    seen: Seen = []
    started, made, own_colour = dist.init_process_group, dist.new_group, mesh._process_group_color

    def start(*args: object, **kwargs: object) -> None:
        started(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0) if bound else None

    def make(ranks: Sequence[int], device_id: torch.device | None = None, **kwargs: object) -> object:
        assert dist.group.WORLD is not None
        device = dist.group.WORLD.bound_device_id
        split, own = (None if each is None else each.type for each in (device, device_id))
        seen.append((tuple(ranks), split, own))
        dist.group.WORLD.bound_device_id = None  # gloo has none
        try:
            return made(list(ranks), **kwargs)  # pyright: ignore[reportArgumentType]
        finally:
            dist.group.WORLD.bound_device_id = device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", start)
        patch.setattr(dist, "new_group", make)
        if colours is not None:
            patch.setattr(mesh, "_process_group_color", lambda ranks: own_colour(ranks) % colours)
        opened = mesh.open_mesh(ParallelConfig(ep=2), 60)
        assert dist.group.WORLD is not None and (dist.group.WORLD.bound_device_id is None) != bound
        for axis in mesh.AXES:  # each group works, however it was made
            total = torch.ones(())
            dist.all_reduce(total, group=getattr(opened, axis).group)
            assert int(total) == getattr(opened, axis).degree
        mesh.close_mesh()
    return seen


@pytest.mark.parametrize(
    ("bound", "colours", "device"),
    [(True, None, "cuda"), (True, 1, None), (False, None, None)],
    ids=["told apart", "one colour", "gloo"],
)
def test_groups_of_one_colour_are_not_split_off(bound: bool, colours: int | None, device: str | None) -> None:
    """With one colour for all, an axis of a single line is still split: there is nothing to tell it from."""
    for rank, seen in enumerate(run_ranks(make_groups, 4, bound, colours, timeout_seconds=120, threads=1)):
        split = {ranks: device for ranks, device, _ in seen}
        lines = {ranks: found for ranks, found in split.items() if len(ranks) < 4}
        assert set(lines.values()) == {device}, (rank, seen)
        assert all(rank in ranks for ranks in split)
        assert split[(0, 1, 2, 3)] == ("cuda" if bound else None)
        assert {own for *_, own in seen} == {"cuda" if bound else None}  # so that no communicator is made on the way


def shared_groups(parallel: ParallelConfig) -> dict[str, list[str]]:
    """In a rank: for each axis, those whose group is the same one."""
    opened = mesh.open_mesh(parallel, 60)
    groups = {name: getattr(opened, name).group for name in mesh.AXES}
    found = {name: [other for other in mesh.AXES if groups[other] is groups[name]] for name in mesh.AXES}
    mesh.close_mesh()
    return found


def test_what_overlaps_has_a_group_of_its_own() -> None:
    """What is begun in one group waits on NCCL for what was begun there before: here ep has the ranks of tp, or all."""
    for parallel in (ParallelConfig(tp=2, ep=2), ParallelConfig(ep=4)):
        for shared in run_ranks(shared_groups, 4, parallel, timeout_seconds=120, threads=1):
            assert shared["ep"] == ["ep"] and shared["replicas"] == (
                ["dp", "edp", "replicas"] if parallel.tp > 1 else ["dp", "replicas"]
            )
            assert shared["tp"] == (["tp"] if parallel.tp > 1 else ["tp", "cp", "pp", "edp", "model"])
