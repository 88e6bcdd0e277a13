"""The identity of a checkpoint's weights, from headers and sampled content, without reading whole files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from anaphora.checkpoint import gguf
from anaphora.errors import ModelError

WEIGHTS = "*.safetensors"
_WHOLE_FILE = 64 * 2**20
_SAMPLE = 256


def folder_identity(folder: Path) -> str:
    """Digest of config.json and the weights of a folder, without reading large files whole.

    A converted GGUF folder keeps the identity that its conversion recorded. Otherwise a safetensors file above 64 MB
    counts by its header (names, shapes, offsets) and 256 bytes from the middle of each tensor; smaller files count
    whole. Raises ModelError for a folder that holds no model.
    """
    if (record := folder / gguf.RECORD).is_file() and folder.parent == gguf.cache_folder() / "gguf":
        return str(json.loads(record.read_text())["identity"])
    config = _config(folder)
    weights = sorted(folder.glob(WEIGHTS))
    if not weights:
        raise ModelError(f"{folder} has no *.safetensors file; pickled weights (*.bin) are not loaded: convert them")
    digest = hashlib.sha256()
    for path in (config, *sorted(folder.glob("*.safetensors.index.json")), *weights):
        _add(digest, path.name.encode())
        _add(digest, str(path.stat().st_size).encode())
        if path.suffix == ".safetensors" and path.stat().st_size > _WHOLE_FILE:
            _add_samples(digest, path)
        else:
            _add(digest, bytes.fromhex(gguf.file_sha256(path)))
    return f"folder-sha256:{digest.hexdigest()}"


def config_identity(folder: Path) -> str:
    """Identity of a model of this shape with random weights. Raises ModelError if there is no config.json."""
    return f"dummy-sha256:{gguf.file_sha256(_config(folder))}"


def _config(folder: Path) -> Path:
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is not a model folder in Hugging Face layout{folder_hint(folder)}"
        )
    return config


def _add(digest: hashlib._Hash, field: bytes) -> None:
    """Add a length-framed field."""
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    """Add the header of a safetensors file and a few bytes of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= path.stat().st_size - 8:
            raise ModelError(f"{path} is not a safetensors file: its header would be {length} bytes long")
        header = file.read(length)
        _add(digest, header)
        try:
            tensors = json.loads(header)
            ranges = sorted(entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} is not a safetensors file: its header cannot be read ({error})") from error
        for begin, end in ranges:
            file.seek(8 + length + (begin + end) // 2)
            _add(digest, file.read(min(_SAMPLE, end - begin)))


def folder_hint(folder: Path) -> str:
    """Points to a GGUF file in the folder, for an error message; empty if there is none."""
    found = sorted(path.name for path in folder.glob("*.gguf"))
    return f"; to serve a GGUF file, name the file: {folder / found[0]}" if found else ""
