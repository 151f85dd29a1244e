"""The attention kernel against attention by hand in float64, and what its results must not depend on."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from target.elsewhere import ask

from eyas.target import attention, tuning

LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True)
def _there() -> Any:
    if not any(shutil.which(name) for name in attention.COMPILERS):
        pytest.skip("no C++ compiler: the kernel is not tested")
    assert attention.prepare() is None
    with torch.no_grad():
        yield


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """float64 [B, T, heads, E]: a row that sees nothing is 0."""
    shared = query.shape[1] // key.shape[1]
    keys, values = (part.double().repeat_interleave(shared, dim=1) for part in (key, value))
    scores = (query.double() @ keys.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ values.masked_fill(~mask.any(-2)[..., None], 0.0)).transpose(1, 2)


def problem(
    batch: int, heads: int, groups: int, tokens: int, length: int, size: int = 64, value_size: int = 64, seed: int = 0
) -> list[torch.Tensor]:
    """Query laid out as models do, keys and values as views of slots that are longer, and who sees what."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, tokens, heads, size, generator=generator).transpose(1, 2)
    key = torch.randn(batch, groups, length + 7, size, generator=generator)[:, :, :length]
    value = torch.randn(batch, groups, length + 7, value_size, generator=generator)[:, :, :length]
    ends = torch.randint(1, length - tokens + 1, (batch, 1), generator=generator) + torch.arange(tokens)
    return [query, key, value, (torch.arange(length) < ends[:, :, None])[:, None]]


def run(*tensors: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    assert attention.supported(*tensors)
    return torch.ops.eyas.attention(*tensors, scale)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "tokens", "length", "size", "value_size"),
    [
        (1, 9, 3, 1, 40, 64, 64),
        (16, 9, 3, 1, 300, 64, 64),
        (3, 9, 3, 6, 129, 64, 64),
        (2, 4, 4, 5, 70, 8, 8),
        (2, 8, 1, 2, 600, 80, 80),
        (2, 6, 2, 7, 515, 96, 40),
        (1, 4, 2, 3, 1000, 192, 128),
        (1, 2, 1, 1, 33, 256, 256),
    ],
)
def test_it_is_attention(
    dtype: torch.dtype, batch: int, heads: int, groups: int, tokens: int, length: int, size: int, value_size: int
) -> None:
    compare(problem(batch, heads, groups, tokens, length, size, value_size), dtype)


def compare(tensors: list[torch.Tensor], dtype: torch.dtype, scale: float = 0.2, limit: float = 0.0) -> None:
    *parts, mask = tensors
    parts = [part.to(dtype) for part in parts]
    got = run(*parts, mask, scale=scale)
    want = by_hand(*parts, mask, scale)
    assert got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=limit or LIMITS[dtype], atol=limit or LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
def test_windows_trees_and_rows_that_see_nothing(dtype: torch.dtype) -> None:
    query, key, value, _ = problem(3, 6, 2, 5, 700)
    mask = torch.rand(3, 1, 5, 700, generator=torch.Generator().manual_seed(1)) < 0.03
    mask[0, :, 2] = False  # nothing
    mask[1, :, :, :600] = False  # a window
    mask[2, :, 3] = False
    mask[2, :, 3, 699] = True  # one key
    compare([query, key, value, mask], dtype)
    assert not run(query, key, value, mask)[0, 2].any()


@pytest.mark.parametrize("dtype", LIMITS)
def test_one_mask_for_all_sequences_or_tokens(dtype: torch.dtype) -> None:
    query, key, value, mask = problem(3, 6, 2, 5, 90)
    for part in (mask[:1], mask[:, :, :1], mask[:1, :, :1], mask[:1].expand(3, -1, -1, -1)):
        compare([query, key, value, part], dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), 3e38])
def test_what_is_not_seen_is_not_there(dtype: torch.dtype, rubbish: float) -> None:
    query, key, value, mask = problem(4, 6, 2, 3, 300)
    hidden = ~mask.any(2)[:, :, :, None]
    spoilt = [part.masked_fill(hidden, rubbish).to(dtype) for part in (key, value)]
    clean = [part.masked_fill(hidden, 0.0).to(dtype) for part in (key, value)]
    assert torch.equal(run(query.to(dtype), *spoilt, mask), run(query.to(dtype), *clean, mask))


def test_a_spoilt_key_reaches_those_only_who_see_it() -> None:
    query, key, value, _ = problem(1, 6, 2, 3, 50)
    mask = torch.ones(1, 1, 3, 50, dtype=torch.bool)
    mask[0, 0, :2, 20] = False
    clean = run(query, key, value, mask)
    key[0, :, 20] = value[0, :, 20] = float("nan")
    got = run(query, key, value, mask)
    assert torch.equal(got[0, :2], clean[0, :2])
    assert got[0, 2].isnan().all()


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_result_depends_on_nothing_beside_it(dtype: torch.dtype) -> None:
    """To the last bit: not on neighbours, the slots' length, other tokens of the draft, or the number of threads."""
    query, key, value, mask = problem(5, 9, 3, 4, 900)
    query, key, value = (part.to(dtype) for part in (query, key, value))
    together = run(query, key, value, mask)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(query, key, value, mask), together)
    finally:
        torch.set_num_threads(threads)
    for b in range(5):
        end = int(mask[b].sum(-1).max())
        for length in {end, min(end + 1, 900), 900}:
            alone = run(
                query[b : b + 1], *(part[b : b + 1, :, :length] for part in (key, value)), mask[b : b + 1, ..., :length]
            )
            assert torch.equal(alone[0], together[b]), (b, length)
        for t in range(4):
            one = run(query[b : b + 1, :, t : t + 1], key[b : b + 1], value[b : b + 1], mask[b : b + 1, :, t : t + 1])
            assert torch.equal(one[0, 0], together[b, t]), (b, t)


def test_large_scores_and_equal_ones() -> None:
    query, key, value, mask = problem(2, 6, 2, 2, 300)
    compare([query * 100, key, value, mask], torch.float32, limit=1e-4)  # scores of 1,000 are known to 1e-4
    compare([query * 0, key, value, mask], torch.float32)


def test_a_compiled_graph_calls_it() -> None:
    tensors = problem(2, 6, 2, 2, 80)

    def step(*parts: torch.Tensor) -> torch.Tensor:
        if attention.supported(*parts):
            return torch.ops.eyas.attention(*parts, None) * 2
        return parts[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), run(*tensors) * 2)


def test_what_it_does_not_take() -> None:
    query, key, value, mask = problem(2, 6, 2, 2, 80)
    others: dict[str, list[Any]] = {
        "no mask": [query, key, value, None],
        "an additive mask": [query, key, value, mask.float()],
        "float16": [part.half() for part in (query, key, value)] + [mask],
        "two types": [query, key.bfloat16(), value, mask],
        "heads without a key head": [query[:, :5], key, value, mask],
        "a mask for each head": [query, key, value, mask.expand(-1, 6, -1, -1)],
        "columns": [query, key.transpose(2, 3).contiguous().transpose(2, 3), value, mask],
        "an odd size": [part[..., :12] for part in (query, key, value)] + [mask],
        "a shorter mask": [query, key, value, mask[..., :79]],
    }
    for name, tensors in others.items():
        assert not attention.supported(*tensors), name
    with torch.enable_grad():
        assert not attention.supported(query.clone().requires_grad_(), key, value, mask)
    with pytest.raises(ValueError, match="do not belong together"):
        torch.ops.eyas.attention(query, key, value, mask[..., :79], None)


@pytest.mark.parametrize(("count", "few"), [(1, True), (6, True), (40, False)])
def test_few_rows_of_a_tuned_model_come_here(count: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, run_kernel = [], attention._run
    monkeypatch.setattr(attention, "_run", lambda *args: calls.append(args[1].shape[2]) or run_kernel(*args))
    model = zoo.case("llama").build()
    layers = model.config.num_hidden_layers
    tuning.tune(model, smallest=0)
    calls.clear()
    mask = torch.ones(2, 1, count, count, dtype=torch.bool).tril()
    ids = torch.arange(2 * count).view(2, count)
    got = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert calls == ([count] * layers if few else [])
    want = zoo.case("llama").model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# Where it is built. Each time in a process of its own, for a library is loaded once; the processes come from a server
# that has imported PyTorch, which takes longer than all the rest.

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["eyas.target.attention"])


def elsewhere(umask: int | None = None, **environment: str) -> str:
    """What ``prepare`` says in a process of its own."""
    said, says = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=ask, args=(says, umask, environment))
    process.start()
    says.close()
    assert said.poll(120)
    answer = said.recv()
    process.join(10)
    assert process.exitcode == 0
    return answer


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    fresh = {"EYAS_CACHE": str(tmp_path)}
    assert "there is none of g++" in elsewhere(PATH=str(tmp_path), CXX="", **fresh)
    assert "$CXX names none: no-such-compiler" in elsewhere(CXX="no-such-compiler -O1", **fresh)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho error: no space >&2; exit 3\n")
    broken.chmod(0o700)
    assert "does not compile" in elsewhere(CXX=str(broken), **fresh)
    wrong = tmp_path / "wrong"  # links something else
    wrong.write_text("#!/bin/sh\nfor last; do :; done; echo nothing > $last\n")
    wrong.chmod(0o700)
    assert "cannot be loaded" in elsewhere(CXX=str(wrong), **fresh)
    assert not list((tmp_path / "kernels").glob("attention-*"))  # what is wrong is not kept


def test_it_is_built_once_and_not_taken_from_others(tmp_path: Path) -> None:
    fresh = {"EYAS_CACHE": str(tmp_path)}
    assert elsewhere(**fresh) == "None"
    (library,) = (tmp_path / "kernels").glob("attention-*/a.so")
    before = library.stat().st_mtime_ns
    assert elsewhere(**fresh) == "None"
    assert library.stat().st_mtime_ns == before
    assert elsewhere(PATH=str(tmp_path), CXX="", **fresh) == "None"  # it takes a compiler once
    library.chmod(0o666)
    assert "is not this user's alone" in elsewhere(**fresh)


@pytest.mark.thorough
def test_a_damaged_one_is_built_anew(tmp_path: Path) -> None:
    fresh = {"EYAS_CACHE": str(tmp_path)}
    assert elsewhere(**fresh) == "None"
    (library,) = (tmp_path / "kernels").glob("attention-*/a.so")
    whole = library.read_bytes()
    for damage in (lambda: os.truncate(library, 4096), library.unlink, lambda: library.write_bytes(b"no library")):
        damage()
        assert elsewhere(**fresh) == "None"
        assert len(library.read_bytes()) == len(whole)


@pytest.mark.parametrize("mask", [0o002, 0o077])
@pytest.mark.thorough
def test_whatever_the_umask_its_own_is_taken(mask: int, tmp_path: Path) -> None:
    for _ in range(2):
        assert elsewhere(mask, EYAS_CACHE=str(tmp_path / "cache")) == "None"
