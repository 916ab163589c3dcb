"""Any layout loads any layout's checkpoint and goes on as one uninterrupted plain process would.

For every ordered pair (A, B), the layout itself included: three steps under A, save; load under B, three more.

- fp32, SGD with momentum: losses, gradient norms, weights' consequences thus, within 1e-6 (relative) of one process.
- AdamW, router biases in use: what B loaded and saved again equals what A saved, bit for bit in every logical tensor
  (weights, both moments, biases) and scalar. Losses: 1e-6 as well. AdamW makes noise of a gradient near zero into a
  whole update, but three steps of 1e-3 in elements that hardly matter for the loss stay below that bound.
- The same layout in fp32, bf16 and fp16: every bit of losses, norms, weights and states at the end.
- A change of precision between the two: the same bits in fp32 masters and states, both ways.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

from layout_runs import DENSE_MODEL, MOE_MODEL, LayoutResult, run_config, run_reference, write_tokens
from modeling.config import ModelConfig
from modeling.moe_config import BiasBalance
from modeling.optimizers.config import AdamWConfig, OptimizerConfig
from pair_runs import ODD_SCALER, STEPS, Loaded, Saved, Work, load_under, save_under
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("layout pairs"),
]  # the first test of a matrix saves under all of its layouts

BOUND = 1e-6
MOE = dataclasses.replace(MOE_MODEL, n_layers=4)
MOE_BIAS = dataclasses.replace(MOE, moe=dataclasses.replace(MOE_MODEL.moe, balance=BiasBalance(rate=0.01)))
DENSE = dataclasses.replace(DENSE_MODEL, n_layers=4)
TIED = dataclasses.replace(DENSE, tie_embeddings=True)

MOE_LAYOUTS = {  # all models have tied embeddings
    "one": (1, ParallelConfig(zero=0)),
    "dp2 zero1": (2, ParallelConfig(zero=1)),
    "dp2 ep2 zero2": (2, ParallelConfig(zero=2, ep=2)),
    "dp2 zero3": (2, ParallelConfig(zero=3)),
    "tp2 ep2 zero1": (2, ParallelConfig(zero=1, tp=2, ep=2)),
    "cp2 ep2 zero2": (2, ParallelConfig(zero=2, cp=2, ep=2)),
    "pp2 zero1": (2, ParallelConfig(zero=1, pp=2)),
    "tp2 dp2 ep4 zero2": (4, ParallelConfig(zero=2, tp=2, ep=4)),
    "dp4 ep2 zero3": (4, ParallelConfig(zero=3, ep=2)),
    "dp4 ep4 zero1": (4, ParallelConfig(zero=1, ep=4)),
    "pp2 dp2 ep2 zbv zero2": (4, ParallelConfig(zero=2, pp=2, ep=2, pipeline=ZBV())),
    "pp2 tp2 ep2 interleaved zero3": (4, ParallelConfig(zero=3, pp=2, tp=2, ep=2, pipeline=Interleaved(n_chunks=2))),
    "cp2 dp2 ep4 ring zero3": (4, ParallelConfig(zero=3, cp=2, ep=4, cp_attention="ring")),
    "pp2 tp2 cp2 ep4 dualpipev zero1": (8, ParallelConfig(zero=1, pp=2, tp=2, cp=2, ep=4, pipeline=DualPipeV())),
}
DENSE_LAYOUTS = {
    "dp2 zero1": (2, ParallelConfig(zero=1)),
    "dp2 zero0": (2, ParallelConfig(zero=0)),
    "tp2 dp2 zero3": (4, ParallelConfig(zero=3, tp=2)),
    "cp2 zero2": (2, ParallelConfig(zero=2, cp=2)),
    "pp2 dp2 zero1": (4, ParallelConfig(zero=1, pp=2)),
}
FAST = ("dp2 zero3", "pp2 zero1")


@dataclass(eq=False)
class Matrix:
    """Layouts of one model that have saved, and the plain process's run of six steps with each optimizer."""

    layouts: dict[str, tuple[int, ParallelConfig]]
    works: dict[str, dict[str, Work]]  # layout -> name -> work
    folder: Path
    saved: dict[str, list[dict[str, Saved]]]
    reference: dict[str, LayoutResult]

    @functools.cache  # noqa: B019  (a matrix lives as long as its module's tests)
    def loaded(self, layout: str) -> dict[tuple[str, str], Loaded]:
        """Everything that this layout loads, in one start of its processes."""
        works = [self.with_sources(layout, work) for work in self.works[layout].values()]
        return load_under(layout, self.layouts[layout][0], works, self.folder)

    def with_sources(self, layout: str, work: Work) -> Work:
        """fp32: from all layouts, and 16 bits of the layout before. 16 bits: from the layout itself and others."""
        names = list(self.layouts)
        before = names[names.index(layout) - 1]
        match work.name:
            case "sgd":
                sources = [f"sgd/{other}" for other in names]
            case "adamw":
                sources = [f"adamw/{other}" for other in names]
                sources += [f"{name}/{before}" for name in ("bf16", "fp16") if name in self.works[before]]
            case _:
                sources = [f"{work.name}/{layout}", f"adamw/{before}"]
                sources += [f"fp16/{before}"] if "fp16" in self.works[before] else []
        return dataclasses.replace(work, sources=tuple(sources), resaves=work.name != "sgd")


def make_matrix(folder: Path, model: ModelConfig, adamw_model: ModelConfig, layouts: dict) -> Matrix:
    """Saves under each layout."""
    tokens = write_tokens(folder)
    kinds: dict[str, tuple[ModelConfig, OptimizerConfig | None, str]] = {"sgd": (model, None, "fp32")}
    kinds |= {name: (adamw_model, AdamWConfig(lr=1e-3), name) for name in ("bf16", "fp16")}
    kinds["adamw"] = (adamw_model, AdamWConfig(lr=1e-3), "fp32")

    def work(name: str, parallel: ParallelConfig, n_ranks: int = 1) -> Work:
        chosen, optimizer, precision = kinds[name]
        short_of_micro_batches = parallel.pp > 1 and n_ranks > parallel.pp * parallel.cp * parallel.tp
        micro_batch_size = 1 if short_of_micro_batches else 2
        settings = {"steps": 2 * STEPS, "micro_batch_size": micro_batch_size, "precision": precision}
        return Work(name, run_config(tokens, model=chosen, optimizer=optimizer, parallel=parallel, **settings))

    works = {
        layout: {name: work(name, parallel, ranks) for name in kinds if parallel.zero or name in ("sgd", "adamw")}
        for layout, (ranks, parallel) in layouts.items()
    }
    saved = {
        layout: save_under(layout, ranks, list(works[layout].values()), folder)
        for layout, (ranks, _) in layouts.items()
    }
    reference = {name: run_reference(work(name, ParallelConfig()).config) for name in ("sgd", "adamw")}
    return Matrix(layouts, works, folder, saved, reference)


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    """By name, made when first asked for."""

    @functools.cache
    def make(name: str) -> Matrix:
        folder = tmp_path_factory.mktemp("matrix")
        match name:
            case "moe":
                return make_matrix(folder, MOE, MOE_BIAS, MOE_LAYOUTS)
            case "dense":
                return make_matrix(folder, TIED, DENSE, DENSE_LAYOUTS)
            case _:
                return make_matrix(folder, MOE, MOE_BIAS, {layout: MOE_LAYOUTS[layout] for layout in FAST})

    return make


def cases() -> list:
    """(matrix, layout): the small matrix and the whole ones."""
    slow = [("moe", layout) for layout in MOE_LAYOUTS] + [("dense", layout) for layout in DENSE_LAYOUTS]
    marked = [pytest.param(*case, marks=pytest.mark.slow, id=": ".join(case)) for case in slow]
    fast = [pytest.param("fast", layout, id=f"fast: {layout}", marks=pytest.mark.slow) for layout in FAST]
    return [*fast, *marked]


def largest_difference(rows: list[dict], expected: list[dict]) -> float:
    """Of losses and gradient norms, relative."""
    return max(
        abs(row[key] - other[key]) / abs(other[key])
        for row, other in zip(rows, expected, strict=True)
        for key in ("loss", "grad_norm")
    )


@pytest.mark.parametrize(("name", "layout"), cases())
def test_goes_on_from_every_layouts_checkpoint(matrices, name, layout):
    matrix = matrices(name)
    reference, worst = matrix.reference["sgd"].rows, {}
    worst["before the save"] = largest_difference(matrix.saved[layout][0]["sgd"].rows, reference)
    for source in matrix.layouts:
        loaded = matrix.loaded(layout)["sgd", f"sgd/{source}"]
        assert (loaded.start.step, loaded.start.consumed) == (STEPS, 8 * STEPS)
        worst[source] = largest_difference(loaded.rows, reference[STEPS:])
    assert {source: error for source, error in worst.items() if error > BOUND} == {}


@pytest.mark.parametrize(("name", "layout"), cases())
def test_adamw_state_is_what_was_saved(matrices, name, layout):
    matrix = matrices(name)
    reference = matrix.reference["adamw"].rows
    worst, differing = {}, {}
    for source in matrix.layouts:
        loaded = matrix.loaded(layout)["adamw", f"adamw/{source}"]
        differing[source] = loaded.differing
        worst[source] = max(
            abs(row["loss"] - other["loss"]) / other["loss"]
            for row, other in zip(loaded.rows, reference[STEPS:], strict=True)
        )
    assert {source: names for source, names in differing.items() if names} == {}
    assert {source: error for source, error in worst.items() if error > BOUND} == {}


@pytest.mark.parametrize(("name", "layout"), cases())
def test_the_same_layout_goes_on_bit_for_bit(matrices, name, layout):
    matrix = matrices(name)
    for work in matrix.works[layout]:
        loaded = matrix.loaded(layout)[work, f"{work}/{layout}"]
        ranks = [rank[work] for rank in matrix.saved[layout]]
        seen = [(row["loss"], row["grad_norm"], row.get("loss_scale")) for row in loaded.rows]
        assert seen == [(row["loss"], row["grad_norm"], row.get("loss_scale")) for row in ranks[0].rows[STEPS:]], work
        assert loaded.state == " ".join(rank.state for rank in ranks), work
        if work == "fp16":
            assert [row["loss_scale"] for row in loaded.rows] == [ODD_SCALER["cur_scale"]] * STEPS


@pytest.mark.parametrize(("name", "layout"), cases())
def test_a_change_of_precision_keeps_every_bit_of_the_state(matrices, name, layout):
    matrix = matrices(name)
    changed = {
        (work, source): loaded.differing
        for (work, source), loaded in matrix.loaded(layout).items()
        if work != "sgd" and work != source.split("/")[0]
    }
    assert changed
    assert {pair: names for pair, names in changed.items() if names} == {}
