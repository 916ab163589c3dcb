"""What can go wrong with a save. Kept apart from the code that saves, so that naming an error imports no torch."""


class IncompleteSave(Exception):
    """The coverage certificate failed, or a rank could not write: nothing was committed."""


class BrokenSave(Exception):
    """Saving cannot go on: a rank is gone, a process is stale, or our code failed. Raised on all ranks that live."""
