"""Peak memory of a call, from the allocator's record: exact and repeatable, unlike resident set size."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def peak_memory_bytes(fn: Callable[[], object], device: torch.device) -> int:
    """Return the most memory that `fn` holds at one time, in addition to what was allocated before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_memory_bytes_cpu(fn)


def _peak_memory_bytes_cpu(fn: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no profiler messages on stderr
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        fn()
    assert record.profiler is not None
    results = record.profiler.kineto_results
    assert results is not None
    events = list(results.experimental_event_tree())
    changes = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    allocated = peak = 0
    for _, change in sorted(changes):
        allocated += change
        peak = max(peak, allocated)
    return peak
