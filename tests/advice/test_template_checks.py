"""A template is rendered at several dates and times; what breaks a growing conversation is reported with a fix."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from anaphora.advice.template_checks import check_template
from anaphora.text.chat_template import ChatTemplate, default_template

TEMPLATES = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat-templates"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
BODY = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("%Y-%m-%d", "changes at midnight"),
        ("%A", "changes at midnight"),
        ("%-d. %B", "changes at midnight"),
        ("%H:%M", "time of day"),
        ("%s", "time of day"),
        ("%B %Y", "month or the year"),
        ("%Y", "month or the year"),
    ],
)
def test_a_date_in_any_format(form: str, words: str) -> None:
    checks = check_template(ChatTemplate("Today: {{ strftime_now('" + form + "') }}\n" + BODY, {}))
    (found,) = [check for check in checks if check.problem and check.breaks]
    assert words in found.problem
    assert found.before != found.after
    assert "--chat-template" in found.mend


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("{% if messages[0].role != 'system' %}{{ strftime_now('%d %b') }}{% endif %}" + BODY, "no system text"),
        ("{% if tools %}{{ tools }}{{ strftime_now('%d %b') }}{% endif %}" + BODY, "tools are given"),
    ],
)
def test_a_date_that_only_some_prompts_contain(source: str, where: str) -> None:
    (found,) = [check for check in check_template(ChatTemplate(source, {})) if check.problem and check.breaks]
    assert where in found.problem
    assert "midnight" in found.problem


def test_a_refused_conversation_is_only_a_note() -> None:
    """Roles must alternate and there is no system text or tool result, as in templates of Gemma and Mistral."""
    refusing = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must take turns: user, assistant') }}{% endif %}{% endfor %}"
    )
    checks = check_template(ChatTemplate(refusing + BODY, {}))
    assert [check.problem for check in checks if check.problem and check.breaks] == []
    assert any("roles must take turns" in check.problem for check in checks)
    rewriting = refusing + "{{ messages | length }}" + BODY
    broken = {check.name for check in check_template(ChatTemplate(rewriting, {})) if check.problem and check.breaks}
    assert "two turns" in broken


def test_a_constant_date_is_fine() -> None:
    today = datetime.now().strftime("%Y-%m-%d")
    checks = check_template(ChatTemplate(f"Written on {today}.\n" + BODY, {}))
    assert [check for check in checks if check.problem and check.breaks] == []


def test_the_time_of_one_rendering_does_not_affect_the_next() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    message = [{"role": "user", "content": "hi"}]
    assert template.at(datetime(1999, 1, 1)).render(message) == "1999"
    earliest = datetime.now().year
    assert earliest <= int(template.render(message)) <= datetime.now().year


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"the chat templates are not at {TEMPLATES}")
@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("HuggingFaceTB-SmolLM3-3B", {}),
        ("deepseek-ai-DeepSeek-V3.1", {}),
        ("mistralai-Mistral-Nemo-Instruct-2407", {"place of the system text": "moved to the last user message"}),
        ("openai-gpt-oss-120b", {"the date": "today's date"}),
        ("Qwen-Qwen3-0.6B", {"a user message after a tool round with reasoning": "reasoning is dropped"}),
        ("Qwen3.5-4B", {"a user message after a tool round with reasoning": "reasoning is dropped"}),
        ("GLM-4.7-Flash", {"a user message after a tool round with reasoning": "reasoning is dropped"}),
    ],
)
def test_templates_of_models(name: str, problems: dict[str, str]) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text("utf-8"), SPECIAL_TOKENS)
    found = {check.name: check.problem for check in check_template(template) if check.problem and check.breaks}
    assert bool(found) == bool(problems)
    for check, words in problems.items():
        assert words in found[check]
    assert ("the date" in found) == (name == "openai-gpt-oss-120b")
    assert ("place of the system text" in found) == name.startswith("mistralai")


def test_the_embedded_template_passes() -> None:
    template = ChatTemplate(default_template(), SPECIAL_TOKENS)
    assert [check for check in check_template(template) if check.problem] == []
