"""Makes the fork server end with its launcher; imported there first, so that it also holds while the rest is imported.

Python's own fork server ends when the last process that holds its pipe does, and the ranks hold it too. An interrupt
from the terminal is ignored here: the launcher handles it, and then ends the fork server and the ranks.
"""

import os
import signal

from parallel.processes.lifeline import LAUNCHER, end_with_parent

end_with_parent(int(os.environ[LAUNCHER]))
signal.signal(signal.SIGINT, signal.SIG_IGN)
