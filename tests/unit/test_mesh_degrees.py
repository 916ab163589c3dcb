"""Who shares a group with whom."""

import pytest

from parallel.mesh import AXES, Degrees


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
