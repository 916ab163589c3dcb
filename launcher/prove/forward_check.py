"""The check of the forward pass: where in the model its outputs begin to differ, and for which token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.prove.checks import GRADIENT_BOUND, Check
from launcher.prove.compare.errors import norm
from launcher.prove.plain import PlainRun
from launcher.prove.rank import OutputSeen, RankSeen


@dataclass(frozen=True)
class Miss:
    """How far one rank's outputs of one micro-batch are off, over the tokens that are not padding."""

    squares: float  # the tokens' squared errors, summed
    furthest: float  # the largest error of a token
    where: str  # that token's sample, position and rank


def check_outputs(phase: str, ranks: Sequence[RankSeen], plain: PlainRun) -> Check:
    """Compares each module's outputs in the first step, relative to the output's norm over the batch, without padding.

    Shows the first module in execution order that fails, else the worst, with the token that is furthest off.
    """
    assert plain.valid_NS is not None
    checks = []
    for module, truth_NSD in plain.outputs.items():
        misses = list(misses_of(module, phase, ranks, plain, truth_NSD))
        if not misses:
            return Check(phase, "modules' outputs", f"{module}: no rank has it", math.inf, GRADIENT_BOUND)
        error = math.sqrt(sum(miss.squares for miss in misses)) / norm(truth_NSD[plain.valid_NS])
        furthest = max(misses, key=lambda miss: miss.furthest)
        checks.append(Check(phase, "modules' outputs", f"{module}, {furthest.where}", error, GRADIENT_BOUND))
    failed = [check for check in checks if not check.passed]
    return failed[0] if failed else max(checks, key=lambda check: check.error)


def misses_of(module: str, phase: str, ranks: Sequence[RankSeen], plain: PlainRun, truth_NSD: Tensor) -> Iterator[Miss]:
    """One Miss for each micro-batch of each rank that holds the module, without samples that are not of the batch."""
    assert plain.valid_NS is not None
    rows = {sample: row for row, sample in enumerate(plain.choices[0].samples)}
    for rank in ranks:
        for seen in rank.phases[phase].steps[0].outputs:
            known = [number for number, sample in enumerate(seen.samples) if sample in rows]
            if seen.module == module and known:
                sequences = torch.tensor([rows[seen.samples[number]] for number in known])
                truth_BPD = truth_NSD[sequences][:, seen.positions]
                miss_BP = (seen.hidden_BPD[known].double() - truth_BPD.double()).norm(dim=-1)
                valid_BP = plain.valid_NS[sequences][:, seen.positions]
                yield summed(miss_BP.nan_to_num(math.inf, math.inf).masked_fill(~valid_BP, 0.0), seen, known, rank)


def summed(miss_BP: Tensor, seen: OutputSeen, known: list[int], rank: RankSeen) -> Miss:
    """The Miss of one micro-batch, from the error of each token (0 in padding)."""
    row, place = divmod(int(miss_BP.argmax()), miss_BP.shape[1])
    where = f"sample {seen.samples[known[row]]}, position {int(seen.positions[place])} on {rank.place}"
    return Miss(float(miss_BP.square().sum()), float(miss_BP.max()), where)
