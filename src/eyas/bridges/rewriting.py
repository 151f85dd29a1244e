"""Changes to a Python file that leave everything else in it as it is, byte for byte. Imports libcst."""

from __future__ import annotations

from collections.abc import Sequence

import libcst
from libcst.metadata import MetadataWrapper, PositionProvider

from eyas.bridges.changes import Argument, CannotPatchError, Change, Members

MARK = "# Added by eyas patch; eyas patch --revert takes it out again."


def rewrite(content: bytes, changes: Sequence[Change], name: str) -> bytes:
    """``content`` with the changes made. Raises CannotPatchError where it is no Python or one of them has no place."""
    try:
        wrapper = MetadataWrapper(libcst.parse_module(content))
    except (libcst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise CannotPatchError(f"{name} cannot be parsed: {error}") from error
    if wrapper.module.bytes != content:
        raise CannotPatchError(f"{name} cannot be changed safely: libcst does not give it back as it is")
    rewriter = _Rewriter(changes)
    after = wrapper.visit(rewriter).bytes
    if missed := [change.what for change in changes if change not in rewriter.made]:
        raise CannotPatchError(f"{name}: there is no place for {'; '.join(missed)}")
    return after


class _Rewriter(libcst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, changes: Sequence[Change]):
        super().__init__()
        self.members = [change for change in changes if isinstance(change, Members)]
        self.arguments = [change for change in changes if isinstance(change, Argument)]
        self.made: list[Change] = []

    def leave_ClassDef(self, original_node: libcst.ClassDef, updated_node: libcst.ClassDef) -> libcst.ClassDef:
        line = self.get_metadata(PositionProvider, original_node).start.line
        for change in self.members:
            body = updated_node.body
            if (change.cls, change.line) == (original_node.name.value, line) and isinstance(body, libcst.IndentedBlock):
                self.made.append(change)
                updated_node = updated_node.with_changes(
                    body=body.with_changes(body=[*body.body, *_statements(change.text)])
                )
        return updated_node

    def leave_Call(self, original_node: libcst.Call, updated_node: libcst.Call) -> libcst.Call:
        for change in self.arguments:
            if not original_node.args and _code(original_node.func) == change.function:
                self.made.append(change)
                return updated_node.with_changes(args=[libcst.Arg(libcst.parse_expression(change.argument))])
        return updated_node


def _statements(text: str) -> list[libcst.BaseStatement]:
    """The statements of ``text``, behind an empty line and the mark."""
    blank = libcst.EmptyLine(indent=False)
    lines: list[libcst.EmptyLine] = [blank, libcst.EmptyLine(comment=libcst.Comment(MARK))]
    found = []
    for statement in libcst.parse_module(text).body:
        found.append(statement.with_changes(leading_lines=lines))
        lines = [blank] if isinstance(statement, libcst.FunctionDef) else []
    return found  # type: ignore[return-value]


def _code(node: libcst.CSTNode) -> str:
    return libcst.Module([]).code_for_node(node)
