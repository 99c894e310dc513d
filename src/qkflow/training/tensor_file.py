"""Write named tensors to a safetensors file, which contains no pickle and is safe to load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file. Raise OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()  # safetensors would create it with permissions for the owner only
    try:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"}
        )
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
