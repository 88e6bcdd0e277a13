"""A template is played on several days and times; what it does to a growing conversation is told with its mend."""

from __future__ import annotations

from datetime import datetime

import pytest

from anaphora.advice.template_checks import examine
from anaphora.text.chat_template import ChatTemplate

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
def test_whatever_form_the_date_has(form: str, words: str) -> None:
    checks = examine(ChatTemplate("Today: {{ strftime_now('" + form + "') }}\n" + BODY, {}))
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
def test_a_date_that_not_every_prompt_shows(source: str, where: str) -> None:
    (found,) = [check for check in examine(ChatTemplate(source, {})) if check.problem and check.breaks]
    assert where in found.problem
    assert "midnight" in found.problem


def test_what_a_template_refuses_breaks_nothing() -> None:
    """No system text, no tool results, roles that take turns: as the templates of Gemma and Mistral have it."""
    refusing = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must take turns: user, assistant') }}{% endif %}{% endfor %}"
    )
    checks = examine(ChatTemplate(refusing + BODY, {}))
    assert [check.problem for check in checks if check.problem and check.breaks] == []
    assert any("roles must take turns" in check.problem for check in checks)
    rewriting = refusing + "{{ messages | length }}" + BODY
    broken = {check.name for check in examine(ChatTemplate(rewriting, {})) if check.problem and check.breaks}
    assert "two turns" in broken


def test_a_date_that_stands_still_is_none() -> None:
    today = datetime.now().strftime("%Y-%m-%d")
    checks = examine(ChatTemplate(f"Written on {today}.\n" + BODY, {}))
    assert [check for check in checks if check.problem and check.breaks] == []


def test_the_clock_of_one_rendering_is_not_that_of_the_next() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    message = [{"role": "user", "content": "hi"}]
    assert template.at(datetime(1999, 1, 1)).render(message) == "1999"
    assert template.render(message) == str(datetime.now().year)
