"""Dropout (Srivastava et al. 2014, JMLR 15) with masks that depend on an element's place, not on earlier draws.

A draw is a function of the seed, the step, the layer, the place in the layer, the sample's number, the position in the
sample, and the channel (in attention: the head and the key). So each parallel layout, each micro-batch size, a resumed
run and recomputed layers drop the same elements: a rank that holds some of them draws the masks of these alone.

That is a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC'11). Its mixing
is SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA, section 5), which can
compute any of its outputs without those before it. Output number n of a seed is the seed of the next level: the run's
seed gives the step's, that gives the layer's, and so on. Each 64-bit output of the last level decides LANES elements.

Shape letters: B batch, S sequence, D d_model, Q queries, K keys, H heads.
"""

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from modeling.transfer import to_device

GOLDEN = 0x9E3779B97F4A7C15  # the step from one output's input to the next one's
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
WORD = 1 << 64  # integers are taken modulo it: int64 tensors wrap around, on CPUs and on CUDA
LANES = 4  # elements that one output decides, by 16 bits each
LEVELS = 1 << 16  # probabilities are rounded to multiples of 1 / LEVELS
# Places of dropout in a layer. EMBEDDING goes with layer 0.
EMBEDDING, SCORES, ATTENTION, FEED_FORWARD = range(4)


@dataclass(frozen=True)
class Draws:
    """What the dropout masks of a micro-batch are drawn from: the seed, the step, and where the elements stand.

    ``step`` is the update's number, from 1. ``samples_B`` are the samples' numbers in the order of the run's data,
    ``places_S`` the positions in the sample (not in the document) that this rank holds: int64, on the device.
    """

    seed: int
    step: int
    samples_B: Tensor
    places_S: Tensor

    def at(self, places_S: Tensor) -> "Draws":
        """The draws for the same samples at the positions ``places_S``."""
        return replace(self, places_S=places_S)

    def to(self, device: torch.device) -> "Draws":
        """The same draws with their tensors on the device."""
        samples_B, places_S = (to_device(each, device) for each in (self.samples_B, self.places_S))
        return replace(self, samples_B=samples_B, places_S=places_S)

    def of_samples(self, layer: int, site: int) -> Tensor:
        """One seed for each sample at one place of the layer, int64 (B,). ``site`` is EMBEDDING, SCORES, and so on."""
        seed = reduce(output_of, (self.step, layer, site), self.seed)
        return outputs(torch.full_like(self.samples_B, signed(seed)), self.samples_B)


@dataclass(frozen=True)
class Dropout:
    """Sets each element to zero with ``probability``, and scales the others so that the mean stays."""

    probability: float
    layer: int
    site: int

    def __call__(self, hidden_BSD: Tensor, draws: Draws | None) -> Tensor:
        """hidden_BSD with some elements dropped; unchanged where ``draws`` is None, which means outside training."""
        if self.probability == 0 or draws is None:
            return hidden_BSD
        seeds_BS = outputs(draws.of_samples(self.layer, self.site)[:, None], draws.places_S)
        dropped_BSD = dropped(seeds_BS, 0, hidden_BSD.shape[-1], self.probability)
        return hidden_BSD.masked_fill(dropped_BSD, 0) * scale_of(self.probability)


@dataclass(frozen=True)
class ScoreDropout:
    """Dropout of the weights that attention gives to keys, for the heads in ``heads``.

    ``seeds_B`` has a seed for each sample of the batch.
    """

    probability: float
    seeds_B: Tensor
    heads: range

    def of_part(self, rank: int, degree: int) -> "ScoreDropout":
        """The dropout of part number ``rank`` of ``degree`` equal parts of the heads."""
        size = len(self.heads) // degree
        return replace(self, heads=self.heads[rank * size : (rank + 1) * size])

    def factors(self, places_Q: Tensor, first_key: int, n_keys: int) -> Tensor:
        """The factors of attention's weights, fp32 (B, H, Q, K): zero, or the scale that keeps the mean.

        ``places_Q`` are the queries' positions in their samples. The keys' positions are ``n_keys`` from ``first_key``
        on.
        """
        heads_H = torch.arange(self.heads.start, self.heads.stop, device=self.seeds_B.device)
        seeds_BHQ = outputs(outputs(self.seeds_B[:, None], heads_H)[..., None], places_Q)
        dropped_BHQK = dropped(seeds_BHQ, first_key, n_keys, self.probability)
        factors_BHQK = torch.full(dropped_BHQK.shape, scale_of(self.probability), device=dropped_BHQK.device)
        return factors_BHQK.masked_fill_(dropped_BHQK, 0)


def scale_of(probability: float) -> float:
    """The factor of the elements that are not dropped."""
    return LEVELS / (LEVELS - round(probability * LEVELS))


def dropped(seeds: Tensor, first: int, count: int, probability: float) -> Tensor:
    """Which of ``count`` elements, from number ``first`` on, are dropped for each seed: bool (..., count).

    The lowest 16 bits of each output decide its first element: all machines that torch runs on are little-endian.
    """
    start, stop = first // LANES, -(-(first + count) // LANES)
    words = outputs(seeds[..., None], torch.arange(start, stop, device=seeds.device))
    lanes = words.view(torch.int16)[..., first - LANES * start :][..., :count]
    return lanes < round(probability * LEVELS) - LEVELS // 2


def outputs(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Output number ``numbers`` (from 0) of SplitMix64 for each of ``seeds``: int64, broadcast."""
    mixed = seeds + (numbers + 1) * signed(GOLDEN)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        mixed ^= (mixed >> shift).bitwise_and_((WORD >> shift) - 1)  # zeros come in from the left
        if multiplier is not None:
            mixed *= signed(multiplier)
    return mixed


def output_of(seed: int, number: int) -> int:
    """Output number ``number`` (from 0) of SplitMix64 for one seed, as a Python integer from 0 to 2**64 - 1."""
    mixed = (seed + (number + 1) * GOLDEN) % WORD
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        mixed = (mixed ^ mixed >> shift) * multiplier % WORD
    return mixed


def signed(word: int) -> int:
    """The int64 value that has the same bits as ``word``."""
    return word - WORD if word >= WORD // 2 else word
