"""The Triton attention kernels: on a GPU if there is one, otherwise small launches in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from anaphora.attention import gpu_plan, graph_buffers
from anaphora.attention.base import FLOAT8, KVLayout, LayerOptions, StepLayout, backend_class
from anaphora.errors import ConfigError
from anaphora.types.batch import BlockCopy, PrefixGroup
from tests.support.attention import Known, Shape, Step, error, make_step, read_row, round_to_float8, run, token_row

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from anaphora.attention import gpu as backend_module
from anaphora.attention.gpu import TritonAttention

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE) if ON_GPU else [torch.float32]
MIXED = (
    Known(cached=37),
    Known(cached=20, new=9),
    Known(cached=0, new=19),
    Known(cached=40, parent=0, shared=2),
)


@pytest.fixture(autouse=True)
def _always_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing pays from two rows on, so that small steps show it."""
    monkeypatch.setattr(gpu_plan, "MIN_SHARED_KEYS", 1)
    monkeypatch.setattr(gpu_plan, "MIN_SAVED_BYTES", 1)
    round_to_float8(monkeypatch)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def attend(step: Step, dtype: torch.dtype, groups: tuple[PrefixGroup, ...] = ()) -> torch.Tensor:
    step = rounded(step, dtype)
    blocks = 2 + max(max(table) for table in step.tables)
    backend = backend_class("cuda")([step.shape.layout], blocks, step.shape.block_size, dtype, DEVICE)
    return run(step, backend, backend.pools[0], dtype, groups)


def rounded(step: Step, dtype: torch.dtype) -> Step:
    """The step with its inputs rounded to ``dtype``, so that only the arithmetic is tested."""
    for index, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        step.keys[index] = keys.to(dtype).double()
        step.values[index] = values.to(dtype).double()
    step.query = step.query.to(dtype)
    return step


def check(step: Step, dtype: torch.dtype, groups: tuple[PrefixGroup, ...] = ()) -> torch.Tensor:
    """Run the step: it must be right to rounding, and leaving out any needle must show."""
    out = attend(step, dtype, groups)
    assert error(out, step.expected()) < TOLERANCE[dtype]
    for index, needles in enumerate(step.needles):
        for position in needles:
            faulty = step.expected(dropped=(index, position))
            if not torch.equal(faulty, step.expected()):  # no row sees a needle outside the window
                assert error(out, faulty) > TOLERANCE[dtype], f"sequence {index}, position {position}"
    return out


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
def test_head_sizes_in_a_mixed_batch(size: int, dtype: torch.dtype) -> None:
    shape = Shape(KVLayout(2, size, size), heads=4)
    check(make_step(shape, MIXED, LayerOptions(size**-0.5)), dtype)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    sequences = (Known(cached=block_size), Known(cached=2 * block_size - 1), Known(3, new=block_size))
    check(make_step(Shape(KVLayout(1, 64, 64), 3, block_size), sequences, LayerOptions(0.125)), dtype)


def test_latents(dtype: torch.dtype) -> None:
    shape = Shape(KVLayout(1, 576, 512, latent=True), heads=20)
    sequences = (Known(cached=37), Known(cached=40, parent=0, shared=2), Known(cached=18, new=5))
    check(make_step(shape, sequences, LayerOptions(576**-0.5)), dtype, (PrefixGroup(0, 2, (0, 1)),))


@pytest.mark.parametrize(
    "options",
    [
        LayerOptions(0.125, window=17),
        LayerOptions(0.125, window=5),
        LayerOptions(0.3, softcap=2.0),
        LayerOptions(0.125, sinks=torch.tensor([-1.0, 0.5, 2.0, 3.0])),
        LayerOptions(0.2, window=20, softcap=3.0, sinks=torch.tensor([1.0, 0.5, 2.0, -3.0])),
    ],
    ids=["window", "window of less than a block", "softcap", "sinks", "all"],
)
def test_options_with_and_without_groups(options: LayerOptions, dtype: torch.dtype) -> None:
    if options.sinks is not None:
        options = dataclasses.replace(options, sinks=options.sinks.to(DEVICE))
    shape = Shape(KVLayout(2, 64, 64), heads=4)
    separate = check(make_step(shape, MIXED, options), dtype)
    together = check(make_step(shape, MIXED, options), dtype, (PrefixGroup(0, 2, (0, 3)),))
    assert error(together, separate.double().cpu()) < 2 * TOLERANCE[dtype]


TREE = (
    Known(cached=70),
    Known(cached=66, parent=0, shared=4),
    Known(cached=50, parent=0, shared=2),
    Known(cached=49, parent=2, shared=3),
    Known(cached=15),
    Known(cached=33, new=3, parent=0, shared=2),
)
TREE_GROUPS = (PrefixGroup(2, 4, (0, 1)), PrefixGroup(0, 2, (0, 1, 2, 3)), PrefixGroup(2, 3, (2, 3)))


def test_a_tree_of_groups(dtype: torch.dtype) -> None:
    check(make_step(Shape(KVLayout(2, 64, 64), 4), TREE, LayerOptions(0.125)), dtype, TREE_GROUPS)


def test_long_ranges_are_cut_and_merged(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plan, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr("anaphora.attention.gpu.PROGRAMS_PER_SM", 32)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 3.0], device=DEVICE)
    shape = Shape(KVLayout(2, 64, 64), 4)
    check(make_step(shape, TREE, LayerOptions(0.125, sinks=sinks)), dtype, TREE_GROUPS)
    check(make_step(shape, TREE, LayerOptions(0.125, window=21)), dtype, TREE_GROUPS)


class GraphPlanned:
    """A backend that plans every step in a CUDA graph's static buffers."""

    def __init__(self, backend: TritonAttention, large_tiles: bool) -> None:
        backend.reserve_graphs(16)
        self._backend = backend
        self._large_tiles = large_tiles
        self.run = backend.run

    def plan(self, layout: StepLayout) -> None:
        assert self._backend.plan_graph(layout, len(layout.slot_mapping), self._large_tiles) is self._large_tiles


def test_a_plan_in_static_buffers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(KVLayout(1, 64, 64), heads=12)
    step = rounded(make_step(shape, [*TREE[:5], TREE[1]], LayerOptions(0.125)), dtype)
    backend = backend_class("cuda")([shape.layout], 60, shape.block_size, dtype, DEVICE)
    planned = GraphPlanned(backend, large_tiles=True)
    groups = (PrefixGroup(0, 2, (0, 1, 2, 3, 5)), PrefixGroup(2, 4, (0, 1, 5)))
    run(step, planned, backend.pools[0], dtype)  # to learn the shapes of the layers
    assert error(run(step, planned, backend.pools[0], dtype), step.expected()) < TOLERANCE[dtype]
    assert error(run(step, planned, backend.pools[0], dtype, groups), step.expected()) < TOLERANCE[dtype]
    monkeypatch.setattr(graph_buffers, "TABLE_ENTRIES", 10)
    layout = StepLayout(torch.zeros(6, dtype=torch.int64, device=DEVICE), tuple(step.queries))
    assert backend.plan_graph(layout, 6) is None


def test_a_mixed_batch_in_static_buffers(dtype: torch.dtype) -> None:
    shape = Shape(KVLayout(1, 64, 64), heads=12)
    sequences = (
        Known(cached=37),
        Known(cached=20, new=3),
        Known(cached=0, new=9),
        Known(cached=40, parent=0, shared=2),
    )
    step = rounded(make_step(shape, sequences, LayerOptions(0.125)), dtype)
    backend = backend_class("cuda")([shape.layout], 60, shape.block_size, dtype, DEVICE)
    planned = GraphPlanned(backend, large_tiles=True)
    run(step, planned, backend.pools[0], dtype)  # to learn the shapes of the layers
    for groups in ((), (PrefixGroup(0, 2, (0, 3)),)):
        assert error(run(step, planned, backend.pools[0], dtype, groups), step.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_step_tells_whether_it_needs_large_tiles(grouped: bool) -> None:
    shape = Shape(KVLayout(1, 64, 64), heads=12)
    backend = backend_class("cuda")([shape.layout], 60, shape.block_size, torch.float32, DEVICE)
    backend.reserve_graphs(16)
    backend.pools[0].zero_()
    found = []
    for sequences in ((Known(cached=37), Known(cached=40, parent=0, shared=2)), (Known(cached=5), Known(0, new=3))):
        step = make_step(shape, sequences, LayerOptions(0.125))
        groups = (PrefixGroup(0, 2, (0, 1)),) if grouped else ()
        rows = sum(query.length for query in step.queries)
        layout = StepLayout(torch.zeros(rows, dtype=torch.int64, device=DEVICE), tuple(step.queries), groups)
        backend.plan_graph(layout, rows, True)
        query, key = (torch.zeros(heads, rows, 64, device=DEVICE) for heads in (12, 1))
        backend.run(0, query, key, key, LayerOptions(0.125))
        found.append(backend.plan_graph(layout, rows))
    assert found == [grouped, True]


def test_a_corrupt_cached_block_shows(dtype: torch.dtype) -> None:
    step = make_step(Shape(KVLayout(1, 64, 64), 2), (Known(cached=37),), LayerOptions(0.125))
    expected = rounded(step, dtype).expected()
    assert error(attend(step, dtype), expected) < TOLERANCE[dtype]
    step.values[0][:, 16:32] = step.values[0][:, :16].clone()
    assert error(attend(step, dtype), expected) > TOLERANCE[dtype]


def test_copies_take_the_filled_slots_of_all_layers() -> None:
    layouts = [KVLayout(1, 16, 16), KVLayout(2, 16, 16), KVLayout(1, 16, 16)]
    backend = backend_class("cuda")(layouts, 6, 16, torch.float32, DEVICE)
    for pool in backend.pools:
        pool.copy_(torch.randn(pool.shape))
    before = [pool.clone() for pool in backend.pools]
    backend.copy_blocks([BlockCopy(1, 4, 5), BlockCopy(2, 5, 16)])
    for pool, old in zip(backend.pools, before, strict=True):
        wanted = old.clone()
        wanted[64:69], wanted[80:96] = old[16:21], old[32:48]
        assert torch.equal(pool, wanted)


@pytest.mark.parametrize("block_size", [1, 8, 24, 100])
def test_other_block_sizes_are_refused_by_name(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"--block-size {block_size} .* powers of two from 16"):
        backend_class("cuda")([KVLayout(1, 64, 64)], 4, block_size, torch.float32, DEVICE)


def test_odd_head_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer 1 has keys of 1024"):
        backend_class("cuda")([KVLayout(1, 64, 64), KVLayout(1, 1024, 64)], 4, 16, torch.float32, DEVICE)


# --- Keys and values in float8 ----------------------------------------------------------------------------------------

COMPUTED = torch.bfloat16 if ON_GPU else torch.float32


def attend_float8(step: Step, groups: tuple[PrefixGroup, ...] = ()) -> torch.Tensor:
    """Run the step over a float8 pool; its keys and values become those read back from the pool."""
    step, layout = rounded(step, COMPUTED), step.shape.layout
    blocks = 2 + max(max(table) for table in step.tables)
    backend = backend_class("cuda")([layout], blocks, step.shape.block_size, FLOAT8, DEVICE)
    out = run(step, backend, backend.pools[0], COMPUTED, groups)
    for index, keys in enumerate(step.keys):
        rows = [read_row(backend.pools[0][step.slot(index, at)], layout) for at in range(keys.shape[1])]
        step.keys[index], step.values[index] = (torch.stack(x, 1) for x in zip(*rows, strict=True))
    return out


@pytest.fixture
def any_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the kernels on more layouts than are served."""
    monkeypatch.setattr(backend_module, "check_float8", lambda layout, options: None)


@pytest.mark.parametrize(
    ("layout", "options", "words"),
    [
        (KVLayout(1, 64, 64), LayerOptions(0.125, window=17), "sliding window of 17 tokens"),
        (KVLayout(1, 72, 64, latent=True), LayerOptions(0.125), "different sizes"),
    ],
)
def test_float8_is_refused_where_it_is_not_proven(layout: KVLayout, options: LayerOptions, words: str) -> None:
    step = make_step(Shape(layout, 4), (Known(cached=3),), options)
    with pytest.raises(
        ConfigError, match=f"--kv-cache-dtype fp8 is not supported for this model: .*{words}.* use auto"
    ):
        attend_float8(step)


FLOAT8_CASES = {
    "head 128": (Shape(KVLayout(2, 128, 128), 4), LayerOptions(128**-0.5)),
    "head 80": (Shape(KVLayout(2, 80, 80), 4), LayerOptions(80**-0.5)),
    "three heads": (Shape(KVLayout(3, 64, 64), 6), LayerOptions(0.125, softcap=2.0)),
    "window": (Shape(KVLayout(1, 64, 32), 4), LayerOptions(0.125, window=17)),
    "latents": (Shape(KVLayout(1, 72, 64, latent=True), 20), LayerOptions(72**-0.5)),
}


@pytest.mark.usefixtures("any_layer")
@pytest.mark.parametrize("case", FLOAT8_CASES)
def test_float8_is_exact_except_for_the_rounding_of_each_vector(case: str) -> None:
    for groups in ((), (PrefixGroup(0, 2, (0, 3)),)):
        step = make_step(FLOAT8_CASES[case][0], MIXED, FLOAT8_CASES[case][1])
        before = [keys.clone() for keys in step.keys]
        out = attend_float8(step, groups)
        assert error(out, step.expected()) < TOLERANCE[COMPUTED]
        for index, needles in enumerate(step.needles):
            for position in needles:
                faulty = step.expected(dropped=(index, position))
                if not torch.equal(faulty, step.expected()):
                    assert error(out, faulty) > TOLERANCE[COMPUTED], f"sequence {index}, position {position}"
        assert all(0 < error(new, old) < 0.5 for old, new in zip(before, step.keys, strict=True))


def test_each_vector_is_written_over_its_own_largest_element() -> None:
    layout = KVLayout(3, 24, 16)
    backend = backend_class("cuda")([layout], 3, 16, FLOAT8, DEVICE)
    keys, values = torch.randn(3, 5, 24), torch.randn(3, 5, 16)
    keys[1, 2] *= 1000
    values[2, 3] = 0.0
    slots = torch.tensor([3, 17, 20, 33, 40], device=DEVICE)
    backend._write(layout, backend.pools[0], slots, keys.to(DEVICE), values.to(DEVICE), len(slots))
    for at, slot in enumerate(slots):
        row = backend.pools[0][slot].cpu()
        wanted = token_row([keys[:, at], values[:, at]], backend.pools[0]).cpu()
        assert torch.equal(row[: layout.width + 4 * 6], wanted[: layout.width + 4 * 6])
    assert error(read_row(backend.pools[0][33], layout)[1][:2], values[:2, 3].double()) < 0.3


def test_float8_blocks_are_copied_with_their_scales() -> None:
    layout = KVLayout(1, 16, 16)
    backend = backend_class("cuda")([layout], 6, 16, FLOAT8, DEVICE)
    pool = backend.pools[0]
    assert pool.shape == (6 * 16, layout.token_bytes(FLOAT8)) == (96, 48)
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
    before = pool.clone()
    backend.copy_blocks([BlockCopy(1, 4, 5)])
    assert torch.equal(pool[64:69], before[16:21])
    assert torch.equal(pool[69:], before[69:])
