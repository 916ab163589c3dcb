"""Faults that tests plant in a rank's own process, to see that the checks fail."""

from typing import Any

import torch


def plant(fault: str | None) -> None:
    """Breaks the code of this process in the named way; None breaks nothing."""
    match fault:
        case None:
            return
        case "gradients not reduced":
            import torch.distributed as dist

            dist.all_reduce = skip_for_large(dist.all_reduce)
            import deepspeed.comm as comm

            comm.all_reduce = skip_for_large(comm.all_reduce)
        case "gradients not copied":
            from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

            def refuse(*_: Any, **__: Any) -> None:
                raise RuntimeError("a gradient is copied into a bucket")

            DeepSpeedZeroOptimizer.reduce_ready_partitions_and_remove_grads = refuse
        case "host gradients lack a weight":
            patch_host_gradients(lambda held: held[:-1])
        case "host gradients are of a copy":
            patch_host_gradients(lambda held: [(weight, part.clone(), holders) for weight, part, holders in held])
        case "loss divided by the local count":
            import launcher.training.step as step

            original = step.accumulate_gradients

            def local_mean(engine: Any, dataset: Any, indices: Any, micro_batch_size: int, *rest: Any) -> Any:
                mine = step.share_of_batch(indices, micro_batch_size, engine.mesh).reshape(-1)
                n_targets, n_tokens = dataset.count(mine)
                dataset.count = lambda _: (n_targets * engine.mesh.dp.degree, n_tokens * engine.mesh.dp.degree)
                try:
                    return original(engine, dataset, indices, micro_batch_size, *rest)
                finally:
                    del dataset.count

            patch_loop("accumulate_gradients", local_mean)
        case "loss not scaled by dp":
            from parallel.zero.engine import Engine

            original_backward = Engine.backward
            Engine.backward = lambda self, loss, *rest, **last: original_backward(
                self, loss / self.mesh.dp.degree, *rest, **last
            )
        case "labels shifted":
            patch_batches(lambda batch: setattr(batch, "targets_BS", batch.targets_BS.roll(1, dims=1)))
        case "mask off":
            patch_batches(
                lambda batch: setattr(batch.context, "documents_BS", torch.zeros_like(batch.context.documents_BS))
            )
        case "positions doubled":  # (a position that merely fails to restart changes nothing: RoPE is relative)
            patch_batches(lambda batch: batch.context.positions_BS.mul_(2))
        case "last micro-batch dropped":
            import launcher.training.step as step

            deal = step.share_of_batch
            step.share_of_batch = lambda indices, size, mesh: deal(indices, size, mesh)[:-1]
        case "balance loss times dp":
            import parallel.batch as parallel_batch
            from modeling.context import Context

            def scaled(positions: Any, documents: Any, balance_scale: float, *rest: Any, **more: Any) -> Context:
                return Context(positions, documents, balance_scale * 2, *rest, **more)

            parallel_batch.Context = scaled
        case "weights drawn by rank":
            import os

            import parallel.zero.engine as engine

            draw = engine.initial_box
            engine.initial_box = lambda config, seed, *rest: draw(config, seed + int(os.environ["RANK"]), *rest)
        case "router bias from local counts":
            import launcher.training.loop as loop

            original_move = loop.move_router_biases

            def local(model: Any, config: Any, counts: dict[int, torch.Tensor]) -> None:
                original_move(model, config, {layer: count.flip(0) for layer, count in counts.items()})

            loop.move_router_biases = local
        case "dropout's masks counted from the start of the process":
            import launcher.training.step as step

            passes, seen = step.accumulate_gradients, []

            def counted_anew(*arguments: Any) -> Any:
                *before, (seed, number) = arguments
                seen.append(number)
                return passes(*before, (seed, len(seen)))

            patch_loop("accumulate_gradients", counted_anew)
        case "second moment forgotten at load":
            after_load(lambda engine: [engine.pieces(part)["exp_avg_sq"].zero_() for part in engine.fragments])
        case "optimizer step count not restored":
            from parallel.zero.engine import Engine

            original_reset = Engine.reset_states
            Engine.reset_states = lambda self, step, kept=(): original_reset(self, 0, kept)
        case "stale low-precision weights after load":
            from parallel.zero.engine import Engine

            Engine.publish_weights = lambda self: None
        case "data position not restored":
            import launcher.training.loop as loop

            original_restore = loop.restore

            def restore(*arguments: Any) -> Any:
                state, warnings = original_restore(*arguments)
                state.consumed = 0
                return state, warnings

            loop.restore = restore
        case _:
            raise AssertionError(f"no fault named {fault!r}")


def train_with_fault(fault: str | None, config: Any, changed: list[Any]) -> None:
    """One rank of the real training loop, broken in the named way."""
    from launcher.training.loop import train

    plant(fault)
    train(config, changed)


def after_load(change: Any) -> None:
    """Makes ``change`` be applied to the engine after each checkpoint that is loaded into it."""
    import launcher.training.state as state

    original = state.load_state

    def changed(engine: Any, checkpoint: Any) -> None:
        original(engine, checkpoint)
        change(engine)

    state.load_state = changed


def patch_loop(name: str, function: Any) -> None:
    """Replaces a function of launcher.training.step, there and in launcher.training.loop, which calls it."""
    import launcher.training.loop as loop
    import launcher.training.step as step

    setattr(step, name, function)
    setattr(loop, name, function)


def patch_batches(change: Any) -> None:
    """Makes ``change`` be applied to every micro-batch that is read."""
    import launcher.training.step as step

    original = step.read_micro_batch

    def changed(*arguments: Any, **options: Any) -> Any:
        batch = original(*arguments, **options)
        change(batch)
        return batch

    step.read_micro_batch = changed


def patch_host_gradients(change: Any) -> None:
    """Makes ``change`` be applied to the list of gradients that ZeRO 2 with optimizer offload holds on the host."""
    from parallel.zero.zero2_on_host import Zero2OnHost

    original = Zero2OnHost.gradients
    Zero2OnHost.gradients = lambda self: change(original(self))  # type: ignore[method-assign]


def skip_for_large(all_reduce: Any) -> Any:
    """An all-reduce that leaves tensors of more than 500 elements alone: gradients, but no norms or counts."""

    def maybe(tensor: torch.Tensor, *arguments: Any, **rest: Any) -> Any:
        return all_reduce(tensor[:0].clone() if tensor.numel() > 500 else tensor, *arguments, **rest)

    return maybe
