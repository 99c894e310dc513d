"""The README of a model that is shared."""

from __future__ import annotations

from qkflow.attention import couplings
from qkflow.attention.registry import Spec
from qkflow.models import Decoder


def model_card(model: Decoder, form: str) -> str:
    """What the model is, and how to load it, in the form the hub reads."""
    shape, attention = model.config, model.config.attention
    coupling = couplings.get(Spec.parse(attention.coupling).name)
    coupled = attention.coupling != "none"
    tags = ["qkflow", f"coupling:{coupling.name}"] if form == "qkflow" else ["llama"]
    count = sum(parameter.numel() for parameter in model.parameters())
    rows = {
        "parameters": f"{count:,}",
        "layers × width": f"{shape.layers} × {shape.width}",
        "heads (key/value)": f"{shape.heads} ({shape.kv_heads or shape.heads})",
        "vocabulary": f"{shape.vocabulary:,}",
        "feed-forward": f"{shape.feed_forward}, {shape.hidden_size}",
        "coupling": f"`{attention.coupling}`" + (": " + coupling.equation if coupled else ""),
        "scoring": f"`{attention.scoring}`",
        "start": f"`{shape.start}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    extra = ['import qkflow.hub  # pip install "qkflow[hub]"; registers the architecture']
    code = [
        *(extra if form == "qkflow" else []),
        "from transformers import pipeline",
        "",
        'generate = pipeline("text-generation", model="path/or/name/of/this/model")',
        'print(generate("Once", max_new_tokens=32)[0]["generated_text"])',
    ]
    source = f"\nThe coupling is that of {coupling.citation}.\n" if coupled and form == "qkflow" else ""
    merged = (
        "\nThe drift it was trained with is merged into its weights.\n" if coupled and form == "llama" else ""
    )
    lines = ["---", f"library_name: {'qkflow' if form == 'qkflow' else 'transformers'}"]
    lines += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---", ""]
    lines += ["# A decoder trained with qkflow", "", "| | |", "|---|---|", table, source + merged]
    lines += ["## Use", "", "```python", *code, "```", ""]
    return "\n".join(lines)
