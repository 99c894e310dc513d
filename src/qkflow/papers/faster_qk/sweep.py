"""Many settings at once: equal shapes as lanes of one computation, other shapes in other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from queue import Empty
from typing import Any

from qkflow.papers.faster_qk.synthetic import SyntheticConfig, SyntheticResult, train_synthetic

_report_progress: Callable[[int], None]


def sweep(
    configs: Sequence[SyntheticConfig], seeds: Sequence[int], workers: int, on_progress: Callable[[int], None]
) -> list[SyntheticResult]:
    """Every setting with every seed, in order. `workers` 0: a process per shape, up to the cores at hand."""
    groups: dict[tuple[str, int, int], list[SyntheticConfig]] = {}
    for setting in configs:
        groups.setdefault(setting.batching_key, []).append(setting)
    workers = min(workers or os.cpu_count() or 1, len(groups))
    longest_first = sorted(groups.values(), key=lambda group: -sum(each.steps for each in group))
    if workers == 1:
        outcomes = [
            outcome for group in longest_first for outcome in train_synthetic(group, seeds, on_progress)
        ]
    else:
        outcomes = _run_in_processes(longest_first, seeds, workers, on_progress)
    return sorted(outcomes, key=lambda each: (configs.index(each.config), seeds.index(each.seed)))


def _run_in_processes(
    groups: list[list[SyntheticConfig]],
    seeds: Sequence[int],
    workers: int,
    on_progress: Callable[[int], None],
) -> list[SyntheticResult]:
    context = get_context("spawn")  # a forked child may inherit locked threads of torch
    reports: Any = context.Queue()
    pending: set[Future[list[SyntheticResult]]]
    with ProcessPoolExecutor(workers, context, _init_worker, (reports,)) as pool:
        futures = [pool.submit(_train_group, group, list(seeds)) for group in groups]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, timeout=0.2)
            while True:
                try:
                    on_progress(reports.get_nowait())
                except Empty:
                    break
        return [outcome for future in futures for outcome in future.result()]


def _init_worker(reports: Any) -> None:
    import torch

    global _report_progress
    torch.set_num_threads(1)  # the matrices are far too small to share
    _report_progress = reports.put


def _train_group(configs: list[SyntheticConfig], seeds: list[int]) -> list[SyntheticResult]:
    return train_synthetic(configs, seeds, _report_progress)
