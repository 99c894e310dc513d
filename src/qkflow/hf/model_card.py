"""The README of a model that is shared."""

from __future__ import annotations

from qkflow.attention import couplings
from qkflow.attention.registry import Spec
from qkflow.models import ModelConfig


def model_card(shape: ModelConfig, parameters: int, form: str) -> str:
    """What a model of a shape is once exported, and how to load it, in the form the hub reads."""
    attention = shape.attention
    coupling = couplings.get(Spec.parse(attention.coupling).name)
    coupled = attention.coupling != "none" and form == "qkflow"
    tags = ["qkflow", f"coupling:{coupling.name}"] if form == "qkflow" else ["llama"]
    rows = {
        "parameters": f"{parameters:,}",
        "layers × width": f"{shape.layers} × {shape.width}",
        "heads (key/value)": f"{shape.heads} ({shape.kv_heads or shape.heads})",
        "vocabulary": f"{shape.vocabulary:,}",
        "feed-forward": f"{shape.feed_forward}, {shape.hidden_size}",
        "coupling": f"`{attention.coupling}`: {coupling.equation}" if coupled else "`none`",
        "scoring": f"`{attention.scoring}`",
        "start": f"`{shape.start}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    extra = ['import qkflow.hf  # pip install "qkflow[hf]"; registers the architecture']
    code = [
        *(extra if form == "qkflow" else []),
        "from transformers import pipeline",
        "",
        'generate = pipeline("text-generation", model="path/or/name/of/this/model")',
        'print(generate("Once", max_new_tokens=32)[0]["generated_text"])',
    ]
    note = f"\nThe coupling is that of {coupling.citation}.\n" if coupled else ""
    if attention.coupling != "none" and not coupled:  # only a drift becomes a Llama
        note = "\nThe drift it was trained with is merged into its weights.\n"
    lines = ["---", f"library_name: {'qkflow' if form == 'qkflow' else 'transformers'}"]
    lines += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---", ""]
    lines += ["# A decoder trained with qkflow", "", "| | |", "|---|---|", table, note]
    lines += ["## Use", "", "```python", *code, "```", ""]
    return "\n".join(lines)
