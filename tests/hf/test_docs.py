"""docs/huggingface.md: run its code blocks in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_page_runs_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "LlamaAttention" in printed
    assert printed.count("torch.Size([2, 8])") == 2
    assert (tmp_path / "my-coupling" / "coupling.safetensors").exists()
