"""ZeRO 1 in bf16: fp32 masters and optimizer states are sharded; every rank holds fp32 sums of whole gradients."""

import torch
from torch import Tensor, nn

from modeling.optimizers.rule import UpdateRule
from parallel.zero.fragments import Share, mapped_share, position
from parallel.zero.sharding import HeldGradient, Sharding
from parallel.zero.weights import HeldWeight


class Zero1Bf16(Sharding):
    """DeepSpeed's BF16_Optimizer: after each backward pass the bf16 gradients move on into its fp32 sums."""

    stage = 1

    def optimizer_class(self) -> type:
        """BF16_Optimizer's."""
        return self.patches.Bf16Optimizer

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One pass, whose gradients are added to the fp32 sums."""
        self.deepspeed.set_gradient_accumulation_boundary(False)
        self.optimizer.clear_lp_grads()
        torch.autograd.backward(loss)
        self.optimizer.update_hp_grads(clear_lp_grads=False)
        if last:
            self.reduce_all()

    def after_backward(self, stage: nn.Module) -> None:
        """Adds the gradients to the fp32 sums."""
        self.optimizer.update_hp_grads(clear_lp_grads=False)
        self.optimizer.clear_lp_grads(set_to_none=True)

    def total(self, weight: nn.Parameter) -> Tensor:
        """DeepSpeed's fp32 sum."""
        return weight._hp_grad  # pyright: ignore[reportAttributeAccessIssue]

    def gradients(self) -> list[HeldGradient]:
        """Whole gradients in fp32."""
        optimizer, found = self.optimizer, []
        for group, parameters in enumerate(optimizer.bf16_groups):
            for number, parameter in enumerate(parameters):
                if optimizer.fp32_groups_has_gradients[group][number]:
                    holders = self.weights[parameter].replicas.degree
                    found.append((parameter, optimizer.fp32_groups_gradients[group][number], holders))
        return found

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """This rank's part of the fp32 sums."""
        group = position(self.optimizer.fp32_groups_flat_partition, flat)
        return self.optimizer.fp32_groups_gradient_flat_partition[group].detach().float().view(-1)

    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """One for each group."""
        return list(zip(self.optimizer.fp32_groups_flat_partition, self.optimizer.bf16_groups, strict=True))

    def share_of(self, weight: HeldWeight) -> Share | None:
        """As DeepSpeed's own mapping says."""
        return mapped_share(weight.parameter)

    def publish(self, rule: UpdateRule) -> None:
        """Copies the masters into the weights, and gathers them."""
        self.optimizer.update_lp_params()
