"""Describes Roundtable's mesh to DeepSpeed: process groups, and the marks that DeepSpeed reads on parameters.

DeepSpeed's data parallelism is Roundtable's dp x cp, its model parallelism pp x tp (over which it reduces norms and
overflows), and its experts are replicated over edp. Experts are treated separately whenever the ranks that replicate
them are not those that replicate dense weights.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from modeling.mup import Widths
from modeling.optimizers.build import parameter_groups
from modeling.optimizers.config import OptimizerConfig
from parallel.layout import Place
from parallel.mesh import Mesh
from parallel.zero.weights import HeldWeight

EXPERTS = "roundtable_experts"  # the name under which DeepSpeed finds the experts' group


def experts_are_separate(mesh: Mesh) -> bool:
    """Whether the ranks that replicate experts differ from those that replicate dense weights."""
    return mesh.edp.ranks != mesh.replicas.ranks


class Mpu:
    """The object through which DeepSpeed asks for groups and positions."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def get_data_parallel_group(self) -> Any:
        """The process group of the ranks that hold the same dense weights."""
        return self.mesh.replicas.group

    def get_data_parallel_rank(self) -> int:
        """This rank's position among the ranks that hold the same dense weights."""
        return self.mesh.replicas.rank

    def get_data_parallel_world_size(self) -> int:
        """The number of replicas of this rank's dense weights."""
        return self.mesh.replicas.degree

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The global ranks of the replicas of this rank's dense weights."""
        return list(self.mesh.replicas.ranks)

    def get_model_parallel_group(self) -> Any:
        """The process group of the ranks that together hold one copy of the dense weights (pp x tp)."""
        return self.mesh.model.group

    def get_model_parallel_rank(self) -> int:
        """This rank's position among the ranks that together hold one copy of the dense weights."""
        return self.mesh.model.rank

    def get_model_parallel_world_size(self) -> int:
        """The degree of pp x tp."""
        return self.mesh.model.degree

    def get_tensor_model_parallel_group(self) -> Any:
        """The process group of the tp axis."""
        return self.mesh.tp.group

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's position on the tp axis."""
        return self.mesh.tp.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """The degree of tp."""
        return self.mesh.tp.degree

    def get_pipeline_model_parallel_group(self) -> Any:
        """The process group of the pp axis."""
        return self.mesh.pp.group

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's position on the pp axis."""
        return self.mesh.pp.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """The degree of pp."""
        return self.mesh.pp.degree


def register_expert_groups(mesh: Mesh) -> None:
    """Registers the experts' process groups (ep and edp) in DeepSpeed's tables of groups."""
    from deepspeed.utils import groups

    for registry, value in (
        (groups._EXPERT_PARALLEL_GROUP, mesh.ep.group),
        (groups._EXPERT_DATA_PARALLEL_GROUP, mesh.edp.group),
        (groups._EXPERT_PARALLEL_GROUP_RANKS, list(mesh.ep.ranks)),
        (groups._EXPERT_DATA_PARALLEL_GROUP_RANKS, list(mesh.edp.ranks)),
    ):
        registry[EXPERTS] = value


def mark_parameter(parameter: nn.Parameter, place: Place, mesh: Mesh) -> None:
    """Sets the attributes by which DeepSpeed recognizes tp shards and experts, before it gets the parameter."""
    marks: dict[str, Any] = {}
    if place.is_expert and experts_are_separate(mesh):
        marks |= {"allreduce": False, "group_name": EXPERTS}
    if mesh.tp.degree > 1 and place.axis is not None:
        marks["tensor_model_parallel"] = True
    for key, value in marks.items():
        setattr(parameter, key, value)


def mark_for_zero3(parameter: nn.Parameter, place: Place, mesh: Mesh) -> None:
    """Sets the attributes by which ZeRO 3 partitions experts over the ranks that replicate them (edp)."""
    if place.is_expert and experts_are_separate(mesh):
        marks = {
            "ds_zero_partition_process_group": mesh.edp.group,
            "ds_zero_placement_family": "autoep_expert",
            "ds_zero_partition_group_name": EXPERTS,
        }
        for key, value in marks.items():
            setattr(parameter, key, value)


def optimizer_groups(
    weights: Collection[HeldWeight], mesh: Mesh, config: OptimizerConfig, widths: Widths
) -> list[dict[str, Any]]:
    """The parameter groups of torch's optimizer; experts that other ranks replicate have marked groups of their own.

    ``widths`` are the whole model's (modeling.mup.widths_of), not those of the parts that this rank holds.
    """
    rows = [(held.place.is_expert, (held.parameter, held.weight, held.place.shape)) for held in weights]
    if not experts_are_separate(mesh):
        return parameter_groups([row for _, row in rows], config, widths)
    experts = parameter_groups([row for is_expert, row in rows if is_expert], config, widths)
    dense = parameter_groups([row for is_expert, row in rows if not is_expert], config, widths)
    marked = [{**group, "name": EXPERTS, "moe": True} for group in experts]
    return [{**group, "name": f"dense_{number}"} for number, group in enumerate(dense)] + marked
