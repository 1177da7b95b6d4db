"""OpenMP on a CPU that is shared: spin briefly, then sleep. Imports nothing, for it must come before torch.

By default an OpenMP thread that waits for the others spins for long. Where two threads share a core for a moment (a
virtual machine, a second process) each barrier then costs a scheduler tick: measured on two virtual cores, one forward
of a 135 M model took 8.0 s instead of 0.12 s, and two torch processes slowed each other 10 to 40 times. Never spinning
is safe too, but decoding, with its hundreds of small operations a token, then pays for waking: 52 ms a token, not 33.
"""

from __future__ import annotations

import os

SPINS = "100000"  # some hundred microseconds


def calm_openmp() -> None:
    """Set GOMP_SPINCOUNT unless the user set how OpenMP waits; without effect once torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
