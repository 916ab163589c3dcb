"""Which settings a run that goes on may change, and what is said of the others."""

from pathlib import Path

import pytest

from data.config import DataConfig, SourceConfig, StageConfig
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_dir import check_same_run

STAGES = (StageConfig(from_tokens=1000, weights=(1.0,)),)


def config_with(weight: float = 1.0, **data: object) -> RunConfig:
    """A run on one source."""
    sources = (SourceConfig(path="a", weight=weight),)
    return RunConfig(data=DataConfig(**{"sources": sources, "seq_len": 32, "stages": STAGES, **data}))


@pytest.mark.parametrize(
    "free", [{"read_ahead": 0}, {"workers": 3}, {"token_dir": "x"}, {"cache_dir": "x"}, {"cache_gib": 1.0}]
)
def test_what_changes_no_sample_may_change(free: dict[str, object]) -> None:
    check_same_run(config_with(), Path("x"), config_with(**free), consumed=96)


@pytest.mark.parametrize("other", [{"seq_len": 64}, {"weight": 2.0, "stages": ()}])
def test_stages_are_not_blamed_for_another_key(other: dict[str, object]) -> None:
    """They were, with a number of consumed tokens that was counted in the new sequences."""
    old = config_with(stages=other.get("stages", STAGES))
    with pytest.raises(UserError) as caught:
        check_same_run(old, Path("x"), config_with(**other), consumed=96)
    (line,) = caught.value.problems
    assert " must stay " in line and "stages" not in line


def test_a_key_that_a_source_had_no_use_for_may_be_left_out(tmp_path: Path) -> None:
    """It is refused since; where it had to stay, too, the two remedies led in a circle."""
    (tmp_path / "a.txt").write_text("text")

    def config_of(**fields: str) -> RunConfig:
        return config_with(sources=(SourceConfig(path=str(tmp_path / "a.txt"), **fields),))  # type: ignore[arg-type]

    check_same_run(config_of(subset="en"), tmp_path, config_of(), 96)
    with pytest.raises(UserError, match=r"text_key=\w+ must stay body"):
        check_same_run(config_of(text_key="body", subset="en"), tmp_path, config_of(), 96)
