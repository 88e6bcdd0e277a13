"""Flags of ``vllm serve`` that Anaphora does not have: which are accepted, and why the others are refused."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from anaphora.config import SERVE_SETTINGS, flag_name

ANY = "*"


@cache
def _data() -> dict[str, Any]:
    """Reads vllm_flags.json.

    ``aliases`` maps spellings to flags, ``accepted`` has groups of flags with values and a note, ``absent`` groups with
    a reason.
    """
    data: dict[str, Any] = json.loads(files("anaphora.advice").joinpath("vllm_flags.json").read_text("utf-8"))
    return data


@cache
def known() -> frozenset[str]:
    """Returns all flags of ``anaphora serve`` and ``vllm serve`` in their long forms."""
    own = {flag_name(field) for cls in SERVE_SETTINGS for field in fields(cls) if "help" in field.metadata}
    theirs = {flag for group in (*_data()["absent"], *_data()["accepted"]) for flag in group["flags"]}
    return frozenset(own | theirs | set(_data()["aliases"].values()) | {"--model", "--help"})


def _forms(name: str) -> tuple[str, str, str]:
    plain = name.partition(".")[0]
    return plain, plain.replace("--no-", "--", 1), plain.replace("--disable-", "--enable-", 1)


def is_known(name: str) -> bool:
    """Whether either server has the flag, also negated or dotted (``--compilation-config.mode``)."""
    return not known().isdisjoint(_forms(name))


def is_switch(name: str) -> bool:
    """Whether a flag takes no value."""
    for cls in SERVE_SETTINGS:
        for field in fields(cls):
            if flag_name(field) in _forms(name):
                return isinstance(field.default, bool)
    for group in _data()["accepted"]:
        if name in group["flags"]:
            return "values" not in group
    return name.startswith(_SWITCHES)


_SWITCHES = ("--no-", "--enable-", "--disable-", "--use-", "--trust-", "--calculate-", "--fully-", "--headless")


def takes_several(name: str) -> bool:
    """Whether a flag takes several values."""
    tuples = {flag_name(field) for cls in SERVE_SETTINGS for field in fields(cls) if isinstance(field.default, tuple)}
    return name in tuples | {"--lora-modules"}


def normalize(argument: str) -> str:
    """Returns a flag in its long form with dashes for underscores; other arguments unchanged."""
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    aliases: dict[str, str] = _data()["aliases"]
    return aliases.get(name, name) + equals + value


class _Accept(argparse.Action):
    """Accepts a flag that has no effect here and records a note for the user.

    If its value would need another behaviour, appends the reason to ``namespace.refused``, so that all refused flags
    are reported at once.
    """

    def __init__(self, option_strings: list[str], dest: str, group: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=None if "values" in group else 0, **kwargs)
        self.group = group

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        allowed, note = self.group.get("values"), self.group["note"]
        if allowed and ANY not in allowed and values not in allowed:
            refused = (
                f"{option_string} is a flag of vllm serve that Anaphora does not have: {note} "
                f"({option_string} {' or '.join(allowed)} is accepted)"
            )
            namespace.refused = [*getattr(namespace, "refused", []), refused]
            return
        namespace.notes = [*getattr(namespace, "notes", []), f"{option_string} changes nothing: {note}"]


def add_accepted(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that have no effect, hidden from the help. Their notes go to ``namespace.notes``."""
    for group in _data()["accepted"]:
        for flag in group["flags"]:
            hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(flag, action=_Accept, group=group, dest="notes", **hidden)


def explain(argument: str, known: Iterable[str]) -> str:
    """Returns why ``argument`` is refused. ``known`` are the flags among which to find the closest."""
    name = argument.partition("=")[0]
    candidates = set(_forms(name))
    for group in (*_data()["absent"], *_data()["accepted"]):
        if candidates & set(group["flags"]):
            reason = group.get("reason", group.get("note"))
            return f"{name} is a flag of vllm serve that Anaphora does not have" + (f": {reason}" if reason else "")
    return f"there is no flag {name}" + closest(name, known)


def closest(name: str, known: Iterable[str]) -> str:
    """Returns `` (did you mean …?)``, or empty text if no name is close."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""
