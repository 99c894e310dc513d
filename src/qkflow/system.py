"""The machine a process runs on: CPU cores, devices, memory, versions."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import qkflow
from qkflow.errors import InputError

if TYPE_CHECKING:  # importing torch takes a second, and counting cores does not need it
    import torch


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def process_cpu_count() -> int:
    """Return the number of CPU cores this process may use; a container may allow fewer than exist."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> float:
    """Return the memory of this machine in bytes; infinity if it is not known."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # Windows
        return math.inf


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends, also by SIGKILL. Linux alone can."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to end: SIGTERM, and SIGHUP when its terminal is closed.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return (signal.SIGTERM, hangup)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Iterator[None]:
    """Install a handler for some signals. Do nothing outside the main thread: Python handles none there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is CUDA, else MPS, else the CPU.

    Raise InputError if it is not a device, or not one of this machine.
    """
    import torch

    counts = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    if name == "auto":
        return torch.device(next(kind for kind, count in counts.items() if count))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"'{name}' is not a device: use auto, {', '.join(counts)}", code="unknown-device"
        ) from None
    if (device.index or 0) >= counts.get(device.type, 0):
        raise InputError(
            f"device '{name}' is not available on this machine: use --device auto or cpu",
            code="device-unavailable",
        )
    return device


def has_bfloat16_instructions(device: torch.device) -> bool:
    """Return whether matmuls in bfloat16 are fast on the device; a CPU without instructions emulates them."""
    import torch

    if device.type != "cpu":
        return True
    # Older versions of PyTorch do not report capabilities.
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return bool(capabilities.get("avx512_bf16", capabilities.get("bf16", True)))  # x86, ARM


def collect_env(device: torch.device | None = None) -> dict[str, Any]:
    """Return the versions and hardware to store beside a measurement on `device` (default: the CPU)."""
    import torch

    device = device or torch.device("cpu")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "qkflow": qkflow.__version__,
        "commit": git_commit(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "machine": _cpu_name(),
    }


def git_commit() -> str | None:
    """Return the commit of the source tree, `-dirty` if it has changes; None for an installed package."""
    folder = Path(qkflow.__file__).parent
    try:
        # An environment may be installed inside an unrelated repository: qkflow must be tracked by it.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated CUDA memory, or resident set size."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    if sys.platform == "linux":
        with suppress(OSError):  # a container without /proc
            for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.machine()
