"""What can go wrong with a checkpoint. Kept apart from the code that does it, so that naming it imports no torch."""


class IncompleteSave(Exception):
    """The coverage certificate failed, or a rank could not write: nothing was committed."""


class BrokenSave(Exception):
    """Saving cannot go on: a rank is gone, a process is stale, or our code failed. Raised on all ranks that live."""


class UnreachableStore(OSError):
    """A checkpoint's place did not do what it was asked; the message is a line: which object or rank, and why."""
