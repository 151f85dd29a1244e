"""The plugin is a distribution of its own, which is not installed here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "plugin" / "src"))
