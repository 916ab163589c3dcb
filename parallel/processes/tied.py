"""Imported by the fork server before anything else: it ends with its launcher, also while it imports the rest.

Python's own fork server ends when the last process that holds its pipe does, and its ranks hold it too.
"""

import os

from parallel.processes.lifeline import LAUNCHER, end_with_parent

end_with_parent(int(os.environ[LAUNCHER]))
