"""The target contract on real architectures, against the unmodified models' own plain forward passes."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import transformers
import zoo
from torch import nn
from transformers import PreTrainedModel

from eyas.core import TargetError, UsageError
from eyas.target.adapter import HFTarget
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


# One pass after another, each compared with plain forwards


@dataclass
class Row:
    """One sequence in its slot: the tokens whose keys and values are there."""

    slot: int = 0
    ids: list[int] | None = None
    images: zoo.Images | None = None
    rope_delta: int = 0

    def __post_init__(self) -> None:
        self.ids = self.ids or []


Draft = tuple[list[int], list[int]]  # tokens, and each one's parent (-1: the root)


def line(tokens: list[int]) -> Draft:
    return tokens, list(range(-1, len(tokens) - 1))


def random_tree(size: int, rng: random.Random) -> Draft:
    tokens = [rng.randrange(zoo.WORDS) for _ in range(size)]
    return tokens, [-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, size))]


def path_to(node: int, parents: list[int]) -> list[int]:
    return [*(path_to(parents[node], parents) if parents[node] >= 0 else []), node]


class Checked:
    """A target whose every pass is compared, node by node, with plain forwards over the whole sequence."""

    def __init__(self, name: str, slots: int = 1, length: int = 80):
        self.model, self.target = zoo.case(name).model, target_of(name)
        self.cache = self.target.new_cache(slots, length)

    def read(self, row: Row, ids: list[int], images: zoo.Images | None = None) -> None:
        """A prompt, or a piece of one."""
        out = self.target.forward(self._block([row], [line(ids)], tree=False), self.cache, images=images)
        row.images, row.rope_delta = images or row.images, row.rope_delta + out.rope_delta
        self._compare(row, line(ids), out, 0)
        row.ids += ids

    def verify(self, rows: list[Row], drafts: list[Draft], tree: bool = True) -> None:
        out = self.target.forward(self._block(rows, drafts, tree), self.cache)
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            self._compare(row, draft, out, i)

    def keep(self, row: Row, draft: Draft, node: int) -> None:
        path = path_to(node, draft[1])
        self.cache.keep(row.slot, len(row.ids), path)
        row.ids += [draft[0][i] for i in path]

    def _block(self, rows: list[Row], drafts: list[Draft], tree: bool) -> Block:
        paths = [[path_to(node, parents) for node in range(len(parents))] for _, parents in drafts]
        block = Block(
            torch.tensor([tokens for tokens, _ in drafts]),
            slots=tuple(row.slot for row in rows),
            starts=tuple(len(row.ids) for row in rows),
            rope_deltas=tuple(row.rope_delta for row in rows),
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
    out = target.forward(Block(torch.tensor([ids]), (0,), (0,), (0,)), target.new_cache(1, len(ids)), images=images)
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
            checked.keep(row, draft, node=rng.randrange(len(draft[0])))


@inputs
def test_rows_of_a_batch_equal_one_by_one(name, image):
    """Rows at different places, in slots out of order that hold somebody's leftovers, one of them with an image."""
    rng, checked = random.Random(name), Checked(name, slots=5)
    for slot in range(5):
        checked.read(Row(slot), words(60, seed=slot))
    rows = [Row(slot=4), Row(slot=0), Row(slot=2)]
    checked.read(rows[0], *prompt_of(name, image, seed=4))
    checked.read(rows[1], words(3, seed=5))
    pieces = [line(words(6, seed)) for seed in (6, 7, 8)]  # the third row starts from nothing
    checked.verify(rows, pieces, tree=False)
    for row, piece in zip(rows, pieces, strict=True):
        checked.keep(row, piece, node=5)
    for size in (7, 1, 4):
        drafts = [random_tree(size, rng) for _ in rows]
        checked.verify(rows, drafts)
        for row, draft in zip(rows, drafts, strict=True):
            checked.keep(row, draft, node=rng.randrange(size))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma3-vl", "gpt-oss", "llama4"])
def test_without_window_or_chunk_the_text_would_differ(name, monkeypatch):
    """A test of the tests above: masks that forget the window would not pass them."""
    checked, row = Checked(name), Row()
    checked.read(row, words(30, seed=0))
    masks = checked.target._masks
    monkeypatch.setattr(checked.target, "_masks", replace(masks, window=999, chunk=999))
    with pytest.raises(AssertionError, match="not close"):
        checked.verify([row], [line(words(3, seed=1))])


# Logits at the end only


@names
def test_last_only_gives_the_last_logits(name):
    target, block = target_of(name), Block(torch.tensor([words(12, seed=3)]), (0,), (0,), (0,))
    every, last = (target.forward(block, target.new_cache(1, 12), last_only=only) for only in (False, True))
    assert last.logits.shape == (1, 1, zoo.VOCAB)
    assert_same(last.logits, every.logits[:, -1:], 1e-5)
    assert torch.equal(last.states, every.states)


# The three methods of the contract


@names
def test_embed_and_head_are_the_weights_in_use(name):
    """Shuffled embedding rows act as shuffled tokens, a doubled head doubles the logits, and back again."""
    target = HFTarget(zoo.case(name).build())
    ids = torch.tensor([words(12, seed=3)])

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return target.forward(Block(tokens, (0,), (0,), (0,)), target.new_cache(1, 12)).logits

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
    block = Block(torch.tensor([[1, 2, 3]]), (0,), (0,), (0,))
    assert target.forward(block, target.new_cache(1, 3)).logits.dtype == torch.bfloat16


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@names
def test_layers_to_capture(name):
    model = zoo.case(name).build()
    before = hooks(model)
    target = HFTarget(model)
    n, size = target.num_layers, target.hidden_size
    assert n == 4
    block = Block(torch.tensor([words(12, seed=3)]), (0,), (0,), (0,))

    def states() -> torch.Tensor | None:
        return target.forward(block, target.new_cache(1, 12)).states

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
    assert hooks(model) == before


# The model stays as it was


@inputs
def test_plain_generate_is_the_same_afterwards(name, image):
    model = zoo.case(name).build()
    ids, images = prompt_of(name, image)

    def generate() -> list[int]:
        return model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, **(images or {}))[0].tolist()

    before, config, count = generate(), model.config.to_dict(), hooks(model)
    target = HFTarget(model)
    target.set_eagle3_layers_to_capture([0, 2, 4])
    cache_ = target.new_cache(1, 40)
    delta = target.forward(Block(torch.tensor([ids]), (0,), (0,), (0,)), cache_, images=images).rope_delta
    target.forward(Block(torch.tensor([words(3, seed=1)]), (0,), (len(ids),), (delta,)), cache_)
    assert generate() == before
    assert model.config.to_dict() == config
    assert hooks(model) == count


def test_a_failed_pass_leaves_nothing_behind(monkeypatch):
    model = zoo.case("llama4").build()
    count, target = hooks(model), HFTarget(model)
    target.set_eagle3_layers_to_capture([0, 2, 4])

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target.layers[2], "forward", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.forward(Block(torch.tensor([words(12, seed=3)]), (0,), (0,), (0,)), target.new_cache(1, 12))
    assert hooks(model) == count
    assert all(layer.self_attn.attn_temperature_tuning for layer in target.layers)


def test_images_go_into_an_empty_slot():
    ids, images = zoo.case("kimi-k2.5").image_prompt()
    target = target_of("kimi-k2.5")
    for block in (Block(torch.tensor([ids]), (0,), (3,), (0,)), Block(torch.tensor([ids] * 2), (0, 1), (0, 0), (0, 0))):
        with pytest.raises(ValueError, match="first block of a single, empty slot"):
            target.forward(block, target.new_cache(2, 40), images=images)


# Images and request state


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_image_reaches_the_logits(name):
    """And the embeddings are there for the drafter, whatever layers are captured."""
    target = HFTarget(zoo.case(name).model)
    ids, images = zoo.case(name).image_prompt()
    block = Block(torch.tensor([ids]), (0,), (0,), (0,))
    one = target.forward(block, target.new_cache(1, 30), images=images)
    other = target.forward(block, target.new_cache(1, 30), images=images | {"pixel_values": -images["pixel_values"]})
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
    case.model.model.rope_deltas = torch.tensor([[77]])
    without_types = {key: value for key, value in images.items() if key != "mm_token_type_ids"}
    block = Block(torch.tensor([ids]), (0,), (0,), (0,))
    assert target.forward(block, target.new_cache(1, 30), images=without_types).rope_delta == 0
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
    ids = torch.tensor([words(12, seed=3)])
    repaired, as_shipped = (HFTarget(zoo.llama4(repair=repair)) for repair in (True, False))
    expected, got = (t.forward(Block(ids, (0,), (0,), (0,)), t.new_cache(1, 12)).logits for t in (repaired, as_shipped))
    assert torch.equal(got, expected)


# What a finished request leaves in its slot


@names
def test_a_cleared_slot_is_clean(name):
    """NaN in a masked row would still reach the sum as 0 * NaN."""
    checked = Checked(name, slots=2)
    long, short = Row(slot=0), Row(slot=1)
    checked.read(long, words(30, seed=0))
    for pool in checked.cache._pools:
        for tensor in pool:
            tensor[:, 1] = torch.nan
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
    block = Block(torch.tensor([ids]), (0,), (0,), (0,))
    output = target.forward(block, target.new_cache(1, 64), images=images)
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
