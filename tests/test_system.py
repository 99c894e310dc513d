from __future__ import annotations

import os

import pytest
import torch

from input_errors import raises_code
from qkflow import system


def test_process_cpu_count_respects_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert system.process_cpu_count() == 2


def test_auto_prefers_cuda_then_mps_then_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert system.resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert system.resolve_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert system.resolve_device("auto") == torch.device("cuda")
    assert system.resolve_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("gpu", "unknown-device"),
        ("meta", "device-unavailable"),
        ("cuda", "device-unavailable"),
        ("cuda:3", "device-unavailable"),
    ],
)
def test_unusable_device_is_refused(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises_code(code):
        system.resolve_device(name)


def test_collect_env_names_versions_and_device() -> None:
    env = system.collect_env()
    assert env["torch"] == torch.__version__
    assert env["device"] == "cpu"
    assert env["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("capabilities", "expected"), [({"avx512_bf16": False}, False), ({"avx512_bf16": True}, True), ({}, True)]
)
def test_bfloat16_instructions(
    capabilities: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert system.has_bfloat16_instructions(torch.device("cpu")) is expected
    assert system.has_bfloat16_instructions(torch.device("cuda"))
