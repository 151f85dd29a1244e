"""What lies beside the sources goes into a wheel with them: the drafters that come with Eyas, and the engines' plugin.

All else is in pyproject.toml. Its package-dir could place them without code, but then editable installs would import
Eyas by a finder that comes last, behind any folder named eyas in the working directory.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import FileError

PLACE = Path("eyas", "shipped")  # where src/eyas/drafter/shipped.py looks
BESIDE = ("drafters/*/*", "plugin/README.md", "plugin/pyproject.toml", "plugin/src/eyas_plugin/**/*.py")


def beside() -> list[str]:
    """Paths in the repository. A wheel that lacks one of these kinds must not be built."""
    found: list[str] = []
    for pattern in BESIDE:
        files = sorted(str(path) for path in Path().glob(pattern) if path.is_file())
        if not files:
            raise FileError(f"{pattern}: nothing there, so this tree is not all of Eyas")
        found += files
    return found


class BuildWithShipped(build_py):
    def run(self) -> None:
        super().run()
        for source, out in self._copies() if not self.editable_mode else ():
            self.mkpath(str(out.parent))
            self.copy_file(source, str(out))

    def get_source_files(self) -> list[str]:  # what a source distribution has to carry
        return [*super().get_source_files(), *beside()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        ours = [str(out) for _, out in self._copies()] if not self.editable_mode else []
        return [*super().get_outputs(include_bytecode), *ours]

    def _copies(self) -> list[tuple[str, Path]]:
        return [(source, Path(self.build_lib, PLACE, source)) for source in beside()]


setup(cmdclass={"build_py": BuildWithShipped})
