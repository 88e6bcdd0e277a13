from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import InvalidRequest, ModelError
from anaphora.text.tokenizer import Tokenizer
from tests.support import vocabularies

CASES = [
    *vocabularies.TEXT,
    "",
    " ",
    "  two spaces, then one ",
    "a<|im_end|>b <|im_start|>",
    "line\n\nline\r\n\ttab",
    "a\u0301 \u200d\ufeff \U0001f600\U0001f468\u200d\U0001f469",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    return {kind: vocabularies.save(root / kind, vocabularies.make(kind)) for kind in vocabularies.KINDS}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_ids_and_text_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders[kind])
    ours = Tokenizer.load(folders[kind])
    for text in CASES:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_ids == set(theirs.all_special_ids) | {ours.encode(text)[-1] for text in ("<|im_end|>",)} | {
        theirs.convert_tokens_to_ids("<|im_start|>")
    }


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
@given(text=st.text())
def test_token_bytes_decode_to_the_text(kind: str, loaded: dict[str, Tokenizer], text: str) -> None:
    tokenizer = loaded[kind]
    if any(special in text for special in vocabularies.SPECIALS):
        return
    ids = tokenizer.encode(text)
    raw = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert (raw.removeprefix(" ") if tokenizer.strips_leading_space else raw) == text == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 450)))
def test_decoding_any_ids_equals_the_library_for_byte_level(loaded: dict[str, Tokenizer], ids: list[int]) -> None:
    library = vocabularies.make("byte_level")
    for skip in (True, False):
        assert loaded["byte_level"].decode(ids, skip_special_tokens=skip) == library.decode(ids, skip)


def test_bytes_of_tokens(loaded: dict[str, Tokenizer]) -> None:
    fallback, level = loaded["byte_fallback"], loaded["byte_level"]
    library = vocabularies.make("byte_fallback")
    assert fallback.token_bytes(library.token_to_id("<0xE3>")) == b"\xe3"
    assert fallback.token_bytes(library.token_to_id("▁the")) == b" the"
    assert fallback.token_text(library.token_to_id("<0xE3>")) == "\ufffd"
    assert b"".join(map(level.token_bytes, level.encode("😀", add_special_tokens=False))) == "😀".encode()
    assert level.token_bytes(level.encode("<|im_end|>")[0]) == b"<|im_end|>"
    assert level.token_bytes(10**6) == b""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bos_is_added_once(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(vocabularies.save(tmp_path, vocabularies.with_bos(vocabularies.make(kind))))
    bos = tokenizer.bos_token_id
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [bos, *plain]
    rendered = "<s>the dog"
    assert tokenizer.encode(rendered) == tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.encode(rendered).count(bos) == 1
    assert tokenizer.encode("<s><s>the dog").count(bos) == 2, "what the text itself says twice stays"
    assert tokenizer.encode("") == [bos]


def test_a_chat_that_writes_bos_has_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    backend = vocabularies.with_bos(vocabularies.make("byte_level"))
    folder = vocabularies.save(tmp_path, backend, chat_template=template)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    messages = [{"role": "user", "content": "the dog"}]
    assert ours.chat_template is not None
    prompt = ours.chat_template.render(messages)
    assert ours.encode(prompt) == theirs.apply_chat_template(messages, return_dict=False)
    assert ours.encode(prompt) == ours.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_add_bos_token_of_the_config_decides(wanted: bool, in_file: bool, tmp_path: Path) -> None:
    backend = vocabularies.make("byte_level")
    backend = vocabularies.with_bos(backend) if in_file else backend
    tokenizer = Tokenizer.load(vocabularies.save(tmp_path, backend, add_bos_token=wanted))
    assert tokenizer.encode("the dog").count(tokenizer.bos_token_id) == wanted


def test_special_tokens_as_text_or_object_and_absent(tmp_path: Path) -> None:
    backend = vocabularies.make("byte_level")
    entry = {"content": "<|im_end|>", "special": True}
    tokenizer = Tokenizer.load(vocabularies.save(tmp_path, backend, bos_token=None, eos_token=entry))
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == (backend.token_to_id("<|im_end|>"),)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}


def test_special_tokens_map_is_read_and_the_config_wins(tmp_path: Path) -> None:
    folder = vocabularies.save(tmp_path, vocabularies.make("byte_level"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "</s>"}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


def test_identity_follows_the_content(tmp_path: Path) -> None:
    first = Tokenizer.load(vocabularies.save(tmp_path / "a", vocabularies.make("byte_level")))
    same = Tokenizer.load(vocabularies.save(tmp_path / "b", vocabularies.make("byte_level")))
    other = Tokenizer.load(vocabularies.save(tmp_path / "c", vocabularies.make("unigram")))
    bos = Tokenizer.load(vocabularies.save(tmp_path / "d", vocabularies.make("byte_level"), add_bos_token=True))
    assert first.identity == same.identity
    assert len({first.identity, other.identity, bos.identity}) == 3


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json is broken"):
        Tokenizer.load(tmp_path)
    folder = vocabularies.save(tmp_path / "config", vocabularies.make("byte_level"))
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        Tokenizer.load(folder)


def test_a_lone_surrogate_is_refused(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        loaded["byte_level"].encode("a\ud83d")


def test_encode_from_many_threads(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    texts = [text * 20 for text in vocabularies.TEXT] * 8
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


def test_encode_releases_the_gil(loaded: dict[str, Tokenizer]) -> None:
    """With this switch interval another thread runs only if the encoding thread releases the GIL itself."""
    go, ran = threading.Event(), []

    def other() -> None:
        go.wait()
        ran.append(True)

    tokenizer, interval = next(iter(loaded.values())), sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        go.set()
        for _ in range(500):
            tokenizer.encode("ab " * 5_000)
            if ran:
                break
        released = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert released


def test_template_from_file_config_or_list(tmp_path: Path) -> None:
    backend = vocabularies.make("byte_level")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from list"}]
    for place, config, expected in (
        ("none", {}, None),
        ("config", {"chat_template": "from config"}, "from config"),
        ("list", {"chat_template": named}, "from list"),
    ):
        template = Tokenizer.load(vocabularies.save(tmp_path / place, backend, **config)).chat_template
        assert (template and template.source) == expected
    folder = vocabularies.save(tmp_path / "file", backend, chat_template="from config")
    (folder / "chat_template.jinja").write_text("from file")
    template = Tokenizer.load(folder).chat_template
    assert template is not None
    assert template.source == "from file"


def test_a_model_with_a_broken_template_still_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = vocabularies.save(tmp_path, vocabularies.make("byte_level"), chat_template="{% for %}")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template is None
    assert "does not compile" in caplog.text
    assert tokenizer.encode("the dog")


def test_the_embedded_models_ids_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    from anaphora.checkpoint.resolve import resolve

    try:
        folder = resolve(None).folder
    except ModelError as error:
        pytest.skip(error.message)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in [*CASES, "2024-11-29 10:15:02", "<|im_start|>user\nHi<|im_end|>\n"]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert [ours.token_text(token_id) for token_id in ours.encode("12345")] == list("12345")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ours.chat_template is not None
    prompt = ours.chat_template.render(messages)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode(prompt) == ours.encode(prompt, add_special_tokens=False) == expected
