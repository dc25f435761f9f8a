"""The errors that mean more than their message; and whether the user has had enough."""

import threading

#: Set once this process was told to end. Compiled code may turn the KeyboardInterrupt into some other error.
interrupted = threading.Event()


class BadInput(ValueError):
    """Something the user gave cannot work; nothing was started or lost.

    The message says what was expected, what was got and what to change. `python -m pipeline` prints it alone, without a
    traceback, and exits with code 2.
    """


class DiskFull(BadInput):
    """No space left on this machine's disk."""


class HostUnfit(RuntimeError):
    """This machine cannot do the job; another one may."""
