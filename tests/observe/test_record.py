from __future__ import annotations

import functools
import json
import threading
import time
from pathlib import Path

import pytest

from anaphora.errors import ConfigError
from anaphora.observe.record import Complete, RecordWriter, RequestRecord, add_block_hashes, read, salt_digest
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams


def record(number: int = 0, **fields: object) -> RequestRecord:
    return RequestRecord(time=1.5, id=f"r{number}", model="m", prompt_tokens=10, block_size=4, **fields)  # type: ignore[arg-type]


def hashes(*tokens: int, salt: str | None = None) -> Complete:
    return functools.partial(add_block_hashes, "model", Request("r", tokens, SamplingParams(), 0.0, cache_salt=salt))


def write(path: Path, records: list[RequestRecord], **options: int) -> RecordWriter:
    writer = RecordWriter(path, **options)
    for one in records:
        writer.write(one, hashes(1))
    writer.close()
    return writer


def test_records_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    records = [record(1, body={"prompt": "é\n"}, cached_tokens=4), record(2, finish="stop")]
    write(path, records[:1])
    write(path, records[1:])  # a restart goes on where the file ends
    assert list(read(path)) == records


def test_shared_prefixes_have_shared_hashes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = RecordWriter(path)
    prompts = [hashes(*range(10)), hashes(*range(8), 50, 51, 52, 53), hashes(*range(10), salt="tenant")]
    for prompt in prompts:
        writer.write(record(), prompt)
    writer.close()
    first, second, salted = (one.block_hashes for one in read(path))
    assert [len(hashes) for hashes in (first, second, salted)] == [2, 3, 2]
    assert first == second[:2]
    assert not set(first) & set(salted)
    assert "tenant" not in path.read_text()


def test_an_invalid_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, [record(1)])
    for bad in (b"{broken\n", b'{"time": "x"}\n', b"[]\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        with path.open("ab") as file:
            file.write(b"\n" + bad)
        reader = read(path)
        assert next(reader).id == "r1"
        with pytest.raises(ConfigError, match=r"log\.jsonl, line 3 is not a request record"):
            next(reader)
        path.write_bytes(path.read_bytes().split(b"\n", 1)[0] + b"\n")


def test_an_absent_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        next(read(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="--record"):
        RecordWriter(tmp_path / "absent" / "log.jsonl")


def test_rotation_keeps_whole_lines_and_a_few_files(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = write(path, [record(number) for number in range(100)], rotate_bytes=300)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log.jsonl", *(f"log.jsonl.{n}" for n in range(1, 5))]
    assert all(file.stat().st_size <= 300 for file in files)
    ids = [one.id for file in [*reversed(files[1:]), files[0]] for one in read(file)]
    assert ids == [f"r{number}" for number in range(100 - len(ids), 100)]
    assert writer.dropped == 0


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_moved_or_deleted_file_is_reopened(tmp_path: Path, how: str) -> None:
    path, moved = tmp_path / "log.jsonl", tmp_path / "log.jsonl-20260101"
    writer = RecordWriter(path)
    writer.write(record(1))
    while writer.written < 1:
        time.sleep(0.001)
    if how == "deleted":
        path.unlink()
    else:
        path.rename(moved)
    if how == "replaced":
        path.touch()
    writer.write(record(2))
    writer.write(record(3))
    writer.close()
    assert [one.id for one in read(path)] == ["r2", "r3"]
    assert how == "deleted" or [one.id for one in read(moved)] == ["r1"]
    assert writer.dropped == 0


def test_a_deleted_folder_drops_records_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.jsonl"
    path.parent.mkdir()
    writer = RecordWriter(path)
    path.parent.rename(tmp_path / "away")
    writer.write(record(1))
    while writer.dropped < 1:
        time.sleep(0.001)
    path.parent.mkdir()
    writer.write(record(2))
    writer.close()
    assert [one.id for one in read(path)] == ["r2"]


def test_a_slow_disk_drops_and_counts_but_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    monkeypatch.setattr(RecordWriter, "_append", lambda self, line: release.wait(30))
    writer = RecordWriter(tmp_path / "log.jsonl", queue_lines=4)
    for number in range(50):
        writer.write(record(number), hashes(1))
    assert writer.dropped >= 50 - 4 - 1
    release.set()
    writer.close()
    assert caplog.text.count("records are being dropped") == 1


def test_the_memory_of_queued_records_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(RecordWriter, "_append", lambda self, line: release.wait(30))
    writer = RecordWriter(tmp_path / "log.jsonl", queue_bytes=1000)
    for _ in range(10):
        writer.write(record(), size=400)
    assert writer.dropped == 8
    release.set()
    writer.close()
    assert writer.written == 2


def test_only_the_record_that_cannot_be_completed_is_dropped(tmp_path: Path) -> None:
    def fail(_: RequestRecord) -> None:
        raise ValueError("no JSON")

    writer = RecordWriter(tmp_path / "log.jsonl")
    for complete in (None, fail, None):
        writer.write(record(), complete)
    writer.close()
    assert (writer.written, writer.dropped) == (2, 1)


def test_zero_cached_tokens_are_written_and_unknown_are_not(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, [record(cached_tokens=0), record()])
    none, unknown = (json.loads(line) for line in path.read_text().splitlines())
    assert none["cached_tokens"] == 0
    assert "cached_tokens" not in unknown


def test_a_full_disk_does_not_stop_the_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    path = tmp_path / "log.jsonl"
    path.symlink_to(full)
    assert write(path, [record(1), record(2)]).dropped == 2
    assert "No space left" in caplog.text


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, [record(1)])
    writer = RecordWriter(path)
    real = writer._file

    class Short:
        """Writes half of a line, as a disk that fills up does."""

        def write(self, data: bytes) -> int:
            return real.write(data[: len(data) // 2])

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    writer._file = Short()  # type: ignore[assignment]
    writer.write(record(2), hashes(1))
    writer.close()
    assert writer.dropped == 1
    assert [one.id for one in read(path)] == ["r1"]


def test_the_log_distinguishes_salts_without_revealing_them() -> None:
    assert salt_digest(None) == ""
    assert salt_digest("org_1" + "2345") == salt_digest("org_12345")
    assert salt_digest("tenant-a") != salt_digest("tenant-b")
    assert "tenant" not in salt_digest("tenant-a")
