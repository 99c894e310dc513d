"""`qkflow probe`: where a trained model's attention goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from torch import Tensor

from qkflow import console
from qkflow.config_io import check_utf8
from qkflow.errors import InputError
from qkflow.measures.attention import MEASURES, LayerProbe


def probe(
    model: Annotated[Path, tyro.conf.Positional],
    *,
    text: str | None = None,
    data: str | None = None,
    windows: int = 8,
    seq_len: int = 64,
    out: Path | None = None,
    device: str = "auto",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Measure every head's attention, and draw it.

    Per layer and head: entropy of the weights (nats), sink mass (weight on the first token), spectral gap and
    effective rank of the weight matrix, the largest logit. The weights are recomputed from what each layer
    saw; the model itself runs as always.

    examples:
      qkflow probe runs/first --text "Congress shall have power to declare war"
      qkflow probe runs/first --data speeches --windows 32 --length 128
      qkflow probe runs/first --text "To be, or not to be" --out attention.html
      qkflow probe runs/first --text "To be, or not to be" --out attention.png --json

    Args:
        model: folder of a finished run, or its model folder.
        text: measure on this text.
        data: measure on windows of the validation split of this corpus instead.
        windows: how many, with --data.
        length: tokens of each, with --data.
        out: draw the weights of the first window: .html (to look at closely) or .png.
        device: auto, cpu, cuda or mps.
        threads: of the processor (default: all cores).
        json: print one JSON object instead of a table.
    """
    import torch

    from qkflow.measures import attention, attention_maps
    from qkflow.system import resolve_device
    from qkflow.training.pretrained import load_model
    from qkflow.training.worker import configure_process

    if (text is None) == (data is None):
        raise InputError("give either --text or --data to measure on")
    check_utf8("--text", text or "")
    draw = None if out is None else attention_maps.get_map_writer(out)
    configure_process(threads)
    decoder, tokenizer = load_model(model, device=resolve_device(device))
    if text is not None:
        ids = torch.tensor([tokenizer.encode_with_bos(text)])
    else:
        ids = _validation_windows(model, str(data), windows, seq_len)
    layers = attention.probe_attention(
        decoder, ids.to(decoder.embedding.weight.device), keep_weights=out is not None
    )
    if draw is not None and out is not None:
        labels = [tokenizer.decode([token]) or attention_maps.END_LABEL for token in ids[0].tolist()]
        draw(out, layers, labels)
    if json:
        drawn = None if out is None else str(out)
        console.emit_json(
            {"model": str(model), "layers": [layer.to_dict() for layer in layers], "out": drawn}
        )
        return
    _print_table(layers)
    if out is not None:
        console.out.print(f"drawn to {out}", markup=False, highlight=False, soft_wrap=True)


def _validation_windows(model: Path, corpus: str, windows: int, length: int) -> Tensor:
    import torch

    from qkflow.data import EvalWindows, prepare
    from qkflow.training.pretrained import tokenizer_spec

    if windows < 1 or length < 1:
        raise InputError(f"--windows and --length must be at least 1, not {windows} and {length}")
    tokens = prepare(corpus, tokenizer_spec(model)).tokens("validation")
    inputs, _ = next(iter(EvalWindows(tokens, length, windows, windows * length)))
    return torch.from_numpy(inputs)


def _print_table(layers: list[LayerProbe]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    has_steps = any(layer.step_size for layer in layers)
    for name in ("layer", "head", *MEASURES, *(("step size",) if has_steps else ())):
        table.add_column(name.replace("_", " "), justify="right")
    for number, layer in enumerate(layers):
        for head in range(len(layer.entropy)):
            values = [
                f"{_head_value(getattr(layer, name), head, len(layer.entropy)):.3f}" for name in MEASURES
            ]
            if has_steps and layer.step_size:
                values.append(f"{_head_value(layer.step_size, head, len(layer.entropy)):.3f}")
            table.add_row(str(number), str(head), *values)
    console.out.print(table)


def _head_value(values: list[float], head: int, n_heads: int) -> float:
    """What belongs to a head; where it has several query heads, the largest."""
    each = len(values) // n_heads
    return max(values[head * each : (head + 1) * each])
