"""Faults of the evaluation alone, in a rank's own process; training itself stays right. For prove_faults.plant."""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def count_fillers() -> None:
    """Targets of the filler samples in a micro-batch count, as token 0."""
    import launcher.training.step as step

    step.IGNORED = 0


def drop_share() -> None:
    """Rank 1's part of the loss is lost."""
    import launcher.training.step as step

    over_ranks = step.Sums.over_ranks

    def dropping(self: Any, *rest: Any) -> Any:
        if not torch.is_grad_enabled() and int(os.environ["RANK"]) == 1:
            self.loss = 0.0
        return over_ranks(self, *rest)

    step.Sums.over_ranks = dropping


def count_one_too_many_in_16_bits() -> None:
    """In less than fp32 the held-out loss is divided by one target too many."""
    import launcher.prove.rank as rank_module

    evaluate = rank_module.heldout_loss

    @functools.wraps(evaluate)
    def counting(config: Any, engine: Any, heldout: Any, *rest: Any) -> float:
        loss = evaluate(config, engine, heldout, *rest)
        n_targets, _ = heldout.count(np.arange(config.train.eval_sequences))
        return loss if config.train.precision == "fp32" else loss * n_targets / (n_targets + 1)

    rank_module.heldout_loss = counting


def read_others() -> None:
    """The last sequence of the held-out text is left out, and an earlier one read twice."""
    change_samples(lambda indices: indices.clip(max=indices.max() - 1) if 0 not in indices else indices)


def reverse_stages() -> None:
    """The last stage takes the micro-batches in reverse order."""
    from parallel.pipeline.stages import Stage

    take = Stage.open

    def reversed_at_the_end(self: Any, micro_batches: Any) -> None:
        if self.part.has_head and not torch.is_grad_enabled():
            micro_batches = micro_batches[::-1]
        take(self, micro_batches)

    Stage.open = reversed_at_the_end


def leave_gradients() -> None:
    """Each evaluation leaves a gradient in the final norm's weight."""

    def leave(engine: Any) -> None:
        for name, weight in engine.model.named_parameters():
            if name == "final_norm.weight":
                weight.grad = torch.full_like(weight, 0.1)

    after_evaluation(leave)


def leave_counts() -> None:
    """The next step's router counts start from the last evaluation's instead of zero."""
    import launcher.training.step as step

    left: dict[int, torch.Tensor] = {}
    begin, over_ranks = step.Sums.__init__, step.Sums.over_ranks

    def beginning(self: Any, config: Any) -> None:
        begin(self, config)
        if torch.is_grad_enabled():
            self.layers = dict(left)
            left.clear()

    def ending(self: Any, *rest: Any) -> Any:
        if not torch.is_grad_enabled():
            left.update({layer: row.clone() for layer, row in self.layers.items()})
        return over_ranks(self, *rest)

    step.Sums.__init__, step.Sums.over_ranks = beginning, ending


def move_biases() -> None:
    """Evaluation moves the routers' biases, as only training should."""
    from modeling.moe import MoE

    def move(engine: Any) -> None:
        for module in engine.model.modules():
            if isinstance(module, MoE) and module.router.bias is not None:
                module.router.bias[0] += 0.01

    after_evaluation(move)


def see_all_documents() -> None:
    """In evaluation, packed documents attend to each other."""
    import launcher.training.step as step

    read = step.read_micro_batch

    def without_mask(*arguments: Any, **options: Any) -> Any:
        batch = read(*arguments, **options)
        if not torch.is_grad_enabled():
            batch.context.documents_BS = batch.context.documents_BS.clamp(max=0)
        return batch

    step.read_micro_batch = without_mask


def see_first_weights() -> None:
    """Under ZeRO 3 every evaluation computes with this rank's parts of the weights as of the first evaluation."""
    from parallel.zero.engine import Engine

    evaluate = Engine.evaluate

    def stale(self: Any, micro_batches: Any) -> Any:
        held = [weight.ds_tensor for weight in self.model.parameters()]
        whole = [weight for weight in self.model.parameters() if weight.numel() > 0]
        now = [tensor.detach().clone() for tensor in (*held, *whole)]
        first = self.__dict__.setdefault("first_weights", now)
        for tensor, old in zip((*held, *whole), first, strict=True):
            tensor.data.copy_(old)
        outputs = list(evaluate(self, micro_batches))
        for tensor, new in zip((*held, *whole), now, strict=True):
            tensor.data.copy_(new)
        return outputs

    Engine.evaluate = stale


def change_samples(change: Callable[[Any], Any]) -> None:
    import launcher.training.step as step

    read = step.read_micro_batch

    def changed(dataset: Any, indices: Any, *rest: Any, **options: Any) -> Any:
        return read(dataset, indices if torch.is_grad_enabled() else change(indices), *rest, **options)

    step.read_micro_batch = changed


def after_evaluation(change: Callable[[Any], None]) -> None:
    """Makes ``change`` be applied to the engine after every evaluation."""
    import launcher.prove.rank as rank_module

    evaluate = rank_module.heldout_loss

    @functools.wraps(evaluate)
    def changing(config: Any, engine: Any, *rest: Any) -> float:
        loss = evaluate(config, engine, *rest)
        change(engine)
        return loss

    rank_module.heldout_loss = changing
