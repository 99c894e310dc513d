"""`qkflow explore`: look into one or two models in the browser."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import tyro

from qkflow import console
from qkflow.config_io import check_utf8
from qkflow.errors import InputError


def explore(
    model: Annotated[str, tyro.conf.Positional],
    model2: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    text: str | None = None,
    base: str | None = None,
    port: int | None = None,
    no_browser: bool = False,
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Look into one or two models in the browser: attention, couplings, predictions, ablations.

    A page on this machine shows every head of the model on a text that you type: as a map and as arcs, sorted
    by entropy, sink mass or induction score; queries and keys before and after the coupling; the logit lens;
    the loss with heads switched off. With two models, also their difference. The address has a token; other
    users and other pages cannot read it. Ctrl-C ends the server.

    examples:
      qkflow explore runs/first
      qkflow explore runs/standard runs/euler --text "To be, or not to be"
      qkflow explore runs/first/checkpoints/step-00000400 runs/first/checkpoints/step-00000800
      qkflow explore exported/
      qkflow explore openai-community/gpt2
      qkflow explore path/to/llama path/to/adapter --base path/to/llama

    Args:
        model: folder of a run, model, checkpoint or adapter, or a transformers folder or Hub name.
        model2: a second model to compare with, with the same tokenizer.
        text: text to start with.
        base: model of an adapter, if the adapter does not name it.
        port: port to serve on (default: any free port).
        no_browser: print the address, and do not open a browser.
        device: auto, cpu, cuda or mps.
        threads: CPU threads (default: all cores).
        json: print one JSON object with the address.
    """
    from qkflow.explore.models import SAMPLE, check_same_tokens, open_model
    from qkflow.explore.server import Explorer, build_app
    from qkflow.system import resolve_device
    from qkflow.training.worker import configure_process
    from qkflow.web.security import LocalOnly, bind_site, serve

    check_utf8("--text", text or "")
    if text is not None and not text.strip():
        raise InputError("--text is empty: give a text, or leave it out", code="empty-text")
    configure_process(threads)
    target = resolve_device(device)
    sources = [model] if model2 is None else [model, model2]
    models = [open_model(source, base=base, device=target) for source in sources]
    if len({each.name for each in models}) < len(models):
        for each, source in zip(models, sources, strict=True):
            each.name = source
    check_same_tokens(models, text or SAMPLE)
    explorer = Explorer(models, text or SAMPLE)
    explorer.describe()  # measures induction once, which also warms up the model
    site = bind_site(port)

    def announce() -> None:
        if json:
            console.emit_json({"url": site.url, "models": [each.name for each in models]})
        else:
            print(
                f"explore {' and '.join(each.name for each in models)} at {site.url}\nCtrl-C ends the server"
            )
        sys.stdout.flush()
        threading.Thread(target=explorer.prepare, daemon=True).start()

    serve(LocalOnly(build_app(explorer), site), site, open_browser=not no_browser, on_ready=announce)
