"""Which device to run on. NPU before CUDA before CPU; torch-npu is imported only where it is installed."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys

import torch

from eagle_train.errors import UserError


def choose(wanted: str = "auto") -> torch.device:
    """`auto`, `cpu`, `cuda[:n]` or `npu[:n]` → the device.

    Raises:
        UserError: a device that was asked for by name and is not there.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "auto":
        for kind in ("npu", "cuda"):
            if _available(kind):
                return torch.device(kind)
        return torch.device("cpu")
    kind = wanted.split(":")[0]
    if not _available(kind):
        raise UserError(f"device {wanted} was asked for, but no {kind} is available", hint="give auto or cpu")
    return torch.device(wanted)


def _available(kind: str) -> bool:
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            import torch_npu  # noqa: F401
        except (ImportError, OSError, RuntimeError) as e:  # installed, but without the CANN it needs
            print(f"torch_npu is installed but cannot be imported ({e}); no npu is used", file=sys.stderr)
            return False
        return bool(torch.npu.is_available())  # type: ignore[attr-defined]
    return kind == "cuda" and torch.cuda.is_available()


def use_threads(wanted: int, processes_here: int) -> int:
    """Set torch's CPU threads; 0 divides the cores this process may use among the machine's processes.

    `accelerate launch` sets OMP_NUM_THREADS=1 even for a single process, which would leave the other cores idle.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = wanted or max(1, cores // processes_here)
    torch.set_num_threads(chosen)
    return chosen


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far, in GB: the process's on a CPU, the allocator's elsewhere."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return torch.accelerator.max_memory_allocated() / 1e9
