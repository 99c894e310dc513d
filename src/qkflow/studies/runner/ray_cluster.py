"""Connection to a Ray cluster: that of an address, one that runs on this machine, or a new local one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from qkflow.errors import InputError
from qkflow.system import process_cpu_count

REACH_TIMEOUT = 5.0  # seconds for a server to accept a connection
CONNECT_TIMEOUT = 60.0  # seconds for a cluster to accept a driver, a Python process that imports Ray
OBJECT_STORE_BYTES = 80 * 2**20  # runs exchange files, not objects
WORKER_NICENESS = "RAY_worker_niceness"  # Ray's default of 15 gives runs a thirtieth of a core that is shared
AUTH_MODE = "RAY_AUTH_MODE"
_CONNECT = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


def connect(ray: Any, address: str | None) -> None:
    """Connect to the cluster at `address`; without one to a cluster that runs here, or a new local one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "configure_logging": False}
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        with suppress(ConnectionError):
            ray.init(address="auto", **quiet)
            return
    if address in (None, "local"):
        _start_local(ray, **quiet)
        return
    check_reachable(address)
    _check_connection(address)
    ray.init(address=address, **quiet)


def _start_local(ray: Any, **options: Any) -> None:
    """Start a cluster of this machine alone."""
    # Ray replaces 127.0.0.1 by an address that other machines reach; a local cluster needs none.
    loopback = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    os.environ.setdefault(WORKER_NICENESS, "0")
    os.environ.setdefault(AUTH_MODE, "token")  # Ray's default, which it announces on every start
    try:
        ray.init(
            address="local",
            num_cpus=process_cpu_count(),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address=loopback,
            **options,
        )
    except Exception as error:  # of no class of its own: a node that is slow to start
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"Ray did not start on this machine ({reason}): try again, or use --engine local",
            code="ray-not-started",
        ) from None


def check_reachable(address: str) -> None:
    """Raise InputError if no server answers at HOST:PORT; Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise InputError(
            f"--address {address} is not HOST:PORT, ray://HOST:PORT or auto", code="invalid-address"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise _out_of_reach(address, getattr(error, "strerror", None) or str(error)) from None


def _check_connection(address: str) -> None:
    """Raise InputError unless a Ray cluster accepts a connection.

    A process of its own connects. Of a server that is not Ray's, or refuses, Ray prints warnings for minutes.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CONNECT, address], capture_output=True, text=True, timeout=CONNECT_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise _out_of_reach(address, f"no answer in {CONNECT_TIMEOUT:g} seconds") from None
    if not done.returncode:
        return
    if "AuthToken" in done.stderr or AUTH_MODE in done.stderr:
        raise InputError(
            f"the Ray cluster at {address} takes connections with its token only: set {AUTH_MODE}=token, and "
            "copy ~/.ray/auth_token from its head node",
            code="cluster-needs-token",
        )
    reasons = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    raise _out_of_reach(address, reasons[-1])


def _out_of_reach(address: str, reason: str) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address} ({reason}): start one with `ray start --head`, or correct "
        "--address",
        code="cluster-out-of-reach",
    )
