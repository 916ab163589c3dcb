"""train.compile=on in real runs: layouts proven with it, the same run twice, the first step's cost, no compiler."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from command_runs import train, write_config
from launcher.cli import main
from launcher.config.load import load_config
from launcher.training import compiling, cpp_kernels
from launcher.training.compiling import missing_compiler
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from modeling.kernels import attention_passes, expert_passes, native, row_passes, tiles
from modeling.kernels.fuse import compiled, plainly
from parallel.config import ParallelConfig
from parallel.mesh import close_mesh, open_mesh
from parallel.processes.start import run_ranks
from prove_runs import failures, prove

NO_COMPILER = missing_compiler("cpu")
compiles = pytest.mark.skipif(NO_COMPILER is not None, reason=f"nothing can be compiled: {NO_COMPILER}")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@compiles
@pytest.mark.slow
@pytest.mark.timeout(1200)  # compilers take as long as the machine lets them
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.zero=3", "train.recompute=full", "train.precision=bf16"), 2),
        (("parallel.tp=2", "parallel.ep=2"), 2),
        (("parallel.pp=2", "parallel.pipeline.name=zbv", "train.recompute=selective"), 2),
        (("parallel.cp=2", "parallel.ep=4", "parallel.zero=2"), 4),
    ],
    ids=str,
)
def test_compiled_layouts_are_proven(tmp_path: Path, overrides: tuple[str, ...], ranks: int) -> None:
    """To the bounds of any proof: the reference computes plainly."""
    outcome = prove(tmp_path, ("train.compile=on", *overrides), ranks, timeout_seconds=1000)
    assert outcome.proven, failures(outcome)


@compiles
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_start_takes_from_the_cache_what_the_first_compiled(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows bit for bit. The event says how long the first calls took: many seconds once, few afterwards."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    rows, events = [], []
    for name in ("first", "second"):
        config = write_config(tmp_path, tokens, name, steps=2)
        rows.append([(row["loss"], row["grad_norm"]) for row in train(config, 1, "train.compile=on")])
        every = read_metrics(tmp_path / name / "metrics.jsonl")
        events.append(next(row for row in every if row.get("event") == "compiled"))
    assert rows[0] == rows[1]
    first, second = events
    assert first["step"] == 1 and first["chains"] == second["chains"] >= 4
    assert second["seconds"] < first["seconds"] / 2


def fuse_in_rank(without: int) -> tuple[bool, list[str]]:
    """In a rank, as on a GPU: whether auto compiles, and what is told; one rank's compiler fails."""
    rank, told = int(os.environ["RANK"]), list[str]()
    mesh = open_mesh(ParallelConfig(), 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "fuse_of", lambda choice, *_: compiled if choice == "auto" else plainly)
        patch.setattr(compiling, "why_not", lambda device: "no space left on device" if rank == without else None)
        fuse = compiling.usable_fuse("auto", mesh.device, told.append, share=partial(compiling.first_problem, mesh))
    close_mesh()
    return fuse is compiled, told


def test_where_one_rank_cannot_compile_none_does() -> None:
    """The others would wait for it in each step, and rank 0, which tells, would know of nothing."""
    told = "train.compile=auto: elementwise kernels are not compiled, so steps take longer"
    line = f"{told}: rank 1 (dp 1): no space left on device; "
    ranks = run_ranks(fuse_in_rank, 2, 1, timeout_seconds=100, threads=1)
    assert [compiles for compiles, _ in ranks] == [False, False]
    assert all(told == [line + compiling.REMEDIES["cpu"]] for _, told in ranks)
    assert run_ranks(fuse_in_rank, 2, 2, timeout_seconds=100, threads=1) == [(True, [])] * 2


KERNELS = {
    "rows": (row_passes.SOURCE, row_passes.why_not),
    "attention": (attention_passes.VECTORS, attention_passes.why_not),
    "attention on units": (attention_passes.TILES, attention_passes.why_not_tiles),
    "experts on units": (expert_passes.TILES, partial(expert_passes.why_not, torch.bfloat16)),
    "experts": (expert_passes.VECTORS, partial(expert_passes.why_not, torch.float32)),
}


def kernels_in_rank(lacking: str) -> tuple[dict[str, str | None], list[str]]:
    """In a rank: why it does not take each of KERNELS, and what is told; rank 1 lacks one of them."""
    told, lacks = list[str](), KERNELS[lacking][0] if lacking in KERNELS and os.environ["RANK"] == "1" else None
    mesh = open_mesh(ParallelConfig(), 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "problem", lambda source, further: "no space left" if lacks == source else None)
        patch.setattr(tiles, "problem", lambda source: "no matrix units" if lacks == source else None)
        patch.setattr(tiles, "options", lambda: tiles.VECTORS if lacks is None else None)
        precision = "fp32" if lacking == "experts" else "bf16"
        config = load_config("configs/quickstart.yaml", [f"train.precision={precision}"])
        share = partial(compiling.first_problem, mesh)
        cpp_kernels.tell_of_missing_kernels(config, torch.device("cpu"), told.append, share)
        found = {name: why_not() for name, (_, why_not) in KERNELS.items()}
    close_mesh()
    return found, told


@pytest.mark.parametrize(
    ("lacking", "problem"),
    [
        ("rows", "no space left"),
        ("attention", "no space left"),
        ("attention on units", "no matrix units"),
        ("experts on units", "no matrix units"),
        ("experts", "no space left"),
        ("nothing", None),
    ],
)
def test_a_kernel_that_one_rank_lacks_is_taken_by_none(lacking: str, problem: str | None) -> None:
    """Else what ranks of tp have in common would differ by rounding, and a token's experts with it."""
    first, second = run_ranks(kernels_in_rank, 2, lacking, timeout_seconds=100, threads=1)
    given = None if problem is None else f"rank 1 (dp 1): {problem}"
    assert first[0] == second[0] == {name: given if name == lacking else None for name in KERNELS}
    line = [] if given is None else [f"kernels in C++ are not used, so steps take longer: {given}"]
    assert (first[1], second[1]) == (line, line if problem == "no space left" else [])


def test_on_is_refused_without_a_compiler(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and no run directory."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = write_config(tmp_path, tokens, "refused")
    assert main(["train", str(config), "--ranks", "1", "train.compile=on"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "train.compile=on needs a compiler that works: there is no no-such-compiler; "
        "install g++ and Python's headers, or set train.compile=off"
    )
    assert not (tmp_path / "refused").exists()
