"""`roundtable prove` of models some of whose layers have linear attention, under every axis."""

import pytest

from any_family import any_family
from prove_runs import failures, prove

LINEAR = (
    "model.linear_attention.n_k_heads=8",
    "model.linear_attention.n_v_heads=16",
    "model.full_attention_layers=[3,7]",
)
FEW_KEYS = ("model.linear_attention.n_k_heads=1", *LINEAR[1:])


def slow(overrides: tuple[str, ...], ranks: int):
    return pytest.param(overrides, ranks, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ((*LINEAR, "parallel.tp=2", "parallel.cp=2", "train.recompute=selective"), 4),
        slow((*LINEAR, "parallel.tp=2", "parallel.tp_overlap=true", "train.precision=bf16"), 2),
        slow((*LINEAR, "parallel.cp=2", "parallel.cp_attention=ring", "parallel.zero=3", "train.recompute=full"), 4),
        slow((*FEW_KEYS, "parallel.cp=4", "optimizer={name: muon}"), 4),
        slow((*LINEAR, "parallel.pp=2", "parallel.pipeline.name=zbv", "train.recompute=selective"), 2),
        slow((*LINEAR, "parallel.pp=2", "parallel.pipeline.name=dualpipev", "parallel.ep=2"), 4),
        slow((*LINEAR, "parallel.zero=3", "train.precision=bf16", "train.recompute=feed_forward"), 2),
        slow((*LINEAR, "parallel.tp=2", "train.precision=fp8", "train.activation_gib=64"), 2),
        slow((*LINEAR, "parallel.tp=2", "parallel.pp=2", "train.offload_activations=true"), 4),
        slow((*LINEAR, "model.mtp.depth=1", "model.full_attention_layers=[3]", "parallel.tp=2"), 2),
        slow((*LINEAR, "parallel.tp=2", "model.init={name: mup, base_d_model: 128}", "model.tie_embeddings=false"), 2),
    ],
    ids=lambda value: " ".join(each for each in value if "linear" not in each) if isinstance(value, tuple) else value,
)
def test_linear_attention_is_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, overrides, ranks, on_both_sides=(any_family,))
    assert outcome.proven, failures(outcome)
