"""Muon: each hidden matrix moves by the nearest orthogonal matrix to its momentum; all other weights by AdamW."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from modeling.dims import Weight
from modeling.mup import Widths, fan_ratios, longer_ratio
from modeling.optimizers.rule import Beta, ClipNorm, Epsilon, LearningRate, MatrixWork, UpdateRule, WeightDecay

if TYPE_CHECKING:
    import torch

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
MATRIX_STATES = ("momentum_buffer",)
ADAMW_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(UpdateRule):
    """Muon (Jordan 2024) with the decay and the scale of Liu et al. 2025 (arXiv:2502.16982, section 2.2).

    That scale makes an update as large as AdamW's usually is, so one learning rate serves both kinds of weights. As in
    the paper, embeddings and the head are updated by AdamW. So are routers and gates of shared experts: their outputs
    are scores, like the head's; and a router whose single chosen expert always has the weight one has only rounding
    errors as gradient, which Muon would turn into an update of full size.
    """

    counts_updates: ClassVar[bool] = True  # for the bias correction of AdamW's moments
    takes_whole_matrices: ClassVar[bool] = True

    name: Literal["muon"] = "muon"
    lr: LearningRate = 3e-4
    weight_decay: WeightDecay = 0.1
    decay_embeddings: bool = False
    momentum: Beta = field(default=0.95, metadata={"usual": 0.9})  # of hidden matrices, in Nesterov's form
    beta1: Beta = 0.9  # of all other weights, as the next two are
    beta2: Beta = 0.95
    eps: Epsilon = 1e-8
    clip_norm: ClipNorm | None = 1.0
    iteration_dtype: Literal["fp32", "bf16"] = "fp32"  # of the products that make a matrix orthogonal

    @property
    def states(self) -> tuple[str, ...]:
        """All tensors that the rule may keep: a hidden matrix's momentum, and other weights' moments."""
        return (*MATRIX_STATES, *ADAMW_STATES)

    def states_of(self, weight: Weight) -> tuple[str, ...]:
        """A hidden matrix's momentum; any other weight's two moments."""
        return MATRIX_STATES if weight.is_hidden_matrix else ADAMW_STATES

    def matrix_work(self, rows: int, columns: int) -> MatrixWork:
        """The work of one matrix's update: three products in each iteration, and reads and writes around them.

        Those are for a norm, a division and casts.
        """
        from modeling.optimizers.orthogonal import ITERATIONS

        shorter, size, width = min(rows, columns), rows * columns, ELEMENT_BYTES[self.iteration_dtype]
        flops = 4 * shorter * size + 2 * shorter**3
        moved = width * (4 * size + 5 * shorter**2)
        around = (4 * ELEMENT_BYTES["fp32"] + 2 * width) * size
        return MatrixWork(self.iteration_dtype, ITERATIONS * flops, ITERATIONS * moved + around)

    def exact(self) -> Self:
        """The same rule with its iterations in fp32."""
        return replace(self, iteration_dtype="fp32")

    def width_scale(self, weight: Weight, shape: tuple[int, ...], widths: Widths) -> float:
        """The factor of the learning rate under muP: sqrt(r_out / (r_in r_longer)) for hidden matrices, else AdamW's.

        An update's spectral norm should be in proportion to sqrt(fan_out / fan_in) (Yang, Simon & Bernstein 2023,
        arXiv:2310.17813, condition 1); Muon's is lr 0.2 sqrt(max(fan_in, fan_out)). ``r_longer`` is that maximum
        divided by the base model's.
        """
        r_in, r_out = fan_ratios(weight, widths)
        if not weight.is_hidden_matrix:
            return 1 / r_in
        return (r_out / (r_in * longer_ratio(weight, shape, widths))) ** 0.5

    def build(self, groups: list[dict[str, Any]], *, fused: bool) -> "torch.optim.Optimizer":
        """Roundtable's own Muon: torch's (2.13) takes no stacks of matrices, and orthogonalizes in bf16 alone."""
        from modeling.dtypes import DTYPES
        from modeling.optimizers.orthogonal import Muon

        return Muon(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            iteration_dtype=DTYPES[self.iteration_dtype],
            fused=fused,
        )
