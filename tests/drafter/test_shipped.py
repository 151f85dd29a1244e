"""The drafter that comes with Eyas: whole, small, without anything odd, and with a card that says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.core import EyasError
from eyas.drafter import shipped
from eyas.drafter.inspect import describe
from eyas.drafter.shipped import SHIPPED, shipped_drafter

LARGEST = 30e6  # bytes
ROOT = Path(__file__).resolve().parents[2]


def test_every_one_is_there() -> None:
    for target, name in SHIPPED.items():
        folder = shipped_drafter(target)
        assert folder == ROOT / "drafters" / name
        assert {file.name for file in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
        assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST
        found = describe(folder)
        assert found.dialect == "sglang" and not found.odd
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "\nbase_model: " in card and "\nlicense: apache-2.0\n" in card
        for command in (f"eyas data {target} ", f"eyas train {target} ", f"eyas eval {target} "):
            assert command in card


def test_a_target_without_one() -> None:
    assert shipped_drafter("someone/else") is None


def test_the_package_comes_before_what_is_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, around = tmp_path / "inside", tmp_path / "around"
    monkeypatch.setattr(shipped, "ROOTS", (inside, around))
    for root in (around, inside):
        folder = root / "drafters" / SHIPPED["smollm2"]
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        assert shipped_drafter("smollm2") == folder


def test_what_is_lost_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "ROOTS", (tmp_path / "inside", tmp_path / "around"))
    (tmp_path / "inside" / "drafters" / SHIPPED["smollm2"]).mkdir(parents=True)  # an empty folder is no drafter
    with pytest.raises(EyasError, match=r"neither in its package \(.*inside\) nor .*around\): install Eyas again"):
        shipped_drafter("smollm2")
