"""What is added to a class, and what is said of one that cannot be helped. Modules of PyTorch, no engine."""

from __future__ import annotations

import inspect

import pytest
from eyas_plugin import wrappers
from eyas_plugin.wrappers import CannotServeEagle3, Interface
from torch import nn

SET, GET = "set_eagle3_layers_to_capture", "get_embed_and_head"


def interface(**changes) -> Interface:
    return Interface("SGLang", methods=(SET, GET), **{"extra": ("set_embed_and_head",), "whole": True, **changes})


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = None

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.layers = layer_ids

    def get_embed_and_head(self):
        return "embed", "head"

    def forward(self, ids):
        return ids


def wrapper(attribute: str = "language_model", inner=Inner, call: str = "") -> type:
    """A class of its own for each test: it is going to be changed."""
    call = call or f"self.{attribute}"

    class Wrapper(nn.Module):
        def __init__(self, config=None, *, prefix: str = ""):
            super().__init__()
            self.vision = nn.Linear(2, 2)
            setattr(self, attribute, inner())

        if call == "self.language_model.model":

            def forward(self, ids):
                return self.language_model.model(ids)

        else:

            def forward(self, ids):
                return self.language_model(ids)

    return Wrapper


def amended(cls: type, like: Interface | None = None):
    """The class, and what is said of models of it as they are made."""
    like, said = like or interface(), []
    added = wrappers.amend(cls, like, lambda model, methods: said.append(wrappers.examine(model, methods, like)))
    return added, said


def test_calls_are_passed_on():
    cls = wrapper()
    signature = inspect.signature(cls.__init__)
    added, said = amended(cls)
    assert added == (SET, GET, "set_embed_and_head") and inspect.signature(cls.__init__) == signature
    model = cls()
    assert said == ["language_model: Inner"]
    model.set_eagle3_layers_to_capture([1, 2])
    assert model.language_model.layers == [1, 2] and model.get_embed_and_head() == ("embed", "head")
    model.set_eagle3_layers_to_capture()
    assert model.language_model.layers is None
    with pytest.raises(AttributeError, match="set_embed_and_head"):  # nothing calls it on a target
        model.set_embed_and_head("embed", "head")


def test_once_is_enough():
    cls = wrapper()
    first, said = amended(cls)
    made = cls.__init__
    assert amended(cls)[0] == first and cls.__init__ is made
    cls()
    assert len(said) == 1


def test_a_class_that_lacks_nothing_stays_as_it_is():
    members = dict(vars(Inner))
    added, said = amended(Inner)
    Inner()
    assert added == () and said == []
    assert {k: v for k, v in vars(Inner).items() if k != "_eyas_added"} == members
    del Inner._eyas_added


def test_only_what_is_missing_is_added():
    cls = wrapper()
    cls.get_embed_and_head = lambda self: "its own"
    added, _ = amended(cls)
    assert added == (SET, "set_embed_and_head") and cls().get_embed_and_head() == "its own"


def test_a_wrapper_of_a_wrapper():
    cls = wrapper("language_model", wrapper("language_model"))
    _, said = amended(cls)
    model = cls()
    assert said == ["language_model.language_model: Inner"]
    model.set_eagle3_layers_to_capture([3])
    assert model.language_model.language_model.layers == [3]


def test_two_models_inside():
    cls = wrapper()
    make = cls.__init__

    def both(self):
        make(self)
        self.talker = Inner()

    cls.__init__ = both
    _, said = amended(cls)
    assert said == [] and cls() and said == ["language_model: Inner"]

    other = wrapper("talker")
    make_other = other.__init__

    def two(self):
        make_other(self)
        self.writer = Inner()

    other.__init__ = two
    amended(other)
    with pytest.raises(CannotServeEagle3, match="several models inside it have the interface: talker, writer"):
        other()


def test_nothing_inside_has_it():
    cls = wrapper(inner=lambda: nn.Linear(2, 2))
    amended(cls)
    with pytest.raises(CannotServeEagle3) as refused:
        cls()
    assert str(refused.value) == (
        "eyas-plugin: Wrapper cannot be a target of EAGLE-3 in this SGLang: nothing inside it has "
        "set_eagle3_layers_to_capture and get_embed_and_head: language_model (Linear). Take another target or a newer "
        "SGLang; without EYAS_PLUGIN and speculation it can be served."
    )


@pytest.mark.parametrize("whole", [True, False])
def test_a_forward_that_goes_around(whole):
    """SGLang's inner models give the states themselves; vLLM's wrappers may call what is inside them."""
    cls = wrapper(call="self.language_model.model")
    _, said = amended(cls, interface(whole=whole))
    if not whole:
        assert cls() and said
        return
    with pytest.raises(CannotServeEagle3, match=r"its forward goes around self\.language_model"):
        cls()


def test_a_rehearsal_that_fails():
    def rehearse(model, inner):
        assert isinstance(inner, nn.Linear), "it must inherit from EagleModelMixin"

    cls = wrapper()
    amended(cls, interface(rehearse=rehearse))
    with pytest.raises(CannotServeEagle3, match="it must inherit from EagleModelMixin"):
        cls()


def test_flags():
    cls = wrapper()
    cls.has_own_lm_head = True
    added, _ = amended(cls, interface(flags={"supports_eagle3": True, "has_own_lm_head": False}))
    assert added[-1:] == ("supports_eagle3",) and cls.supports_eagle3 and cls.has_own_lm_head


def test_a_subclass_is_not_examined_before_it_is_whole():
    cls = wrapper(inner=lambda: nn.Linear(2, 2))
    amended(cls)

    class Later(cls):
        def __init__(self):
            super().__init__()
            self.language_model = Inner()

    Later().set_eagle3_layers_to_capture([1])
