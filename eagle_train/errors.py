"""The one exception that is a message to the user rather than a fault of ours."""

from __future__ import annotations


class UserError(Exception):
    """What was given, what was expected and, as `hint`, what to do; the command line prints it and exits with 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n  → {hint}" if hint else message)
