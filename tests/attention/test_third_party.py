"""A coupling of another package, registered through its entry point; in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PART = '''
from qkflow.attention.couplings.base import Coupling

class Swap(Coupling):
    """q ← k ; k ← q."""
    name = "swap"
    equation = "q ← k ; k ← q"
    citation = "none"
    good_for = "this test"

    def __init__(self, head_shapes, factory_kwargs):
        super().__init__(head_shapes)

    def forward(self, q, k):
        return k, q

    reference = forward
'''


def test_entry_point_adds_a_coupling(tmp_path: Path) -> None:
    (tmp_path / "swapping.py").write_text(PART)
    info = tmp_path / "swapping-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swapping\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[qkflow.couplings]\nswap = swapping:Swap\n")
    code = (
        "import torch, qkflow; from qkflow.attention import couplings; assert 'swap' in couplings.names();"
        "a = qkflow.Attention(8, 2, coupling='swap'); x = torch.randn(1, 4, 8);"
        "assert torch.allclose(a(x), a.reference(x)[0], atol=1e-6);"
        "from qkflow.bench.variants import all_variants;"
        "print([row.coupling for row in all_variants() if row.name == 'swap'])"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['swap']", done.stderr
