"""qkflow models in TransformerLens; skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformer_lens.model_bridge", exc_type=ImportError)

from qkflow.hf.modeling import QKFlowConfig, QKFlowForCausalLM
from qkflow.hf.transformer_lens import bridge_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.mark.parametrize("tied", [True, False])
def test_bridge_computes_the_same(tied: bool) -> None:
    torch.manual_seed(0)
    config = QKFlowConfig(
        vocab_size=32, n_layers=2, dim=32, n_heads=2, tie_embeddings=tied, attention={"coupling": "euler"}
    )
    model = QKFlowForCausalLM(config).eval()
    attention = model.model.decoder.blocks[0].attention
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        embedded = model.model.decoder.blocks[0].attention_norm(model.model.decoder.embedding(IDS))
        weights = attention.reference(embedded)[1]
        logits, cache = bridge_model(model).run_with_cache(IDS)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(cache["blocks.0.attn.hook_pattern"], weights)
    assert cache["blocks.1.hook_resid_post"].shape == (1, 8, 32)


def test_bridge_intervenes() -> None:
    torch.manual_seed(0)
    model = QKFlowForCausalLM(QKFlowConfig(vocab_size=32, n_layers=2, dim=32, n_heads=2)).eval()
    bridge = bridge_model(model)
    with torch.no_grad():
        before = bridge(IDS)
        off = bridge.run_with_hooks(IDS, fwd_hooks=[("blocks.0.mlp.hook_out", lambda x, hook: x * 0)])
    assert not torch.allclose(before, off)
