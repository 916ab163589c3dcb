"""ZeRO 1 in bf16: fp32 masters and optimizer states are sharded; every rank holds fp32 sums of whole gradients."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from modeling.decoder import Decoder
from modeling.optimizers.rule import UpdateRule
from parallel.zero.fragments import Share, mapped_share, position
from parallel.zero.sharding import HeldGradient, Sharding
from parallel.zero.weights import HeldWeight


class Zero1Bf16(Sharding):
    """ZeRO 1 by DeepSpeed's BF16_Optimizer: each bf16 gradient is added to its fp32 sum as soon as autograd made it."""

    stage = 1
    zeroes_sums = False

    def optimizer_class(self) -> type:
        """Roundtable's subclass of BF16_Optimizer."""
        return self.patches.Bf16Optimizer

    def open(self, model: Decoder, base: torch.optim.Optimizer, weights: Mapping[nn.Parameter, HeldWeight]) -> None:
        """Hands model and optimizer to DeepSpeed, and hooks each weight's gradient, which ``take`` adds to its sum.

        So a pass never holds all gradients in 16 bits.
        """
        super().open(model, base, weights)
        self.optimizer.accumulation = self.accumulation
        for group, parameters in enumerate(self.optimizer.bf16_groups):
            for number, parameter in enumerate(parameters):
                parameter.register_post_accumulate_grad_hook(partial(self.take, group, number))

    def take(self, group: int, number: int, parameter: nn.Parameter) -> None:
        """Called by autograd: adds a weight's gradient to its fp32 sum, and frees the gradient."""
        self.optimizer._update_hp_grad(parameter, group, number, clear_lp_grads=False)
        parameter.grad = None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One micro-batch's backward pass, whose gradients are added to the fp32 sums; the last one reduces them."""
        self.deepspeed.set_gradient_accumulation_boundary(False)
        torch.autograd.backward(loss)
        if last:
            self.reduce_all()

    def reduce_all(self) -> None:
        """Averages the fp32 sums over the replicas, by DeepSpeed's all-reduce in buckets.

        Without any replicas this is left out, since it would copy all sums for nothing.
        """
        has_gradients, gradients = self.optimizer.fp32_groups_has_gradients, self.optimizer.fp32_groups_gradients
        for taken, totals in zip(has_gradients, gradients, strict=True):
            for is_taken, total in zip(taken, totals, strict=True):
                if not is_taken:
                    total.zero_()  # no pass of this step gave the weight a gradient: the sum is the previous step's
        self.deepspeed.set_gradient_accumulation_boundary(True)
        if any(weight.replicas.degree > 1 for weight in self.weights.values()):
            self.deepspeed.allreduce_gradients(self.bucket)

    def after_backward(self, stage: nn.Module) -> None:
        """Adds to the fp32 sums the gradients that zero-bubble schedules made without calling autograd's hooks."""
        self.optimizer.update_hp_grads(clear_lp_grads=False)
        self.optimizer.clear_lp_grads(set_to_none=True)

    def total(self, weight: nn.Parameter) -> Tensor:
        """DeepSpeed's fp32 sum of the weight's gradient."""
        return weight._hp_grad  # pyright: ignore[reportAttributeAccessIssue]

    def gradients(self) -> list[HeldGradient]:
        """Each weight's whole gradient in fp32, which every replica holds."""
        optimizer, found = self.optimizer, []
        for group, parameters in enumerate(optimizer.bf16_groups):
            for number, parameter in enumerate(parameters):
                if optimizer.fp32_groups_has_gradients[group][number]:
                    holders = self.weights[parameter].replicas.degree
                    found.append((parameter, optimizer.fp32_groups_gradients[group][number], holders))
        return found

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """This rank's part of the group's fp32 sums, laid out as the partition ``flat``."""
        group = position(self.optimizer.fp32_groups_flat_partition, flat)
        return self.optimizer.fp32_groups_gradient_flat_partition[group].detach().float().view(-1)

    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """This rank's fp32 partition of each group, with the group's weights."""
        return list(zip(self.optimizer.fp32_groups_flat_partition, self.optimizer.bf16_groups, strict=True))

    def share_of(self, weight: HeldWeight) -> Share | None:
        """This rank's share of the weight's master, from DeepSpeed's own mapping; None where it has none."""
        return mapped_share(weight.parameter)

    def publish(self, rule: UpdateRule) -> None:
        """Copies this rank's masters into its part of the weights, and all-gathers the weights over the replicas."""
        self.optimizer.update_lp_params()
