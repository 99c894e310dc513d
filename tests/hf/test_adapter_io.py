from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qkflow
from families import disturb, output, tiny, token_ids
from input_errors import raises_code
from qkflow import files, hf


def test_save_load_round_trip_is_small(tmp_path: Path) -> None:
    model = hf.attach(tiny("gpt2"), "affine:hidden_dim=4")
    disturb(model)
    hf.save_adapter(model, tmp_path / "adapter")
    written = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert written == ["coupling.safetensors", "coupling_config.json"]
    added = sum(p.numel() for name, p in model.named_parameters() if ".coupling." in name)
    assert (tmp_path / "adapter" / "coupling.safetensors").stat().st_size < 4 * added + 4096
    other = hf.load_adapter(tiny("gpt2"), tmp_path / "adapter")
    assert torch.equal(output(other, token_ids()), output(model, token_ids()))
    assert [layer.coupling_info.spec for _, layer in hf.named_coupled_layers(other)] == [
        "affine:hidden_dim=4"
    ] * 2


def test_load_in_another_process(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "euler", layers=[1])
    disturb(model)
    hf.save_adapter(model, tmp_path / "adapter")
    torch.save(output(model, token_ids()), tmp_path / "expected.pt")
    code = (
        "import torch; from qkflow import hf; from families import output, tiny, token_ids\n"
        f"model = hf.load_adapter(tiny('llama'), {str(tmp_path / 'adapter')!r})\n"
        f"assert torch.equal(output(model, token_ids()), torch.load({str(tmp_path / 'expected.pt')!r}))\n"
        "print('equal')"
    )
    paths = [str(Path(qkflow.__file__).parents[1]), str(Path(__file__).parents[1] / "helpers")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == "equal", ran.stderr


def test_mismatched_adapter_is_refused(tmp_path: Path) -> None:
    hf.save_adapter(hf.attach(tiny("llama"), "drift"), tmp_path)
    with raises_code("adapter-mismatch"):
        hf.load_adapter(tiny("llama", num_key_value_heads=4), tmp_path)
    with raises_code("adapter-mismatch"):
        hf.load_adapter(tiny("llama", num_hidden_layers=1), tmp_path)
    model = tiny("gpt2")
    with raises_code("adapter-mismatch"):
        hf.load_adapter(model, tmp_path)
    assert not hf.named_coupled_layers(model), "all layers are checked before any is changed"


def test_load_onto_coupled_model_is_refused(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "drift")
    hf.save_adapter(model, tmp_path)
    with raises_code("already-coupled"):
        hf.load_adapter(model, tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "drift")
    hf.save_adapter(model, tmp_path)
    weights = tmp_path / "coupling.safetensors"
    torch.save({"x": torch.ones(1)}, weights)
    with raises_code("not-safetensors"):
        hf.load_adapter(tiny("llama"), tmp_path)
    weights.rename(tmp_path / "coupling.bin")
    with raises_code("no-adapter"):
        hf.load_adapter(tiny("llama"), tmp_path)
    with raises_code("not-a-folder"):
        hf.load_adapter(tiny("llama"), tmp_path / "coupling.bin")


def test_corrupt_adapter_folders_are_refused(tmp_path: Path) -> None:
    with raises_code("no-coupling"):
        hf.save_adapter(tiny("llama"), tmp_path)
    for empty in (tmp_path, tmp_path / "nowhere"):
        with raises_code("no-adapter"):
            hf.load_adapter(tiny("llama"), empty)
    hf.save_adapter(hf.attach(tiny("llama"), "euler"), tmp_path)
    move_config_to_json(tmp_path)
    config = json.loads((tmp_path / "coupling_config.json").read_text())
    config["layers"]["model.layers.0.self_attn"]["coupling"] = "euler:hidden_dim=3"
    (tmp_path / "coupling_config.json").write_text(json.dumps(config))
    with raises_code("corrupt-adapter"):
        hf.load_adapter(tiny("llama"), tmp_path)
    model = tiny("llama")
    config["layers"]["model.layers.0.self_attn"]["coupling"] = "euler"
    config["layers"]["model.layers.1.self_attn"]["coupling"] = "euler:hidden_dim=3"
    (tmp_path / "coupling_config.json").write_text(json.dumps(config))
    with raises_code("corrupt-adapter"):
        hf.load_adapter(model, tmp_path)
    assert not hf.named_coupled_layers(model), "all or nothing"
    (tmp_path / "coupling_config.json").write_text(json.dumps({**config, "layers": {}}))
    with raises_code("corrupt-adapter"):
        hf.load_adapter(model, tmp_path)
    with raises_code("not-a-folder"):
        hf.save_adapter(hf.attach(tiny("llama"), "euler"), tmp_path / "coupling_config.json")
    (tmp_path / "coupling_config.json").write_text(json.dumps({**config, "format": 99}))
    with raises_code("adapter-format"):
        hf.load_adapter(tiny("llama"), tmp_path)
    (tmp_path / "coupling_config.json").write_text("[]")
    with raises_code("corrupt-adapter"):
        hf.load_adapter(tiny("llama"), tmp_path)
    (tmp_path / "coupling_config.json").unlink()
    with raises_code("no-adapter"):
        hf.load_adapter(tiny("llama"), tmp_path)


def move_config_to_json(folder: Path) -> None:
    """Rewrite an adapter in the first format: config in the JSON file only."""
    weights = folder / "coupling.safetensors"
    save_file(load_file(weights), weights, {"format": "pt"})


def test_legacy_config_file_loads(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "affine:hidden_dim=4")
    disturb(model)
    hf.save_adapter(model, tmp_path)
    move_config_to_json(tmp_path)
    assert torch.equal(
        output(hf.load_adapter(tiny("llama"), tmp_path), token_ids()), output(model, token_ids())
    )


@pytest.mark.parametrize(("write", "expected"), [("write_atomic", "old"), ("write_json", "new")])
@pytest.mark.parametrize("legacy", [False, True])
def test_interrupted_save_leaves_old_or_new_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, expected: str, legacy: bool
) -> None:
    models = {
        "old": hf.attach(tiny("llama"), "drift"),
        "new": hf.attach(tiny("llama"), "affine:hidden_dim=4"),
    }
    for model in models.values():
        disturb(model)
    hf.save_adapter(models["old"], tmp_path)
    if legacy:
        move_config_to_json(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, write, full)
    with pytest.raises(OSError, match="No space left"):
        hf.save_adapter(models["new"], tmp_path)
    loaded = hf.load_adapter(tiny("llama"), tmp_path)
    assert torch.equal(output(loaded, token_ids()), output(models[expected], token_ids()))


def test_shared_coupling_is_saved_per_layer(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "euler", seed=0)
    first, second = (layer for _, layer in hf.named_coupled_layers(model))
    second.coupling = first.coupling
    expected = output(model, token_ids())
    hf.save_adapter(model, tmp_path)
    assert torch.equal(output(hf.load_adapter(tiny("llama"), tmp_path), token_ids()), expected)


def test_qkflow_models_are_refused(tmp_path: Path) -> None:
    hf.save_adapter(hf.attach(tiny("llama"), "affine"), tmp_path)
    ours = hf.QKFlowForCausalLM(hf.QKFlowConfig(vocab_size=96, n_layers=2, dim=64, n_heads=4))
    for attempt in (
        lambda: hf.attach(ours),
        lambda: hf.load_adapter(ours, tmp_path),
        lambda: hf.reinitialize(ours),
    ):
        with raises_code("qkflow-model"):
            attempt()
