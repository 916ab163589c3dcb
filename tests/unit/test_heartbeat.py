"""A rank's end of the watchdog's connections, without any other rank."""

import time

from parallel.heartbeat import Heart


def test_a_waking_call_ends_the_poll():
    heart = Heart({})
    heart.wake()
    started = time.monotonic()
    assert heart.poll(30) == []
    assert time.monotonic() - started < 15
    heart.close()


def test_a_waking_call_may_come_after_the_end():
    """The thread that polls may see the last word, send it and close before the one that set it wakes it."""
    heart = Heart({})
    heart.close()
    heart.wake()
