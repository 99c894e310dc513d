"""`qkflow probe`: measure and draw the attention of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor

from qkflow import console
from qkflow.config_io import Range, check_utf8
from qkflow.errors import InputError
from qkflow.measures.attention import LayerProbe

MAX_WEIGHTS = 1 << 22  # per head, of all windows: their singular values take minutes


def probe(
    model: Annotated[Path, tyro.conf.Positional],
    *,
    text: str | None = None,
    data: str | None = None,
    windows: Annotated[int, Range(1, 10**5)] = 8,
    seq_len: Annotated[int, Range(1, 10**5)] = 64,
    out: Path | None = None,
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Measure and draw the attention weights of every head.

    Per layer and head: entropy (nats), sink mass (weight on the first token), spectral gap and effective rank
    of the weight matrix, the largest logit, and the diagnostics of the coupling, such as its step size.

    examples:
      qkflow probe runs/first --text "Congress shall have power to declare war"
      qkflow probe runs/first --data speeches --windows 32 --seq-len 128
      qkflow probe runs/first --text "To be, or not to be" --out attention.html
      qkflow probe runs/first --text "To be, or not to be" --out attention.png --json

    Args:
        model: folder of a finished run, or its model folder.
        text: text to measure on.
        data: corpus to measure on instead: windows of its validation split.
        windows: number of windows, with --data.
        seq_len: tokens per window, with --data.
        out: write the attention of the first window: .html (the explorer, offline) or .png (maps).
        device: auto, cpu, cuda or mps.
        threads: CPU threads (default: all cores).
        json: print one JSON object instead of a table.
    """
    import torch

    from qkflow.explore import offline
    from qkflow.explore.decoder_model import DecoderModel
    from qkflow.measures import attention, attention_maps
    from qkflow.system import resolve_device
    from qkflow.training.pretrained import load_model
    from qkflow.training.worker import configure_process

    if (text is None) == (data is None):
        raise InputError("set either --text or --data", code="text-or-data")
    check_utf8("--text", text or "")
    if out is not None and out.suffix.lower() not in (".html", ".png"):
        raise InputError(
            f"attention maps are written as .html or .png, not '{out.name}'", code="unknown-map-format"
        )
    configure_process(threads)
    decoder, tokenizer = load_model(model, device=resolve_device(device))
    if text is not None:
        ids = torch.tensor([tokenizer.encode_with_bos(text)])
    else:
        ids = _validation_windows(model, str(data), windows, seq_len)
    if len(ids) * ids.shape[1] ** 2 > MAX_WEIGHTS:
        limit = int((MAX_WEIGHTS / len(ids)) ** 0.5)
        raise InputError(
            f"{len(ids)} x {ids.shape[1]:,} tokens have too many attention weights to measure: take a text "
            f"or a --seq-len of at most {limit:,} tokens, or fewer --windows",
            code="text-too-long",
        )
    is_png = out is not None and out.suffix.lower() == ".png"
    layers = attention.probe_attention(decoder, ids.to(decoder.embedding.weight.device), keep_weights=is_png)
    if out is not None and is_png:
        attention_maps.write_png(out, layers)
    elif out is not None:
        explored = DecoderModel(model.resolve().name, decoder, tokenizer)
        window = ids[0].tolist()
        offline.write_page(out, [explored], [explored.capture_ids(window)], tokenizer.decode(window))
    if json:
        rows = [layer.to_dict() for layer in layers]
        console.emit_json({"model": str(model), "layers": rows, "out": None if out is None else str(out)})
        return
    _print_table(layers)
    if out is not None:
        console.out.print(f"attention maps: {out}", markup=False, highlight=False, soft_wrap=True)


def _validation_windows(model: Path, corpus: str, windows: int, seq_len: int) -> Tensor:
    """Return token ids (windows, seq_len) of the validation split."""
    import torch

    from qkflow.data import prepare
    from qkflow.training.pretrained import tokenizer_spec

    token_set = prepare(corpus, tokenizer_spec(model))
    inputs, _ = next(iter(token_set.eval_windows("validation", seq_len, windows, windows * seq_len)))
    return torch.from_numpy(inputs)


def _print_table(layers: list[LayerProbe]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    names = list(dict.fromkeys(name for layer in layers for name in layer.to_dict()))
    for name in ("layer", "head", *names):
        table.add_column(name.replace("_", " "), justify="right")
    for layer_idx, layer in enumerate(layers):
        known = layer.to_dict()
        for head in range(len(layer.entropy)):
            cells = [f"{layer.head_value(name, head):.3f}" if name in known else "" for name in names]
            table.add_row(str(layer_idx), str(head), *cells)
    console.out.print(table)
