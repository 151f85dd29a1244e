"""The interpreter against Python itself where all is known, and what it makes of what is not."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from bridges.engines import SGLANG, write

from eyas.bridges.code.classes import Classes
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.source import open_engine
from eyas.bridges.code.values import ABSENT, UNKNOWN, Either, Instance, Raised, Record, Tensor, join, truth

MODULE = "sglang/srt/models/code.py"


@pytest.fixture
def run(tmp_path: Path):
    """Calls ``f`` of some code; ``facts`` and ``environment`` are the interpreter's."""

    def call(code: str, *args: Any, facts: dict | None = None, environment: dict | None = None) -> Any:
        source = open_engine("sglang", write(tmp_path, SGLANG, sglang__srt__models__code=code))
        interpreter = Interpreter(Classes(source), facts or {}, environment or {})
        call.interpreter = interpreter  # type: ignore[attr-defined]
        return interpreter.call(interpreter.global_name(MODULE, "f"), *args)

    return call


KNOWN = {
    "arithmetic": "def f(n): return [2, n // 2, n - 3, -n, n * 2 % 7, n / 4]",
    "comprehensions": "def f(n): return [i + 1 for i in range(n) if i % 2], {i for i in range(3)}, {i: i for i in [1]}",
    "nested": "def f(n): return [(a, b) for a in range(3) for b in range(a)]",
    "lists": "def f(n):\n a = [1, *[2, 3]]\n a.append(n)\n a[0] = 9\n return a[1:], sorted(set(a)), len(a), a[-1]",
    "dictionaries": "def f(n):\n d = {'a': 1, **{'b': 2}}\n d['c'] = n\n return d.get('x', 5), 'a' in d, [*d.items()]",
    "strings": "def f(n):\n s = f'layers.{n}.x'\n return s.replace('x', 'y'), s.startswith('lay'), s.split('.')",
    "branches": "def f(n):\n if n > 5 and not n == 9:\n  return 'big'\n elif n is None:\n  return 0\n return 'small'",
    "loops": (
        "def f(n):\n t = 0\n for i in range(n):\n  if i == 2:\n   continue\n  if i == 5:\n   break\n  t += i\n"
        " else:\n  t = -1\n return t"
    ),
    "unpacking": "def f(n):\n a, (b, c) = n, (1, 2)\n return a, b, c",
    "conditional": "def f(n): return 'a' if n else 'b'",
    "boolean": "def f(n): return (n or 3, n and 4, None or [], not n, 1 < n <= 10)",
    "default": "def g(a, b=2, *c, d=4, **e): return a, b, c, d, e\ndef f(n): return g(n), g(1, 2, 3, d=5, z=6)",
    "exceptions": "def f(n):\n try:\n  return {'a': 1}[n]\n except KeyError:\n  return 'none'\n finally:\n  n = 0",
    "attributes of nothing": "def f(n):\n try:\n  return None.get('x')\n except AttributeError:\n  return 'none'",
    "walrus": "def f(n): return [y for x in [n] if (y := x + 1)]",
    "classes": (
        "class A:\n k = 3\n def __init__(self, n): self.n = n\n def m(self): return self.n + self.k\n"
        "class B(A):\n def m(self): return super().m() * 2\n @property\n def p(self): return self.n\n"
        "def f(n):\n b = B(n)\n return b.m(), b.p, isinstance(b, A), hasattr(b, 'q'), getattr(b, 'q', 7), type(b) is B"
    ),
    "static": (
        "class A:\n @staticmethod\n def s(n): return n\n @classmethod\n def c(cls, n): return cls.s(n)\n"
        "def f(n): return A.c(n)"
    ),
    "globals": "A = [1, 2]\nB = A + [3]\ndef g(n): return n\ndef f(n): return g(n), B",
    "with": "def f(n):\n with open_something(n) as x:\n  n = 4\n return n",
    "regular": "import re\ndef f(n): return re.sub(r'^layers\\.0\\.', 'mid.', 'layers.0.a')",
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("argument", [0, 7, 9])
def test_the_same_as_python(run, name, argument):
    names: dict[str, Any] = {"open_something": lambda n: __import__("contextlib").nullcontext(n)}
    exec(KNOWN[name], names)
    assert run(KNOWN[name], argument) == names["f"](argument)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(x): return x + 1", UNKNOWN),
        ("def f(x): return x.a.b(3)[0]", UNKNOWN),
        ("def f(x): return [i for i in x]", UNKNOWN),
        ("def f(x): return x or True", True),
        ("def f(x): return x and False", False),
        ("def f(x): return x is None", UNKNOWN),
        ("def f(x): return isinstance(x, dict)", UNKNOWN),
        ("def f(x): return no_such_name", UNKNOWN),
        ("async def f(x): return 1", UNKNOWN),
        ("def f(x): yield 1", UNKNOWN),
        ("def f(x):\n while True: x = f(x)\n return 1", 1),
        ("def f(x):\n return f(x)", UNKNOWN),
        ("def f(x):\n if x: return 1\n else: return 1", 1),
    ],
)
def test_what_is_not_known(run, code, expected):
    assert run(code, UNKNOWN) is expected


def test_an_unknown_condition_leads_both_ways(run):
    found = run("def f(x):\n a = 1\n if x: a = 2\n return a", UNKNOWN)
    assert isinstance(found, Either) and found.options == [1, 2] and truth(found) is True
    assert run("def f(x):\n if x: return 1\n return 2", UNKNOWN).options == [1, 2]


def test_an_exception_counts_only_where_it_is_certain(run):
    with pytest.raises(Raised, match="ValueError: 3 is too much") as caught:
        run("def f(n):\n if n > 2: raise ValueError(f'{n} is too much')", 3)
    assert caught.value.where == "models/code.py:2"
    assert run("def f(x):\n if x: raise ValueError('no')\n return 1", UNKNOWN) == 1
    assert run("def f(x):\n if x: return 0\n raise ValueError('no')", UNKNOWN) is UNKNOWN
    with pytest.raises(Raised, match="AssertionError: n == 2"):
        run("def f(n): assert n == 2", 3)


def test_what_follows_a_return_that_may_have_happened_is_possible_only(run):
    run("class A: ...\ndef f(x):\n a = A()\n a.before = 1\n if x: return\n a.after = 2", UNKNOWN)
    assert [(a.name, a.certain) for a in run.interpreter.assigned] == [("before", True), ("after", False)]


def test_helpers_outside_the_models_cannot_end_anything(run, tmp_path):
    write(tmp_path, {}, sglang__srt__context="def get(): raise ValueError('nothing runs')")
    assert run("from sglang.srt.context import get\ndef f(n): return [n, get()]", 1) == [1, UNKNOWN]


def test_facts_stand_in_for_the_running_engine(run):
    code = "def f(x):\n if x.group.is_last_rank and is_eagle3(): return 1\n return 2"
    assert run(code, UNKNOWN, facts={"is_last_rank": True, "is_eagle3": True}) == 1


def test_settings_come_from_the_environment(run):
    code = """
    import os
    class Field:
        def __init__(self, default): self.default = default
    class Envs:
        SOME_FLAG = Field(False)
    envs = Envs()
    def f(n): return envs.SOME_FLAG.get(), os.getenv("OTHER", "x")
    """
    assert run(textwrap.dedent(code), 1) == (False, "x")
    assert run(textwrap.dedent(code), 1, environment={"SOME_FLAG": "true", "OTHER": "y"}) == (True, "y")


def test_warnings_are_heard_where_they_are_certain(run):
    run("def f(n):\n if n: logger.warning('Reset to 48')\n if unknown: logger.warning('maybe')", 1)
    assert [w.message for w in run.interpreter.warnings] == ["Reset to 48"]


def test_a_config_has_what_its_file_has(run):
    config = Record({"a": 1, "text_config": {"hidden_size": 2}, "eagle_config": {"x": 3}}, frozenset({"closed"}))
    code = "def f(c): return c.a, c.text_config.hidden_size, c.eagle_config['x']"
    assert run(code, config) == (1, 2, 3)
    assert run("def f(c): return getattr(c, 'closed', 4), hasattr(c, 'closed')", config) == (4, False)
    with pytest.raises(Raised, match="AttributeError: 'config' object has no attribute 'closed'"):
        run("def f(c): return c.closed", config)
    assert run("def f(c): return c.other", config) is UNKNOWN and config.asked[-1] == "other"


FILLED = {
    "a function inside": "def inner(m): self.names[m] = 1\n  inner(x)",
    "a function inside, by another method": "def inner(m): self.more()\n  inner(x)",
    "a generator": "self.yields()",
    "a coroutine": "self.later()",
    "a loop of unknown length": "for i in x: self.names[0] = 1; self.items.append(i)",
    "a loop without a known end": "while x: self.names.update(x); self.items.append(1)",
    "an unknown key": "self.names[x] = 1; self.items = x",
    "a helper that misses a running engine": "help_with(self)",
    "what is passed over": "try:\n   self.names[0] = missing.thing()\n   raise ValueError\n  finally: pass",
}


@pytest.mark.parametrize("by", FILLED)
def test_what_code_that_is_not_followed_may_fill(run, tmp_path, by):
    """A list or dictionary with gaps: an unknown item, rather than a KeyError or IndexError that nobody would meet."""
    helper = "def help_with(a):\n raise ValueError('nothing runs')\n a.names[1] = 1\n a.items.append(1)"
    write(tmp_path, {}, sglang__srt__context=helper)
    code = (
        "from sglang.srt.context import help_with\nclass A:\n"
        " def __init__(self, x):\n  self.names = {}\n  self.items = []\n  self.build(x)\n"
        f" def build(self, x):\n  {FILLED[by]}\n"
        " def more(self):\n  self.names.setdefault(1, 2)\n  self.items.extend([1])\n"
        " def yields(self):\n  self.names[0] = 1\n  self.items.append(1)\n  yield\n"
        " async def later(self):\n  self.names[0] = 1\n  self.items.append(1)\n"
        "def f(x):\n a = A(x)\n return a.names[1], 1 in a.names, a.items[3], len(a.items)"
    )
    with_list = by not in ("a function inside", "what is passed over")
    if with_list:
        assert run(code, UNKNOWN) == (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
    else:
        found = run(code.replace("a.items[3], len(a.items)", "2"), UNKNOWN)
        assert found == (UNKNOWN, UNKNOWN, 2)


def test_what_is_filled_here_has_no_gaps(run):
    """The names of a function of its own are its own; what all of the code was seen to fill lacks what it lacks."""
    for code in (
        "def f(n):\n d = {}\n d[0] = n\n return d[1]",
        "def f(n):\n d = {}\n def inner(d): d[1] = 2\n return d[1]",
        "def f(n):\n d = {}\n for i in range(n): d[i + 2] = i\n return d[1]",
        "def f(n):\n d = []\n for i in range(n): d.append(i)\n return d[n]",
    ):
        with pytest.raises(Raised, match=r"KeyError|IndexError"):
            run(code, 3)
    assert run("def f(n):\n d = {}\n def inner(): d[1] = 2\n inner()\n return d[1]", 3) is UNKNOWN


def test_what_somebody_else_is_given_to_fill(run):
    code = "def f(n):\n def inner(d): d[1] = 2\n d = {}\n inner(d)\n return d[1]"
    assert run(code, 3) is UNKNOWN
    code = "class A:\n known = {}\n two = {0: 1}\ndef f(n): return A.known[n], A.two[0]"
    assert run(code, 3) == (UNKNOWN, 1)


def test_an_object_that_takes_forever_to_make(run):
    code = "class A:\n def __init__(self, n):\n  for i in range(n):\n   for j in range(n): self.a = i\n  self.b = 1"
    run(code + "\ndef f(n): return A(n)", 1)
    made = run.interpreter.call(run.interpreter.global_name(MODULE, "f"), 9000)
    assert run.interpreter.build(made) is made and made.attrs["b"] is UNKNOWN


def test_what_a_running_engine_is_asked_for(run):
    run("def f(a, n):\n if a.b: a.table[n]\n return a.table[n - 1], a.table[a.c]", UNKNOWN, 3)
    found = [(a.name, a.value, a.certain) for a in run.interpreter.looked_up]
    assert found == [("a.table", 3, False), ("a.table", 2, True)]


def test_super_that_names_its_class(run):
    code = (
        "class A:\n def m(self): return 'a'\nclass B(A):\n def m(self): return 'b'\n"
        "class C(B):\n def m(self): return super().m(), super(B, self).m()\ndef f(n): return C().m()"
    )
    assert run(code, 1) == ("b", "a")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 2}, 2),
        ({"hidden_size": 2, "text_config": {"hidden_size": 3}}, 3),
        ({"hidden_size": 2, "text_config": None}, 2),
        ({"vision_config": {"hidden_size": 4}, "decoder": {"hidden_size": 5}}, 5),
        ({"hidden_size": 2, "text_config": {"hidden_size": 3}, "decoder": {"hidden_size": 5}}, 2),
    ],
)
def test_the_text_config_of_transformers(run, config, expected):
    from transformers import PretrainedConfig

    assert run("def f(c): return c.get_text_config().hidden_size", Record(dict(config))) == expected
    parts = {k: PretrainedConfig(**v) if isinstance(v, dict) else v for k, v in config.items()}
    if not {"text_config", "decoder"} <= config.keys():  # transformers itself refuses two
        assert PretrainedConfig(**parts).get_text_config().hidden_size == expected


@pytest.mark.parametrize("code", ["list(range(n))", "[None] * n", "[i for i in range(n)]", "'a' * n", "sum(range(n))"])
def test_nothing_is_made_as_long_as_a_config_says(run, code):
    for size in (10**9, 10**30):
        assert run(f"def f(n): return {code}", size) is UNKNOWN
    assert run(f"def f(n): return {code}", 3) == eval(code, {"n": 3})


ODD = [
    "x in {'a': 1}",
    "x in 'abc'",
    "{x}",
    "{x: 1}",
    "{i for i in [x]}",
    "{i: 1 for i in [x]}",
    "{'a': 1}[x]",
    "[1][x:]",
]


@pytest.mark.parametrize("code", ODD)
@pytest.mark.parametrize("value", [[1], {"a": {}}, 10**400, "a", 2])
def test_values_of_kinds_that_nobody_expects(run, code, value):
    """The answer of Python, its exception as the engine's, or nothing known: no exception of our own."""
    try:
        expected = eval(code, {"x": value})
    except (TypeError, KeyError, ValueError, OverflowError):
        expected = UNKNOWN
    try:
        found = run(f"def f(x): return {code}", value)
    except Raised:
        found = UNKNOWN
    assert found is UNKNOWN or found == expected


def test_parameters_and_who_fills_them(run):
    code = """
    from torch import nn
    from sglang.srt.layers.linear import QKVParallelLinear
    from sglang.srt.layers.layernorm import RMSNorm
    class M(nn.Module):
        def __init__(self):
            self.qkv = QKVParallelLinear(4, 2, bias=False)
            self.fc = nn.Linear(6, 4)
            self.norms = nn.ModuleList([RMSNorm(4) for _ in range(2)])
            self.head = self.fc
            self.layers = make()
    def f(weight):
        m = M()
        params = dict(m.named_parameters())
        param = params["fc.weight"]
        param.weight_loader(param, weight)
        return m, "fc.weight" in params, "fc.nothing" in params, "layers.0.x" in params
    """
    tensor = Tensor("w", (4, 6))
    model, has, lacks, perhaps = run(textwrap.dedent(code), tensor)
    known = run.interpreter.parameters(model).known
    assert (has, lacks, perhaps) == (True, False, UNKNOWN) and tensor.used
    shapes = {"qkv.weight": None, "fc.weight": (4, 6), "fc.bias": None, "norms.0.weight": (4,), "norms.1.weight": (4,)}
    assert {name: p.shape for name, p in known.items()} == shapes
    assert [name for name, p in known.items() if p.filled] == ["fc.weight"]


def test_an_object_is_initialised_when_it_is_asked(run):
    code = "class A:\n def __init__(self): self.a = log()\ndef f(n):\n x = A()\n return x"
    found = run(code, 1)
    assert isinstance(found, Instance) and not found.ready and not run.interpreter.calls
    assert run.interpreter.attribute(found, "b") is ABSENT and found.ready


def test_endless_code_ends(run):
    assert run("def f(n):\n for a in range(10000):\n  for b in range(10000): n += 1\n return n", 1) is UNKNOWN


def test_joining():
    assert join([1, 1]) == 1 and join([1, Either([1, 2])]).options == [1, 2]
    assert truth(Either([1, 0])) is None and truth(Either([0, None])) is False
    with pytest.raises(TypeError):
        bool(UNKNOWN)
