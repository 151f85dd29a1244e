from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training import talkers

from eyas.core import UsageError
from eyas.training.dataset import DataError, Dataset, DatasetWriter, Manifest, Row

MANIFEST = Manifest("t", 100)


def row(seed: int, length: int | None = None) -> Row:
    random = np.random.default_rng(seed)
    length = length or int(random.integers(1, 40))
    mask = random.random(length) < 0.5
    mask[-1] = True
    return Row(random.integers(0, 100, length).astype(np.int32), mask, "made", {"n": seed, "text": "naïve 🦅"})


def same(one: Row, other: Row) -> bool:
    return (
        np.array_equal(one.ids, other.ids)
        and np.array_equal(one.mask, other.mask)
        and (one.source, one.provenance) == (other.source, other.provenance)
    )


def write(folder: Path, rows: int = 300, shard_rows: int = 140) -> Dataset:
    writer = DatasetWriter(folder, MANIFEST, shard_rows=shard_rows)
    for n in range(rows):
        writer.append([row(n)], f"i{n}")
    return writer.finish()


def test_rows_come_back_as_they_were_in_any_order(tmp_path: Path) -> None:
    found = write(tmp_path / "d")
    rows = [row(n) for n in range(300)]
    assert len(found) == 300 and len(list((tmp_path / "d").glob("*.parquet"))) == 3
    assert found.lengths.tolist() == [len(r.ids) for r in rows] and found.lengths.dtype == np.int32
    for n in np.random.default_rng(0).permutation(300):
        assert same(found[int(n)], rows[n])
        assert found[int(n)].ids.dtype == np.int32 and found[int(n)].mask.dtype == bool
    assert all(same(a, b) for a, b in zip(found, rows, strict=True))
    assert same(found[-1], rows[-1])
    with pytest.raises(IndexError):
        found[300]
    assert found.manifest == replace(
        MANIFEST,
        rows=300,
        tokens=sum(len(r.ids) for r in rows),
        loss_tokens=sum(int(r.mask.sum()) for r in rows),
        sources={"made": 300},
        complete=True,
    )


def test_shards_are_plain_parquet(tmp_path: Path) -> None:
    write(tmp_path / "d", 3)
    table = pq.read_table(tmp_path / "d" / "data-00000.parquet")
    assert {f.name: f.type for f in table.schema} == {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "source": pa.string(),
        "provenance": pa.string(),
    }
    assert table["input_ids"].to_pylist() == [row(n).ids.tolist() for n in range(3)]


def test_a_writer_that_dies_loses_no_whole_piece(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    writer = DatasetWriter(folder, MANIFEST, shard_rows=4)
    for n in range(6):
        writer.append([row(n)], f"i{n}")
    writer.append([], "i6", "too short")
    journal = folder / "data-00001.jsonl"
    writer._lock.release()  # what a dying process does
    content = journal.read_bytes()
    journal.write_bytes(content + b'{"item": "i7", "rows": [{"ids": [1, 2')

    again = DatasetWriter(folder, MANIFEST, shard_rows=4)
    assert again.done == {f"i{n}" for n in range(7)}
    assert again.conversations == 6
    assert journal.read_bytes() == content
    again.append([row(7)], "i7")
    found = again.finish()
    assert [r.provenance["n"] for r in found] == [0, 1, 2, 3, 4, 5, 7]
    assert found.manifest.dropped == {"too short": 1}


def test_a_journal_whose_shard_is_there_is_not_read_twice(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    writer = DatasetWriter(folder, MANIFEST, shard_rows=3)
    for n in range(2):
        writer.append([row(n)], f"i{n}")
    left = (folder / "data-00000.jsonl").read_bytes()
    writer.append([row(2)], "i2")  # makes the shard
    (folder / "data-00000.jsonl").write_bytes(left)
    (folder / ".data-00001.parquet.part").write_bytes(b"half")
    writer._lock.release()
    again = DatasetWriter(folder, MANIFEST, shard_rows=3)
    assert [r.provenance["n"] for r in again.finish()] == [0, 1, 2]
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "data-00000.parquet", "manifest.json"]


def test_closing_keeps_what_there_is_readable(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "d", MANIFEST)
    writer.append([row(0)], "i0")
    writer.close()
    found = Dataset.open(tmp_path / "d")
    assert len(found) == 1 and not found.manifest.complete


def test_more_may_be_added_to_finished_data(tmp_path: Path) -> None:
    write(tmp_path / "d", 3)
    writer = DatasetWriter(tmp_path / "d", MANIFEST)
    writer.append([row(3), row(4)], "i3")
    assert [r.provenance["n"] for r in writer.finish()] == [0, 1, 2, 3, 4]


def test_a_piece_is_written_once(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "d", MANIFEST)
    writer.append([row(0)], "i0")
    with pytest.raises(DataError, match="holds i0 already"):
        writer.append([row(0)], "i0")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "d", MANIFEST)
    with pytest.raises(UsageError, match="Another process"):
        DatasetWriter(tmp_path / "d", MANIFEST)
    writer.close()
    DatasetWriter(tmp_path / "d", MANIFEST).close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"recipe": {"seed": 1}}, "begun with seed 0, and now it is 1"),
        ({"sampling": {"top_p": 0.5}}, "begun with top_p null, and now it is 0.5"),
        ({"target": "u"}, 'begun with target "t"'),
    ],
)
def test_two_recipes_are_not_mixed(tmp_path: Path, changed: dict, words: str) -> None:
    first = replace(MANIFEST, recipe={"seed": 0})
    DatasetWriter(tmp_path / "d", first).close()
    with pytest.raises(UsageError, match=words):
        DatasetWriter(tmp_path / "d", replace(first, **changed))


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        DatasetWriter(tmp_path, MANIFEST)
    assert (tmp_path / "thesis.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Row(np.array([1], np.int32), np.array([False])), "nothing to learn"),
        (Row(np.array([100], np.int32), np.array([True])), r"in \[0, 100\)"),
        (Row(np.array([1, 2], np.int32), np.array([True])), "one length"),
        (Row(np.array([], np.int32), np.array([], bool)), "one length"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(tmp_path: Path, bad: Row, words: str) -> None:
    writer = DatasetWriter(tmp_path / "d", MANIFEST)
    with pytest.raises(DataError, match=words):
        writer.append([bad], "x")
    assert writer.done == set()


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with pytest.raises(DataError, match="is no folder"):
        Dataset.open(folder)
    write(folder)
    manifest = (folder / "manifest.json").read_text()
    shard = folder / "data-00001.parquet"
    content = shard.read_bytes()

    shard.write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"data-00001\.parquet cannot be read"):
        Dataset.open(folder)
    middle = len(content) // 4
    shard.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    with pytest.raises(DataError, match=r"data-00001\.parquet"):
        list(Dataset.open(folder))
    shard.unlink()
    with pytest.raises(DataError, match="should hold 300 rows and holds 160"):
        Dataset.open(folder)
    pq.write_table(pa.table({"input_ids": [[1]]}), shard)
    with pytest.raises(DataError, match="not written by `eyas data`"):
        Dataset.open(folder)
    shard.write_bytes(content)

    for text, words in (
        ("{", "damaged"),
        (json.dumps({"target": "t"}), "damaged"),
        (json.dumps({**json.loads(manifest), "extra": 1}), "unknown key 'extra'"),
        (json.dumps({**json.loads(manifest), "format": 9}), "format 9"),
        (json.dumps({**json.loads(manifest), "vocab_size": 50}), r"in \[0, 50\)"),
    ):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=words):
            list(Dataset.open(folder))


def test_nothing_yet(tmp_path: Path) -> None:
    DatasetWriter(tmp_path / "d", MANIFEST).close()
    with pytest.raises(DataError, match="no rows yet"):
        Dataset.open(tmp_path / "d")


def test_a_full_disk_ends_the_work_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = DatasetWriter(tmp_path / "d", MANIFEST)
    writer.append([row(0)], "i0")

    class Full:
        """The journal's file, on a disk with room for ten bytes."""

        def __init__(self, file):
            self.file, self.room = file, 10

        def write(self, line: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            done, self.room = self.file.write(line[: self.room]), 0
            return done

        def __getattr__(self, name):
            return getattr(self.file, name)

    writer._journal = Full(writer._journal)
    with pytest.raises(DataError, match="No space left on device"):
        writer.append([row(1)], "i1")
    writer._lock.release()
    again = DatasetWriter(tmp_path / "d", MANIFEST)
    assert again.done == {"i0"}

    monkeypatch.setattr(
        pq, "write_table", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(DataError, match="No space left on device"):
        again.close()
    monkeypatch.undo()
    assert [r.provenance["n"] for r in DatasetWriter(tmp_path / "d", MANIFEST).finish()] == [0]


def test_data_of_another_target_is_refused() -> None:
    here = talkers.tokenizer()
    manifest = Manifest.of("t", here, 300)
    manifest.check_target(talkers.tokenizer(), 300)
    with pytest.raises(DataError, match="has 300 tokens; this target has 301"):
        manifest.check_target(here, 301)
    with pytest.raises(DataError, match="another chat template"):
        manifest.check_target(talkers.tokenizer(talkers.TAGGED), 300)
    other = talkers.tokenizer()
    other.add_tokens(["extra"])
    with pytest.raises(DataError, match="another tokenizer"):
        manifest.check_target(other, 300)
    with pytest.raises(DataError, match="another tokenizer"):
        manifest.check_target(None, 300)
