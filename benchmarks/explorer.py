"""Latency and memory of `qkflow explore` in Chromium.

    python benchmarks/explorer.py                   # untrained 60m on 128 tokens, 8×8 heads on 1,024 tokens
    python benchmarks/explorer.py --json

Needs Playwright and a Chromium of the system. The server runs in its own process, as for a user. Times are
medians over `rounds`:

    open     from entering the address to the first drawn map, with the server up and the model loaded
    text     from submitting another text of the same length to its drawn map
    hover    from the pointer event on a token to the frame that shows its attention
    head     from the click on another head to the frame that shows it
    memory   resident memory of the page's process after all of it

On a busy machine look at the CPU times, which depend less on other processes: `view_cpu_s` of the server for
one text (all threads together), `hover_cpu_ms` and `head_cpu_ms` of the page's main thread.
"""

from __future__ import annotations

import json as json_module
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

from qkflow import console
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.models import Decoder, preset
from qkflow.training import pretrained

SENTENCE = "It is the business of the future to be dangerous, and of the past to be remembered. "
FRAME = """async act => {
  const start = performance.now();
  act();
  await new Promise(done => requestAnimationFrame(() => { const c = new MessageChannel();
    c.port1.onmessage = done; c.port2.postMessage(0); }));
  return performance.now() - start;
}"""
HOVER = f"""async index => ({FRAME})(() => document.querySelectorAll("#tokens button")[index]
  .dispatchEvent(new PointerEvent("pointerover", {{ bubbles: true }})))"""
SWITCH = f"""async index => ({FRAME})(() => document.querySelectorAll("#grid button")[index].click())"""
READY = "body[data-state=ready]"
BARS = {"open_s": "1.5 / 6", "hover_ms": "50 /", "head_ms": "50 /", "memory_mb": "/ 500"}


def main(rounds: int = 5, threads: int = 2, json: bool = False) -> None:
    """Measure both sizes and print a table.

    Args:
        rounds: repetitions of opening the page and of changing the text.
        threads: CPU threads of the server.
        json: print one JSON object.
    """
    rows = {}
    for name, tokens in (("60m, 128 tokens", 128), ("8×8 heads, 1,024 tokens", 1024)):
        with tempfile.TemporaryDirectory() as folder:
            decoder = Decoder(preset("60m"), seed=0)
            weights = pretrained.full_state_dict(decoder)
            pretrained.save_model(Path(folder) / "model", decoder.config, weights, ByteTokenizer())
            del decoder, weights
            rows[name] = measure(Path(folder), tokens, rounds, threads)
    if json:
        console.emit_json(rows)
        return
    print(f"{'':<14}" + "".join(f"{name:>24}" for name in rows) + f"{'bar':>16}")
    for key in next(iter(rows.values())):
        values = "".join(f"{row[key]:>24}" for row in rows.values())
        print(f"{key:<14}{values}{BARS.get(key, ''):>16}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def measure(folder: Path, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "qkflow", "explore", str(folder), "--no-browser", "--json"]
    text = (SENTENCE * 20)[: tokens - 1]  # and the end-of-document token
    started = time.perf_counter()
    server = subprocess.Popen(
        [*command, "--threads", str(threads), "--text", text], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        url = json_module.loads("".join(_until_brace(lines)))["url"]
        start_seconds = time.perf_counter() - started
        return {"start_s": round(start_seconds, 2), **drive(url, text, rounds, server.pid)}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)


def _until_brace(lines: Any) -> Any:
    for line in lines:
        yield line
        if line.rstrip() == "}":
            return


def drive(url: str, text: str, rounds: int, server_pid: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        page = context.pages[0]
        sizes: list[int] = []
        page.on(
            "response",
            lambda response: (
                sizes.append(int(response.headers.get("content-length", 0)))
                if response.url.endswith("/api/view")
                else None
            ),
        )
        opened, changed = [], []
        for index in range(rounds):
            page.goto("about:blank")
            begin = time.perf_counter()
            # another text each time: the server keeps the last ones
            page.goto(f"{url}#text={index}{text[1:].replace(' ', '+')}")
            page.wait_for_selector(READY, timeout=300_000)
            opened.append(time.perf_counter() - begin)
        cpu_before = cpu_seconds(server_pid)
        for index in range(rounds):
            page.fill("#text", f"{index}x{text[2:]}")
            begin = time.perf_counter()
            page.click("#run")
            page.wait_for_selector(READY, timeout=300_000)
            changed.append(time.perf_counter() - begin)
        view_cpu = (cpu_seconds(server_pid) - cpu_before) / rounds
        page.wait_for_timeout(1500)
        count = page.locator("#tokens button").count()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        marks = [main_thread_seconds(session)]
        hovers = [page.evaluate(HOVER, index) for index in range(1, count, max(1, count // 20))]
        marks.append(main_thread_seconds(session))
        switches = [page.evaluate(SWITCH, index) for index in range(1, 60, 3)]
        marks.append(main_thread_seconds(session))
        memory = renderer_memory(profile)
        context.close()
    return {
        "tokens": count,
        "open_s": round(statistics.median(opened), 2),
        "text_s": round(statistics.median(changed), 2),
        "hover_ms": round(statistics.median(hovers), 1),
        "hover_max_ms": round(max(hovers), 1),
        "head_ms": round(statistics.median(switches), 1),
        "head_max_ms": round(max(switches), 1),
        "view_cpu_s": round(view_cpu, 2),
        "hover_cpu_ms": round(1000 * (marks[1] - marks[0]) / len(hovers), 1),
        "head_cpu_ms": round(1000 * (marks[2] - marks[1]) / len(switches), 1),
        "payload_mb": round(max(sizes) / 1e6, 2),
        "memory_mb": round(memory / 1e6),
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main_thread_seconds(session: Any) -> float:
    """Return the CPU time of all tasks of the page's main thread so far."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def renderer_memory(profile: str) -> int:
    """Return the resident bytes of the largest renderer below the browser with this profile."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            commands[folder.name] = (folder / "cmdline").read_text()
            parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has ended

    def is_ours(pid: str) -> bool:
        while pid in parents:
            if profile in commands[pid]:
                return True
            pid = parents[pid]
        return False

    renderers = [pid for pid, command in commands.items() if "--type=renderer" in command and is_ours(pid)]
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in renderers)
    return max(pages, default=0) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    tyro.cli(main)
