"""Build the wheel, install it without constraints into a clean environment, use it: `make wheel-check`.

torch comes first, in the version of constraints.txt: a newer one may pull gigabytes of GPU libraries. All
other versions are what pip chooses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["QKFLOW_CACHE"] = str(folder / "cache")
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    start = time.monotonic()
    torch = re.findall(r"^torch==.+$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, folder=folder)
        (wheel,) = folder.glob("qkflow-*.whl")
        venv.create(folder / "env", with_pip=True)
        binaries = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        python, qkflow = binaries / "python", binaries / "qkflow"
        for package in (torch, wheel):
            run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", package, folder=folder)
        print(run(python, "-m", "pip", "freeze", folder=folder), end="")
        run(python, "-m", "pip", "check", folder=folder)
        print(run(qkflow, "--version", folder=folder), end="")
        claims = json.loads(run(qkflow, "claims", "--json", folder=folder))  # the packaged results
        recipes = json.loads(run(qkflow, "reproduce", "--json", folder=folder))["recipes"]
        print(f"{len(claims)} groups of claims, {len(recipes)} recipes")
        options = "--data speeches --tokenizer bytes --variants euler --controls none --inits gpt2 --seeds 3"
        study = ("compare", *options.split(), "--tokens", "2k", "--seq-len", "16", "--batch-size", "4")
        run(qkflow, *study, "--screening-seeds", "1", "--out", "study", folder=folder)
        assert (folder / "study" / "report.html").stat().st_size > 100_000
    print(f"the wheel works in a clean environment ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
