"""Damage a file. A mutation is (path, operator, seed), so that a case can be printed and repeated."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hostile_tokenizers import HOSTILE_TOKENIZERS, MORE_TOKENIZERS
from qkflow.data import token_set

SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
# Values of every type that readers must refuse or show as text. Numbers are small or absurd: what lies
# between is a legal request for a long computation.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e-300, 1e308, 99999999999, 2**63 - 1, 2**64, 10**23),
    *(float("nan"), float("inf"), -float("inf"), "", " ", "x", "1", "nan", "2024-13-45", SCRIPT),
    *(
        "../../../etc/passwd",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "C:\\x",
        "\udcff",
        "\x00",
        "\x1b[31m",
        "[/bold]",
    ),
    *("{{7*7}}", "é" * 300, "x" * 100_000, [], {}, [[]], [None], {"": 1}, {"a": {"b": []}}, [1, "x", None]),
]
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join(['*' + before] * 9)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)
DEEP = 20_000


def apply_mutation(root: Path, path: str, operator: str, seed: int) -> None:
    """Damage `root/path`. An operator that does not suit the file leaves it as it is."""
    target = root / path
    if target.is_file() and not target.is_symlink():
        with suppress(
            *(ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error, yaml.YAMLError)
        ):
            OPERATORS[operator](target, random.Random(seed))
            if seed % 2:
                _seal(target)


def _seal(path: Path) -> None:
    """Let the checksums of a token set or a checkpoint agree with the damage, as a stranger would."""
    for name, key in (("manifest.json", "seal"), ("checkpoint.json", "checksum")):
        manifest_path = path.with_name(name)
        if not manifest_path.is_file() or manifest_path.stat().st_size > 1 << 20:
            continue
        manifest = json.loads(manifest_path.read_bytes())
        if path.is_file() and path.name in manifest["files"] and path.stat().st_size < 1 << 20:
            entry = {"bytes": path.stat().st_size, "sha256": token_set._checksum(path)}
            manifest["files"][path.name].update(entry, sample=token_set._sampled_checksum(path))
        del manifest[key]
        _replace(manifest_path, json.dumps(manifest | {key: token_set._manifest_checksum(manifest)}).encode())


def _replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    _replace(path, content[: rng.randrange(len(content) + 1)])


def flip_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 4, 64)) if content else 0):
        content[rng.randrange(len(content))] = rng.randrange(256)
    _replace(path, bytes(content))


def insert_bytes(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    at = rng.randrange(len(content) + 1)
    piece = rng.choice(
        (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\r\n", b"'", b"}", b": ", b"\t", b"%")
    )
    _replace(path, content[:at] + piece * rng.choice((1, 3, 1000)) + content[at:])


def replace_content(path: Path, rng: random.Random) -> None:
    """Replace the file by something else altogether."""
    nested = b"[" * DEEP + b"]" * DEEP
    objects = b'{"a":' * DEEP + b"1" + b"}" * DEEP
    _replace(
        path,
        rng.choice(
            (
                *(b"", b"\n", b"null", b"[]", b"{}", b"0", b'"text"', b"NaN", b"- \n- ", b"9" * 5000, nested),
                *(objects, BOMB.encode(), b"<<: *x", b"? [a, b]\n: c", b"2024-13-45", b"a: 2024-13-45"),
                *(b"!!python/object/apply:os.system [touch pwned]", b"a: 0x" + b"f" * 9000, b"{a: 1, a: 2}"),
                *(pickle.dumps({"a": 1}), b"\x80\x04\x95", b"PK\x03\x04", b"\x00" * 4096, b"\xff" * 100),
                *(b"a: " + b"{b: " * 2000 + b"1" + b"}" * 2000, b"1:2:3:4", b"=", b"_", b"1_000:59"),
                *(b'a: "\\UFFFFFFFF"', b"a: 1:1" + b":1" * 2000 + b".5", b"- 1\n" * 600_000),
            )
        ),
    )


def replace_by_other(path: Path, rng: random.Random) -> None:
    """Replace the file by a folder, a link, a pipe, a socket or nothing."""
    path.unlink()
    kind = rng.choice(("nothing", "folder", "loop", "dangling", "pipe", "socket", "device", "huge"))
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            here = os.open(path.parent, os.O_RDONLY)  # the path of a socket is short
            try:
                server.bind(f"/proc/self/fd/{here}/{path.name}")
            finally:
                os.close(here)
    elif kind == "device":
        path.symlink_to(rng.choice(("/dev/zero", "/dev/full", "/dev/null", "/dev/tty")))
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # sparse: no space is used


def change_value(path: Path, rng: random.Random) -> None:
    """Change one value of a JSON, JSON Lines or YAML file: another value, another key, or none."""
    text = path.read_text("utf-8")
    if path.suffix in (".yaml", ".yml"):
        values = _changed(yaml.safe_load(text), rng)
        try:
            _replace(path, yaml.safe_dump(values, sort_keys=False).encode(errors="surrogateescape"))
        except yaml.YAMLError:
            _replace(path, json.dumps(values).encode())
    elif path.suffix == ".jsonl":
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(_changed(json.loads(lines[at]), rng))
        _replace(path, "\n".join(lines).encode())
    elif path.name == "tokenizer.json" and rng.random() < 0.5:
        section = rng.choice([*HOSTILE_TOKENIZERS.values(), *MORE_TOKENIZERS.values()])
        _replace(path, json.dumps(json.loads(text) | section).encode())
    elif path.suffix == ".json":
        _replace(path, json.dumps(_changed(json.loads(text), rng)).encode())
    elif path.suffix == ".safetensors":
        change_header(path, rng)
    else:
        flip_bytes(path, rng)


def _changed(values: Any, rng: random.Random) -> Any:
    """Return `values` with one node changed; nodes near the root are as likely as all leaves together."""
    if rng.random() < 0.25 or not isinstance(values, dict | list) or not values:
        if not isinstance(values, dict) or not values or rng.random() < 0.3:
            return rng.choice(VALUES)
        kept = dict(values)
        key = rng.choice(list(kept))
        match rng.randrange(3):
            case 0:
                del kept[key]
            case 1:
                kept[rng.choice((SCRIPT, "", "x", "../x", f"{key}s"))] = kept.pop(key)
            case _:
                kept[rng.choice(("x", "", SCRIPT))] = rng.choice(VALUES)
        return kept
    if isinstance(values, dict):
        key = rng.choice(list(values))
        return {**values, key: _changed(values[key], rng)}
    at = rng.randrange(len(values))
    return [*values[:at], _changed(values[at], rng), *values[at + 1 :]]


def change_header(path: Path, rng: random.Random) -> None:
    """Let the header of a safetensors file lie about names, shapes, types and offsets; or store NaN."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    match rng.randrange(9):
        case 8:  # finite, and too large to compute with
            data = struct.pack("<f", rng.choice((7.2e16, 1e12, -1e30, 3e38))) * (len(data) // 4)
        case 0:
            header[name]["shape"] = rng.choice(
                ([], [0], [-1], [2**40, 2**40], [1], [16], ["x"], None, [10**30])
            )
        case 1:
            header[name]["dtype"] = rng.choice(("F64", "I8", "BOOL", "F8_E4M3", "X", "", None, 1))
        case 2:
            header[name]["data_offsets"] = rng.choice(([0, 0], [0, 2**63], [-1, 4], [4, 0], [0], "x", None))
        case 3:
            header[rng.choice(("../../x", "/etc/x", SCRIPT, "", "x", "é"))] = header.pop(name)
        case 4:
            data = struct.pack("<f", rng.choice((float("nan"), float("inf")))) * (len(data) // 4)
        case 5:
            header = _changed(header, rng)
        case 6:
            header["__metadata__"] = rng.choice((None, {}, {"format": 1}, {"format": "x"}, [], "x"))
        case _:
            _replace(
                path,
                struct.pack("<Q", rng.choice((0, 1, 2**63, 2**64 - 1, length + 1, length - 1))) + content[8:],
            )
            return
    encoded = json.dumps(header).encode()
    _replace(path, struct.pack("<Q", len(encoded)) + encoded + data)


OPERATORS: dict[str, Callable[[Path, random.Random], None]] = {
    function.__name__: function
    for function in (
        truncate,
        flip_bytes,
        insert_bytes,
        replace_content,
        replace_by_other,
        change_value,
        change_header,
    )
}


def copy_item(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy(source, target)
