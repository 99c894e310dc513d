"""Many settings at once: equal shapes as lanes of one computation, other shapes in other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from queue import Empty
from typing import Any

from qkflow.papers.faster_qk.synthetic import Outcome, Setting, train

_report: Callable[[int], None]


def sweep(
    settings: Sequence[Setting], seeds: Sequence[int], workers: int, advance: Callable[[int], None]
) -> list[Outcome]:
    """Every setting with every seed, in order. `workers` 0: a process per shape, up to the cores at hand."""
    groups: dict[tuple[str, int, int], list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.shape, []).append(setting)
    workers = min(workers or os.cpu_count() or 1, len(groups))
    longest_first = sorted(groups.values(), key=lambda group: -sum(each.steps for each in group))
    if workers == 1:
        outcomes = [outcome for group in longest_first for outcome in train(group, seeds, advance)]
    else:
        outcomes = _in_processes(longest_first, seeds, workers, advance)
    return sorted(outcomes, key=lambda each: (settings.index(each.setting), seeds.index(each.seed)))


def _in_processes(
    groups: list[list[Setting]], seeds: Sequence[int], workers: int, advance: Callable[[int], None]
) -> list[Outcome]:
    context = get_context("spawn")  # a forked child may inherit locked threads of torch
    reports: Any = context.Queue()
    pending: set[Future[list[Outcome]]]
    with ProcessPoolExecutor(workers, context, _prepare, (reports,)) as pool:
        futures = [pool.submit(_work, group, list(seeds)) for group in groups]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, timeout=0.2)
            while True:
                try:
                    advance(reports.get_nowait())
                except Empty:
                    break
        return [outcome for future in futures for outcome in future.result()]


def _prepare(reports: Any) -> None:
    import torch

    global _report
    torch.set_num_threads(1)  # the matrices are far too small to share
    _report = reports.put


def _work(settings: list[Setting], seeds: list[int]) -> list[Outcome]:
    return train(settings, seeds, _report)
