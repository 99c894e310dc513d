"""The coupling of docs/add_a_coupling.md works everywhere, from a package of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "add_a_coupling.md"
MAX_LINES = 45

CHECKS = """
import sys
import pytest, torch
from qkflow.attention import couplings
from qkflow.bench.variants import all_variants
from qkflow.cli.commands.registry import coupling_rows
from qkflow.measures.attention import probe_attention
from qkflow.models import Decoder, preset
from qkflow.studies.variants import parse_variant

row = next(row for row in coupling_rows() if row["coupling"] == "givens")
assert row["identity at init"] and row["invertible"]
assert "givens" in {variant.name for variant in all_variants()}
assert "givens" in str(parse_variant("givens+differential"))

model = Decoder(preset("tiny", vocab_size=32, n_layers=1, attention={"coupling": "givens"}), seed=0)
with torch.no_grad():
    model.blocks[0].attention.coupling.angle.value.fill_(0.25)
(layer,) = probe_attention(model, torch.arange(16)[None])
assert layer.diagnostics["angle"] == [0.25] * 4

sys.exit(pytest.main(["-n", "0", "-k", "givens", "tests/contracts/test_couplings.py"]))
"""


def test_page_adds_a_coupling(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert block.count("\n") <= MAX_LINES
    package, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "givens.py").write_text(block, "utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (entry_points,) = re.findall(r'"qkflow.couplings"\]\n(.*?)```', PAGE.read_text("utf-8"), re.S)
    (info / "entry_points.txt").write_text("[qkflow.couplings]\n" + entry_points.replace('"', ""))
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
