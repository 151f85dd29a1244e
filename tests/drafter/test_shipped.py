"""The drafter that comes with Eyas: whole, small, without anything odd, and with a card that says what it is."""

from __future__ import annotations

from eyas.drafter.inspect import describe
from eyas.drafter.shipped import FOLDER, SHIPPED, shipped_drafter

LARGEST = 30e6  # bytes


def test_every_one_is_there() -> None:
    for target, name in SHIPPED.items():
        folder = shipped_drafter(target)
        assert folder == FOLDER / name
        assert {file.name for file in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
        assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST
        found = describe(folder)
        assert found.dialect == "sglang" and not found.odd
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "\nbase_model: " in card and "\nlicense: apache-2.0\n" in card
        for command in (f"eyas data {target} ", f"eyas train {target} ", f"eyas eval {target} "):
            assert command in card
