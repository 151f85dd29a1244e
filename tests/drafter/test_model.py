"""The draft model against plain loops, in every variant."""

from __future__ import annotations

import pytest
import torch
from drafter.reference import draft, rms
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.core import CheckpointError
from eyas.drafter.config import Eagle3Config
from eyas.drafter.model import Eagle3Model, rotation_table, untrained
from eyas.drafter.storage import _split

SIZES = {
    "hidden_size": 32,
    "target_hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "draft_vocab_size": 64,
    "aux_layer_ids": (2, 5, 7),
    "rms_norm_eps": 1e-5,
    "own_embedding": True,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
VARIANTS = {
    "plain": {},
    "one key head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "two layers": {"num_hidden_layers": 2},
    "residual": {"norm_before_residual": True, "num_hidden_layers": 2},
    "qwen3": {"qk_norm": True},
    "bias": {"attention_bias": True},
    "norm_output": {"norm_output": True},
    **{f"rope {name}": {"rope": rope} for name, rope in ROPES.items()},
}


class DictCache:
    """The simplest cache: appends."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.layers:
            old_k, old_v = self.layers[layer_idx]
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        self.layers[layer_idx] = k, v
        return k, v


def build(seed: int = 0, **changes: object) -> Eagle3Model:
    """Random weights of a size that lets every part of the model show in the output."""
    model = Eagle3Model(Eagle3Config(**{**SIZES, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * values if "norm" in name else 0.3 * values)
    return model.eval()


def inputs(count: int, batch: int = 1, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, 32, generator=generator), torch.randn(batch, count, 32, generator=generator)


def causal(count: int) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def expected(model: Eagle3Model, embeds, hidden, positions, mask) -> tuple[torch.Tensor, torch.Tensor]:
    c = model.config
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=c.hidden_size,
            num_attention_heads=c.num_attention_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_position_embeddings,
            rope_parameters=dict(c.rope),
        )
    )
    return draft(
        _split(model.state_dict(), c),
        embeds,
        hidden,
        positions,
        mask,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        layers=c.num_hidden_layers,
        eps=c.rms_norm_eps,
        frequencies=rotary.inv_freq,
        scale=rotary.attention_scaling,
        norm_before_residual=c.norm_before_residual,
    )


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), wanted.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_forward_is_the_reference(name: str) -> None:
    model = build(**VARIANTS[name])
    embeds, hidden = inputs(9)
    positions = list(range(90, 99))
    out = model(embeds, hidden, torch.tensor([positions]))
    before, after = expected(model, embeds[0], hidden[0], positions, causal(9))
    assert_close(out.normed[0], after)
    assert_close(out.next_hidden[0], after if model.config.norm_output else before)


@torch.no_grad()
def test_a_tree_under_a_mask_is_its_paths() -> None:
    """Two branches behind a prefix of 3: positions are depths, and no branch sees the other."""
    model = build(num_hidden_layers=2)
    embeds, hidden = inputs(7)
    parents = [-1, 0, 1, 2, 2, 3, 4]
    positions = [0, 1, 2, 3, 3, 4, 4]
    mask = torch.zeros(7, 7, dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask[node] = mask[parent] if parent >= 0 else False
        mask[node, node] = True
    out = model(embeds, hidden, torch.tensor([positions]), mask[None, None])
    _, after = expected(model, embeds[0], hidden[0], positions, mask)
    assert_close(out.normed[0], after)
    for path in ([0, 1, 2, 3, 5], [0, 1, 2, 4, 6]):
        alone = model(embeds[:, path], hidden[:, path], torch.arange(5)[None])
        assert_close(out.normed[:, path], alone.normed)


@pytest.mark.parametrize("pieces", [(1,) * 8, (3, 5), (5, 1, 2)])
@torch.no_grad()
def test_a_cache_changes_nothing(pieces: tuple[int, ...]) -> None:
    model = build(num_hidden_layers=2, attention_bias=True)
    embeds, hidden = inputs(8, batch=2)
    positions = torch.arange(8).expand(2, 8)
    whole = model(embeds, hidden, positions)
    cache, start, normed = DictCache(), 0, []
    for count in pieces:
        part = slice(start, start + count)
        normed.append(model(embeds[:, part], hidden[:, part], positions[:, part], cache=cache).normed)
        start += count
    assert_close(torch.cat(normed, 1), whole.normed)


@torch.no_grad()
def test_a_masked_row_of_a_cache_does_not_show() -> None:
    model = build()
    embeds, hidden = inputs(4, batch=2)
    cache = DictCache()
    model(embeds[:, :2], hidden[:, :2], torch.tensor([[0, 1], [0, 1]]), cache=cache)
    mask = torch.tensor([[True, False, True], [True, True, True]])[:, None, None]  # by sequence
    out = model(embeds[:, 3:], hidden[:, 3:], torch.tensor([[1], [2]]), mask, cache)
    short = model(embeds[:1, [0, 3]], hidden[:1, [0, 3]], torch.tensor([[0, 1]]))
    long = model(embeds[1:, [0, 1, 3]], hidden[1:, [0, 1, 3]], torch.tensor([[0, 1, 2]]))
    assert_close(out.normed[0, 0], short.normed[0, -1])
    assert_close(out.normed[1, 0], long.normed[0, -1])


@torch.no_grad()
def test_fusing_with_every_kind_of_norm() -> None:
    aux = torch.randn(1, 5, 3 * 24, generator=torch.Generator().manual_seed(3))
    plain = build(target_hidden_size=24)
    assert_close(plain.fuse(aux), aux @ plain.fc.weight.T)

    each = build(target_hidden_size=24, fc_norm=True)
    parts = [rms(part, norm.weight, 1e-5) for part, norm in zip(aux.split(24, -1), each.fc_norm, strict=True)]
    assert_close(each.fuse(aux), torch.cat(parts, -1) @ each.fc.weight.T)

    whole = build(target_hidden_size=24, norm_before_fc=True)
    assert_close(whole.fuse(aux), rms(aux, whole.input_norm.weight, 1e-5) @ whole.fc.weight.T)

    five = build(target_hidden_size=24, num_aux=5, aux_layer_ids=(0, 1, 2, 3, 4))
    assert five.fuse(torch.randn(1, 2, 5 * 24)).shape == (1, 2, 32)

    single = build(num_aux=1, aux_layer_ids=(9,))
    state = torch.randn(1, 2, 32)
    assert single.fc is None
    assert torch.equal(single.fuse(state), state)


@pytest.mark.parametrize("kind", ROPES)
def test_rotations_are_those_of_transformers(kind: str) -> None:
    config = Eagle3Config(**{**SIZES, "rope": ROPES[kind]})
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=ROPES[kind])
    )
    cos, sin = rotary(torch.zeros(1), torch.arange(300)[None])
    table = rotation_table(config, 300)
    sign = torch.tensor([-1.0] * 4 + [1.0] * 4)
    torch.testing.assert_close(table, torch.cat((cos[0], sin[0] * sign), -1), atol=1e-4, rtol=0)


@torch.no_grad()
def test_positions_grow_on_demand() -> None:
    model = build(max_position_embeddings=4)
    embeds, hidden = inputs(3)
    near = model(embeds, hidden, torch.arange(3)[None])
    far = model(embeds, hidden, torch.arange(5000, 5003)[None])
    assert_close(far.normed, near.normed)  # RoPE knows distances only
    model.reserve_positions(9000)
    assert_close(model(embeds, hidden, torch.arange(3)[None]).normed, near.normed)


@torch.no_grad()
def test_borrowing_embedding_and_head() -> None:
    model = untrained(32, 10, 64, seed=3)
    with pytest.raises(CheckpointError, match="call bind first"):
        model.embed(torch.tensor([[1]]))
    embed, head = torch.randn(70, 32), torch.randn(70, 32)  # padded beyond the vocabulary
    model.bind(embed, head)
    assert torch.equal(model.embed(torch.tensor([[5, 63]])), embed[[5, 63]][None])
    assert model.embed(torch.tensor([[5]])).data_ptr() != embed.data_ptr()
    assert not any("borrow" in name or "embed" in name for name in model.state_dict())

    shared = build(own_head=False, own_embedding=False)
    shared.bind(embed, head)
    states = torch.randn(1, 2, 32)
    assert_close(shared.logits(states), F.linear(states, head[:64]))
    with pytest.raises(CheckpointError, match=r"head is \[64, 16\], the drafter needs \[64, 32\]"):
        shared.bind(embed, torch.randn(64, 16))
    with pytest.raises(CheckpointError, match="give it to bind"):
        shared.bind(embed)

    tied = build(own_head=False, tied_head=True, own_embedding=False)
    tied.bind(embed)
    assert_close(tied.logits(states), F.linear(states, embed[:64]))
    own = build(own_head=False, tied_head=True)
    assert_close(own.logits(states), F.linear(states, own.embed_tokens.weight))


def test_borrowed_weights_are_not_copied() -> None:
    embed = torch.randn(64, 32)
    model = untrained(32, 10, 64)
    model.bind(embed)
    embed[7] = 5.0
    assert torch.equal(model.embed(torch.tensor([7])), torch.full((1, 32), 5.0))


def test_every_parameter_gets_a_gradient() -> None:
    """Two unrolled steps, as in training: the second reads the first's state and keys."""
    model = build(num_hidden_layers=2, fc_norm=True, norm_output=True, qk_norm=True, attention_bias=True)
    model.train()
    cache = DictCache()
    ids = torch.arange(6)[None]
    hidden = model.fuse(torch.randn(1, 6, 96))
    first = model(model.embed(ids), hidden, ids, causal(6)[None, None], cache)
    mask = torch.cat([causal(6), torch.eye(6, dtype=torch.bool)], 1)[None, None]
    second = model(model.embed(ids + 1), first.next_hidden, ids + 1, mask, cache)
    (model.logits(first.normed).logsumexp(-1) + model.logits(second.normed).logsumexp(-1)).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []


def test_untrained_depends_on_sizes_and_seed_alone() -> None:
    one, two, other = (untrained(64, 10, 128, draft_vocab_size=32, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert one.aux_layer_ids == (2, 5, 7)
    assert one.draft_to_target.tolist() == list(range(32))
    assert not one.config.own_embedding
    assert one.lm_head.weight.shape == (32, 64)


@pytest.mark.parametrize("layers", range(1, 9))
def test_untrained_fits_shallow_targets(layers: int) -> None:
    ids = untrained(32, layers, 64).aux_layer_ids
    assert list(ids) == sorted(set(ids))
    assert all(0 <= i <= layers for i in ids)


def test_untrained_names_what_does_not_fit() -> None:
    with pytest.raises(CheckpointError, match="draft_vocab_size exceeds vocab_size 64"):
        untrained(32, 10, 64, draft_vocab_size=65)


@torch.no_grad()
def test_bfloat16_stays_near_float32() -> None:
    exact, low = build(), build().to(torch.bfloat16)
    embeds, hidden = inputs(6)
    wanted = exact(embeds, hidden, torch.arange(6)[None]).normed
    out = low(embeds.bfloat16(), hidden.bfloat16(), torch.arange(6)[None])
    assert out.normed.dtype == torch.bfloat16
    assert (out.normed.float() - wanted).abs().max() < 0.15
    assert low.logits(out.normed).dtype == torch.bfloat16
