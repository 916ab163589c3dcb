"""One training step in plain PyTorch on one process, with which every layout is compared.

It uses no engine, no collective and no code of `parallel`, and training uses nothing from here: they share only the
model's definition, its initial weights and the optimizers. Shape letters: B batch, S sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.context import PADDING, Context
from modeling.decoder import Decoder
from modeling.dims import stated_weights
from modeling.dropout import Draws
from modeling.dtypes import DTYPES
from modeling.init import materialize
from modeling.logical import whole_decoder
from modeling.loss import IGNORE
from modeling.metrics import metrics_of
from modeling.moe import RoutingStats
from modeling.moe_config import BiasBalance
from modeling.mtp import Ahead
from modeling.mup import widths_of
from modeling.optimizers.build import parameter_groups
from modeling.optimizers.config import OptimizerConfig
from modeling.precision import multiply_by, products_of
from modeling.precision_config import Precision, stored_as


@dataclass
class PlainBatch:
    """Some sequences of a batch, (B, S) each: int64 tokens, targets (-100: does not count), positions, documents.

    ``samples_B`` are their numbers, where the model has dropout.
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    samples_B: Tensor | None = None


@dataclass
class ReferenceStep:
    """The results of one step. Gradients are fp32, before clipping, by logical name."""

    loss: float  # token cross-entropy, mean over the targets that count
    balance_loss: dict[int, float]  # layer -> mean over sequences
    z_loss: dict[int, float]  # layer -> mean over tokens
    grad_norm: float
    gradients: dict[str, Tensor]
    counts: dict[int, Tensor]  # layer -> pairs sent to each expert
    skipped: bool  # nothing was updated: a gradient was not finite in fp16, or no target counts
    has_targets: bool = True
    head_z_loss: float = 0.0  # squared logsumexp of the head's logits, mean over the targets that count
    further_losses: dict[int, float] = field(default_factory=dict)  # depth -> mean over the targets that count there
    metrics: dict[str, float] = field(default_factory=dict)  # the layers' metrics, by their keys in metrics.jsonl

    def add_metrics(self, layer: int, stats: RoutingStats, n_tokens: int, n_sequences: int) -> None:
        """Adds a layer's routing metrics of one micro-batch, reduced and divided as each field's ``Metric`` states."""
        divisors = {None: 1, "tokens": n_tokens, "sequences": n_sequences}
        for name, metric in metrics_of(RoutingStats).items():
            key, value = metric.key.format(layer=layer), float(getattr(stats, name)) / divisors[metric.mean_over]
            if metric.reduce == "max":
                self.metrics[key] = max(self.metrics.get(key, -math.inf), value)
            else:
                self.metrics[key] = self.metrics.get(key, 0.0) + value


class ReferenceTrainer:
    """The model on one device, its fp32 masters, and a torch optimizer over them."""

    def __init__(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        precision: Precision = "fp32",
        loss_scale: float = 1.0,
    ) -> None:
        self.config = config
        self.seed = seed
        self.model: Decoder = whole_decoder(config)
        materialize(self.model, config, seed, "cpu", torch.float32)
        self.masters = {name: nn.Parameter(weight.detach().clone()) for name, weight in self.model.named_parameters()}
        self.model.to(DTYPES[stored_as(precision)])
        multiply_by(self.model, products_of(precision))
        restore_fp32_buffers(self.model)
        stated = stated_weights(self.model)
        rows = [(master, stated[name], tuple(master.shape)) for name, master in self.masters.items()]
        groups = parameter_groups(rows, optimizer, widths_of(config))
        self.rule = optimizer
        self.optimizer = optimizer.build(groups, fused=False)
        self.clip_norm = optimizer.clip_norm
        self.loss_scale = loss_scale

    def step(
        self,
        batch: Sequence[PlainBatch],
        lr: float,
        choices: list[dict[int, Tensor]] | None = None,
        number: int | None = None,
    ) -> ReferenceStep:
        """One update from the whole global batch, given as micro-batches.

        ``choices`` are choices of experts that the routers have to make: for each micro-batch, layer -> indices_TK.
        ``number`` is the update's, counted from 1; only dropout needs it.
        """
        n_targets = sum(int((part.targets_BS != IGNORE).sum()) for part in batch)
        n_tokens = max(1, sum(int((part.documents_BS != PADDING).sum()) for part in batch))
        n_sequences = sum(part.tokens_BS.shape[0] for part in batch)
        result = ReferenceStep(0.0, {}, {}, 0.0, {}, {}, skipped=False, has_targets=n_targets > 0)
        n_targets = max(1, n_targets)  # where none counts the loss is 0
        n_further = count_further(self.config, batch)
        for index, part in enumerate(batch):
            context = Context(
                part.positions_BS,
                part.documents_BS,
                balance_scale=self.loss_scale / n_sequences,
                z_scale=self.loss_scale / n_tokens,
                has_padding=bool((part.documents_BS == PADDING).any()),
                choices={} if choices is None else dict(choices[index]),
                draws=self.draws(part, number),
            )
            ahead = [tokens_ahead(part, k, self.further_weight / n_further[k]) for k in n_further]
            output = self.model(part.tokens_BS, context, part.targets_BS, ahead=ahead)
            (output.loss * (self.loss_scale / n_targets)).backward()
            self.accumulate(result)
            result.loss += float(output.loss.detach()) / n_targets
            result.head_z_loss += float(output.z_loss) / n_targets
            for k, loss in enumerate(output.further_losses, 1):
                result.further_losses[k] = result.further_losses.get(k, 0.0) + float(loss) / n_further[k]
            for layer, stats in output.stats.items():
                result.balance_loss[layer] = (
                    result.balance_loss.get(layer, 0.0) + float(stats.balance_loss) / n_sequences
                )
                result.z_loss[layer] = result.z_loss.get(layer, 0.0) + float(stats.z_loss) / n_tokens
                result.counts[layer] = result.counts.get(layer, 0) + stats.counts_E
                result.add_metrics(layer, stats, n_tokens, n_sequences)
        self.update(result, lr)
        return result

    def draws(self, part: PlainBatch, number: int | None) -> Draws | None:
        """The source of this update's dropout masks; None where the model has no dropout."""
        if not self.config.has_dropout:
            return None
        assert part.samples_B is not None and number is not None
        return Draws(self.seed, number, part.samples_B, torch.arange(part.tokens_BS.shape[1]))

    @property
    def further_weight(self) -> float:
        """The weight of the mean loss of each depth of multi-token prediction, times the loss scale; 0 without any."""
        mtp = self.config.mtp
        return 0.0 if mtp is None else self.loss_scale * mtp.coefficient / mtp.depth

    @torch.no_grad()
    def accumulate(self, result: ReferenceStep) -> None:
        """Adds one micro-batch's gradients to ``result``, in fp32 without the loss scale, and clears the model's."""
        for name, weight in self.model.named_parameters():
            if weight.grad is not None:
                total = result.gradients.setdefault(name, torch.zeros_like(self.masters[name]))
                total += weight.grad.float() / self.loss_scale
                weight.grad = None

    @torch.no_grad()
    def update(self, result: ReferenceStep, lr: float) -> None:
        """Clips, steps the optimizer, copies the masters into the model, and moves the router biases.

        Nothing is done where no target counts or a gradient is not finite. Sets ``grad_norm`` and ``skipped``.
        """
        squares = [gradient.double().square().sum() for gradient in result.gradients.values()]
        result.grad_norm = float(torch.stack(squares).sum().sqrt())
        result.skipped = not (result.has_targets and torch.isfinite(torch.tensor(result.grad_norm)).item())
        if result.skipped:
            return
        clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (result.grad_norm + 1e-6))
        for name, master in self.masters.items():
            master.grad = result.gradients[name] * clip if name in result.gradients else None
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.optimizer.step()
        for name, weight in self.model.named_parameters():
            weight.copy_(self.masters[name])
        move_biases(self.model, self.config, result.counts)

    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by logical name."""
        return {name: self.optimizer.state[master] for name, master in self.masters.items()}


def count_further(config: ModelConfig, batch: Sequence[PlainBatch]) -> dict[int, int]:
    """The targets (at least 1) at each depth k of multi-token prediction, from 1: tokens k + 1 places ahead."""
    depths = () if config.mtp is None else range(1, config.mtp.depth + 1)
    return {k: max(1, sum(int((token_ahead(part, k + 1) != IGNORE).sum()) for part in batch)) for k in depths}


def tokens_ahead(part: PlainBatch, k: int, scale: float) -> Ahead:
    """The input of the multi-token prediction module of depth k: the tokens k places ahead, and the next as targets."""
    return Ahead(token_ahead(part, k).clamp(min=0), token_ahead(part, k + 1), scale)


def token_ahead(part: PlainBatch, k: int) -> Tensor:
    """The token k places ahead of each position (B, S), where the sample has one of the same document; else IGNORE.

    That token is the target of the position k - 1 places ahead, if that position is in the same document.
    """
    token_BS = torch.full_like(part.targets_BS, IGNORE)
    for place in range(part.targets_BS.shape[1] - k + 1):
        same_B = part.documents_BS[:, place] == part.documents_BS[:, place + k - 1]
        token_BS[same_B, place] = part.targets_BS[same_B, place + k - 1]
    return token_BS


def restore_fp32_buffers(model: nn.Module) -> None:
    """Makes every floating-point buffer fp32 again after the model was cast (router biases)."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.float())


@torch.no_grad()
def move_biases(model: Decoder, config: ModelConfig, counts: dict[int, Tensor]) -> None:
    """Moves router biases by the balancing rule of arXiv:2408.15664, algorithm 1, in code independent of training's.

    Each expert's bias moves by the rate: up where the whole batch sent it fewer tokens than the mean, down where more.
    """
    if config.moe is None or not isinstance(config.moe.balance, BiasBalance):
        return
    for name, bias_E in model.named_buffers():
        layer = int(name.split(".")[1])
        if layer in counts:
            pairs_E = [int(count) for count in counts[layer]]
            for expert, count in enumerate(pairs_E if len(pairs_E) == len(bias_E) else []):
                missing = sum(pairs_E) - count * len(pairs_E)
                bias_E[expert] += config.moe.balance.rate * ((missing > 0) - (missing < 0))
