"""Values of many formats and languages, at several places and in several kinds of bodies: class, place and cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anaphora.tools.doctor.price.breaks import Break
from anaphora.tools.doctor.price.diagnose import diagnose
from anaphora.tools.doctor.read.load_log import log_from_bodies
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate, load_tokenizer_and_template
from tests.tools.doctor import logs, plants
from tests.tools.doctor.logs import Body
from tests.tools.doctor.plants import Plant

RULES = logs.rules(lines=14)
COUNT, TURNS = 6, 2


@pytest.fixture(scope="module")
def model() -> TokenizerAndTemplate:
    return load_tokenizer_and_template(None, None)


def at_head(line: str) -> str:
    return f"{line}\n{RULES}"


def in_the_middle(line: str) -> str:
    lines = RULES.split("\n")
    return "\n".join([*lines[:7], line, *lines[7:]])


def in_a_sentence(line: str) -> str:
    lines = RULES.split("\n")
    return "\n".join([*lines[:7], f"{lines[7]} {line.rstrip('.')}. {lines[8][2:]}", *lines[9:]])


PLACES = (at_head, in_the_middle, in_a_sentence)


def examined(bodies: list[Body], model: TokenizerAndTemplate) -> list[Break]:
    return [item for item in diagnose(log_from_bodies(bodies, model)).breaks if item.status == "confirmed"]


def check(plant: Plant, numbers: list[int], place: Callable[[str], str], model: TokenizerAndTemplate) -> None:
    """``numbers`` has the number of the value in each request."""
    lines = [plant.line.replace("{}", plant.value(number)) for number in numbers]
    bodies = logs.interleaved(logs.conversations(count=COUNT, turns=TURNS, head=RULES))
    broken = [logs.with_system(b, lambda _, t=t: place(t)) for b, t in zip(bodies, lines, strict=True)]
    clean = place("").replace("\n\n", "\n").replace(" . ", " ").strip("\n")
    mended = [
        [logs.with_last_user(logs.with_system(b, lambda _: clean), t) for b, t in zip(bodies, lines, strict=True)],
        [logs.with_system(b, lambda _, t=t: f"{clean}\n{t}") for b, t in zip(bodies, lines, strict=True)],
    ]
    found = examined(broken, model)
    assert [item.finding.kind in plant.kinds for item in found] == [True], [item.finding.kind for item in found]
    finding = found[0].finding
    assert (finding.location.message, finding.location.role) == (0, "system")
    number = finding.line - 1
    text = broken[number]["messages"][0]["content"]
    start = text.index(lines[number].rstrip(".")) + plant.line.index("{}")
    end = start + len(plant.value(numbers[number]))
    assert (
        finding.location.start >= start - 1
        or text[finding.location.start : finding.location.end].strip() in lines[number]
    )
    assert finding.location.end <= end + 2
    assert finding.location.end > finding.location.start
    truth = logs.computed(broken, 1)[1] - min(logs.computed(log, 1)[1] for log in mended)
    assert abs(found[0].tokens_lost - truth) <= 0.15 * truth


REQUESTS = COUNT * TURNS
CASES = [
    *((plant, list(range(REQUESTS))) for plant in plants.EACH_REQUEST),
    *((plant, [int(n >= 7) for n in range(REQUESTS)]) for plant in plants.EACH_DAY),
    *((plant, [n % COUNT for n in range(REQUESTS)]) for plant in plants.EACH_CONVERSATION),
    *((plant, [3 * n // REQUESTS for n in range(REQUESTS)]) for plant in plants.EACH_RELEASE),
]


@pytest.mark.parametrize(("plant", "numbers"), CASES, ids=[f"{i}-{plant.name}" for i, (plant, _) in enumerate(CASES)])
def test_class_place_and_cost(
    plant: Plant, numbers: list[int], model: TokenizerAndTemplate, request: pytest.FixtureRequest
) -> None:
    check(plant, numbers, PLACES[int(request.node.callspec.id.split("-")[0]) % len(PLACES)], model)
