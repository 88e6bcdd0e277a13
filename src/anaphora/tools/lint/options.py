"""Options of ``anaphora lint``. A field is a flag, as in ``anaphora.config``."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.config import option
from anaphora.errors import ConfigError


@dataclass(frozen=True)
class LintOptions:
    target: str | None = option(
        None,
        "a chat template (a file, a model folder, or the template's text), or a server's command line in quotes, as "
        'typed: "vllm serve MODEL --block-size 16"',
        positional=True,
    )
    model: str | None = option(
        None, "with a command line: folder of the model that it names (template, config, tokenizer)", metavar="FOLDER"
    )
    chat_template: str | None = option(
        None, "with a command line: the chat template that the server uses", metavar="FILE|MODEL"
    )
    log: str | None = option(
        None,
        "with a command line: a log of requests (- for standard input), for the length of their system texts and their "
        "use of prompt_logprobs",
        metavar="LOG",
    )
    json: str | None = option(None, "write what was found to this file", metavar="FILE")

    def __post_init__(self) -> None:
        if self.json == "-":
            raise ConfigError("--json writes a file in addition to the report: name one instead of -")
        if self.log is not None and self.log.startswith(("http://", "https://")):
            raise ConfigError(f"--log needs a file, and {self.log} is a server: record one with anaphora record")


@dataclass(frozen=True)
class MovedDoctorFlags:
    """Flags of ``anaphora doctor`` that are now ``anaphora lint``. To be removed in version 0.3."""

    template: str | None = option(
        None, "moved to anaphora lint TEMPLATE; this flag will be removed in 0.3", metavar="FILE|MODEL"
    )
    serve_flags: str | None = option(
        None, 'moved to anaphora lint "COMMAND LINE"; this flag will be removed in 0.3', metavar="TEXT"
    )
