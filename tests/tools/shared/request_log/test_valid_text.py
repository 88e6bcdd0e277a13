"""Lone surrogates in logs become U+FFFD, wherever a log can hold them; every file that is written stays valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anaphora.tools.doctor import DoctorOptions, run
from anaphora.tools.shared.request_log.bodies import LoggedRequest
from anaphora.tools.shared.request_log.log_files import read_requests
from anaphora.tools.shared.request_log.valid_text import loads, valid_text


def test_only_lone_surrogates_change() -> None:
    assert valid_text("a\ud800b\udfff") == "a\ufffdb\ufffd"
    assert valid_text("é\ud83d\ude00") == "é\U0001f600"
    assert valid_text("\ufeffé") == "\ufeffé"
    assert valid_text("plain") == "plain"
    read = loads(r'{"\ud800": ["\udc00", "\ud83d\ude00", "\\ud800", NaN]}')
    assert read["\ufffd"][:3] == ["\ufffd", "\U0001f600", "\\ud800"]
    with pytest.raises(ValueError, match="Expecting"):
        loads("{")


MESSAGES = [{"role": "user", "content": "a\ud800 NUMBER"}]
SPAN = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(MESSAGES)}
PROMPT = r"'a\ud800 NUMBER'"
LINES = {
    "vllm": f"INFO 12-01 04:30:00 [logger.py:43] Received request c: prompt: {PROMPT}, params: SamplingParams(n=1)",
    "nested": json.dumps({"body": json.dumps({"messages": MESSAGES})}),
    "span": json.dumps({"name": "chat", "attributes": SPAN}),
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_log_with_lone_surrogates_is_read_and_every_file_is_written(line: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(line.replace("NUMBER", str(n)) + "\n" for n in range(1000, 1006)))
    found: list[LoggedRequest] = list(read_requests(str(log), lambda *bad: pytest.fail(str(bad))))
    text = found[0].prompt or found[0].messages[0]["content"]
    assert text == "a\ufffd 1000"
    names = [str(tmp_path / name) for name in ("d.json", "d.html", "fixed.jsonl")]
    assert run(DoctorOptions(log=str(log), json=names[0], html=names[1], fix=names[2])) == 0
    assert len(list(read_requests(names[2], lambda *bad: pytest.fail(str(bad))))) == 6
