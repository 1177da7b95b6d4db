"""OpenMP on a CPU that is shared: wait asleep, not spinning. Imports nothing, for it must come before torch.

By default an OpenMP thread that waits for the others spins. Where two threads share a core for a moment (a virtual
machine, a second process) each barrier then costs a scheduler tick: measured on two virtual cores, one forward of a
135 M model took 8.0 s instead of 0.15 s, and two torch processes slowed each other 10 to 40 times. Asleep costs at most
a few percent where the cores are free.
"""

from __future__ import annotations

import os


def calm_openmp() -> None:
    """Set OMP_WAIT_POLICY=passive unless the user set it; without effect once torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
