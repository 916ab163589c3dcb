"""Ranks of `roundtable blame` in which something is broken on purpose."""

import pytest

from launcher.blame.aim import AimedDataset, Part
from launcher.commands.blame import blame_here
from launcher.replay.plan import Plan
from parallel.zero.engine import Engine


def see_another_document(plan: Plan) -> object:
    """A fault: each pass counts the targets of a whole sample in addition to those of its document."""
    init, whole = AimedDataset.__init__, Part(0, 0, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AimedDataset, "__init__", lambda self, dataset, parts: init(self, dataset, [*parts, whole]))
        return blame_here(plan)


def keep_gradients(plan: Plan) -> object:
    """A fault: the gradients of a pass are applied to the weights, where they should be discarded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "discard", lambda self: self.step(1e-3))
        return blame_here(plan)
