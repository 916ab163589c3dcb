"""The torch optimizer of the Muon rule.

torch.optim.Muon has the same update of one matrix, in bf16. Here it is computed in fp32, like the master weights,
unless ``iteration_dtype`` says otherwise: in bf16 a rounding error of the gradient, which differs between layouts, can
become one of 2^-9 of an element, and the iterations multiply an error in a small singular value by up to 3.4445^5 =
485.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, steepest at zero (Jordan 2024)
ITERATIONS = 5
LEAST_NORM = 1e-7
RMS = 0.2  # root mean square of an update's elements, as is usual in AdamW (arXiv:2502.16982, section 2.2)


class Muon(torch.optim.Optimizer):
    """Updates weights of groups with ``takes_whole`` by orthogonalized momentum, others by AdamW; with decoupled decay.

    Matrices are (..., rows, columns): each matrix of a stack is updated by itself. Where a rank holds a part of a
    matrix, or flat parts of many (ZeRO), the group's ``matrices`` gather whole ones.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        iteration_dtype: torch.dtype,
        fused: bool,
    ) -> None:
        self.function = partial(scaled_orthogonal, dtype=iteration_dtype)
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "fused": fused})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the weights from their gradients. A weight without one stays as it is. ``closure`` must be None."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = self.first_state(weight, group)
            if group["takes_whole"]:
                self.step_matrices(weights, group)
            elif weights:
                self.step_others(weights, group)

    def first_state(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """A weight's initial state: zeros of its shape for each state, and a count of updates.

        The count is on the device where torch's fused or unfused kernels look for it.
        """
        step = torch.zeros((), dtype=torch.float32, device=weight.device if group["fused"] else "cpu")
        return {"step": step, **{name: torch.zeros_like(weight) for name in group["states"]}}

    def step_matrices(self, weights: list[nn.Parameter], group: dict[str, Any]) -> None:
        """W <- W - lr (scaled_orthogonal(M) + decay W), M the momentum in Nesterov's form."""
        for weight in weights:
            state = self.state[weight]
            state["step"] += 1
            state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
            read, write = partial(self.direction, weight, group), partial(self.move, weight, group)
            group["matrices"].transform(weight, read, self.function, write)

    def direction(self, weight: nn.Parameter, group: dict[str, Any], start: int, length: int) -> Tensor:
        """The momentum in Nesterov's form, for ``length`` entries of the first dim from ``start`` on."""
        assert weight.grad is not None
        average = self.state[weight]["momentum_buffer"].narrow(0, start, length)
        return weight.grad.narrow(0, start, length).lerp(average, group["momentum"])

    def move(self, weight: nn.Parameter, group: dict[str, Any], start: int, update: Tensor) -> None:
        """Applies weight decay and ``update`` to the weight's entries of the first dim from ``start`` on."""
        part, lr = weight.narrow(0, start, len(update)), group["lr"]
        part.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)

    def step_others(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Updates weights other than hidden matrices by torch's AdamW."""
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            [weight.grad for weight in weights if weight.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def scaled_orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The orthogonal matrix nearest to each of (..., rows, columns), times RMS sqrt(max(rows, columns)), in fp32."""
    return orthogonal(matrices, dtype).mul_(RMS * math.sqrt(max(matrices.shape[-2:])))


def orthogonal(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """For each fp32 matrix U S V^T of (..., rows, columns) nearly U V^T, with singular values of about 0.7 to 1.2.

    By Newton-Schulz iterations (Jordan 2024), whose products are rounded to ``dtype``. A matrix of zeros stays zero.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    wide = matrices.mT if is_tall else matrices
    wide = (wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=LEAST_NORM)).to(dtype)
    multiply_add = torch.addmm if wide.dim() == 2 else torch.baddbmm
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        wide = multiply_add(wide, polynomial, wide, beta=a)
    return (wide.mT if is_tall else wide).to(matrices.dtype)
