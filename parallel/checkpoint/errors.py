"""Exceptions of saving and of checkpoint stores, in a module of their own so that importing them needs no torch."""


class IncompleteSave(Exception):
    """A save was not committed, because the coverage certificate failed or a rank could not write."""


class BrokenSave(Exception):
    """Saving cannot go on: a rank is gone, a process is stale, or Roundtable's code failed. All live ranks raise it."""


class UnreachableStore(OSError):
    """A checkpoint store did not carry out an operation. The message is one line: which object or rank, and why."""
