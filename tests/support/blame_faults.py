"""Ranks of `roundtable blame` in which something is broken on purpose."""

import pytest

from launcher.blame.aim import AimedDataset, Part
from launcher.commands.blame import blame_here
from launcher.replay.plan import Plan
from parallel.zero.engine import Engine


def see_another_document(plan: Plan) -> object:
    """Each pass counts the targets of a whole sample besides its document's."""
    init, whole = AimedDataset.__init__, Part(0, 0, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AimedDataset, "__init__", lambda self, dataset, parts: init(self, dataset, [*parts, whole]))
        return blame_here(plan)


def keep_gradients(plan: Plan) -> object:
    """What a pass leaves is applied, where it should be dropped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "discard", lambda self: self.step(1e-3))
        return blame_here(plan)
