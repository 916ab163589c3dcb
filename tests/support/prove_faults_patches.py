"""Helpers that plant faults: they change engines, gradients, norms, batches and loads in a rank's own process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from faults import patch_batches


def divided_by_own_count(dp: int) -> Callable[..., Any]:
    import launcher.training.step as step

    original = step.accumulate_gradients

    def accumulate(engine: Any, dataset: Any, indices: Any, micro_batch_size: int, *rest: Any) -> Any:
        mine = step.share_of_batch(indices, micro_batch_size, engine.mesh).reshape(-1)
        n_targets, n_tokens = dataset.count(mine)
        dataset.count = lambda _: (n_targets * dp, n_tokens * dp)
        try:
            return original(engine, dataset, indices, micro_batch_size, *rest)
        finally:
            del dataset.count

    return accumulate


def count_one_target_too_many_in_16_bits() -> None:
    """In less than fp32 the reported loss of a step is divided by one target too many; gradients are right."""
    import launcher.training.loop as loop

    row_of = loop.metrics_row

    def row(config: Any, engine: Any, state: Any, totals: Any, update: Any, n_targets: int, *rest: Any) -> Any:
        return row_of(config, engine, state, totals, update, n_targets + (config.train.precision != "fp32"), *rest)

    loop.metrics_row = row


def patch_contexts(change: Callable[[Any], None]) -> None:
    patch_batches(lambda batch: change(batch.context))


def patch_backward(change: Callable[[Any, Any], Any]) -> None:
    from parallel.zero.engine import Engine

    original = Engine.backward
    Engine.backward = lambda self, loss, *rest, **last: original(self, change(self, loss), *rest, **last)


def change_engines(change: Callable[[Any], object]) -> None:
    """Makes ``change`` be applied to every engine after it is built."""
    import launcher.prove.rank as rank_module

    build = rank_module.build_engine

    def changed(*arguments: Any) -> Any:
        engine = build(*arguments)
        change(engine)
        return engine

    rank_module.build_engine = changed


def hook_gradients(names: str, factor: float) -> None:
    """Multiplies the gradients of all weights whose names contain ``names`` by ``factor``."""

    def hook(engine: Any) -> None:
        for name, weight in engine.model.named_parameters():
            if names in name:
                weight.register_hook(lambda gradient: gradient * factor)

    change_engines(hook)


def scale_own_copies(engine: Any, factor: float) -> None:
    """This rank scales the norms' gradients after their sum over tp, so that its copies of norms drift apart."""
    add_over_tp = engine.add_over_tp

    def add_and_scale() -> None:
        add_over_tp()
        for parameter, part, _ in engine.gradients():
            if engine.weights[parameter].weight.dims == ("d_model",):
                part.mul_(factor)

    engine.add_over_tp = add_and_scale


def leave_gradients_alone(engine: Any, dims: tuple[str, ...]) -> None:
    """Gradients of the weights with these dims are not summed over tp."""
    for parameter, weight in engine.weights.items():
        if weight.weight.dims == dims:
            engine.weights[parameter] = replace(weight, place=replace(weight.place, axis="tp"))


def own_every_weight(engine: Any) -> None:
    engine.weights = {weight: replace(layout, is_owner=True) for weight, layout in engine.weights.items()}


def keep_sequence_sums(engine: Any) -> None:
    for module in engine.model.modules():
        if hasattr(module, "add_sequence_sums"):
            module.add_sequence_sums = lambda sums_BX: sums_BX


def divide_entropy_by_own_tokens() -> None:
    """Each rank divides a router's entropy by its own tokens before the ranks sum it."""
    from modeling.moe import MoE

    add = MoE.add_auxiliary_losses

    def own(self: Any, *arguments: Any) -> Any:
        weights_TK, stats = add(self, *arguments)
        stats.entropy = stats.entropy / len(stats.choice_TK)
        return weights_TK, stats

    MoE.add_auxiliary_losses = own


def weigh_auxiliary(coefficient: str, factor: float) -> None:
    from modeling.moe import MoE

    original = MoE.add_auxiliary_losses

    def weighed(self: Any, *arguments: Any) -> Any:
        true = getattr(self, coefficient)
        setattr(self, coefficient, true * factor)
        try:
            return original(self, *arguments)
        finally:
            setattr(self, coefficient, true)

    MoE.add_auxiliary_losses = weighed


def patch_norm(change: Callable[[list[Any]], list[Any]]) -> None:
    import parallel.zero.engine as engine_module

    original = engine_module.global_norm
    engine_module.global_norm = lambda parts, *rest: original(change(list(parts)), *rest)


def patch_deal(change: Callable[..., Any]) -> None:
    import launcher.training.step as step

    deal = step.share_of_batch
    step.share_of_batch = lambda indices, size, mesh: change(deal, indices, size, mesh)


def plant_local_counts() -> None:
    import launcher.training.loop as loop
    import launcher.training.step as step

    local: dict[int, torch.Tensor] = {}
    over_ranks, move = step.Sums.over_ranks, loop.move_router_biases

    def remembering(self: Any, *rest: Any) -> Any:
        local.update({layer: row[3:].to(torch.int64) for layer, row in self.layers.items()})
        return over_ranks(self, *rest)

    step.Sums.over_ranks = remembering
    loop.move_router_biases = lambda model, config, counts: move(model, config, local)


def overlook_overflows() -> None:
    from parallel.zero.engine import Engine

    original = Engine.step

    def overlooking(self: Any, lr: float) -> Any:
        result = original(self, lr)
        if result.skipped:
            self.sharding.loss_scale.scaler.cur_scale *= 2
        return replace(result, skipped=False)

    Engine.step = overlooking


def targets_of(wanted: Any, is_meant: Callable[[Any], bool]) -> list[Any]:
    """The targets in ``Checkpoint.wanted``'s result that are filled from pieces for which ``is_meant``, each once."""
    return list({id(each): each for pairs in wanted.values() for piece, each in pairs if is_meant(piece)}.values())


def patch_load(change: Callable[[Any], None]) -> None:
    """Makes ``change`` be applied to the engine just before a checkpoint is loaded into it."""
    import launcher.prove.rank as rank_module

    load = rank_module.load_state

    def changed(engine: Any, checkpoint: Any) -> None:
        change(engine)
        load(engine, checkpoint)

    rank_module.load_state = changed


def reset_without_step(engine: Any) -> None:
    reset = engine.reset_states
    engine.reset_states = lambda step, kept=(): reset(0, kept)
