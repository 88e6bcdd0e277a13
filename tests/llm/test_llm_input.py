"""Any value in any argument of LLM is accepted or refused by name, and the next call works."""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora import LLM, SamplingParams
from anaphora import llm as llm_module
from anaphora.checkpoint.resolve import ModelSource, resolve
from anaphora.errors import AnaphoraError, ConfigError, InvalidRequest
from anaphora.llm import Settings, TemplateOptions
from tests.support.engine import VOCAB, FakeRunner
from tests.support.tokenizers import write_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-(2**70), -129, -2, -1, 0, 1, 2, 5, 129, VOCAB - 1, VOCAB, 2**31, 2**63, 2**70]),
    st.sampled_from([-1.5, -0.0, 0.5, 1.0, 7.25, 1e300, math.inf, -math.inf, math.nan]),
    st.sampled_from(["", "x", "auto", "0", "é", "\ud800", "\0", "stop" * 8]),
    st.sampled_from([b"", b"x", bytearray(b"x"), 1j, decimal.Decimal(1), object(), int, len, ...]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.sets(scalars.filter(lambda value: not isinstance(value, bytearray)), max_size=2),
        st.dictionaries(st.sampled_from(["role", "content", "prompt", "prompt_token_ids", "type", 5, "x"]), inner),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, VOCAB, TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load", lambda config: FakeRunner(num_blocks=200, context_length=800))
        patch.setattr(llm_module, "resolve", lambda model, **options: ModelSource(folder, "fake", "fake-1"))
        yield LLM()


@contextlib.contextmanager
def refused(*names: str, param: str | None = None) -> Iterator[None]:
    """Nothing, or one of the two errors, with one of ``names`` in what it says."""
    caught: list[AnaphoraError] = []
    try:
        yield
    except (InvalidRequest, ConfigError) as error:
        caught.append(error)
    for error in caught:
        assert error.message
        assert not names or any(name in error.message for name in names)
        assert param is None or error.param == param


def survives(llm: LLM) -> None:
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
    llm.check()
    assert llm.stats().referenced_blocks == 0


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
@given(value=anything)
@settings(max_examples=25)
def test_any_value_of_any_sampling_parameter(llm: LLM, name: str, value: Any) -> None:
    with refused(name, param=name):
        llm.generate([[1, 2, 3]], SamplingParams(**({"max_tokens": 2} | {name: value})))
    survives(llm)


@given(value=anything)
@settings(max_examples=100)
def test_any_value_as_prompts(llm: LLM, value: Any) -> None:
    with refused():
        llm.generate(value, SamplingParams(max_tokens=2))
    survives(llm)


@given(value=anything)
@settings(max_examples=100)
def test_any_value_as_sampling_params(llm: LLM, value: Any) -> None:
    with refused():
        llm.generate(["a", "b"], value)
    survives(llm)


@given(value=anything)
@settings(max_examples=100)
def test_any_value_as_messages(llm: LLM, value: Any) -> None:
    with refused():
        llm.chat(value, SamplingParams(max_tokens=2))
    survives(llm)


@pytest.mark.parametrize("name", sorted(TemplateOptions.__annotations__))
@given(value=anything)
@settings(max_examples=50)
def test_any_value_of_any_template_option(llm: LLM, name: str, value: Any) -> None:
    with refused(name, "surrogate"):
        llm.chat(HI, SamplingParams(max_tokens=2), **{name: value})
    survives(llm)


@pytest.mark.parametrize("name", sorted(Settings.__annotations__))
@given(value=anything)
@settings(max_examples=25)
def test_any_value_of_any_setting(llm: LLM, name: str, value: Any) -> None:
    with refused(name, f"--{name.replace('_', '-')}"):
        survives(LLM(**{name: value}))  # over the fake runner


@given(value=anything.filter(lambda value: value is not None and not isinstance(value, str)))
def test_a_model_that_is_no_name_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="model"):
        resolve(value)


@pytest.mark.parametrize("path", [Path("absent"), "absent\0", "\ud800", ""])
def test_a_model_that_is_no_folder_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"absent|folder|model"):
        resolve(path)
