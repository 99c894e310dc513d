"""Model card of an exported model."""

from __future__ import annotations

from qkflow.attention import couplings
from qkflow.attention.registry import Spec
from qkflow.models import ModelConfig


def create_model_card(config: ModelConfig, n_params: int, export_format: str) -> str:
    """Return the README.md of an exported model: metadata for the Hub, sizes, and how to load it."""
    attention = config.attention
    coupling = couplings.get(Spec.parse(attention.coupling).name)
    coupled = attention.coupling != "none" and export_format == "qkflow"
    tags = ["qkflow", f"coupling:{coupling.name}"] if export_format == "qkflow" else ["llama"]
    rows = {
        "parameters": f"{n_params:,}",
        "n_layers × dim": f"{config.n_layers} × {config.dim}",
        "n_heads (n_kv_heads)": f"{config.n_heads} ({config.n_kv_heads or config.n_heads})",
        "vocab_size": f"{config.vocab_size:,}",
        "feed-forward": f"{config.feed_forward}, {config.resolved_hidden_dim}",
        "coupling": f"`{attention.coupling}`: {coupling.equation}" if coupled else "`none`",
        "scoring": f"`{attention.scoring}`",
        "init": f"`{config.init}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    extra = ['import qkflow.hf  # pip install "qkflow[hf]"; registers the architecture']
    code = [
        *(extra if export_format == "qkflow" else []),
        "from transformers import pipeline",
        "",
        'generate = pipeline("text-generation", model="path/or/name/of/this/model")',
        'print(generate("Once", max_new_tokens=32)[0]["generated_text"])',
    ]
    note = f"\nCoupling: {coupling.citation}.\n" if coupled else ""
    if attention.coupling != "none" and not coupled:  # only a linear coupling exports to Llama
        note = "\nThe drift it was trained with is merged into its weights.\n"
    lines = ["---", f"library_name: {'qkflow' if export_format == 'qkflow' else 'transformers'}"]
    lines += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---", ""]
    lines += ["# A decoder trained with qkflow", "", "| | |", "|---|---|", table, note]
    lines += ["## Use", "", "```python", *code, "```", ""]
    return "\n".join(lines)
