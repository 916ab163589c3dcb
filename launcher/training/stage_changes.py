"""Stages of the data that a start changes: which they are, and whether what is trained on already would change."""

from dataclasses import replace
from typing import Any

from data.config import StageConfig
from data.stages import first_change, first_sample
from launcher.config.tree import RunConfig

STAGES = "data.stages"


def is_of_stages(key: str) -> bool:
    """Whether a changed key is of the stages."""
    return f"{key}.".startswith(f"{STAGES}.")


def stage_problem(old: RunConfig, new: RunConfig, consumed: int) -> str | None:
    """The line where the new stages deal a sample anew that is consumed already; None where they deal none.

    ``consumed``: where the run that goes on has its next sample. None, too, where seq_len or the sources are others,
    which are refused by themselves: in other sequences, or by the sources' own weights, all would be dealt anew.
    """
    if (old.data.seq_len, old.data.sources) != (new.data.seq_len, new.data.sources):
        return None
    changed, seq_len = first_change(old.data, new.data), new.data.seq_len
    if changed is None or changed >= consumed:
        return None
    stages = new.data.stages
    number = max((n for n, stage in enumerate(stages) if first_sample(stage, seq_len) <= changed), default=None)
    which = f"{STAGES}[{number}].from_tokens={stages[number].from_tokens}" if number is not None else STAGES
    rule = f"would change the data from token {changed * seq_len} on, and the run has consumed {consumed * seq_len}"
    remedy = f"set back what lies before that, and let a new or changed stage begin at {consumed * seq_len} or later"
    return f"{which} {rule}; {remedy}"


def told_of_stages(config: RunConfig, before: tuple[StageConfig, ...], consumed: int) -> dict[str, Any]:
    """What the event of changed stages says besides: from which token on the data is another, and what is consumed.

    ``before`` are the stages of the run's start before this one. ``from_tokens`` is null where no token is dealt anew.
    """
    changed, seq_len = first_change(replace(config.data, stages=before), config.data), config.data.seq_len
    from_tokens = changed * seq_len if changed is not None else None
    return {"from_tokens": from_tokens, "consumed_tokens": consumed * seq_len}
