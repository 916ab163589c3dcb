"""The matrix's table, and what a model that does not fit it is told."""

from pathlib import Path

from launcher.config.load import load_config
from launcher.prove.matrix import Layout, fit, layouts

QUICKSTART = "configs/quickstart.yaml"


def markdown_rows() -> list[str]:
    """The table as docs/layouts.md has it: a line for each set of axes."""
    together: dict[str, list[Layout]] = {}
    for layout in layouts():
        parallel, n_ranks = layout.parallel, layout.n_ranks
        dp = n_ranks // (parallel.tp * parallel.cp * parallel.pp)
        degrees = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "ep": parallel.ep, "dp": dp}
        named = ", ".join(f"{axis} 2" for axis, degree in degrees.items() if degree == 2)
        together.setdefault(f"{named} | {n_ranks}", []).append(layout)
    rows = []
    for words, group in together.items():
        schedules = dict.fromkeys(layout.parallel.pipeline.name for layout in group if layout.parallel.pp > 1)
        attentions = dict.fromkeys(layout.parallel.cp_attention for layout in group if layout.parallel.cp > 1)
        rows.append(f"| {words} | {', '.join(schedules)} | {', '.join(attentions)} | {len(group)} |")
    return rows


def degrees(layout):
    parallel = layout.parallel
    dp = layout.n_ranks // (parallel.tp * parallel.cp * parallel.pp)
    return (("tp", parallel.tp), ("cp", parallel.cp), ("pp", parallel.pp), ("ep", parallel.ep), ("dp", dp))


def test_the_table_holds_every_pair_and_triple_that_ranks_allow():
    axes = {frozenset(axis for axis, degree in degrees(layout) if degree == 2) for layout in layouts()}
    names = ("tp", "cp", "pp", "ep", "dp")
    pairs = {frozenset((a, b)) for a in names for b in names if a < b}
    assert pairs - axes == {frozenset(("ep", "pp"))}  # a stage of one rank has nothing to fold experts over
    assert all(1 <= len(chosen) <= 3 for chosen in axes)
    assert {layout.parallel.zero for layout in layouts()} == {0, 1, 2, 3}
    assert {layout.parallel.pipeline.name for layout in layouts()} == {"1f1b", "interleaved", "zbv", "dualpipev"}


def test_every_layout_of_the_table_is_legal_for_the_quickstart():
    config = load_config(QUICKSTART)
    assert {layout: problems for layout in layouts() if (problems := fit(config, layout)[1])} == {}


def test_a_dense_model_has_no_experts_to_cut():
    dense = ["model.family=llama", "model.moe=null", "model.qk_norm=false"]
    config = load_config(QUICKSTART, dense)
    refused = [layout for layout in layouts() if fit(config, layout)[1]]
    assert refused == [layout for layout in layouts() if layout.parallel.ep == 2]


def test_the_docs_have_the_table():
    lines = Path("docs/layouts.md").read_text().splitlines()
    head = lines.index("| axes | processes | schedules | cp attention | layouts |")
    rows = markdown_rows()
    assert lines[head + 2 : head + 2 + len(rows)] == rows
    assert f"{len(list(layouts()))} layouts" in Path("docs/layouts.md").read_text()


def test_a_budget_of_activations_is_each_proofs_own():
    """The config's is for its own layout; on one rank its model would need more, and no layout would be proven."""
    given = ["train.activation_gib=0.5", "parallel.tp=8", "train.global_batch_size=64"]
    config = load_config(Path("configs/models/llama-3-8b.yaml"), given)
    for layout in [each for each in layouts() if each.parallel.ep == 1][::20]:
        small, problems = fit(config, layout)
        assert not problems and small.train.activation_gib not in (None, 0.5)
