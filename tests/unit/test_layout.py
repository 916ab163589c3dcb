"""Named dims: every weight of every family states its own, one table says what cuts them, and nothing is told twice."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from launcher.config.layout_rules import check_layout
from launcher.traffic.step import weight_names
from layout_runs import run_config
from modeling import config as model_config
from modeling.attention import GroupedQueryAttention
from modeling.config import ModelConfig
from modeling.counts import count_parameters
from modeling.decoder import build_decoder
from modeling.dims import DIMS, Dim, Weight, stated_weights, units_of
from modeling.init_config import MupInit
from modeling.linear import Linear
from modeling.logical import logical_parameters, logical_tensors
from modeling.moe_config import MoEConfig
from modeling.mup import widths_of
from modeling.optimizers.config import AdamWConfig, MuonConfig
from parallel.config import ParallelConfig
from parallel.layout import AXIS_OF, Place, layout_of, place_of
from parallel.mesh import Degrees
from parallel.pipeline.config import OneFOneB
from parallel.pipeline.stages import rank_parts
from parallel.zero.groups import optimizer_groups
from parallel.zero.weights import HeldWeight
from simulated_mesh import meshes
from small_models import example_config

FAMILIES = {family: example_config(family) for family in model_config.FAMILIES}
MODELS = {**FAMILIES, **{f"{name}, tied": replace(model, tie_embeddings=True) for name, model in FAMILIES.items()}}


def test_the_table_has_a_row_for_every_dim():
    assert list(AXIS_OF) == list(DIMS)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_weight_has_known_dims_and_a_place(model):
    tensors = logical_tensors(model)
    assert {dim for tensor in tensors.values() for dim in tensor.weight.dims} <= set(DIMS)
    assert list(layout_of(model)) == list(logical_parameters(model))
    for name, tensor in logical_parameters(model).items():
        place = place_of(tensor.weight, tensor.shape)
        assert place == layout_of(model)[name]
        assert place.is_summed_over_tp == (place.axis is None)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_layers_of_a_kind_are_built_alike(model):
    """One layer stands for all of its kind; here each is built."""
    with torch.device("meta"):
        whole = build_decoder(model)
    built = [(name, tuple(each.shape)) for name, each in (*whole.named_parameters(), *whole.named_buffers())]
    assert [(name, tensor.shape) for name, tensor in logical_tensors(model).items()] == built


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_cut_dim_is_made_of_the_units_that_the_config_sets(model):
    """So a degree that divides the units' number divides the dim, and no head is torn."""
    units = units_of(model)
    cut = {
        (dim, size)
        for tensor in logical_parameters(model).values()
        for dim, size in zip(tensor.weight.dims, tensor.shape, strict=True)
        if AXIS_OF[dim] is not None
    }
    assert {dim for dim, _ in cut} == set(units)
    assert all(size % units[dim].count == 0 for dim, size in cut)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_dim_has_one_size(model):
    """But for heads, whose queries, keys with values, and outputs may have numbers of channels of their own."""
    sizes: dict[str, set[int]] = {}
    for tensor in logical_tensors(model).values():
        for dim, size in zip(tensor.weight.dims, tensor.shape, strict=True):
            sizes.setdefault(dim, set()).add(size)
    own_channels = {"heads"} if model.mla is not None else set()
    assert {dim for dim, size in sizes.items() if len(size) > 1} == own_channels


def test_a_stated_init_is_what_it_says():
    inits = {name: tensor.weight.init for name, tensor in logical_tensors(FAMILIES["glm4_moe"]).items()}
    last = max(tensor.layer or 0 for tensor in logical_tensors(FAMILIES["glm4_moe"]).values())
    prefix = f"layers.{last}."
    assert inits["final_norm.weight"] == "ones" and inits["embed.weight"] == "normal"
    assert inits[f"{prefix}attention.o.weight"] == inits[f"{prefix}feed_forward.experts.down"] == "residual"


class Nameless(GroupedQueryAttention):
    """With a matrix that nobody has named."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mix = nn.Parameter(torch.empty(3, 3))


def test_planted_weight_without_dims_is_an_error_when_the_model_is_built(monkeypatch):
    monkeypatch.setattr("modeling.attention.GroupedQueryAttention", Nameless)
    with pytest.raises(TypeError, match=r"layers\.0\.attention\.mix: Nameless does not state what mix is"):
        logical_tensors(replace(FAMILIES["llama"], rope_theta=12345.0))  # not one that is known already


class GatedLater(GroupedQueryAttention):
    """With a matrix in layers after the first."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        if layer:
            self.gate = Linear(config.n_heads, config.d_model, ("heads", "d_model"))


class GatedFirst(GroupedQueryAttention):
    """With a matrix in the first layer alone, which stands for all of its kind."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        if not layer:
            self.gate = Linear(config.n_heads, config.d_model, ("heads", "d_model"))


@pytest.mark.parametrize(("attention", "theta"), [(GatedLater, 1001.0), (GatedFirst, 1002.0)])
def test_planted_layers_of_a_kind_that_differ_are_an_error_before_a_start(monkeypatch, attention, theta):
    """The plan of a dry run builds the model as a start does."""
    monkeypatch.setattr("modeling.attention.GroupedQueryAttention", attention)
    model = replace(FAMILIES["llama"], rope_theta=theta)  # not one that is known already
    with pytest.raises(TypeError, match=r"layers\.1\.attention\.gate\.weight: layers that ModelConfig\.layer_kind"):
        weight_names(model, tuple(rank_parts(model, OneFOneB(), 1, 0)))


class Paired(GroupedQueryAttention):
    """With a number for each pair of heads, of which the config's units know nothing."""

    dim: Dim = "linear_k_heads"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pairs = Linear(config.n_heads // 2, config.d_model, (self.dim, "d_model"))


class Torn(Paired):
    """With fewer rows than the config has heads."""

    dim = "heads"


@pytest.mark.parametrize(
    ("attention", "theta", "words"),
    [
        (Paired, 1003.0, r"linear_k_heads=2, of which modeling\.dims\.units_of has no units; state them there"),
        (Torn, 1004.0, r"heads=2, which the 4 units that .* has of it \(model\.n_heads\) do not divide; give it a dim"),
    ],
)
def test_planted_dim_that_is_not_made_of_units_is_an_error_when_the_weights_are_placed(
    monkeypatch, attention, theta, words
):
    """Under tp a rank would fail at it; without tp nothing would."""
    monkeypatch.setattr("modeling.attention.GroupedQueryAttention", attention)
    with pytest.raises(TypeError, match=rf"layers\.0\.attention\.pairs\.weight: tp cuts its dim {words}"):
        layout_of(replace(FAMILIES["llama"], rope_theta=theta))  # not one that is known already


def test_planted_dims_that_do_not_fit_are_errors():
    model = build_decoder(FAMILIES["llama"])
    model.embed.stated = {"weight": Weight(("vocab",))}
    with pytest.raises(TypeError, match=r"embed\.weight: Embedding names dims \('vocab',\) of a tensor of shape"):
        stated_weights(model)
    model.embed.stated = {"weight": Weight(("vocab", "width"))}  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"names dims \['width'\], which modeling.dims.Dim does not have"):
        stated_weights(model)


def test_planted_weight_that_two_axes_would_cut_is_an_error():
    with pytest.raises(TypeError, match="more than one dim"):
        place_of(Weight(("experts", "d_ff", "d_model")), (4, 8, 8))
    with pytest.raises(TypeError, match="no row for the dims"):
        place_of(Weight(("width",)), (4,))  # type: ignore[arg-type]


def test_a_place():
    assert place_of(Weight(("d_model", "heads"), "residual"), (8, 16)) == Place((8, 16), 1, "tp")
    assert place_of(Weight(("scores", "d_model")), (8, 16)) == Place((8, 16), None, None)


def test_degrees_must_divide_what_the_table_cuts(tmp_path):
    config = run_config("tokens", model=replace(FAMILIES["llama"], n_heads=6, n_kv_heads=3, d_ff=35))
    config = replace(config, parallel=ParallelConfig(tp=4))
    lines = [line for line in check_layout(config, 4) if " must divide " in line]
    told = {line.split(" must divide ")[1].partition("=")[0] for line in lines}
    assert {"model.n_heads", "model.n_kv_heads", "model.d_ff"} <= told


def test_the_table_needs_no_torch():
    code = "import sys, parallel.layout, modeling.dims; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_learned_positions_are_an_embedding():
    """They are counted as one, do not decay with matrices, and Muon leaves them to AdamW."""
    model = FAMILIES["gpt2"]
    weight = logical_tensors(model)["embed_positions.weight"].weight
    assert weight.is_embedding
    assert AdamWConfig().decays(weight) is False and AdamWConfig(decay_embeddings=True).decays(weight)
    assert not MuonConfig().takes_whole(weight)
    assert count_parameters(model).embedding == (2 * model.vocab_size + 96) * model.d_model


def test_a_rank_learns_its_parts_at_the_whole_weights_rates():
    """Muon under muP goes by the longer side, which need not be a part's. Experts are cut, too."""
    sizes = {"d_model": 64, "n_heads": 4, "n_kv_heads": 4, "d_head": 32, "d_ff": 72}
    kind = MupInit(base_d_model=32, base_d_ff=72, base_expert_d_ff=48)
    config = ModelConfig(family="none", moe=MoEConfig(d_ff=96, n_dense_layers=1), init=kind, **sizes)
    tensors, layout, rule, widths = logical_parameters(config), layout_of(config), MuonConfig(), widths_of(config)
    whole = {name: rule.group(each.weight, each.shape, widths).lr_scale for name, each in tensors.items()}
    for mesh in meshes(Degrees(4, tp=2, ep=2)):
        boxes = {name: layout[name].held_box(mesh) for name in tensors}
        held = [
            HeldWeight(
                name,
                nn.Parameter(torch.empty(boxes[name].shape, device="meta")),
                tensors[name].weight,
                place,
                boxes[name],
                place.replicas(mesh),
                place.is_owner(mesh),
            )
            for name, place in layout.items()
        ]
        names = {each.parameter: each.name for each in held}
        groups = optimizer_groups(held, mesh, rule, widths)
        assert {names[part]: group["lr_scale"] for group in groups for part in group["params"]} == whole
