"""One rank of a layout whose fp32 masters are nudged, for tests of how far rounding alone moves a replay."""

from launcher.config.tree import RunConfig
from layout_runs import RankResult, rank_result


def nudged(config: RunConfig, seed: int | None) -> RankResult:
    """The pieces of the initial weights that this rank owns, nudged at random by ``seed`` (None: not nudged)."""
    from launcher.replay.rounding import nudge_masters
    from launcher.training.loop import build_engine
    from parallel.mesh import opened_mesh

    with opened_mesh(config.parallel, 120) as mesh:
        engine = build_engine(config, mesh)
        engine.initialize_weights(config.seed)
        if seed is not None:
            nudge_masters(engine, seed)
        return rank_result(engine, [])
