"""Standard streams of a process that was started without some of them (`roundtable train c.yaml >&-`)."""

import os
import sys


def open_closed_streams() -> None:
    """Opens /dev/null in the place of each standard stream that is closed.

    Otherwise the next file that is opened takes the stream's descriptor, and what is printed goes into that file.
    Must be called before any file is opened.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:  # a lower one was free
                os.dup2(handle, number)
                os.close(handle)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
