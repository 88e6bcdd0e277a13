"""Converts a GGUF file, once, to a safetensors folder in the user's cache folder.

A GGUF file takes many seconds to load each time; the converted folder takes about one. The conversion runs in a
separate process (``python -m anaphora.checkpoint.gguf SOURCE TARGET``), so the caller needs neither its memory nor
torch. It works in a temporary folder under a lock and ends with a rename, so a folder is either complete or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anaphora.checkpoint.gguf_tokenizer import GgufTokenizer
from anaphora.errors import ModelError

CONVERTER = 1
"""Version of the conversion, part of the folder's name and identity. Raise it when the output changes."""
DTYPE = "bfloat16"
RECORD = "anaphora.json"

Progress = Callable[[str], None]

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class Converted:
    """A finished conversion: the folder and the identity of its weights."""

    folder: Path
    identity: str


def cache_folder() -> Path:
    """$ANAPHORA_CACHE, else $XDG_CACHE_HOME/anaphora, else ~/.cache/anaphora."""
    if own := os.environ.get("ANAPHORA_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "anaphora"


def file_sha256(path: Path) -> str:
    """Hex digest of a file's whole content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def identity_of(sha256: str) -> str:
    """Identity of the weights converted from a source with this digest."""
    return f"gguf-sha256:{sha256}:converter-{CONVERTER}:{DTYPE}"


def check(path: Path) -> None:
    """Raise ModelError if the file cannot be converted."""
    if _SPLIT.search(path.name):
        raise ModelError(f"{path} is one part of a split GGUF; join the parts with llama.cpp's gguf-split --merge")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"the GGUF file {path} cannot be read: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'; download it again")


def find(name: str, sha256: str) -> Converted | None:
    """The finished conversion of a source with this digest, or None. ``name`` only makes the folder readable."""
    folder = _target(name, sha256)
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return Converted(folder, record["identity"]) if record.get("identity") == identity_of(sha256) else None


def convert(path: Path, name: str, sha256: str, progress: Progress) -> Converted:
    """Convert ``path`` unless it is converted already. Raises ModelError, with the reason, if that fails.

    Several processes may call this at the same time: one converts, the others wait for it.
    """
    if done := find(name, sha256):
        return done
    folder = _target(name, sha256)
    with _locked(folder, progress):
        if done := find(name, sha256):
            return done
        for stale in (*folder.parent.glob(f"{folder.name}.tmp-*"), folder):
            shutil.rmtree(stale, ignore_errors=True)
        work = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        try:
            work.mkdir()
            _run_converter(path, work, progress)
            record = {
                "identity": identity_of(sha256),
                "source": path.name,
                "source_sha256": sha256,
                "converter": CONVERTER,
                "dtype": DTYPE,
            }
            (work / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            _sync(work)
            work.rename(folder)
        except OSError as error:
            raise ModelError(f"cannot write the converted model to {folder}: {error}; set ANAPHORA_CACHE") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    progress(f"Converted model: {folder}")
    return Converted(folder, identity_of(sha256))


def _target(name: str, sha256: str) -> Path:
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    return cache_folder() / "gguf" / f"{readable}-{sha256[:16]}-v{CONVERTER}-{DTYPE}"


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("Another process is converting the model; waiting for it")
            lock.acquire()
    except OSError as error:
        raise ModelError(f"cannot write to the cache folder {folder.parent}: {error}; set ANAPHORA_CACHE") from error
    try:
        yield
    finally:
        lock.release()


def _sync(folder: Path) -> None:
    """Flush the files to disk before the rename, so that a power cut cannot leave a folder with empty files."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _run_converter(path: Path, target: Path, progress: Progress) -> None:
    """Run ``_write_folder`` in a process of its own and pass on its progress."""
    progress(f"Converting {path.name} to safetensors, once: about half a minute for a small model")
    # -P: a file named like a library in the caller's working directory must not be imported.
    command = [sys.executable, "-P", "-m", "anaphora.checkpoint.gguf", str(path.resolve()), str(target)]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | quiet, errors="replace"
    ) as child:
        last: list[str] = []
        for line in child.stdout or ():
            if line.startswith("progress: "):
                progress(line.removeprefix("progress: ").rstrip())
            elif line.strip():
                last = [*last[-19:], line.rstrip()]
    if child.returncode:
        reason = last[-1].rstrip(".") if last else f"exit code {child.returncode}"
        raise ModelError(
            f"{path} could not be converted: {reason}. transformers reads only some GGUF architectures; "
            "name the model's Hugging Face folder instead"
        )


# --- In the converter's own process ---------------------------------------------------------------------------------


def _write_folder(source: Path, target: Path) -> None:
    """Load ``source`` with its weights dequantised to bfloat16; save model, tokenizer and template to ``target``."""
    tokenizer = GgufTokenizer(source)  # first, to find a broken file before torch is loaded
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    unpacked = transformers.GgufConfig(dequantize=True)
    print("progress: reading the weights", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=unpacked, dtype=getattr(torch, DTYPE)
    )
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(attribute, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    print("progress: writing the weights", flush=True)
    model.save_pretrained(target)
    print("progress: writing the tokenizer", flush=True)
    if tokenizer.can_write:
        tokenizer.write(target)
    else:
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    tokenizer.correct_special_tokens(target)


if __name__ == "__main__":
    _write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
