"""Dropout (Srivastava et al. 2014, JMLR 15) whose masks follow from where a number stands, not from earlier draws.

A draw is a function of the seed, the step, the layer, the place in the layer, the sample's number, the position in the
sample, and the channel (of attention: the head and the key). So each parallel layout, each micro-batch size, a resumed
run and recomputed layers drop the same numbers: whoever holds some of them draws the masks of these alone.

That is a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC'11). Its mixing
is SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA, section 5), of which
any output can be had without those before it. Output number n of a seed is the seed of the next level: of the run's
seed, the step's; of that, the layer's, and so on. The last level's outputs of 64 bits decide over LANES numbers each.

Shape letters: B batch, S sequence, D d_model, Q queries, K keys, H heads.
"""

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from modeling.transfer import to_device

GOLDEN = 0x9E3779B97F4A7C15  # the distance of one output's input from the next one's
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
WORD = 1 << 64  # integers are taken modulo it: int64 tensors wrap around, on CPUs and on CUDA
LANES = 4  # numbers that one output decides over, by 16 bits each
LEVELS = 1 << 16  # probabilities are whole parts of it
# Where in a layer; the embedding's layer is 0.
EMBEDDING, SCORES, ATTENTION, FEED_FORWARD = range(4)


@dataclass(frozen=True)
class Draws:
    """What a micro-batch's masks are drawn from, and where its numbers stand.

    ``step`` is the update's number, from 1. ``samples_B`` are the samples' numbers in the order of the run's data,
    ``places_S`` the positions in the sample (not in the document) that are held: int64, on the device.
    """

    seed: int
    step: int
    samples_B: Tensor
    places_S: Tensor

    def at(self, places_S: Tensor) -> "Draws":
        """The draws of the same samples at the positions ``places_S``."""
        return replace(self, places_S=places_S)

    def to(self, device: torch.device) -> "Draws":
        """The same draws, their tensors on the device."""
        samples_B, places_S = (to_device(each, device) for each in (self.samples_B, self.places_S))
        return replace(self, samples_B=samples_B, places_S=places_S)

    def of_samples(self, layer: int, site: int) -> Tensor:
        """A seed for each sample at one place of the layer, int64 (B,)."""
        seed = reduce(output_of, (self.step, layer, site), self.seed)
        return outputs(torch.full_like(self.samples_B, signed(seed)), self.samples_B)


@dataclass(frozen=True)
class Dropout:
    """Sets each number to zero with ``probability``, and scales the others so that the mean stays."""

    probability: float
    layer: int
    site: int

    def __call__(self, hidden_BSD: Tensor, draws: Draws | None) -> Tensor:
        """hidden_BSD with some numbers dropped; as it is where there are no ``draws``: outside training."""
        if self.probability == 0 or draws is None:
            return hidden_BSD
        seeds_BS = outputs(draws.of_samples(self.layer, self.site)[:, None], draws.places_S)
        dropped_BSD = dropped(seeds_BS, 0, hidden_BSD.shape[-1], self.probability)
        return hidden_BSD.masked_fill(dropped_BSD, 0) * scale_of(self.probability)


@dataclass(frozen=True)
class ScoreDropout:
    """Dropout of the weights that attention gives to keys, for some ``heads`` of the model's.

    ``seeds_B``: a seed for each sample of the batch.
    """

    probability: float
    seeds_B: Tensor
    heads: range

    def of_part(self, rank: int, degree: int) -> "ScoreDropout":
        """Of part number ``rank`` of ``degree`` equal ones of the heads."""
        size = len(self.heads) // degree
        return replace(self, heads=self.heads[rank * size : (rank + 1) * size])

    def factors(self, places_Q: Tensor, first_key: int, n_keys: int) -> Tensor:
        """By what the weights are multiplied, fp32 (B, H, Q, K): zero, or what keeps the mean.

        ``places_Q`` are the queries' positions in their samples; the keys' are ``n_keys`` from ``first_key`` on.
        """
        heads_H = torch.arange(self.heads.start, self.heads.stop, device=self.seeds_B.device)
        seeds_BHQ = outputs(outputs(self.seeds_B[:, None], heads_H)[..., None], places_Q)
        dropped_BHQK = dropped(seeds_BHQ, first_key, n_keys, self.probability)
        factors_BHQK = torch.full(dropped_BHQK.shape, scale_of(self.probability), device=dropped_BHQK.device)
        return factors_BHQK.masked_fill_(dropped_BHQK, 0)


def scale_of(probability: float) -> float:
    """What the numbers that stay are multiplied by."""
    return LEVELS / (LEVELS - round(probability * LEVELS))


def dropped(seeds: Tensor, first: int, count: int, probability: float) -> Tensor:
    """Which of ``count`` numbers from number ``first`` on are dropped for each seed: bool (..., count).

    Of each output the lowest 16 bits decide over the first number: all machines that torch runs on store them so.
    """
    start, stop = first // LANES, -(-(first + count) // LANES)
    words = outputs(seeds[..., None], torch.arange(start, stop, device=seeds.device))
    lanes = words.view(torch.int16)[..., first - LANES * start :][..., :count]
    return lanes < round(probability * LEVELS) - LEVELS // 2


def outputs(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Output number ``numbers`` (from 0) of SplitMix64 with each of ``seeds``: int64, broadcast."""
    mixed = seeds + (numbers + 1) * signed(GOLDEN)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        mixed ^= (mixed >> shift).bitwise_and_((WORD >> shift) - 1)  # zeros come in from the left
        if multiplier is not None:
            mixed *= signed(multiplier)
    return mixed


def output_of(seed: int, number: int) -> int:
    """``outputs`` of one seed, in Python's integers: from 0 to 2**64 - 1."""
    mixed = (seed + (number + 1) * GOLDEN) % WORD
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        mixed = (mixed ^ mixed >> shift) * multiplier % WORD
    return mixed


def signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - WORD if word >= WORD // 2 else word
