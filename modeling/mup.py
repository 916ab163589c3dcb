r"""The maximal update parametrization, muP (Yang et al. 2022, Tensor Programs V, arXiv:2203.03466). No torch.

What muP changes, as a model gets m times as wide as its base model, is how its weights are drawn and how fast they
learn. Of the equivalent forms of the paper's appendix B this is table 3, in which no weight has a multiplier: the model
computes what it would without muP, so any class of `transformers` can. r_in and r_out are a weight's fan_in and
fan_out, divided by those that it has in the base model:

====================  ==============  ===================  ==================  =========================
weight                deviation       learning rate: Adam  SGD                 Muon
====================  ==============  ===================  ==================  =========================
embeddings, vectors   1               1                    r_out               1
hidden matrices       1/sqrt(r_in)    1/r_in               r_out / r_in        (as ``MuonConfig`` says)
head, router, gates   1/r_in          1/r_in               1/r_in              1/r_in
====================  ==============  ===================  ==================  =========================

The router and the gate of shared experts have an output of a fixed size as the head has, and are treated as it is; the
matrices of one expert are hidden ones (so have Malasnicki et al. 2025, arXiv:2508.09752). A head that is tied to the
embedding cannot be smaller than it: there table 8 holds, whose multiplier, 1/m on the logits, is
``ModelConfig.logit_divisor``.

Weight decay is divided by what the learning rate is multiplied by, so that a step shrinks a weight by the same factor
at every width (as the authors' package mup does it). The attention's scale needs no change, since the width of a head
is the base model's: a model with wider heads has to set ``score_scale`` (1/d_head instead of its root, appendix B).
"""

from collections.abc import Mapping

from modeling.config import ModelConfig
from modeling.dims import Dim, Weight
from modeling.init_config import MupInit

Widths = Mapping[Dim, float]  # dim -> its size over its size in the base model; 1 for a dim that is left out
BASE: Widths = {}

WITH_D_MODEL: tuple[Dim, ...] = (
    "d_model",
    "heads",
    "kv_heads",
    "per_head",
    "linear_k_heads",
    "linear_v_heads",
    "per_linear_head",
    "d_ff",
    "expert_d_ff",
    "shared_d_ff",
    "token_and_hidden",
)


def widths_of(config: ModelConfig) -> Widths:
    """The size of each of the model's dims over its size in the base model; BASE where ``init`` is not mup.

    Attention's latents, vocabulary, positions and the number of experts are taken to be as in the base model.
    """
    init = config.init
    if not isinstance(init, MupInit):
        return BASE
    widths: dict[Dim, float] = dict.fromkeys(WITH_D_MODEL, init.ratio(config.d_model))
    if init.base_d_ff is not None:
        widths["d_ff"] = config.d_ff / init.base_d_ff
    if init.base_expert_d_ff is not None and config.moe is not None:
        widths["expert_d_ff"] = widths["shared_d_ff"] = config.moe.d_ff / init.base_expert_d_ff
    return widths


def fan_ratios(weight: Weight, widths: Widths) -> tuple[float, float]:
    """(r_in, r_out) of a weight.

    A vector or a table sums over no input: there they are 1 and the ratio of its whole size.

    They follow from the dims' names alone, so a rank that holds a part of a weight finds the same values as all others.
    """
    if weight.is_multiplied:
        return widths.get(weight.dims[-1], 1.0), widths.get(weight.dims[-2], 1.0)
    r_out = 1.0
    for dim in weight.dims:
        r_out *= widths.get(dim, 1.0)
    return 1.0, r_out


def longer_ratio(weight: Weight, shape: tuple[int, ...], widths: Widths) -> float:
    """The length of a matrix's longer side over that of the base model's longer side, which may be the other one.

    ``shape`` is that of the whole logical weight. In a stack it is each single matrix whose sides are meant.
    """
    (r_in, r_out), (fan_out, fan_in) = fan_ratios(weight, widths), shape[-2:]
    return min(r_in * max(1.0, fan_out / fan_in), r_out * max(1.0, fan_in / fan_out))


def deviation_factor(weight: Weight, widths: Widths) -> float:
    """The factor by which muP multiplies the standard deviation of a weight's initial values."""
    r_in, _ = fan_ratios(weight, widths)
    return r_in**-0.5 if weight.is_hidden_matrix else 1 / r_in
