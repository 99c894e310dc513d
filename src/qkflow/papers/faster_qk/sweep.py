"""Train many configs: those of equal shape in one batched computation, different shapes in processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from queue import Empty
from typing import Any

from qkflow.papers.faster_qk.synthetic import SyntheticConfig, SyntheticResult, train_synthetic
from qkflow.system import process_cpu_count

_report_progress: Callable[[int], None]


def sweep(
    configs: Sequence[SyntheticConfig], seeds: Sequence[int], workers: int, on_progress: Callable[[int], None]
) -> list[SyntheticResult]:
    """Train every config with every seed; results keep the order of `configs`, then `seeds`.

    `workers` 0 uses one process per shape, at most one per available CPU.
    """
    groups: dict[tuple[str, int, int], list[SyntheticConfig]] = {}
    for config in configs:
        groups.setdefault(config.batching_key, []).append(config)
    workers = min(workers or process_cpu_count(), len(groups))
    longest_first = sorted(groups.values(), key=lambda group: -sum(config.steps for config in group))
    if workers == 1:
        results = [result for group in longest_first for result in train_synthetic(group, seeds, on_progress)]
    else:
        results = _run_in_processes(longest_first, seeds, workers, on_progress)
    return sorted(results, key=lambda each: (configs.index(each.config), seeds.index(each.seed)))


def _run_in_processes(
    groups: list[list[SyntheticConfig]],
    seeds: Sequence[int],
    workers: int,
    on_progress: Callable[[int], None],
) -> list[SyntheticResult]:
    context = get_context("spawn")  # a forked child may inherit locks held by threads of torch
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
        return [result for future in futures for result in future.result()]


def _init_worker(reports: Any) -> None:
    import torch

    global _report_progress
    torch.set_num_threads(1)  # the matrices are too small to parallelize
    _report_progress = reports.put


def _train_group(configs: list[SyntheticConfig], seeds: list[int]) -> list[SyntheticResult]:
    return train_synthetic(configs, seeds, _report_progress)
