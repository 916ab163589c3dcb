"""Changes to data.stages between two starts of a run, refused where they would change data already trained on."""

from dataclasses import replace
from typing import Any

from data.config import StageConfig
from data.stages import first_change, first_sample
from launcher.config.tree import RunConfig

STAGES = "data.stages"


def is_of_stages(key: str) -> bool:
    """Whether the dotted config key ``key`` is data.stages or lies below it."""
    return f"{key}.".startswith(f"{STAGES}.")


def stage_problem(old: RunConfig, new: RunConfig, consumed: int) -> str | None:
    """The refusal of new stages that would change a sample which the run has already consumed; None where none would.

    ``consumed`` is the number of the resumed run's next sample. Returns None, too, where data.seq_len or data.sources
    changed: that changes every sample, and another check refuses it.
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
    """Fields added to the config_change event of data.stages: ``from_tokens`` and ``consumed_tokens``.

    ``before`` are the stages of the run's previous start, and ``consumed`` the samples consumed so far.
    ``from_tokens`` is the first token of the training order that changes; null where none does.
    """
    changed, seq_len = first_change(replace(config.data, stages=before), config.data), config.data.seq_len
    from_tokens = changed * seq_len if changed is not None else None
    return {"from_tokens": from_tokens, "consumed_tokens": consumed * seq_len}
