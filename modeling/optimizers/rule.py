"""What the rest of the program asks of an update rule. Each rule answers in its own file, beside its config.

No torch is imported here, nor where a rule is declared: reading a config does not need it.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

from annotated_types import Interval

from modeling.dims import Weight
from modeling.mup import Widths
from modeling.precision_config import Stored

if TYPE_CHECKING:
    import torch

# The largest learning rate is far above what trains: the run's health checks say what becomes of it.
LearningRate = Annotated[float, Interval(ge=0, le=1e30)]
WeightDecay = Annotated[float, Interval(ge=0, le=1000.0)]
Beta = Annotated[float, Interval(ge=0, le=0.999999)]
Epsilon = Annotated[float, Interval(ge=1e-30, le=1.0)]
ClipNorm = Annotated[float, Interval(ge=1e-12, le=1e12)]


class MatrixWork(NamedTuple):
    """What an update computes of one whole matrix, beside reading and writing the weight, its gradient and states."""

    dtype: Stored  # of its products' factors
    flops: int
    bytes: int


class Group(NamedTuple):
    """What the weights of one optimizer group share."""

    decays: bool
    lr_scale: float  # what the run's learning rate is multiplied by
    states: tuple[str, ...]
    decay_scale: float  # what the rule's weight decay is
    takes_whole: bool  # whether the group's ``matrices`` make each of its matrices whole


class UpdateRule(ABC):
    """How weights follow from gradients. The subclass is the frozen dataclass of the rule's numbers."""

    counts_updates: ClassVar[bool] = False  # torch's state holds `step`, the number of updates made

    # whether torch's fused kernel is taken on a CPU, too: it has to round an element alike wherever it lies
    fused_on_cpu: ClassVar[bool] = False

    # whether an element's update depends on the others of its matrix, which a group's ``matrices`` make whole
    takes_whole_matrices: ClassVar[bool] = False

    decay_embeddings: bool  # a field of each rule's dataclass

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """The tensors of each weight's shape that the rule keeps beside it, by torch's names; checkpoints hold them."""

    def states_of(self, weight: Weight) -> tuple[str, ...]:
        """Those of ``states`` that the rule keeps beside this weight."""
        return self.states

    def takes_whole(self, weight: Weight) -> bool:
        """Whether this weight's matrices are made whole for its update. Weights that differ in it have groups apart."""
        return self.takes_whole_matrices and weight.is_hidden_matrix

    def matrix_work(self, rows: int, columns: int) -> MatrixWork | None:
        """What an update computes of one matrix that it ``takes_whole``, for plans; None where it takes none."""
        return None

    def exact(self) -> Self:
        """The same rule with all of its arithmetic in fp32, by which a proof compares layouts."""
        return self

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], *, fused: bool) -> "torch.optim.Optimizer":
        """The torch optimizer over ``groups``; ``fused`` takes torch's fused kernels."""

    def decays(self, weight: Weight) -> bool:
        """Whether weight decay falls on a weight: on matrices only, on embeddings and the head if asked for."""
        return weight.is_matrix and (self.decay_embeddings or not weight.is_embedding)

    def lr_scale(self, weight: Weight) -> float:
        """What the learning rate is multiplied by for a weight."""
        return 1.0

    @abstractmethod
    def width_scale(self, weight: Weight, shape: tuple[int, ...], widths: Widths) -> float:
        """What muP multiplies the learning rate by for a weight whose dims are ``widths`` times the base model's.

        ``shape`` is the whole weight's, whatever part of it a rank holds. The factor is 1 where the dims are as large.
        ``modeling.mup`` has the table, and what it is made of.
        """

    def group(self, weight: Weight, shape: tuple[int, ...], widths: Widths) -> Group:
        """The group of a weight of the whole ``shape``.

        The product of learning rate and decay is the base model's at every width.
        """
        width_scale, decays = self.width_scale(weight, shape, widths), self.decays(weight)
        lr_scale = self.lr_scale(weight) * width_scale
        decay_scale = 1 / width_scale if decays else 1.0
        return Group(decays, lr_scale, self.states_of(weight), decay_scale, self.takes_whole(weight))
