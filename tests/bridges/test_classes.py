"""What names mean and where methods are, for every way that engines write it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges.engines import SGLANG, write

from eyas.bridges.code.classes import Classes, ClassRef, External, Member, Undecided
from eyas.bridges.code.source import open_engine


@pytest.fixture
def index(tmp_path: Path):
    def make(**modules: str) -> Classes:
        extra = {f"sglang__srt__models__{name}": text for name, text in modules.items()}
        return Classes(open_engine("sglang", write(tmp_path, SGLANG, **extra)))

    return make


def only(classes: Classes, module: str, name: str) -> ClassRef:
    found = classes.class_in(f"sglang/srt/models/{module}.py", name)
    assert found is not None
    return found


def owner(classes: Classes, module: str, name: str, method: str) -> str | None:
    found = classes.find(only(classes, module, name), method)
    assert not isinstance(found, Undecided)
    return found and f"{Path(found.owner.module).stem}.{found.owner.name}"


def test_inheritance_over_modules(index):
    classes = index(
        base="class Base:\n    def m(self): ...\n",
        middle="from .base import Base as B\nclass Middle(B): ...\n",
        top="from sglang.srt.models import middle\nclass Top(middle.Middle): ...\n",
    )
    assert owner(classes, "top", "Top", "m") == "base.Base" and owner(classes, "top", "Top", "n") is None


def test_a_mixin_comes_first_in_line(index):
    classes = index(
        a="class Mixin:\n    def m(self): ...\nclass Base:\n    def m(self): ...\nclass Top(Mixin, Base): ...\n"
    )
    assert owner(classes, "a", "Top", "m") == "a.Mixin"


def test_a_diamond_is_linearised_as_python_does(index):
    text = "class A:\n    def m(self): ...\nclass B(A): ...\nclass C(A):\n    def m(self): ...\nclass D(B, C): ...\n"
    assert owner(index(a=text), "a", "D", "m") == "a.C"


def test_a_class_that_replaces_its_own_base(index):
    classes = index(
        a="class Layer:\n    def m(self): ...\n", b="from .a import Layer\nclass Layer(Layer):\n    def n(self): ...\n"
    )
    assert owner(classes, "b", "Layer", "m") == "a.Layer"


def test_an_alias_for_type_checkers_is_not_taken(index):
    classes = index(
        a="""
        from typing import TYPE_CHECKING
        from .llama import LlamaForCausalLM

        if TYPE_CHECKING:
            class _Base: ...
        else:
            _Base = LlamaForCausalLM

        class Top(_Base): ...
        """
    )
    assert owner(classes, "a", "Top", "set_embed") == "llama.LlamaForCausalLM"


def test_an_alias_by_condition_is_undecided_unless_both_agree(index):
    classes = index(
        a="""
        class A:
            def m(self): ...
        class B: ...
        Base = A if is_hip() else B
        class Top(Base):
            def own(self): ...
        """
    )
    top = only(classes, "a", "Top")
    assert isinstance(classes.find(top, "own"), Member)
    found = classes.find(top, "n")
    assert isinstance(found, Undecided) and "Base" in found.reason


def test_a_class_split_by_platform(index):
    classes = index(
        one="class Model:\n    def m(self): ...\n",
        two="class Model: ...\n",
        a="if is_hip():\n    from .one import Model\nelse:\n    from .two import Model\n",
    )
    found = classes.meanings("sglang/srt/models/a.py", "Model")
    assert [Path(m.module).stem for m in found if isinstance(m, ClassRef)] == ["one", "two"]
    assert classes.class_in("sglang/srt/models/a.py", "Model") is None


def test_the_last_unconditional_binding_counts(index):
    classes = index(a="class M:\n    def old(self): ...\nclass M:\n    def new(self): ...\n")
    assert owner(classes, "a", "M", "new") == "a.M" and owner(classes, "a", "M", "old") is None


def test_an_import_that_may_fail(index):
    classes = index(
        a="try:\n    from .llama import LlamaForCausalLM as M\nexcept ImportError:\n    M = None\nclass T(M): ..."
    )
    assert owner(classes, "a", "T", "set_embed") == "llama.LlamaForCausalLM"


def test_a_star_import(index):
    assert owner(index(a="from .llama import *\nclass T(LlamaForCausalLM): ...\n"), "a", "T", "set_embed")


def test_a_proxy_decides_at_run_time(index):
    classes = index(
        a="class T:\n    def __getattr__(self, name): return getattr(self.inner, name)\n    def m(self): ...\n"
    )
    found = classes.find(only(classes, "a", "T"), "set_embed")
    assert isinstance(found, Undecided) and "__getattr__" in found.reason
    assert isinstance(classes.find(only(classes, "a", "T"), "m"), Member)


def test_a_base_outside_the_engine_has_none_of_its_methods(index):
    classes = index(a="from torch import nn\nimport transformers\nclass T(nn.Module, transformers.Model): ...\n")
    top = only(classes, "a", "T")
    assert classes.find(top, "set_embed") is None
    assert classes.ancestry(top)[0][1:] == [External("torch.nn.Module"), External("transformers.Model")]


def test_a_base_that_is_nowhere_is_undecided(index):
    classes = index(a="class T(Lost): ...\nclass U(make_base()): ...\n")
    for name in ("T", "U"):
        assert isinstance(classes.find(only(classes, "a", name), "m"), Undecided)


def test_a_base_in_a_module_that_cannot_be_parsed_is_undecided(index):
    classes = index(odd="def (:\n", a="from .odd import Base\nclass T(Base): ...\n")
    found = classes.find(only(classes, "a", "T"), "m")
    assert isinstance(found, Undecided) and "odd.py" in found.reason


def test_classes_that_inherit_from_each_other_end(index):
    classes = index(a="from .b import B\nclass A(B): ...\n", b="from .a import A\nclass B(A): ...\n")
    assert classes.find(only(classes, "a", "A"), "m") is None


def test_generic_bases_and_overloads(index):
    classes = index(
        a="""
        from typing import Generic, TypeVar, overload
        class Base(Generic[T]):
            @overload
            def m(self, a): ...
            def m(self, a, b): return b
        class Top(Base[int]): ...
        """
    )
    found = classes.find(only(classes, "a", "Top"), "m")
    assert isinstance(found, Member) and len(found.node.args.args) == 3  # type: ignore[attr-defined]


def test_what_was_dropped_is_parsed_again(index):
    classes = index()
    before = only(classes, "llama", "LlamaForCausalLM")
    classes.forget(most=0)
    assert only(classes, "llama", "LlamaForCausalLM") == before and classes.source.parsed > 0
