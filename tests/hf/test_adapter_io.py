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
from qkflow import files, hf
from qkflow.errors import InputError


def test_what_is_saved_is_small_and_comes_back(tmp_path: Path) -> None:
    model = hf.attach(tiny("gpt2"), "affine:hidden=4")
    disturb(model)
    hf.save_adapter(model, tmp_path / "adapter")
    written = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert written == ["coupling.safetensors", "coupling_config.json"]
    added = sum(p.numel() for name, p in model.named_parameters() if ".coupling." in name)
    assert (tmp_path / "adapter" / "coupling.safetensors").stat().st_size < 4 * added + 4096
    other = hf.load_adapter(tiny("gpt2"), tmp_path / "adapter")
    assert torch.equal(output(other, token_ids()), output(model, token_ids()))
    assert [layer.coupling_info.spec for _, layer in hf.named_coupled_layers(other)] == [
        "affine:hidden=4"
    ] * 2


def test_an_adapter_loads_in_another_process(tmp_path: Path) -> None:
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


def test_an_adapter_for_another_shape_is_refused(tmp_path: Path) -> None:
    hf.save_adapter(hf.attach(tiny("llama"), "drift"), tmp_path)
    with pytest.raises(
        InputError, match=r"another shape: .* had 4 query and 2 key heads of size 16, here .* 4 and 4"
    ):
        hf.load_adapter(tiny("llama", num_key_value_heads=4), tmp_path)
    with pytest.raises(InputError, match=r"layer 'model.layers.1.self_attn', which this model does not have"):
        hf.load_adapter(tiny("llama", num_hidden_layers=1), tmp_path)
    model = tiny("gpt2")
    with pytest.raises(InputError, match=r"does not have: its attention layers are transformer.h.0.attn"):
        hf.load_adapter(model, tmp_path)
    assert not hf.named_coupled_layers(model), "a refused adapter changes nothing"


def test_loading_onto_a_coupled_model_is_refused(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "drift")
    hf.save_adapter(model, tmp_path)
    with pytest.raises(InputError, match=r"already has the coupling 'drift'"):
        hf.load_adapter(model, tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "drift")
    hf.save_adapter(model, tmp_path)
    weights = tmp_path / "coupling.safetensors"
    torch.save({"x": torch.ones(1)}, weights)
    with pytest.raises(InputError, match=r"not a safetensors file.*pickles are never opened"):
        hf.load_adapter(tiny("llama"), tmp_path)
    weights.rename(tmp_path / "coupling.bin")
    with pytest.raises(InputError, match=r"holds no coupling.safetensors; coupling.bin there is a pickle"):
        hf.load_adapter(tiny("llama"), tmp_path)
    with pytest.raises(InputError, match=r"is a pickle, which is never opened: give the folder"):
        hf.load_adapter(tiny("llama"), tmp_path / "coupling.bin")


def test_broken_folders_are_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing to save"):
        hf.save_adapter(tiny("llama"), tmp_path)
    for empty in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"holds no coupling.safetensors: give the folder"):
            hf.load_adapter(tiny("llama"), empty)
    hf.save_adapter(hf.attach(tiny("llama"), "euler"), tmp_path)
    config_only_beside(tmp_path)
    config = json.loads((tmp_path / "coupling_config.json").read_text())
    config["layers"]["model.layers.0.self_attn"]["coupling"] = "euler:hidden=3"
    (tmp_path / "coupling_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"do not fit its config"):
        hf.load_adapter(tiny("llama"), tmp_path)
    model = tiny("llama")
    config["layers"]["model.layers.0.self_attn"]["coupling"] = "euler"
    config["layers"]["model.layers.1.self_attn"]["coupling"] = "euler:hidden=3"
    (tmp_path / "coupling_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"do not fit its config"):
        hf.load_adapter(model, tmp_path)
    assert not hf.named_coupled_layers(model), "all or nothing"
    (tmp_path / "coupling_config.json").write_text(json.dumps({**config, "layers": {}}))
    with pytest.raises(InputError, match=r"names no layer"):
        hf.load_adapter(model, tmp_path)
    with pytest.raises(InputError, match=r"is a file: give a folder"):
        hf.save_adapter(hf.attach(tiny("llama"), "euler"), tmp_path / "coupling_config.json")
    (tmp_path / "coupling_config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(InputError, match=r"form that this version does not know"):
        hf.load_adapter(tiny("llama"), tmp_path)
    (tmp_path / "coupling_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"the config in '.*' is not a coupling's"):
        hf.load_adapter(tiny("llama"), tmp_path)
    (tmp_path / "coupling_config.json").unlink()
    with pytest.raises(InputError, match=r"holds no coupling_config.json"):
        hf.load_adapter(tiny("llama"), tmp_path)


def config_only_beside(folder: Path) -> None:
    """As couplings were saved at first: the config is in a file of its own, and nowhere else."""
    weights = folder / "coupling.safetensors"
    save_file(load_file(weights), weights, {"format": "pt"})


def test_couplings_saved_with_a_config_beside_them_load(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "affine:hidden=4")
    disturb(model)
    hf.save_adapter(model, tmp_path)
    config_only_beside(tmp_path)
    assert torch.equal(
        output(hf.load_adapter(tiny("llama"), tmp_path), token_ids()), output(model, token_ids())
    )


@pytest.mark.parametrize(("write", "survivor"), [("write_atomic", "old"), ("write_json", "new")])
@pytest.mark.parametrize("beside", [False, True])
def test_a_save_that_is_cut_short_leaves_one_whole_coupling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, survivor: str, beside: bool
) -> None:
    models = {"old": hf.attach(tiny("llama"), "drift"), "new": hf.attach(tiny("llama"), "affine:hidden=4")}
    for model in models.values():
        disturb(model)
    hf.save_adapter(models["old"], tmp_path)
    if beside:
        config_only_beside(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, write, full)
    with pytest.raises(OSError, match="No space left"):
        hf.save_adapter(models["new"], tmp_path)
    loaded = hf.load_adapter(tiny("llama"), tmp_path)
    assert torch.equal(output(loaded, token_ids()), output(models[survivor], token_ids()))


def test_layers_that_share_a_coupling_are_saved_each(tmp_path: Path) -> None:
    model = hf.attach(tiny("llama"), "euler", seed=0)
    first, second = (layer for _, layer in hf.named_coupled_layers(model))
    second.coupling = first.coupling
    expected = output(model, token_ids())
    hf.save_adapter(model, tmp_path)
    assert torch.equal(output(hf.load_adapter(tiny("llama"), tmp_path), token_ids()), expected)


def test_our_own_models_have_their_coupling_in_their_config(tmp_path: Path) -> None:
    hf.save_adapter(hf.attach(tiny("llama"), "affine"), tmp_path)
    ours = hf.QKFlowForCausalLM(hf.QKFlowConfig(vocab_size=96, n_layers=2, dim=64, n_heads=4))
    for attempt in (
        lambda: hf.attach(ours),
        lambda: hf.load_adapter(ours, tmp_path),
        lambda: hf.reinitialize(ours),
    ):
        with pytest.raises(InputError, match=r"this is a qkflow model, whose coupling and start"):
            attempt()
