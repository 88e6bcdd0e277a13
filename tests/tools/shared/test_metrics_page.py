"""Pages of other servers to figures."""

from __future__ import annotations

import pytest

from anaphora.tools.shared.metrics_page import Growth, Page, hits, parse
from tests.tools.doctor import pages


def grown(before: str, after: str) -> Growth:
    return Growth(parse(after), parse(before))


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        (pages.vllm(1), "vllm"),
        (pages.sglang(1), "sglang"),
        (pages.LLAMACPP, "llamacpp"),
        (pages.vllm(1).replace("vllm:", "ray_vllm_"), "vllm"),
        (pages.vllm(1) + "# TYPE anaphora:kv_blocks gauge\nanaphora:kv_blocks 5\n", "anaphora"),
        ("# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 5\n", None),
        ("", None),
    ],
)
def test_engines_are_known_by_their_names(text: str, engine: str | None) -> None:
    assert parse(text).engine() == engine


def test_what_is_not_there_is_none_and_what_is_declared_is_zero() -> None:
    page = parse("# HELP vllm:num_preemptions_total x\n# TYPE vllm:num_preemptions_total counter\n")
    assert page.total("vllm:num_preemptions_total") == 0
    assert page.total("vllm:prompt_tokens_total") is None
    assert Growth(page).mean("vllm:e2e_request_latency_seconds") is None


@pytest.mark.parametrize("name", ["vllm:prefix_cache", "vllm:gpu_prefix_cache"])
def test_hits_under_names_of_all_versions(name: str) -> None:
    text = pages.vllm(10, cached=1210).replace("vllm:prefix_cache", name)
    looked = hits(Growth(parse(text)))
    assert looked is not None
    assert (looked.looked_up, looked.found, looked.rate, looked.unit) == (24200, 12100, 0.5, "tokens")


def test_a_version_that_counts_blocks_says_so_in_its_help() -> None:
    text = pages.vllm(10, cached=1210).replace("queried tokens", "queried blocks")
    looked = hits(Growth(parse(text)))
    assert looked is not None
    assert looked.unit == "blocks"


def test_both_names_at_once_count_once() -> None:
    """vLLM wrote the old and the new names side by side for a while."""
    old = pages.vllm(10, cached=1210).replace("vllm:prefix_cache", "vllm:gpu_prefix_cache")
    looked = hits(Growth(parse(pages.vllm(10, cached=1210) + old)))
    assert looked is not None
    assert looked.looked_up == 24200


def test_growth_adds_up_engines_and_models() -> None:
    def both(one: int, two: int) -> str:
        return pages.vllm(one, cached=1210) + pages.vllm(two, engine="1")

    growth = grown(both(10, 5), both(20, 15))
    looked = hits(growth)
    assert looked is not None
    assert (looked.looked_up, looked.rate) == (20 * 2420, 0.25)
    assert growth.mean("vllm:e2e_request_latency_seconds") == pytest.approx(3.0)
    assert growth.at_most("vllm:request_prompt_tokens")[5000] == 20


def test_a_counter_that_fell_counts_from_zero() -> None:
    growth = grown(pages.vllm(100, cached=2400), pages.vllm(10, cached=1210))
    looked = hits(growth)
    assert growth.resets()
    assert looked is not None
    assert (looked.looked_up, looked.rate) == (24200, 0.5)
    assert not grown(pages.vllm(1), pages.vllm(1)).resets()


def test_a_counter_that_first_shows_in_between_began_at_zero() -> None:
    looked = hits(grown(pages.sglang(10, cached=None), pages.sglang(20, cached=400)))
    assert looked is not None
    assert looked.found == 20 * 400


def test_a_histogram_without_new_samples_has_no_mean() -> None:
    assert grown(pages.vllm(5), pages.vllm(5)).mean("vllm:request_prefill_time_seconds") is None


@pytest.mark.parametrize("text", ["<html>no</html>", '{"error": 1}', "vllm:x{a 1", "a b c d"])
def test_what_is_no_page(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_values_that_are_no_numbers_are_not_there() -> None:
    assert parse("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running NaN\n").samples == {}
    assert Page({}).most("vllm:num_requests_running") is None
