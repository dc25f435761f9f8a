"""The one error that means: the user can mend this."""


class BadInput(ValueError):
    """Something the user gave cannot work; nothing was started or lost.

    The message says what was expected, what was got and what to change. `python -m pipeline` prints it alone, without a
    traceback, and exits with code 2.
    """
