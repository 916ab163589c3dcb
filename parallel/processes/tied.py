"""Imported by the fork server before anything else: it ends with its launcher, also while it imports the rest.

Python's own fork server ends when the last process that holds its pipe does, and its ranks hold it too. An interrupt
from the terminal is the launcher's to hear, which then ends this one and the ranks.
"""

import os
import signal

from parallel.processes.lifeline import LAUNCHER, end_with_parent

end_with_parent(int(os.environ[LAUNCHER]))
signal.signal(signal.SIGINT, signal.SIG_IGN)
