"""A template is played on several days and times; what it does to a growing conversation is told with its mend."""

from __future__ import annotations

from datetime import datetime

import pytest

from anaphora.text.chat import ChatTemplate
from anaphora.text.habits import examine

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


def test_a_date_that_stands_still_is_none() -> None:
    today = datetime.now().strftime("%Y-%m-%d")
    checks = examine(ChatTemplate(f"Written on {today}.\n" + BODY, {}))
    assert [check for check in checks if check.problem and check.breaks] == []


def test_the_clock_of_one_rendering_is_not_that_of_the_next() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    message = [{"role": "user", "content": "hi"}]
    assert template.at(datetime(1999, 1, 1)).render(message) == "1999"
    assert template.render(message) == str(datetime.now().year)
