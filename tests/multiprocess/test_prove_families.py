"""Each family's published model, or a small one where there is none, shrunk as `roundtable prove` shrinks it, under
every axis: the command that a user would run before training one.

tp, pp and dp together (and ep where there are experts), and cp with tp, by all-to-all and by ring.
"""

from pathlib import Path

import pytest
import yaml

from launcher.commands.prove import load_small, prove_in, stay_on_cpu
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.families.family import family_of
from modeling.rope_scaling import LongRopeScaling
from prove_runs import failures
from small_models import example_config

STEPS = 2
MODELS = Path(__file__).parents[2] / "configs/models"
FAST = ("llama",)  # deepseek_v2 is proven under tp, pp and ep in test_prove.py


# Key-value heads that tp and cp can cut: gemma3_text has one, phi3 ten, five on each rank of tp.
FITTING = {"gemma3_text": ("model.n_kv_heads=2",), "phi3": ("model.n_kv_heads=20",)}


def largest_of(family: FamilyName, folder: Path) -> tuple[Path, ModelConfig]:
    """The file of the last of the family's published models, or one in ``folder`` of its example, and the model."""
    published = family_of(family).published
    if not published:
        (path := folder / "example.yaml").write_text(dump_config(RunConfig(model=(model := example_config(family)))))
        return path, model
    name, model = [*published.items()][-1]
    wanted = name.lower().replace(".", "-")
    (path,) = [path for path in MODELS.glob("*.yaml") if yaml.safe_load(path.read_text())["name"] == wanted]
    return path, model


def prove(tmp_path: Path, family: FamilyName, ranks: int, *overrides: str) -> None:
    """Fails with what the proof found."""
    stay_on_cpu()
    path, model = largest_of(family, tmp_path)
    even = f"model.vocab_size={model.vocab_size + model.vocab_size % 2}"  # which tp cuts: GPT-2's 50257 need one more
    changes = ("train.precision=fp32", even, *FITTING.get(family, ()), *overrides)
    config, n_ranks = load_small(path, changes, ranks)
    assert n_ranks == ranks
    outcome = prove_in(tmp_path, config, ranks, STEPS, timeout_seconds=300)
    assert outcome.proven, failures(outcome)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAMILIES]
)
def test_each_family_under_tp_pp_and_dp(tmp_path: Path, family: FamilyName) -> None:
    ep = ("parallel.ep=2",) if family_of(family).has("moe") else ()
    prove(tmp_path, family, 8, "parallel.tp=2", "parallel.pp=2", *ep)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (8, ("parallel.tp=2", "parallel.pp=2")),
        (4, ("parallel.cp=2", "parallel.tp=2", "parallel.cp_attention=ulysses")),
        (4, ("parallel.cp=2", "parallel.cp_attention=ring", "parallel.zero=3", "train.recompute=full")),
    ],
    ids=str,
)
def test_longrope_under_every_axis(tmp_path: Path, ranks: int, layout: tuple[str, ...]) -> None:
    stay_on_cpu()
    config, n_ranks = load_small(MODELS / "phi-4-mini.yaml", ("train.precision=fp32", *layout), ranks)
    assert isinstance(config.model.rope_scaling, LongRopeScaling)
    outcome = prove_in(tmp_path, config, n_ranks, STEPS, timeout_seconds=300)
    assert outcome.proven, failures(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cp_attention", ["ulysses", "ring"])
def test_each_family_under_cp(tmp_path: Path, family: FamilyName, cp_attention: str) -> None:
    prove(
        tmp_path,
        family,
        4,
        "parallel.cp=2",
        "parallel.tp=2",
        "parallel.zero=3",
        f"parallel.cp_attention={cp_attention}",
    )
