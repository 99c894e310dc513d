"""Named tensors in one safetensors file: no pickle, so safe to read from anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file and see it to the disk; raises OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # The file exists first, with the permissions of any other: the library alone would make it private.
    path.touch()
    try:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"}
        )
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
