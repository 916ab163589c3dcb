"""A proof computes on both sides of every size: counted in its ranks (tests/support/prove_sizes.py says what)."""

import functools

import pytest

from prove_runs import failures, prove
from prove_sizes import read_record, recorded

RUNS = [
    # overrides, and for each size what is seen below it at most, and above it at least
    (
        ("parallel.cp=2", "parallel.cp_attention=ring"),
        {"ring_tile": (4, 17), "ring_pieces_every": (0, 1), "chunk_logits": (1, 5), "bucket": (1, 5)},
    ),
    (
        ("parallel.tp=2",),
        {"chunk_logits_under_tp": (1, 5), "row_multiple": (1, 2), "staging_bytes": (None, 2), "query_block": (1, 2)},
    ),
    (
        ("parallel.zero=3",),
        {"persistent": (0, 10), "updated": (0, 3), "reused": (0, 4), "prefetched": (0, 4), "live": (0, 4)},
    ),
    (("train.precision=bf16",), {"bucket": (1, 2)}),
    (("parallel.grad_reduce=micro_batch",), {"reduced": (6, 20)}),
]


SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in RUNS[1:]]


@pytest.mark.parametrize(("overrides", "expected"), [RUNS[0], *SLOW], ids=lambda value: " ".join(value))
def test_a_proof_computes_on_both_sides_of_every_size(tmp_path, overrides, expected):
    record = tmp_path / "record"
    outcome = prove(tmp_path, overrides, on_both_sides=(functools.partial(recorded, record),))
    assert outcome.proven, failures(outcome)
    seen = read_record(record)
    for size, (below, above) in expected.items():
        assert below is None or min(seen[size]) <= below, (size, seen[size])
        assert max(seen[size]) >= above, (size, seen[size])
