"""Write named tensors to a safetensors file, which contains no pickle and is safe to load."""

from __future__ import annotations

import os
import re
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
        code = re.search(r"os error (\d+)", str(error))  # the only place where it names the reason
        if code is not None:
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise OSError(f"cannot write {path}: {error}") from error
