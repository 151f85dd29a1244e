"""The target contract on real architectures, against the unmodified models' own plain forward passes."""

from __future__ import annotations

import gc
import itertools
import random
import re
import weakref
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from eyas.core import TargetError, UsageError
from eyas.target.adapter import HFTarget
from eyas.target.cache import SlotCache
from eyas.target.contract import Block, TargetOutput
from eyas.target.masks import MaskKinds

torch.set_num_threads(1)

WITH_IMAGES = [c.name for c in zoo.CASES if c.image]
INPUTS = [*((name, False) for name in zoo.NAMES), *((name, True) for name in WITH_IMAGES)]
inputs = pytest.mark.parametrize(("name", "image"), INPUTS, ids=[f"{n}-{'image' if i else 'text'}" for n, i in INPUTS])
names = pytest.mark.parametrize("name", zoo.NAMES)


@cache
def target_of(name: str) -> HFTarget:
    target = HFTarget(zoo.case(name).model)
    target.set_eagle3_layers_to_capture(range(target.num_layers + 1))
    return target


def prompt_of(name: str, image: bool, seed: int = 0) -> tuple[list[int], zoo.Images | None]:
    case = zoo.case(name)
    return case.image_prompt(seed=seed) if image else (case.prompt(seed=seed), None)


def words(count: int, seed: int) -> list[int]:
    return zoo.case("llama").prompt(count, seed)


@torch.no_grad()
def plain(
    model: PreTrainedModel, ids: list[int], images: zoo.Images | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward without cache, masks or hooks of ours: (logits [T, V], states [T, (n + 1) * H])."""
    grown = {
        key: nn.functional.pad(value, (0, len(ids) - value.shape[1])) if key.endswith("token_type_ids") else value
        for key, value in (images or {}).items()
    }
    final_norms = [
        module
        for path, module in model.named_modules()
        if re.search(r"(^|\.)(norm|ln_f|final_layer_norm)$", path) and "vision" not in path and "visual" not in path
    ]
    assert len(final_norms) == 1
    before_norm: list[torch.Tensor] = []
    handle = final_norms[0].register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    out = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True, **grown)
    handle.remove()
    return out.logits[0], torch.cat([*out.hidden_states[:-1], *before_norm], dim=-1)[0]


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def cache_of(target: HFTarget, slots: int, length: int) -> SlotCache:
    cache_ = target.new_cache(slots * length)
    cache_.layout(slots, length)
    return cache_


def block_of(ids: list[int], start: int = 0, **more: Any) -> Block:
    """Tokens at a place in the first slot."""
    return Block(torch.tensor([ids]), 0, torch.tensor([start]), start + len(ids), **more)


# One pass after another, each compared with plain forwards


@dataclass
class Row:
    """One sequence in its slot: the tokens whose keys and values are there."""

    slot: int = 0
    ids: list[int] = field(default_factory=list)
    images: zoo.Images | None = None
    rope_delta: int = 0


Draft = tuple[list[int], list[int]]  # tokens, and each one's parent (-1: the root)


def line(tokens: list[int]) -> Draft:
    return tokens, list(range(-1, len(tokens) - 1))


def random_tree(size: int, rng: random.Random) -> Draft:
    tokens = [rng.randrange(zoo.WORDS) for _ in range(size)]
    return tokens, [-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, size))]


def path_to(node: int, parents: list[int]) -> list[int]:
    return [*(path_to(parents[node], parents) if parents[node] >= 0 else []), node]


class Checked:
    """A target whose every pass is compared, node by node, with plain forwards over the whole sequence.

    And its cache with itself: a pass writes its own rows, and no other. ``rows`` of a pass sit in neighbouring slots.
    """

    def __init__(self, name: str, slots: int = 1, length: int = 80):
        self.model, self.target = zoo.case(name).model, target_of(name)
        self.cache = cache_of(self.target, slots, length)
        self._beyond = itertools.cycle([0, 1, 13, length])  # rows to look at behind the longest sequence

    def read(self, row: Row, ids: list[int], images: zoo.Images | None = None) -> None:
        """A prompt, or a piece of one."""
        out = self._forward(self._block([row], [line(ids)], tree=False), images)
        row.images, row.rope_delta = images or row.images, row.rope_delta + out.rope_delta
        self._compare(row, line(ids), out, 0)
        row.ids += ids

    def verify(self, rows: list[Row], drafts: list[Draft], tree: bool = True, idle: tuple[int, ...] = ()) -> None:
        """``idle``: indices of rows whose results do not matter to anyone."""
        out = self._forward(self._block(rows, drafts, tree))
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            if i not in idle:
                self._compare(row, draft, out, i)

    def keep(self, rows: list[Row], drafts: list[Draft], nodes: list[int]) -> None:
        paths = [path_to(node, draft[1]) for node, draft in zip(nodes, drafts, strict=True)]
        longest = max(map(len, paths))
        padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        self.cache.keep(rows[0].slot, torch.tensor([len(row.ids) for row in rows]), padded)
        for row, draft, path in zip(rows, drafts, paths, strict=True):
            row.ids += [draft[0][i] for i in path]

    def held(self) -> list[torch.Tensor]:
        views = self.cache.views(0, self.cache.slots, self.cache.length).values()
        return [tensor.clone() for pair in views for tensor in pair]

    def _forward(self, block: Block, images: zoo.Images | None = None) -> TargetOutput:
        before = self.held()
        out = self.target.forward(block, self.cache, images=images)
        untouched = torch.ones(self.cache.slots, self.cache.length, dtype=torch.bool)
        for row, start in enumerate(block.starts.tolist()):
            untouched[block.slot + row, start : start + block.tokens.shape[1]] = False
        for old, new in zip(before, self.held(), strict=True):
            assert torch.equal(old.transpose(1, 2)[untouched], new.transpose(1, 2)[untouched])
            assert not torch.equal(old, new)
        return out

    def _block(self, rows: list[Row], drafts: list[Draft], tree: bool) -> Block:
        assert [row.slot for row in rows] == list(range(rows[0].slot, rows[0].slot + len(rows)))
        paths = [[path_to(node, parents) for node in range(len(parents))] for _, parents in drafts]
        tokens = torch.tensor([tokens for tokens, _ in drafts])
        starts = [len(row.ids) for row in rows]
        deltas = [row.rope_delta for row in rows]
        block = Block(
            tokens,
            slot=rows[0].slot,
            starts=torch.tensor(starts),
            length=min(max(starts) + tokens.shape[1] + next(self._beyond), self.cache.length),
            rope_deltas=torch.tensor(deltas) if any(deltas) else None,
        )
        if not tree:
            return block
        depths = torch.tensor([[len(path) - 1 for path in of_row] for of_row in paths])
        ancestors = torch.tensor([[[i in path for i in range(len(of_row))] for path in of_row] for of_row in paths])
        return replace(block, depths=depths, ancestors=ancestors)

    def _compare(self, row: Row, draft: Draft, out: TargetOutput, index: int) -> None:
        tokens, parents = draft
        for leaf in set(range(len(parents))) - set(parents):
            path = path_to(leaf, parents)
            logits, states = plain(self.model, row.ids + [tokens[i] for i in path], row.images)
            assert_same(out.logits[index, path], logits[len(row.ids) :])
            assert_same(out.states[index, path], states[len(row.ids) :])


@inputs
def test_the_zoo_is_lively(name, image):
    zoo.assert_lively(zoo.case(name).model, *prompt_of(name, image))


@inputs
def test_captured_states_are_the_models_own(name, image):
    ids, images = prompt_of(name, image)
    target = target_of(name)
    out = target.forward(block_of(ids), target.new_cache(len(ids)), images=images)
    logits, states = plain(target.model, ids, images)
    assert_same(out.states[0], states, 1e-6)
    assert_same(out.logits[0], logits, 1e-5)
    assert (out.embeds is not None) == image
    if image:
        assert_same(out.embeds[0], states[:, : target.hidden_size], 1e-6)
        assert target.image_positions(torch.tensor([ids]), out.embeds)[0].tolist() == [i == zoo.IMAGE for i in ids]


@inputs
def test_pieces_tokens_and_trees_equal_one_plain_forward(name, image):
    """Odd pieces over window and chunk borders, single tokens, chains and trees, each kept along a random path."""
    rng, checked, row = random.Random(name), Checked(name), Row()
    ids, images = prompt_of(name, image)
    sizes = [len(ids)] if image else [1, 6, 9, 3, len(ids) - 19]
    for size in sizes:
        checked.read(row, ids[len(row.ids) :][:size], images)
    for token in words(2, seed=1):
        checked.read(row, [token])
    for size in (1, 9, 2, 7, 8, 5):
        for draft in (random_tree(size, rng), line(words(min(size, 4), seed=size))):
            checked.verify([row], [draft], tree=rng.random() < 0.8 or draft[1] != line(draft[0])[1])
            checked.keep([row], [draft], nodes=[rng.randrange(len(draft[0]))])


@inputs
def test_rows_of_a_batch_equal_one_by_one(name, image):
    """Rows at different places, one of them with an image, among slots that hold somebody's leftovers.

    One of the slots between them is idle: it is computed from whatever it holds, wherever it is said to end.
    """
    rng, checked = random.Random(name), Checked(name, slots=6)
    for slot in range(6):
        checked.read(Row(slot), words(60, seed=20 + slot))
    rows = [Row(slot) for slot in range(1, 5)]
    idle = 2
    rows[idle].ids = words(40, seed=3)
    checked.read(rows[3], *prompt_of(name, image, seed=4))
    checked.read(rows[0], words(3, seed=5))
    pieces = [line(words(6, seed)) for seed in (6, 7, 8, 9)]  # the second row starts from nothing
    checked.verify(rows, pieces, tree=False, idle=(idle,))
    checked.keep(rows, pieces, nodes=[5] * 4)
    for size, place in ((7, 0), (1, 55), (4, 73)):
        drafts = [random_tree(size, rng) for _ in rows]
        rows[idle].ids = [0] * place
        checked.verify(rows, drafts, idle=(idle,))
        checked.keep(rows, drafts, nodes=[rng.randrange(size) for _ in rows])


@names
def test_an_idle_row_of_nan_spoils_no_other(name):
    """Whatever is in a slot that nobody uses stays there, through every layer, router and expert."""
    checked = Checked(name, slots=3)
    rows = [Row(slot) for slot in range(3)]
    for row in rows[::2]:
        checked.read(row, words(11 + row.slot, seed=row.slot))
    rows[1].ids = words(9, seed=3)
    for keys, values in checked.cache.views(1, 1, 80).values():
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    drafts = [random_tree(5, random.Random(i)) for i in range(3)]
    checked.target.forward(checked._block(rows, drafts, tree=True), checked.cache)
    out = checked.target.forward(checked._block(rows, drafts, tree=True), checked.cache)
    assert out.logits[1].isnan().all(), "or this tests nothing"
    for i in (0, 2):
        checked._compare(rows[i], drafts[i], out, i)


@inputs
def test_sequences_go_on_in_another_layout_and_slot(name, image):
    """What was read in few long slots is continued in many short ones, and back, and in a copy."""
    checked, rows = Checked(name, slots=2, length=90), [Row(0), Row(1)]
    checked.read(rows[0], *prompt_of(name, image, seed=1))
    checked.read(rows[1], words(12, seed=2))
    for slots, length in ((4, 45), (1, 180), (3, 50), (2, 90)):
        checked.cache.layout(slots, length)
        for gone in rows[slots:]:  # it starts anew when there is a slot for it again
            gone.ids = []
        used = rows[:slots]
        drafts = [random_tree(5, random.Random(length + i)) for i in range(len(used))]
        checked.verify(used, drafts)
        checked.keep(used, drafts, nodes=[2] * len(used))
    copied = replace(rows[0], slot=1, ids=list(rows[0].ids))
    checked.cache.copy(0, 1, len(copied.ids))
    checked.verify([rows[0], copied], [random_tree(6, random.Random(i)) for i in (7, 8)])


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3-vl", "gpt-oss", "llama4"])
def test_without_window_or_chunk_the_text_would_differ(name, monkeypatch):
    """A test of the tests above: masks that forget the window would not pass them."""
    checked, row = Checked(name), Row()
    checked.read(row, words(30, seed=0))
    masks = checked.target._masks
    monkeypatch.setattr(checked.target, "_masks", replace(masks, window=999, chunk=999))
    with pytest.raises(AssertionError, match="not close"):
        checked.verify([row], [line(words(3, seed=1))])


class NoWaiting(TorchDispatchMode):
    """Refuses what makes a GPU wait until the values of a tensor are known on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"), name
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype == torch.int64 for i in args[1]), "a bool index counts what is True"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "llama-tied-eager", "mistral", "gemma3", "gpt2", "qwen2.5-vl"])
def test_a_step_reads_no_tensor_on_the_host(name):
    target = target_of(name)
    cache_ = cache_of(target, slots=3, length=20)
    ids, starts, path = torch.ones(2, 3, dtype=torch.long), torch.tensor([4, 9]), torch.tensor([[0, 2], [0, 0]])
    run = Block(ids, 1, starts, 20, rope_deltas=torch.tensor([-4, 0]))
    tree = replace(run, depths=torch.tensor([[0, 1, 1]] * 2), ancestors=torch.eye(3, dtype=torch.bool).repeat(2, 1, 1))
    with NoWaiting():
        for block in (run, tree):
            target.forward(block, cache_)
            cache_.keep(1, starts, path)


# Logits at the end only


@names
def test_one_place_of_each_row(name):
    """And the head is not run for any other."""
    target = target_of(name)
    ids = torch.tensor([words(12, seed) for seed in range(3)])
    block = Block(ids, 1, torch.tensor([0, 3, 7]), 19)
    places = torch.tensor([11, 0, 4])
    seen: list[torch.Size] = []
    watch = target._head.register_forward_hook(lambda _module, args, _output: seen.append(args[0].shape))
    every, few = (target.forward(block, cache_of(target, slots=4, length=20), ends=ends) for ends in (None, places))
    watch.remove()
    assert few.logits.shape == (3, 1, zoo.VOCAB)
    assert_same(few.logits[:, 0], every.logits[torch.arange(3), places], 1e-5)
    assert torch.equal(few.states, every.states)
    assert [shape[:2] for shape in seen] == [(3, 12), (3, 1)]


def test_one_place_of_each_row_where_the_head_is_not_called():
    """A model may use its head's weight without calling the module."""
    model = zoo.case("llama").build()
    head = model.lm_head
    model.lm_head = Unseen(head)
    model.get_output_embeddings = lambda: head
    target, ids = HFTarget(model), torch.tensor([words(9, seed) for seed in range(2)])
    block, places = Block(ids, 0, torch.tensor([0, 2]), 11), torch.tensor([3, 8])
    every, few = (target.forward(block, cache_of(target, slots=2, length=12), ends=ends) for ends in (None, places))
    assert torch.equal(few.logits[:, 0], every.logits[torch.arange(2), places])


class Unseen(nn.Module):
    """Multiplies by the weight of a head that nobody calls."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.weight = head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


# The three methods of the contract


@names
def test_embed_and_head_are_the_weights_in_use(name):
    """Shuffled embedding rows act as shuffled tokens, a doubled head doubles the logits, and back again."""
    target = HFTarget(zoo.case(name).build())
    ids = torch.tensor([words(12, seed=3)])

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return target.forward(block_of(tokens[0].tolist()), target.new_cache(12)).logits

    embed, head = target.get_embed_and_head()
    assert embed.shape == head.shape == (zoo.VOCAB, target.hidden_size)
    assert any(embed is weight for weight in target.model.parameters())
    assert any(head is weight for weight in target.model.parameters())
    order = torch.arange(zoo.VOCAB)
    order[: zoo.WORDS] = torch.randperm(zoo.WORDS, generator=torch.Generator().manual_seed(0))
    before, shuffled = logits(ids), logits(order[ids])
    target.set_embed_and_head(embed.detach()[order], head.detach() * 2)
    assert_same(logits(ids), shuffled * 2)
    target.set_embed_and_head(embed, head)
    assert torch.equal(logits(ids), before)


@names
def test_a_wrong_embedding_or_head_replaces_nothing(name):
    target = HFTarget(zoo.case(name).build())
    embed, head = target.get_embed_and_head()
    new = torch.zeros_like(embed)
    for wrong, message in [((new[1:], new), "embedding is .*got"), ((new, new[:, 1:]), "head is .*got")]:
        with pytest.raises(UsageError, match=message):
            target.set_embed_and_head(*wrong)
    assert target.get_embed_and_head() == (embed, head)


def test_a_new_head_takes_the_targets_precision():
    target = HFTarget(zoo.case("llama").build().to(torch.bfloat16))
    embed, head = target.get_embed_and_head()
    target.set_embed_and_head(embed.float(), head.float())
    assert target.forward(block_of([1, 2, 3]), target.new_cache(3)).logits.dtype == torch.bfloat16


@names
def test_layers_to_capture(name):
    target = HFTarget(zoo.case(name).build())
    n, size = target.num_layers, target.hidden_size
    assert n == 4
    block = block_of(words(12, seed=3))

    def states() -> torch.Tensor | None:
        return target.forward(block, target.new_cache(12)).states

    assert states() is None
    for _ in range(3):
        target.set_eagle3_layers_to_capture([1, 3, n])
    chosen = states()
    target.set_eagle3_layers_to_capture([n, 0, 1])  # in the order asked for
    others = states()
    assert chosen.shape == others.shape == (1, 12, 3 * size)
    assert torch.equal(chosen[..., :size], others[..., 2 * size :])
    assert torch.equal(chosen[..., 2 * size :], others[..., :size])
    for wrong in ([-1], [1, n + 1]):
        with pytest.raises(UsageError, match=f"has {n} layers, so entry ids go from 0 to {n}"):
            target.set_eagle3_layers_to_capture(wrong)
    assert torch.equal(states(), others), "a refused call changes nothing"
    for nothing in (None, []):
        target.set_eagle3_layers_to_capture(nothing)
        assert states() is None


# The model stays as it was


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Watched:
    """Which states entered a layer of a model, seen from outside; ``alive``: how many of them somebody holds on to."""

    def __init__(self, model: nn.Module, layer: nn.Module):
        self.seen: list[weakref.ref[torch.Tensor]] = []
        layer.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.append(weakref.ref(args[0] if args else kwargs["hidden_states"]))

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.seen)


@inputs
def test_plain_generate_is_the_same_afterwards(name, image):
    model = zoo.case(name).build()
    ids, images = prompt_of(name, image)

    def generate() -> list[int]:
        return model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, **(images or {}))[0].tolist()

    before, config, count = generate(), model.config.to_dict(), hooks(model)
    target = HFTarget(model)
    target.set_eagle3_layers_to_capture([0, 2, 4])
    cache_ = target.new_cache(40)
    delta = target.forward(block_of(ids), cache_, images=images).rope_delta
    target.forward(block_of(words(3, seed=1), len(ids), rope_deltas=torch.tensor([delta])), cache_)
    assert generate() == before, "with hooks on it"
    assert hooks(model) > count
    del target
    gc.collect()
    assert hooks(model) == count
    assert generate() == before
    assert model.config.to_dict() == config


@names
def test_hooks_are_as_many_as_layers_and_end_with_the_target(name):
    model = zoo.case(name).build()
    count = hooks(model)
    target = HFTarget(model)
    for layers in ([1, 3], [3, 1], None, [1], [4, 3, 0]):
        target.set_eagle3_layers_to_capture(layers)
        target.forward(block_of(words(5, seed=0)), target.new_cache(5))
    assert hooks(model) == count + 5, "entering 0, 1, 3 and the head, leaving the last"
    alive = weakref.ref(target)
    del target
    gc.collect()
    assert alive() is None
    assert hooks(model) == count


@names
def test_states_are_noted_in_our_own_passes_only(name):
    """Neither a pass that others make with the model nor one of ours leaves anything held behind."""
    model, ids = zoo.case(name).build(), words(12, seed=3)
    target = HFTarget(model)
    target.set_eagle3_layers_to_capture([2])
    watched = Watched(model, target.layers[2])
    out = target.forward(block_of(ids), target.new_cache(12))
    states = out.states.clone()
    with torch.no_grad():
        model(input_ids=torch.tensor([words(12, seed=4)]), use_cache=False)
    model(input_ids=torch.tensor([words(7, seed=5)]), use_cache=False).logits.sum().backward()
    assert len(watched.seen) == 3
    assert torch.equal(out.states, states)
    assert_same(states[0], plain(model, ids)[1][:, 2 * target.hidden_size : 3 * target.hidden_size], 1e-6)
    del out
    assert watched.alive == 0


@inputs
def test_two_targets_on_one_model_do_not_disturb_each_other(name, image):
    model = zoo.case(name).build()
    ids, images = prompt_of(name, image)
    count, alone = hooks(model), {}
    layers = {"one": [1, 3], "other": [4, 0, 3]}
    for who, of_who in layers.items():
        target = HFTarget(model)
        target.set_eagle3_layers_to_capture(of_who)
        alone[who] = target.forward(block_of(ids), target.new_cache(30), images=images)
        del target
    targets = {who: HFTarget(model) for who in layers}
    for who, of_who in layers.items():
        targets[who].set_eagle3_layers_to_capture(of_who)

    def assert_as_alone(who: str) -> None:
        out = targets[who].forward(block_of(ids), targets[who].new_cache(30), images=images)
        assert torch.equal(out.states, alone[who].states)
        assert torch.equal(out.logits, alone[who].logits)
        assert not image or torch.equal(out.embeds, alone[who].embeds)

    for who in ("one", "other", "one"):
        assert_as_alone(who)
    targets["other"].set_eagle3_layers_to_capture(None)
    assert_as_alone("one")
    del targets["other"]
    gc.collect()
    assert_as_alone("one")
    targets.clear()
    gc.collect()
    assert hooks(model) == count


def test_a_failed_pass_leaves_nothing_behind(monkeypatch):
    model, ids = zoo.case("llama4").build(), words(12, seed=3)
    target = HFTarget(model)
    target.set_eagle3_layers_to_capture([0, 2, 4])
    expected = target.forward(block_of(ids), target.new_cache(12))
    count, watched = hooks(model), Watched(model, target.layers[1])

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(target.layers[2], "forward", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            target.forward(block_of(ids), target.new_cache(12))
    assert hooks(model) == count + 1, "the watcher's"
    assert all(layer.self_attn.attn_temperature_tuning for layer in target.layers)
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    assert len(watched.seen) == 2
    assert watched.alive == 0
    again = target.forward(block_of(ids), target.new_cache(12))
    assert torch.equal(again.states, expected.states)
    assert torch.equal(again.logits, expected.logits)


def test_images_go_into_an_empty_slot():
    ids, images = zoo.case("kimi-k2.5").image_prompt()
    target = target_of("kimi-k2.5")
    two = Block(torch.tensor([ids] * 2), 0, torch.tensor([0, 0]), len(ids))
    for block in (block_of(ids, start=3), two):
        with pytest.raises(ValueError, match="first block of a single, empty slot"):
            target.forward(block, cache_of(target, 2, 40), images=images)


# The end of the context


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_draft_may_reach_beyond_the_context(kind):
    """A table of positions has no rows there. Such nodes are never emitted; those before the end are what they were."""
    if kind == "gpt2":
        model = zoo.enliven(transformers.GPT2LMHeadModel(transformers.GPT2Config(**zoo.GPT2 | {"n_positions": 24})))
    else:
        model = zoo._text(*zoo.LLAMA, max_position_embeddings=24)
    target = HFTarget(model)
    assert target.context_length == 24
    target.set_eagle3_layers_to_capture(range(5))
    ids, cache_ = words(21, seed=0), target.new_cache(40)
    target.forward(block_of(ids), cache_)
    tokens, parents = [5, 6, 7, 8, 9, 3, 4, 2], [-1, 0, 0, 2, 3, 1, 5, 4]  # two branches, five and four deep
    paths = [path_to(node, parents) for node in range(8)]
    depths = torch.tensor([[len(path) - 1 for path in paths]])
    ancestors = torch.tensor([[[i in path for i in range(8)] for path in paths]])
    assert depths.max() == 4
    tree = target.forward(block_of(tokens, 21, depths=depths, ancestors=ancestors), cache_)
    chain = target.forward(block_of(words(10, seed=1), 21), cache_)
    for path in ([0, 1, 5], [0, 2, 3]):
        logits, states = plain(model, ids + [tokens[i] for i in path])
        assert_same(tree.logits[0, path], logits[21:])
        assert_same(tree.states[0, path], states[21:])
    logits, states = plain(model, ids + words(10, seed=1)[:3])
    assert_same(chain.logits[0, :3], logits[21:])
    assert_same(chain.states[0, :3], states[21:])
    for out in (tree, chain):
        assert out.logits.isfinite().all(), "NaN would stay in the cache"


def test_positions_behind_an_image_may_exceed_the_context():
    """A video can count further than its tokens. Rotary positions are relative: all of them moved change nothing."""
    target, ids = target_of("qwen2.5-vl"), words(12, seed=0)
    far = torch.tensor([2 * target.context_length])
    near, moved = (target.forward(block_of(ids, rope_deltas=by), target.new_cache(12)) for by in (None, far))
    assert_same(moved.logits, near.logits, 1e-3)


# Images and request state


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_image_reaches_the_logits(name):
    """And the embeddings are there for the drafter, whatever layers are captured."""
    target = HFTarget(zoo.case(name).model)
    ids, images = zoo.case(name).image_prompt()
    block = block_of(ids)
    one = target.forward(block, target.new_cache(30), images=images)
    other = target.forward(block, target.new_cache(30), images=images | {"pixel_values": -images["pixel_values"]})
    assert (one.logits[0, -1] - other.logits[0, -1]).abs().max() > 0.1
    assert one.embeds.shape == (1, 30, target.hidden_size)
    assert one.states is None


def test_rope_deltas_belong_to_requests():
    """Eight image tokens in a row of positions that counts four: what follows is four behind, in this request only."""
    case, target = zoo.case("qwen2.5-vl"), target_of("qwen2.5-vl")
    ids, images = case.image_prompt()
    case.model.model.rope_deltas = torch.tensor([[77]])  # somebody's generate() leaves one behind
    checked, with_image, text = Checked("qwen2.5-vl", slots=2), Row(slot=0), Row(slot=1)
    checked.read(text, words(9, seed=1))
    assert text.rope_delta == 0
    checked.read(with_image, ids, images)
    assert with_image.rope_delta == -4
    for seed in (2, 3):
        checked.read(text, words(2, seed))
        checked.read(with_image, words(2, seed))
    drafts = [random_tree(5, random.Random(i)) for i in range(2)]
    checked.verify([with_image, text], drafts)
    case.model.model.rope_deltas = torch.tensor([[77]])
    without_types = {key: value for key, value in images.items() if key != "mm_token_type_ids"}
    assert target.forward(block_of(ids), target.new_cache(30), images=without_types).rope_delta == 0
    assert case.model.model.rope_deltas is None


def test_llama4_scales_queries_by_place_not_by_row():
    """A test of the tests above: at this floor_scale the temperature decides the text."""
    checked, row = Checked("llama4"), Row()
    checked.read(row, words(30, seed=0))
    attentions = [layer.self_attn for layer in checked.target.layers]
    out = checked.target.forward(checked._block([row], [line([3])], tree=True), checked.cache).logits
    try:
        for attention in attentions:
            attention.floor_scale = 8192
        flat = checked.target.forward(checked._block([row], [line([3])], tree=True), checked.cache).logits
    finally:
        for attention in attentions:
            attention.floor_scale = 4
    assert (out - flat).abs().max() > 0.1


def test_llama4_wrapper_runs_where_transformers_cannot_run_it():
    block = block_of(words(12, seed=3))
    repaired, as_shipped = (HFTarget(zoo.llama4(repair=repair)) for repair in (True, False))
    expected, got = (t.forward(block, t.new_cache(12)).logits for t in (repaired, as_shipped))
    assert torch.equal(got, expected)


# What a finished request leaves in its slot


@names
def test_a_cleared_slot_is_clean(name):
    """NaN in a masked row would still reach the sum as 0 * NaN."""
    checked = Checked(name, slots=2)
    long, short = Row(slot=0), Row(slot=1)
    checked.read(long, words(30, seed=0))
    for keys, values in checked.cache.views(1, 1, 80).values():
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    checked.cache.clear(1)
    checked.read(short, words(4, seed=1))
    checked.verify([long, short], [line(words(2, seed=2)), line(words(2, seed=3))], tree=False)


# Refusals


@pytest.mark.parametrize("refused", zoo.REFUSED, ids=lambda r: r.name)
def test_models_that_cannot_be_targets(refused):
    if not hasattr(transformers, refused.needs):
        pytest.skip(f"transformers {transformers.__version__} has no {refused.needs}")
    model = refused.build()
    count = hooks(model)
    with pytest.raises(TargetError, match=refused.reason) as error:
        HFTarget(model)
    assert type(model).__name__ in str(error.value)
    assert hooks(model) == count, "while the error is still being looked at"


def test_damaged_weights_are_refused():
    model = zoo.case("llama").build()
    count = hooks(model)
    model.model.layers[2].mlp.up_proj.weight.data[3, 3] = torch.nan
    with pytest.raises(TargetError, match="computes NaN or infinite logits: its weights are damaged"):
        HFTarget(model)
    assert hooks(model) == count


def test_attention_without_masks_is_refused():
    model = zoo.case("llama").build()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(
        TargetError, match="'flex_attention' takes no tree mask; load the model with attn_implementation"
    ):
        HFTarget(model)


def test_a_model_that_ignores_its_window_is_refused(monkeypatch):
    """The self-check compares our masks with the model's own on windows of three tokens."""
    honest = MaskKinds.from_config
    monkeypatch.setattr(MaskKinds, "from_config", lambda config: replace(honest(config), window=999, chunk=999))
    for name in ("mistral", "gemma3", "llama4"):
        with pytest.raises(TargetError, match="does not decode a tree as it reads a line"):
            HFTarget(zoo.case(name).model)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_that_depends_on_length_ends_the_context(kind):
    """Beyond that length a draft would turn what is before it: no speculation can equal plain decoding there."""
    factors = [1.0] * 4
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40}
    if kind == "longrope":
        rope |= {"short_factor": factors, "long_factor": [4.0] * 4}
    changes = {"rope_parameters": rope, "max_position_embeddings": 160}
    model = zoo._text("LlamaForCausalLM", "LlamaConfig", **changes)
    assert HFTarget(model).context_length == 40


@pytest.mark.parametrize("name", [case.name for case in zoo.CASES if case.image])
def test_images_as_a_processor_gives_them_reach_a_target_of_lower_precision(name):
    case = zoo.case(name)
    target = HFTarget(case.build().to(torch.bfloat16))
    ids, images = case.image_prompt()
    assert images["pixel_values"].dtype == torch.float32
    block = block_of(ids)
    output = target.forward(block, target.new_cache(64), images=images)
    assert output.logits.isfinite().all()
    assert output.embeds is not None
    marked = target.image_positions(block.tokens, output.embeds)[0]
    own = target.model.get_input_embeddings()(block.tokens)[0]
    assert torch.equal(marked, (own != output.embeds[0]).any(-1))


def test_words_are_no_images_where_the_model_scales_its_embeddings():
    target = HFTarget(zoo._text("GraniteForCausalLM", "GraniteConfig", embedding_multiplier=12.0, head_dim=zoo.DROP))
    target.model.config.image_token_id = zoo.IMAGE
    tokens = torch.tensor([[3, 4, zoo.IMAGE, 5]])
    scaled = 12.0 * target.model.get_input_embeddings()(tokens)
    assert target.image_positions(tokens, scaled).tolist() == [[False, False, True, False]]


def test_dropout_is_named_as_what_makes_a_model_differ():
    model = zoo._text("LlamaForCausalLM", "LlamaConfig", attention_dropout=0.5).train()
    with pytest.raises(TargetError, match="training mode"):
        HFTarget(model)
