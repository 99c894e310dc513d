"""`make fuzz`: run many fuzzed invocations and print how they ended.

    PYTHONPATH=tests/helpers python tests/fuzz/run_fuzz.py --cases 20000 --processes 2 --seed 0
    PYTHONPATH=tests/helpers python tests/fuzz/run_fuzz.py --case "$(cat case.json)"

Exit code 1 if a case ended in a traceback, a hang, a leftover file, an orphan process or a wrong exit code;
one case of every kind is printed and can be repeated with --case.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase

from fuzz_driver import SECONDS, Outcome, case_from_json, case_to_json, no_network, run_case
from fuzz_grammar import Case, cases
from fuzz_world import build_world, world_files

GOOD = ("success", "refusal")
MEMORY_LIMIT = 6 << 30  # bytes of address space per process


def run_share(world: Path, count: int, seed: int, log: Path) -> None:
    """Run `count` cases; append how each ended to `log`."""
    no_network()
    # a file without end must not fill the memory of the machine
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    with open(log, "a", encoding="utf-8") as file:

        def record(case: Case) -> None:
            (log.with_suffix(".last")).write_text(case_to_json(case))
            start = time.process_time()
            faulthandler.dump_traceback_later(30 * SECONDS, exit=True)  # a hang that no signal ends
            outcome = run_case(case, world)
            faulthandler.cancel_dump_traceback_later()
            seconds = time.process_time() - start
            row = {"kind": outcome.kind, "command": case.argv[:2], "seconds": round(seconds, 3)}
            if outcome.kind == "refusal":
                row["code"] = outcome.err.strip().rpartition("[")[2].rstrip("]")[:40]
            if outcome.kind not in GOOD:
                row |= {"where": outcome.where, "problem": outcome.problem, "case": case_to_json(case)}
            file.write(json.dumps(row) + "\n")
            file.flush()

        settings = hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(seed)(settings(hypothesis.given(cases(world_files(world)))(record)))()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="one case as JSON")
    parser.add_argument("--world", type=Path, help="folder with the files, kept for the next call")
    parser.add_argument("--logs", type=Path, help="folder for one line of JSON per case")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # of one of the processes
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.log:
        run_share(options.world, options.cases, options.seed, options.log)
        return 0
    with tempfile.TemporaryDirectory(prefix="qkflow-fuzz-") as folder:
        world = options.world or Path(folder) / "world"
        if not world.exists():
            build_world(world)
        if options.case:
            return _print_case(run_case(case_from_json(options.case), world))
        start = time.monotonic()
        rows = _run_processes(options, world, options.logs or Path(folder))
        return _print_counts(rows, options.cases, time.monotonic() - start)


def _run_processes(options: argparse.Namespace, world: Path, folder: Path) -> list[dict]:
    share = -(-options.cases // options.processes)
    processes, logs = [], []
    for number in range(options.processes):
        logs.append(folder / f"{number}.jsonl")
        command = [sys.executable, __file__, "--world", world, "--log", logs[-1], "--cases", share]
        seed = options.seed * 1000 + number
        processes.append(
            subprocess.Popen([*map(str, command), "--seed", str(seed)], stdin=subprocess.DEVNULL)
        )
    codes = [process.wait() for process in processes]
    rows = [json.loads(line) for log in logs if log.exists() for line in log.read_text().splitlines()]
    for code, log in zip(codes, logs, strict=True):
        if code:
            last = log.with_suffix(".last")
            case = last.read_text() if last.exists() else ""
            rows.append(
                {
                    "kind": "hang",
                    "command": [],
                    "seconds": 0,
                    "where": f"process ended with {code}",
                    "problem": "",
                    "case": case,
                }
            )
    return rows


def _print_case(outcome: Outcome) -> int:
    print(outcome.out, end="")
    print(outcome.err, end="", file=sys.stderr)
    print(f"{outcome.kind} {outcome.where} {outcome.problem}")
    return 0 if outcome.kind in GOOD else 1


def _print_counts(rows: list[dict], wanted: int, seconds: float) -> int:
    kinds = Counter(row["kind"] for row in rows)
    bad = [row for row in rows if row["kind"] not in GOOD]
    by_cause: dict[tuple[str, str], list[dict]] = {}
    for row in bad:
        by_cause.setdefault((row["kind"], row["where"]), []).append(row)
    for (kind, where), each in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        shortest = min(each, key=lambda row: len(row["case"]))
        print(f"\n{kind} × {len(each)}: {where}\n{shortest['problem'][-1500:]}\n--case '{shortest['case']}'")
    parts = {
        name: kinds[name]
        for name in ("success", "refusal", "traceback", "hang", "leftover", "orphan", "exit-code", "output")
    }
    counts = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    print(f"\n{len(rows):,} cases in {seconds:.0f} s: {counts}")
    return 1 if bad or len(rows) < wanted else 0


if __name__ == "__main__":
    sys.exit(main())
