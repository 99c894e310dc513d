from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from families import tiny, token_ids
from input_errors import raises_code
from qkflow import hf
from qkflow.hf.split_qkv import is_qkv_split


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    return TrainingArguments(str(folder), **{**options, **changes})


def rows() -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": ids} for ids in token_ids(8, 6).tolist()]


def train(model: Any, folder: Path, *callbacks: Any, resume: bool = False, **changes: Any) -> Any:
    trainer = Trainer(model, arguments(folder, **changes), train_dataset=rows(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return model


def same(first: Any, second: Any) -> None:
    for (name, a), (other, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert name == other
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def train_with_param_groups(model: Any, folder: Path, ratio: float) -> Any:
    """The same training with an optimizer made of `param_groups`, and the Trainer's own schedule."""
    groups = hf.param_groups(model, 1e-3, ratio=ratio, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, fused=True)  # the Trainer's default
    Trainer(model, arguments(folder), train_dataset=rows(), optimizers=(optimizer, None)).train()
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_callback_matches_param_groups(family: str, tmp_path: Path) -> None:
    # without dropout, and with weight decay on the same parameters, the two differ in nothing
    changes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    trained = train(tiny(family, **changes), tmp_path / "a", hf.PaceCallback(8))
    expected = train_with_param_groups(tiny(family, **changes), tmp_path / "b", 8)
    hf.fuse_qkv(trained)
    hf.fuse_qkv(expected)
    same(trained, expected)
    plain = train(tiny(family, **changes), tmp_path / "c")
    moved = [
        name
        for name, value in plain.state_dict().items()
        if not torch.equal(value, trained.state_dict()[name])
    ]
    assert moved, "the ratio makes a difference"


def test_ratio_one_changes_nothing(tmp_path: Path) -> None:
    same(train(tiny("llama"), tmp_path / "a", hf.PaceCallback(1)), train(tiny("llama"), tmp_path / "b"))


def test_learning_rates(tmp_path: Path) -> None:
    seen: list[list[float]] = []
    model = tiny("llama")
    trainer = Trainer(
        model, arguments(tmp_path), train_dataset=rows(), callbacks=[hf.PaceCallback("increasing:5")]
    )
    optimizer = trainer.create_optimizer()
    inner = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        seen.append([group["lr"] for group in optimizer.param_groups])
        return inner(*args, **kwargs)

    optimizer.step = step
    trainer.train()
    base = [1e-3 * (1 - done / 4) for done in range(4)]
    factors = [1 + 4 * done / 4 for done in range(4)]
    # the decaying matrices are cut in two, the vectors (norms) are not
    expected = [[rate, rate * factor, rate] for rate, factor in zip(base, factors, strict=True)]
    for got, wanted in zip(seen, expected, strict=True):
        assert got == pytest.approx(wanted)
    assert len(optimizer.param_groups) == 2, "between steps the groups are the Trainer's own"


def test_resume(tmp_path: Path) -> None:
    whole = train(tiny("llama"), tmp_path / "a", hf.PaceCallback("increasing:9"))
    keep = {"save_strategy": "steps", "save_steps": 2}

    class StopAtTwo(hf.PaceCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 2
            control.should_save = state.global_step == 2

    train(tiny("llama"), tmp_path / "b", StopAtTwo("increasing:9"), **keep)
    resumed = train(tiny("llama"), tmp_path / "b", hf.PaceCallback("increasing:9"), resume=True, **keep)
    same(whole, resumed)


def test_trainer_splits_fused_weights(tmp_path: Path) -> None:
    model = tiny("gpt2")
    names = set(model.state_dict())
    Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[hf.PaceCallback(2)])
    assert is_qkv_split(model.transformer.h[0].attn.c_attn)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("late", ["add_callback", "model_init"])
def test_unsplit_fused_weights_are_refused(late: str, tmp_path: Path) -> None:
    def run(split: bool) -> Any:
        def make() -> Any:
            model = tiny("gpt2")
            if split:
                hf.split_fused_qkv(model)
            return model

        if late == "model_init":
            callbacks = [hf.PaceCallback(20)]
            trainer = Trainer(
                args=arguments(tmp_path), train_dataset=rows(), model_init=make, callbacks=callbacks
            )
        else:
            trainer = Trainer(make(), arguments(tmp_path), train_dataset=rows())
            trainer.add_callback(hf.PaceCallback(20))
        return trainer.train()

    with raises_code("fused-qkv"):
        run(split=False)
    assert run(split=True).global_step == 4


def test_qk_roles_include_coupling(tmp_path: Path) -> None:
    def trained(callback: Any) -> Any:
        model = hf.attach(tiny("llama"), "euler", seed=0)
        return train(model, tmp_path, callback).state_dict()

    only = trained(hf.PaceCallback(4))
    along = trained(hf.PaceCallback(4, qk_roles=("q", "k", "qk", "coupling")))
    name = "model.layers.0.self_attn.coupling.step.value"
    assert not torch.equal(only[name], along[name])


def test_bad_ratios_are_refused(tmp_path: Path) -> None:
    with raises_code("invalid-ratio"):
        hf.PaceCallback(0)
    with raises_code("invalid-ratio"):
        hf.PaceCallback("fast")
    with raises_code("ratio-ramp-too-long"):
        train(tiny("llama"), tmp_path, hf.PaceCallback("increasing:3:steps=9"))
    frozen = tiny("llama")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("mlp" in name)
    with raises_code("no-qk-parameters"):
        train(frozen, tmp_path, hf.PaceCallback(2))
