"""Dropout's masks: SplitMix64's own numbers, spread evenly, independent of their neighbours, the same however cut.

The tests of chance draw from fixed seeds, so they come out alike each time: bounds are what chance exceeds once in a
million tries.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.decoder import Decoder
from modeling.dropout import (
    ATTENTION,
    EMBEDDING,
    FEED_FORWARD,
    SCORES,
    WORD,
    Draws,
    Dropout,
    ScoreDropout,
    dropped,
    output_of,
    outputs,
    signed,
)
from modeling.loss import IGNORE
from parallel.recompute import apply_recompute
from small_models import LENGTHS, build, example_config, next_tokens, packed_rows

# Of the reference implementation, seed 1234567 (https://prng.di.unimi.it/splitmix64.c).
SPLITMIX64 = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
ONE_IN_A_MILLION = 23.9  # chi-square of one degree of freedom
DRAWS = Draws(seed=7, step=3, samples_B=torch.arange(40, 44), places_S=torch.arange(64))
N_CHANNELS = 256


def mask_of(draws: Draws, layer: int = 2, site: int = ATTENTION, probability: float = 0.3) -> Tensor:
    """Which channels are dropped, bool (B, S, D)."""
    ones_BSD = torch.ones(len(draws.samples_B), len(draws.places_S), N_CHANNELS)
    return Dropout(probability, layer, site)(ones_BSD, draws) == 0


def chi_square(first: Tensor, second: Tensor) -> float:
    """Of the four cases of two masks, against their independence: one degree of freedom."""
    first, second = first.flatten(), second.flatten()
    total, found = first.numel(), 0.0
    for one in (first, ~first):
        for other in (second, ~second):
            wanted = float(one.sum()) * float(other.sum()) / total
            found += (float((one & other).sum()) - wanted) ** 2 / wanted
    return found


def test_outputs_are_splitmix64s() -> None:
    """In both forms; Python's integers do not overflow, int64's wrap around."""
    assert [output_of(1234567, number) for number in range(5)] == SPLITMIX64
    seeds = [0, 1, 2**63 - 1, 2**63, WORD - 1, *SPLITMIX64]
    numbers = torch.tensor([0, 1, 77, 2**40, 2**63 - 2])
    found = outputs(torch.tensor([signed(seed) for seed in seeds])[:, None], numbers)
    assert [[each % WORD for each in row] for row in found.tolist()] == [
        [output_of(seed, number) for number in numbers.tolist()] for seed in seeds
    ]


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.3, 0.5, 0.9])
def test_so_many_are_dropped_and_the_mean_stays(probability: float) -> None:
    seeds = torch.arange(1000)
    mask = dropped(seeds, 0, 1000, probability)
    deviation = (probability * (1 - probability) / mask.numel()) ** 0.5
    assert abs(float(mask.double().mean()) - probability) < 5 * deviation
    for part in (mask[:, lane::4] for lane in range(4)):  # each lane of an output
        assert abs(float(part.double().mean()) - probability) < 2 * 5 * deviation
    kept = Dropout(probability, 0, EMBEDDING)(torch.ones(4, 64, 999), DRAWS)
    assert abs(float(kept.mean()) - 1) < 6 * (probability / (1 - probability) / kept.numel()) ** 0.5


def test_bits_are_even() -> None:
    """Each of the 256 values of each byte of an output: chi-square of 255 degrees of freedom."""
    bytes_N8 = outputs(torch.tensor(5), torch.arange(100_000)).view(torch.uint8).view(-1, 8)
    for column in bytes_N8.T:
        counts = torch.bincount(column.int(), minlength=256).double()
        wanted = len(bytes_N8) / 256
        assert 150 < float(((counts - wanted) ** 2 / wanted).sum()) < 372


NEIGHBOURS = {
    "channel": lambda mask: (mask[..., 1:], mask[..., :-1]),
    "channel of the next output": lambda mask: (mask[..., 4:], mask[..., :-4]),
    "position": lambda mask: (mask[:, 1:], mask[:, :-1]),
    "sample": lambda mask: (mask[1:], mask[:-1]),
    "step": lambda mask: (mask, mask_of(replace(DRAWS, step=4))),
    "seed": lambda mask: (mask, mask_of(replace(DRAWS, seed=8))),
    "layer": lambda mask: (mask, mask_of(DRAWS, layer=3)),
    "place in the layer": lambda mask: (mask, mask_of(DRAWS, site=FEED_FORWARD)),
    "step and layer exchanged": lambda mask: (mask, mask_of(replace(DRAWS, step=2), layer=3)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name: str) -> None:
    first, second = NEIGHBOURS[name](mask_of(DRAWS))
    assert chi_square(first, second) < ONE_IN_A_MILLION


def test_planted_dependence_is_seen() -> None:
    """Masks that agree in one of twenty channels more than by chance."""
    mask, other = mask_of(DRAWS), mask_of(DRAWS, layer=3)
    other[..., ::20] = mask[..., ::20]
    assert chi_square(mask, other) > ONE_IN_A_MILLION


@pytest.mark.parametrize("neighbour", ["head", "query", "key"])
def test_neighbouring_weights_are_independent(neighbour: str) -> None:
    dropout = ScoreDropout(0.3, DRAWS.of_samples(0, SCORES), range(4))
    mask_BHQK = dropout.factors(torch.arange(64), 0, 64) == 0
    dim = ("head", "query", "key").index(neighbour) + 1
    length = mask_BHQK.shape[dim] - 1
    assert chi_square(mask_BHQK.narrow(dim, 0, length), mask_BHQK.narrow(dim, 1, length)) < ONE_IN_A_MILLION


def test_a_mask_in_pieces_is_the_whole() -> None:
    """Samples, positions in any order, and channels."""
    whole = mask_of(DRAWS)
    samples, places = torch.tensor([2, 0]), torch.tensor([5, 60, 7, 8])
    piece = mask_of(replace(DRAWS, samples_B=DRAWS.samples_B[samples]).at(places))
    assert torch.equal(piece, whole[samples][:, places])
    for first, count in ((0, 1), (3, 2), (5, 9), (8, 4), (1, 255)):
        seeds = torch.arange(6).view(2, 3)
        assert torch.equal(dropped(seeds, first, count, 0.4), dropped(seeds, 0, 300, 0.4)[..., first : first + count])


def test_weights_in_pieces_are_the_whole() -> None:
    """Heads, queries and keys."""
    dropout = ScoreDropout(0.4, DRAWS.of_samples(1, SCORES), range(6))
    whole = dropout.factors(torch.arange(20), 0, 20)
    assert torch.equal(dropout.of_part(1, 3).factors(torch.tensor([9, 4]), 3, 7), whole[:, 2:4, [9, 4], 3:10])
    assert torch.equal(dropout.of_part(1, 3).of_part(1, 2).factors(torch.arange(20), 0, 20), whole[:, 3:4])


def test_gradients_pass_where_numbers_do() -> None:
    hidden_BSD = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out_BSD = Dropout(0.25, 1, EMBEDDING)(hidden_BSD, DRAWS)
    out_BSD.sum().backward()
    assert hidden_BSD.grad is not None
    assert hidden_BSD.grad.unique().tolist() == [0.0, float(torch.tensor(4 / 3))]
    assert torch.equal(hidden_BSD.grad * hidden_BSD, out_BSD)


DROPS = {"embedding_dropout": 0.1, "residual_dropout": 0.1, "attention_dropout": 0.1}


def loss_and_gradients(model: Decoder, draws: Draws | None) -> tuple[Tensor, list[Tensor]]:
    rows = packed_rows(61, 0, LENGTHS)
    targets_BS = next_tokens(rows)
    model.zero_grad()
    loss = model(rows.tokens_BS, replace(rows.context(), draws=draws), targets_BS).loss
    assert loss is not None
    (loss / (targets_BS != IGNORE).sum()).backward()
    return loss.detach(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


OF_ROWS = Draws(0, 1, torch.tensor([5, 6, 9]), torch.arange(20))


@pytest.mark.parametrize("key", DROPS)
def test_each_probability_counts_in_training_alone(key: str) -> None:
    """And each update has masks of its own, the same when it is repeated."""
    model, without = (build(example_config("qwen3_moe", **some), 0) for some in ({key: 0.1}, {}))
    plain, _ = loss_and_gradients(without, OF_ROWS)
    assert torch.equal(loss_and_gradients(model, None)[0], plain)
    losses = [float(loss_and_gradients(model, replace(OF_ROWS, step=step))[0]) for step in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1] and float(plain) not in losses


@pytest.mark.parametrize("recompute", ["selective", "feed_forward", "full"])
def test_recomputed_layers_drop_the_same(recompute: Any) -> None:
    """Gradients are bit for bit those without recomputation."""
    config = example_config("qwen3_moe", **DROPS)
    model = build(config, 0)
    loss, plain = loss_and_gradients(model, OF_ROWS)
    apply_recompute(model, recompute)
    again, recomputed = loss_and_gradients(model, OF_ROWS)
    assert torch.equal(loss, again) and all(map(torch.equal, recomputed, plain))


@pytest.mark.gpu
def test_masks_on_cuda_are_those_of_the_cpu() -> None:
    """Bit for bit: int64 operations wrap around on both."""
    on_cuda = replace(DRAWS, samples_B=DRAWS.samples_B.cuda(), places_S=DRAWS.places_S.cuda())
    for site in (EMBEDDING, ATTENTION):
        ones_BSD = torch.ones(4, 64, N_CHANNELS)
        ours = Dropout(0.3, 1, site)(ones_BSD.cuda(), on_cuda)
        assert torch.equal(ours.cpu(), Dropout(0.3, 1, site)(ones_BSD, DRAWS))
    weights = [
        ScoreDropout(0.3, draws.of_samples(0, SCORES), range(4)).factors(draws.places_S, 5, 30)
        for draws in (DRAWS, on_cuda)
    ]
    assert torch.equal(weights[0], weights[1].cpu())
