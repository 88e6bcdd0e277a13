from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from anaphora.checkpoint import gguf
from anaphora.errors import ModelError
from anaphora.text.tokenizer import Tokenizer
from tests.support import vocabularies

pytestmark = pytest.mark.slow

HIDDEN, HEADS, KV_HEADS, FEED, LAYERS = 32, 4, 2, 64, 2
SHA = "ab" * 32


def quiet(text: str) -> None:
    """No progress is shown."""


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp orders them for its rotary embedding."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny random Llama with a byte-level tokenizer; returns the weights under their Hugging Face names."""
    from gguf import GGUFWriter

    vocabulary = json.loads(vocabularies.make("byte_level").to_str())["model"]
    tokens = list(vocabulary["vocab"])
    random = np.random.default_rng(0)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in vocabularies.SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")
    weights: dict[str, np.ndarray] = {}

    def add(theirs: str, ours: str, *shape: int, heads: int = 0) -> None:
        weight = random.normal(0, 0.3, shape).astype(np.float32)
        weights[ours] = weight
        writer.add_tensor(theirs, permuted(weight, heads) if heads else weight)

    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    head = HIDDEN // HEADS
    for layer in range(LAYERS):
        theirs, ours = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{theirs}.attn_norm.weight", f"{ours}.input_layernorm.weight", HIDDEN)
        add(f"{theirs}.attn_q.weight", f"{ours}.self_attn.q_proj.weight", HIDDEN, HIDDEN, heads=HEADS)
        add(f"{theirs}.attn_k.weight", f"{ours}.self_attn.k_proj.weight", KV_HEADS * head, HIDDEN, heads=KV_HEADS)
        add(f"{theirs}.attn_v.weight", f"{ours}.self_attn.v_proj.weight", KV_HEADS * head, HIDDEN)
        add(f"{theirs}.attn_output.weight", f"{ours}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
        add(f"{theirs}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight", HIDDEN)
        add(f"{theirs}.ffn_gate.weight", f"{ours}.mlp.gate_proj.weight", FEED, HIDDEN)
        add(f"{theirs}.ffn_up.weight", f"{ours}.mlp.up_proj.weight", FEED, HIDDEN)
        add(f"{theirs}.ffn_down.weight", f"{ours}.mlp.down_proj.weight", HIDDEN, FEED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_conversion_keeps_weights_tokenizer_and_template(cache: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    path = tmp_path / "tiny.gguf"
    weights = write_gguf(path)
    said: list[str] = []
    done = gguf.convert(path, "tiny", gguf.file_sha256(path), said.append)
    assert said[0].startswith("Converting tiny.gguf")
    assert done == gguf.find("tiny", gguf.file_sha256(path))

    stored = load_file(done.folder / "model.safetensors")
    assert set(weights) <= set(stored)
    for name, weight in weights.items():
        assert torch.equal(stored[name], torch.from_numpy(weight).bfloat16()), name
    config = json.loads((done.folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["num_key_value_heads"]) == ("bfloat16", KV_HEADS)

    tokenizer = Tokenizer.load(done.folder)
    original = vocabularies.make("byte_level")
    text = "The quick brown fox, grün 😀<|im_end|>"
    assert tokenizer.encode(text) == original.encode(text).ids
    digits = tokenizer.encode("12345")
    assert [tokenizer.token_text(token_id) for token_id in digits] == list("12345")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (2, (3,))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]) == "x"
    assert {entry.name for entry in (cache / "gguf").iterdir()} == {done.folder.name, f"{done.folder.name}.lock"}


def test_a_file_that_cannot_be_converted_is_named_with_the_reason(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 60)
    with pytest.raises(ModelError, match=r"odd\.gguf could not be converted: \S+"):
        gguf.convert(path, "odd", SHA, quiet)
    assert [entry.suffix for entry in (cache / "gguf").iterdir()] == [".lock"]


# --- once, atomically, under a lock: with a stand-in for the conversion itself ----------------------------------------


@pytest.fixture
def conversions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that the stand-in has filled."""
    filled: list[Path] = []

    def fill(path: Path, target: Path, progress: gguf.Progress) -> None:
        (target / "config.json").write_text("{}")
        filled.append(target)

    monkeypatch.setattr(gguf, "_run_converter", fill)
    return filled


def test_converted_once_by_many_at_a_time(conversions: list[Path], tmp_path: Path) -> None:
    found: list[gguf.Converted] = []
    threads = [
        threading.Thread(target=lambda: found.append(gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(set(found)) == 1
    assert len(found) == 8
    assert (found[0].folder / "config.json").is_file()


def test_what_a_crash_left_behind_is_removed(conversions: list[Path], cache: Path, tmp_path: Path) -> None:
    done = gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet)
    (done.folder / gguf.RECORD).unlink()
    stale = done.folder.with_name(f"{done.folder.name}.tmp-1")
    stale.mkdir()
    (stale / "half").write_text("x")
    assert gguf.find("x", SHA) is None
    assert gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet) == done
    assert len(conversions) == 2
    assert {entry.name for entry in (cache / "gguf").iterdir()} == {done.folder.name, f"{done.folder.name}.lock"}


def test_a_conversion_by_another_converter_is_not_taken(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet)
    monkeypatch.setattr(gguf, "CONVERTER", gguf.CONVERTER + 1)
    second = gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet)
    assert len(conversions) == 2
    assert first.identity != second.identity
    assert first.folder != second.folder
    other = gguf.convert(tmp_path / "y.gguf", "x", "cd" * 32, quiet)
    assert other.identity != second.identity


def test_an_error_leaves_nothing_and_the_next_try_works(
    conversions: list[Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path, progress: gguf.Progress) -> None:
        (target / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_run_converter", full)
        with pytest.raises(ModelError, match=r"No space left on device.*ANAPHORA_CACHE"):
            gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet)
    assert [entry.suffix for entry in (cache / "gguf").iterdir()] == [".lock"]
    assert gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet).folder.is_dir()


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set ANAPHORA_CACHE"):
        gguf.convert(tmp_path / "x.gguf", "x", SHA, quiet)


def test_files_that_are_no_whole_gguf_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"<html>")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        gguf.check(other)
    with pytest.raises(ModelError, match="one part of a split"):
        gguf.check(tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ModelError, match=r"cannot be read: No such file"):
        gguf.check(tmp_path / "absent.gguf")


def test_where_the_cache_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("ANAPHORA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert gguf.cache_folder() == Path("/home/someone/.cache/anaphora")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert gguf.cache_folder() == Path("/xdg/anaphora")
    monkeypatch.setenv("ANAPHORA_CACHE", "~/own")
    assert gguf.cache_folder() == Path("/home/someone/own")
