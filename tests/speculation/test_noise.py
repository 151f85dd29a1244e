import itertools

import pytest
import torch
from scipy import stats

from eyas.speculation import noise
from eyas.speculation.noise import gumbel

TOKENS = torch.arange(4000)


def test_finaliser_is_splitmix64s():
    # The published test vector of splitmix64 with seed 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [1234567 + i * noise._GOLDEN for i in range(1, 6)]
    on_tensor = noise._finalise_(torch.tensor([noise._signed(z % 2**64) for z in states]))
    assert [int(z) % 2**64 for z in on_tensor] == expected
    assert [noise._finalise_int(z) for z in states] == expected


def test_a_value_depends_on_seed_index_and_token_only():
    full = gumbel(7, torch.arange(40), TOKENS)
    draw = torch.Generator().manual_seed(0)
    for width in [*range(1, 40), 255, 1000]:  # every tail of a vectorised loop
        rows = torch.randint(40, (1 + width % 5,), generator=draw)
        columns = torch.randint(len(TOKENS), (width,), generator=draw)
        assert torch.equal(gumbel(7, rows, columns), full[rows][:, columns])
        start = int(columns[0])
        assert torch.equal(gumbel(7, rows, TOKENS[start : start + width]), full[rows, start : start + width])
    assert torch.equal(gumbel(7, torch.arange(0), TOKENS), full[:0])


def test_each_row_may_have_its_own_seed():
    seeds = (7, 2**64 - 1, 0, 10**40)
    indices = torch.tensor([3, 0, 9, 3])
    alone = [gumbel(seed, indices[row : row + 1], TOKENS) for row, seed in enumerate(seeds)]
    assert torch.equal(gumbel(seeds, indices, TOKENS), torch.cat(alone))
    assert torch.equal(
        gumbel([7, 8], indices, TOKENS), torch.cat((gumbel(7, indices[:2], TOKENS), gumbel(8, indices[2:], TOKENS)))
    )
    with pytest.raises(RuntimeError):
        gumbel((1, 2, 3), indices, TOKENS)


def test_the_noise_of_a_release_is_that_of_the_next():
    """Written down: texts of old seeds come again."""
    values = gumbel((1, -5), torch.tensor([0, 1000]), torch.tensor([0, 49151]))
    expected = [[3.20051, -0.818793], [0.5983159, 0.9804531]]
    torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_inputs_are_left_alone():
    indices, tokens = torch.arange(3), torch.arange(5)
    gumbel(1, indices, tokens)
    assert indices.tolist() == [0, 1, 2] and tokens.tolist() == [0, 1, 2, 3, 4]


def test_distribution_along_every_axis():
    def fits(values):
        return stats.kstest(values.flatten().numpy(), stats.gumbel_r.cdf).pvalue > 1e-3

    assert fits(gumbel(3, torch.tensor([5]), torch.arange(50_000)))
    assert fits(gumbel(3, torch.arange(50_000), torch.tensor([11])))
    assert fits(torch.cat([gumbel(seed, torch.tensor([0]), torch.tensor([0])) for seed in range(3000)]))


def test_no_linear_relations():
    """Correlations of the uniforms between a block and its shifts in seed, index and token, and with axes exchanged."""

    def uniforms(seed, index, token):
        return torch.exp(-torch.exp(-gumbel(seed, torch.arange(index, index + 150), torch.arange(token, token + 150))))

    base = uniforms(10, 0, 0)
    shifts = [shift for shift in itertools.product((0, 1, 2, 64), (0, 1, 2, 7, 64), (0, 1, 3, 64)) if any(shift)]
    others = [uniforms(10 + s, i, t) for s, i, t in shifts]
    others += [uniforms(10 + s, 0, 0) for s in (2**31, 2**32, 2**63, -20)]
    others += [uniforms(10 * 2**32, 0, 0), uniforms(10, 2**32, 0), uniforms(10, 0, 2**32)]
    others += [base.T, base.flip(0), base.flip(1)]
    block = base.flatten()
    for other in others:
        # -1 times a block would be an antithetic copy: both signs count.
        assert abs(torch.corrcoef(torch.stack((block, other.flatten())))[0, 1]) < 5 / 150
        # Nor may single bits (here the highest) be related.
        agree = ((block > 0.5) == (other.flatten() > 0.5)).double().mean()
        assert abs(agree - 0.5) < 2.5 / 150


def test_differences_are_unrelated_between_rows():
    """A linear key would make noise(i, t + 1) - noise(i, t) repeat from row to row."""
    steps = gumbel(0, torch.arange(64), torch.arange(2000)).diff(dim=1)
    correlation = torch.corrcoef(steps) - torch.eye(64)
    assert correlation.abs().max() < 0.13


def test_values_do_not_repeat():
    cells = torch.stack([gumbel(seed, torch.arange(50), torch.arange(50)) for seed in (0, 1, 2**40)]).flatten()
    # 7,500 float32 values collide now and then, whole rows never do.
    assert len(cells.unique()) > 0.99 * len(cells)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 3**100, -(3**100)])
def test_any_seed_is_taken_modulo_2_64(seed):
    values = gumbel(seed, torch.tensor([0, 1, 2**62]), TOKENS)
    assert values.isfinite().all()
    assert torch.equal(values, gumbel(seed % 2**64, torch.tensor([0, 1, 2**62]), TOKENS))
    assert not torch.equal(values, gumbel(seed + 1, torch.tensor([0, 1, 2**62]), TOKENS))


@pytest.mark.parametrize(("bits", "value"), [(0, 37.43), (-1, -2.82), (1 << 11, 36.33), (1 << 62, 1.246)])
def test_tails_are_exact_and_finite(monkeypatch, bits, value):
    """At the ends of the 53-bit uniform: -log(-log1p(-u)), with u = 2**-54, 1.5 * 2**-53, 1/4 and nearly 1."""
    monkeypatch.setattr(noise, "_finalise_", lambda z: torch.full_like(z, bits))
    assert gumbel(0, torch.tensor([0]), torch.tensor([0])).item() == pytest.approx(value, abs=0.01)
