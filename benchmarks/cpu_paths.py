"""Measures what each optional path of the CPU code brings, as a ratio of times with and without it.

    python benchmarks/cpu_paths.py [--shapes NAME…] [--paths NAME…] [--rounds 3] [--cpu-time] [--json FILE]

In-process, with random weights, so that it needs neither a checkpoint nor the server's packages. Two times are taken:
the prefill of a prompt of 2,420 tokens in chunks of at most 2,048, and a decode step of eight rows that share 2,400
tokens. Both sides of a ratio are loaded at once and run in turn (A B B A), since the speed of a shared machine drifts.
``gain`` is the time without the path over the time with it: the smaller of the ratio of medians and that of minima.
On a machine that others use, --cpu-time takes the CPU time of a single thread instead of elapsed time.
Set ANAPHORA_CPU_AMX=0 to measure the generic code of a machine that has AMX.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from anaphora.kernels.cpu import amx, attention_amx
from anaphora.model import runner
from anaphora.model.fuse import cpu, cpu_decoder
from anaphora.tools.shared.machine import commit, machine, versions
from anaphora.types.batch import Batch, Chunk, Join, PrefixGroup
from anaphora.types.sampling import SamplingParams

CLOCK = time.perf_counter
PROMPT, SHARED, ROWS, STEPS, CHUNK = 2420, 2400, 8, 8, 2048

Patch = tuple[Any, str, Any]
"""Module, attribute, and its value while the path is off."""


@dataclass(frozen=True)
class Switch:
    """An optional path: how it is switched off while a model is loaded (``load``) and while it runs (``run``)."""

    about: str
    load: tuple[Patch, ...] = ()
    run: tuple[Patch, ...] = ()
    needs_amx: bool = False


def nothing(*_: Any) -> bool:
    return False


PATHS = {
    "amx_generic": Switch("AMX in attention over a pool without panels", run=((amx, "AMX", False),), needs_amx=True),
    "bf16_vectors": Switch(
        "AVX-512 BF16 in attention without AMX, against float32", run=((amx, "BF16_VECTORS", False),)
    ),
    "amx_panels": Switch("a pool in panels", load=((attention_amx, "PANEL", 1 << 30),), needs_amx=True),
    "fused_decoder": Switch("all layers in one AMX kernel", load=((cpu_decoder, "fuse", nothing),), needs_amx=True),
    "packed_linear": Switch("weights packed by oneDNN against nn.Linear", load=((cpu, "packs", nothing),)),
    "norm_rope": Switch("RMSNorm and rotary embedding in one kernel each", load=((cpu, "fuse_norm_rope", nothing),)),
}

_COMMON: dict[str, Any] = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
_SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
_GENERIC = ("packed_linear", "norm_rope", "bf16_vectors")
SHAPES: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {
    # The class of the config, the block size, the paths that can matter, and what differs from _COMMON.
    "smollm2": ("LlamaConfig", 16, (*_GENERIC, "fused_decoder", "amx_panels"), _SMOLLM2),
    "smollm2_blocks_of_8": ("LlamaConfig", 8, ("amx_generic",), _SMOLLM2),
    "llama_head_80": (  # the width of StableLM 3B: no whole tile a head, so no panels and no fused decoder
        "LlamaConfig",
        16,
        (*_GENERIC, "amx_generic"),
        {
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 80,
        },
    ),
    "gemma2": (  # Gemma 2 2B
        "Gemma2Config",
        16,
        (*_GENERIC, "amx_panels"),
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
    "glm4_moe_lite": (  # GLM-4.7-Flash with 16 of its 64 experts
        "Glm4MoeLiteConfig",
        16,
        (*_GENERIC, "amx_generic"),
        {
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 2,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 16,
            "num_local_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "qwen3_moe": (  # Qwen3-30B-A3B with 16 of its 128 experts
        "Qwen3MoeConfig",
        16,
        (*_GENERIC, "amx_panels"),
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
        },
    ),
}


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class Side:
    """A loaded model with some paths off."""

    def __init__(self, folder: Path, block_size: int, off: Switch) -> None:
        self._run, self._block = off.run, block_size
        cache = CacheConfig(block_size=block_size, kv_cache_memory_bytes=512 * 2**20)
        model = ModelConfig(model=str(folder), load_format="dummy", device="cpu", dtype="bfloat16")
        config = EngineConfig(model, cache, SchedulerConfig(max_num_seqs=16))
        with patched(off.load):
            self._runner = runner.load(config)
        self._tokens = tuple((7919 * i + 13) % 40000 + 2 for i in range(PROMPT))

    def prefill(self) -> float:
        """Seconds for the whole prompt, into slot 0."""
        table = tuple(range(1, 1 + -(-PROMPT // self._block)))
        joins: tuple[Join, ...] = (self._join(0, table),)
        begun = CLOCK()
        for start in range(0, PROMPT, CHUNK):
            end = min(start + CHUNK, PROMPT)
            chunk = Chunk(0, start, end - start, self._tokens[start:end], start, (), end == PROMPT)
            self._submit(joins, (chunk,))
            joins = ()
        return CLOCK() - begun

    def decode(self) -> float:
        """Seconds of a step, the median of several. Slots 1 to ROWS share the beginning of slot 0."""
        shared, own = SHARED // self._block, -(-(STEPS + 1) // self._block)
        first = 1 + -(-PROMPT // self._block)
        joins = tuple(
            self._join(row, (*range(1, 1 + shared), *range(first + own * row, first + own * (row + 1))))
            for row in range(1, 1 + ROWS)
        )
        groups = (PrefixGroup(0, shared, tuple(range(1, 1 + ROWS))),)
        times = []
        for step in range(STEPS):
            position = SHARED + step
            chunks = tuple(Chunk(row, position, 1, (row + 2,), position, (), True) for row in range(1, 1 + ROWS))
            begun = CLOCK()
            self._submit(joins, chunks, groups)
            times.append(CLOCK() - begun)
            joins = ()
        return statistics.median(times)

    def _join(self, slot: int, table: tuple[int, ...]) -> Join:
        return Join(slot, SamplingParams(temperature=0.0, max_tokens=None), 0, self._tokens, PROMPT, (), table)

    def _submit(self, joins: Any, chunks: Any, groups: Any = ()) -> None:
        with patched(self._run):
            self._runner.submit(Batch(0, joins, (), chunks, groups)).result()


def measure(sides: dict[str, Side], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("prefill", "decode"):
        times: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            getattr(side, kind)()
        for number in range(2 * rounds):
            for name in sides if number % 2 else reversed(sides):
                times[name].append(getattr(sides[name], kind)())
        ratios = [choose(times["without"]) / choose(times["with"]) for choose in (statistics.median, min)]
        found[kind] = {"gain": round(min(ratios), 3)} | {
            f"{name}_s": [round(seconds, 5) for seconds in given] for name, given in times.items()
        }
    return found


def chosen(shape: str, paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` that this shape can take on this machine."""
    found = [path for path in paths if path in SHAPES[shape][2] and (amx.AMX or not PATHS[path].needs_amx)]
    fused = amx.AMX and shape == "smollm2"  # its layers are in the fused decoder, which no other path reaches
    return [path for path in found if PATHS[path].needs_amx or not fused]


def main() -> None:
    global CLOCK
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread, for a busy machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cpu_time:
        options.threads, CLOCK = 1, time.process_time
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    stored: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit(), "amx": amx.AMX}
    stored |= {"threads": options.threads, "clock": CLOCK.__name__, "shapes": {}}
    for shape in options.shapes:
        kind, block_size, _, special = SHAPES[shape]
        with tempfile.TemporaryDirectory() as name:
            getattr(transformers, kind)(**(_COMMON | special)).save_pretrained(name)
            paths = chosen(shape, options.paths)
            base = Side(Path(name), block_size, Switch("")) if paths else None
            for path in paths:
                begun = time.monotonic()
                sides = {"with": base, "without": Side(Path(name), block_size, PATHS[path])}
                row = measure(sides, options.rounds)
                del sides
                gc.collect()
                stored["shapes"].setdefault(shape, {})[path] = row
                gains = {key: (value["gain"], min(value["with_s"])) for key, value in row.items()}
                print(shape, path, gains, f"{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
