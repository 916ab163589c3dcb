"""The interface of an update rule to the rest of the program. Each rule implements it in its own file, in its config.

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

# The largest learning rate is far above any that trains: the run's health checks catch one that diverges.
LearningRate = Annotated[float, Interval(ge=0, le=1e30)]
WeightDecay = Annotated[float, Interval(ge=0, le=1000.0)]
Beta = Annotated[float, Interval(ge=0, le=0.999999)]
Epsilon = Annotated[float, Interval(ge=1e-30, le=1.0)]
ClipNorm = Annotated[float, Interval(ge=1e-12, le=1e12)]


class MatrixWork(NamedTuple):
    """The work of updating one whole matrix, without reading and writing the weight, its gradient and its states."""

    dtype: Stored  # of its products' factors
    flops: int
    bytes: int


class Group(NamedTuple):
    """The properties that all weights of one optimizer group share."""

    decays: bool
    lr_scale: float  # factor of the run's learning rate
    states: tuple[str, ...]
    decay_scale: float  # factor of the rule's weight decay
    takes_whole: bool  # whether updates need whole matrices, from the group's ``matrices``


class UpdateRule(ABC):
    """How weights follow from gradients. A subclass is the frozen dataclass of the rule's config fields."""

    counts_updates: ClassVar[bool] = False  # torch's state holds `step`, the number of updates made

    # whether torch's fused kernel is used on a CPU, too: it must round an element the same wherever it lies
    fused_on_cpu: ClassVar[bool] = False

    # whether an element's update depends on the rest of its matrix, which a group's ``matrices`` provide whole
    takes_whole_matrices: ClassVar[bool] = False

    decay_embeddings: bool  # a field of each rule's dataclass

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """The names, torch's, of the tensors that the rule keeps for each weight, in its shape.

        Checkpoints hold them.
        """

    def states_of(self, weight: Weight) -> tuple[str, ...]:
        """The ones of ``states`` that the rule keeps for this weight."""
        return self.states

    def takes_whole(self, weight: Weight) -> bool:
        """Whether the update of this weight needs whole matrices.

        Weights that differ in this are in separate groups.
        """
        return self.takes_whole_matrices and weight.is_hidden_matrix

    def matrix_work(self, rows: int, columns: int) -> MatrixWork | None:
        """The work of updating one matrix that the rule takes whole, for plans; None if it takes none."""
        return None

    def exact(self) -> Self:
        """The same rule with all of its arithmetic in fp32, for comparing parallel layouts."""
        return self

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], *, fused: bool) -> "torch.optim.Optimizer":
        """The torch optimizer over ``groups``. ``fused`` selects torch's fused kernels."""

    def decays(self, weight: Weight) -> bool:
        """Whether weight decay applies to a weight: to matrices only; to embeddings and the head only if asked for."""
        return weight.is_matrix and (self.decay_embeddings or not weight.is_embedding)

    def lr_scale(self, weight: Weight) -> float:
        """The rule's own factor of the learning rate for a weight."""
        return 1.0

    @abstractmethod
    def width_scale(self, weight: Weight, shape: tuple[int, ...], widths: Widths) -> float:
        """The factor of the learning rate under muP for a weight whose dims are ``widths`` times the base model's.

        ``shape`` is the whole weight's, whatever part of it a rank holds. The factor is 1 where no dim differs from the
        base model's. ``modeling.mup`` has the table of factors and its derivation.
        """

    def group(self, weight: Weight, shape: tuple[int, ...], widths: Widths) -> Group:
        """The group of a weight with the whole ``shape``.

        The weight decay is divided by muP's factor, so that learning rate times decay is the base model's at every
        width.
        """
        width_scale, decays = self.width_scale(weight, shape, widths), self.decays(weight)
        lr_scale = self.lr_scale(weight) * width_scale
        decay_scale = 1 / width_scale if decays else 1.0
        return Group(decays, lr_scale, self.states_of(weight), decay_scale, self.takes_whole(weight))
