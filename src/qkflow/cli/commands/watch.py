"""`qkflow watch`: the report of a study while it runs."""

from __future__ import annotations

from pathlib import Path

import tyro

from qkflow import console
from qkflow.errors import InputError


def watch(
    folder: tyro.conf.Positional[Path], port: int | None = None, browser: bool = True, json: bool = False
) -> int:
    """Serve the report of a study that still runs, on this machine only.

    The page shows which runs are waiting, running, finished or failed, the time left, live loss curves, and
    the verdicts as they come. Only the folder is read, so the study may run in another process, on Ray or on
    SLURM. The printed address has a token, and no other user or website can read the page. Ctrl-C ends it.

    examples:
      qkflow watch runs/speeches-tiny-200000
      qkflow watch study --port 8100 --no-browser

    Args:
        folder: folder of a `qkflow compare` or `qkflow pace study`.
        port: port on the loopback address (default: any free port).
        browser: open the page in the browser.
        json: print the address as one JSON object on stdout.
    """
    from qkflow.report.watch import Watcher, build_app
    from qkflow.web.security import bind_site, serve

    watcher = Watcher(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name the folder of a study", code="not-a-study")
    watcher.progress.update()  # raises InputError if the folder is not a study
    site = bind_site(port)

    def announce() -> None:
        if json:
            console.emit_json({"url": site.url, "folder": str(folder)})
        else:
            console.out.print(f"watching {folder}: {site.url}", markup=False, highlight=False, soft_wrap=True)
            console.out.print("Ctrl-C ends it", markup=False)

    serve(build_app(watcher, site), site, open_browser=browser, on_ready=announce)
    return 0
