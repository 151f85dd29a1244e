import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.speculation import top
from eyas.speculation.top import largest


def naive(row):
    """NaN before all numbers, and the first of equals."""
    return max(range(len(row)), key=lambda i: (math.isnan(row[i]), 0 if math.isnan(row[i]) else row[i], -i))


@settings(deadline=None, max_examples=200)
@given(
    width=st.integers(1, 40),
    chunk=st.sampled_from([1, 2, 5, 8]),
    values=st.lists(st.sampled_from([0.0, 1.0, -2.0, math.inf, -math.inf, math.nan, -0.0]), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_first_of_the_largest(width, chunk, values, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(values)[torch.randint(len(values), (2, 3, width), generator=generator)].to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top, "_CHUNK", chunk)
        best, columns = largest(x)
    assert best.dtype == dtype and columns.dtype == torch.int64 and best.shape == columns.shape == (2, 3)
    expected = [[naive(row) for row in rows] for rows in x.tolist()]
    assert columns.tolist() == expected
    torch.testing.assert_close(best, x.gather(-1, columns[..., None])[..., 0], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("width", [1023, 1024, 1025, 1535, 49152, 50001])
def test_real_widths(width):
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(width))
    x[1, -1] = x[2, 0] = x[2, -1] = 9
    x[3, width // 2] = math.nan
    best, columns = largest(x)
    assert columns.tolist() == x.argmax(-1).tolist() and columns[1:].tolist() == [width - 1, 0, width // 2]
    assert best[:3].tolist() == x[:3].amax(-1).tolist() and best[3].isnan()


def test_views_and_no_rows():
    x = torch.randn(3, 7, 2500)[:, ::2, 1::2]
    assert torch.equal(largest(x)[1], x.argmax(-1))
    assert largest(torch.empty(0, 1200))[1].shape == (0,)
