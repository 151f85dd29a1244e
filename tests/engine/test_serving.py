"""The engine for many callers at once: each hears of its own request only, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import zoo
from engine.harness import TREE, random_drafter, words

from eyas.core import EyasError, Request, RequestError, SamplingParams
from eyas.engine.llm import LLM
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import Output
from eyas.engine.serving import AsyncLLM
from eyas.target.adapter import HFTarget

NAME = "llama"
PATIENCE = 30  # seconds


@cache
def target(whose: str) -> HFTarget:
    """A model for each thread: two cannot use one at the same time."""
    return HFTarget(zoo.case(NAME).build())


def model(whose: str = "engine", **settings: Any) -> LLM:
    return LLM(
        target(whose),
        words(),
        drafter=random_drafter(NAME),
        shape=TREE,
        context_length=128,
        **{"max_running_requests": 4, "speculation": "fixed", **settings},
    )


@pytest.fixture
def served() -> Iterator[AsyncLLM]:
    made = AsyncLLM(model())
    yield made
    made.close()
    assert not made._thread.is_alive()


def request(number: int, **settings: Any) -> Request:
    kinds = ({}, {"temperature": 1.2, "seed": 3}, {"repetition_penalty": 1.4, "logprobs": 1}, {"stop": (" w1",)})
    sampling = SamplingParams(**{"max_tokens": 6 + number % 20, **kinds[number % 4], **settings})
    return Request(f"r{number}", zoo.case(NAME).prompt(5 + number % 30, number), sampling)


@dataclass
class Told:
    """What one caller heard."""

    outputs: list[Output] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for output in self.outputs for token in output.emitted]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)


async def listen(served: AsyncLLM, asked: Request, told: Told | None = None) -> Told:
    told = told or Told()
    try:
        async with aclosing(served.stream(asked)) as stream:
            async for output in stream:
                assert output.request_id == asked.id
                told.outputs.append(output)
    except EyasError as error:
        told.error = error
    return told


def together(*jobs: Awaitable[Any]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*jobs), PATIENCE)

    return asyncio.run(all_of_them())


def within(job: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(job(), PATIENCE))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def complete(told: Told, asked: Request) -> None:
    expected = model("here").complete(replace(asked, id="alone"))
    assert told.error is None
    assert told.tokens == expected.token_ids and told.text == expected.text
    assert told.outputs[-1].finish_reason == expected.finish_reason
    assert all(output.finish_reason is None for output in told.outputs[:-1])


def test_everybody_hears_of_their_own_request(served):
    requests = [request(number) for number in range(24)]
    for told, asked in zip(together(*(listen(served, r) for r in requests)), requests, strict=True):
        complete(told, asked)
    assert not served._listeners and served.llm.engine.idle


def test_requests_come_while_others_are_answered(served):
    requests = [request(number) for number in range(8)]

    async def late(asked: Request, number: int) -> Told:
        await asyncio.sleep(0.01 * number)
        return await listen(served, asked)

    for told, asked in zip(together(*map(late, requests, range(8))), requests, strict=True):
        complete(told, asked)


def test_outputs_come_one_by_one_and_not_at_the_end(served):
    async def job() -> None:
        told = Told()
        task = asyncio.create_task(listen(served, request(0, max_tokens=100), told))
        await until(lambda: bool(told.outputs))
        assert not task.done()
        await task
        assert len(told.outputs) > 5

    within(job)


def test_first_tokens_do_not_wait_for_the_others():
    llm = model()
    engine, heard = llm.engine, list[tuple[str, int]]()
    engine.add(request(0, max_tokens=60))
    engine.step()
    ahead = next(iter(engine.scheduler.running.values()))
    engine.add(request(1))
    before = len(ahead.ids)
    returned = engine.step(lambda outputs: heard.extend((o.request_id, len(ahead.ids)) for o in outputs))
    assert heard == [(request(1).id, before)], "before the next one was decoded"
    assert [output.request_id for output in returned] == [request(0).id] and len(ahead.ids) > before


@pytest.mark.parametrize("how", ["cancelled", "left"])
def test_who_stops_listening_frees_the_slot_at_once(served, how):
    """Of two long answers one is given up; the other goes on, and the next one starts long before either could end."""
    engine = served.llm.engine
    asked, other = request(1, max_tokens=90), request(2, max_tokens=60)

    async def job() -> Told:
        told = Told()
        beside = asyncio.create_task(listen(served, other))
        if how == "cancelled":
            task = asyncio.create_task(listen(served, asked, told))
            await until(lambda: bool(told.outputs))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with aclosing(served.stream(asked)) as stream:
                async for output in stream:
                    told.outputs.append(output)
                    break
        found, running = await served.call(lambda: (engine.scheduler.find(asked.id), len(engine.scheduler.running)))
        assert found is None and running <= 1 and asked.id not in served._listeners
        assert len(told.tokens) < 90
        return await beside

    complete(within(job), other)


def test_who_waits_can_leave_too():
    served = AsyncLLM(model(max_running_requests=1))
    first, second = request(1, max_tokens=60), request(2)

    async def job() -> Told:
        told = Told()
        running = asyncio.create_task(listen(served, first, told))
        await until(lambda: bool(told.outputs))
        waiting = asyncio.create_task(listen(served, second))
        await served.call(lambda: None)
        waiting.cancel()
        await served.call(lambda: None)
        assert await served.call(lambda: served.llm.engine.scheduler.find("r2")) is None
        return await running

    complete(within(job), first)
    served.close()


# Errors


def test_an_error_reaches_its_caller_only(served):
    refused = [
        replace(request(50), prompt_ids=[]),
        replace(request(51), prompt_ids=[1] * 200),
        replace(request(52), prompt_ids=[10_000]),
        request(53, logit_bias={zoo.VOCAB: 1.0}),
    ]
    fails = request(54, logit_bias=dict.fromkeys(range(zoo.VOCAB), float("-inf")))
    fine = [request(number) for number in range(3)]
    told = together(*(listen(served, asked) for asked in (*refused, fails, *fine)))
    for one in told[:5]:
        assert isinstance(one.error, RequestError) and not one.outputs
    for one, asked in zip(told[5:], fine, strict=True):
        complete(one, asked)


def test_a_request_that_makes_no_sense_ends_nobody_else(served):
    """Not even an error of ours: what a caller gave it for token ids are none."""
    fine = request(0)
    strange, told = together(listen(served, replace(request(1), prompt_ids=["a"])), listen(served, fine))
    assert isinstance(strange.error, RequestError)
    complete(told, fine)


def test_a_fault_at_the_door_is_not_the_callers(served, monkeypatch, caplog):
    def fails(*args: Any) -> Any:
        raise RuntimeError("the roof falls in")

    with monkeypatch.context() as patch:
        patch.setattr(served.llm.engine, "add", fails)
        (told,) = together(listen(served, request(0)))
    assert isinstance(told.error, EyasError) and not isinstance(told.error, RequestError)
    assert isinstance(told.error.__cause__, RuntimeError)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("the engine failed: RuntimeError\n") and "in fails" in line
    complete(together(listen(served, request(0)))[0], request(0))


def test_ids_must_differ(served):
    """The second one is refused, and its going away does not end the first."""
    asked = request(0, max_tokens=60)

    async def job() -> Told:
        told = Told()
        first = asyncio.create_task(listen(served, asked, told))
        await until(lambda: bool(told.outputs))
        second = await listen(served, replace(request(3), id=asked.id))
        assert isinstance(second.error, RequestError) and asked.id in str(second.error)
        return await first

    complete(within(job), asked)
    complete(together(listen(served, asked))[0], asked)  # the id is free again


def test_an_error_between_two_steps_is_the_callers(served):
    def fails() -> None:
        raise ZeroDivisionError("mine")

    async def job() -> int:
        with pytest.raises(ZeroDivisionError, match="mine"):
            await served.call(fails)
        return await served.call(lambda: 7)

    assert within(job) == 7


@pytest.mark.parametrize(
    "where",
    [
        "schedule",
        *(pytest.param(w, marks=pytest.mark.thorough) for w in ("arrange", "observe", "layout", "half a layout")),
    ],
)
def test_a_fault_of_the_engine_ends_who_is_there_and_no_more(served, where, monkeypatch):
    """Whoever comes after it is answered as ever, although the memory was just being arranged anew."""
    engine = served.llm.engine
    before = [request(number, max_tokens=60) for number in range(3)]
    owner, name = {
        "schedule": (engine.scheduler, "schedule"),
        "arrange": (engine.runner, "arrange"),
        "observe": (engine.policy, "observe"),
        "layout": (engine.runner.cache, "layout"),
        "half a layout": (engine.drafter, "layout"),
    }[where]
    original, due = getattr(owner, name), threading.Event()

    def fails(*args: Any) -> Any:
        if due.is_set() and (name != "arrange" or args[0]):
            due.clear()
            raise RuntimeError("the roof falls in")
        return original(*args)

    monkeypatch.setattr(owner, name, fails)

    async def job() -> list[Told]:
        all_told = [Told() for _ in before]
        tasks = [asyncio.create_task(listen(served, r, t)) for r, t in zip(before, all_told, strict=True)]
        await until(lambda: all(told.outputs for told in all_told))
        due.set()
        return await asyncio.gather(*tasks)

    told = within(job)
    assert any(one.error for one in told) and not due.is_set()
    for one, asked in zip(told, before, strict=True):
        if one.error:
            assert "the roof falls in" in str(one.error)
        else:
            complete(one, asked)
    assert within(lambda: served.call(lambda: engine.idle and not served._listeners))
    again = [*before, *(replace(r, id=f"{r.id} again", prompt_ids=[*r.prompt_ids, 5]) for r in before)]
    for one, asked in zip(together(*(listen(served, r) for r in again)), again, strict=True):
        complete(one, asked)
    engine.scheduler.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_that_cannot_be_cleaned_up_ends_the_engine_and_everybody_is_told(monkeypatch):
    """As with CUDA, where after one error nothing works any more."""
    served = AsyncLLM(model())
    engine, step, due = served.llm.engine, served.llm.engine.step, threading.Event()

    def fails() -> Any:
        raise RuntimeError("the roof falls in")

    def stepping(hear: Any) -> Any:
        if due.is_set():
            for name in ("wipe", "clear"):
                monkeypatch.setattr(engine.runner, name, lambda *args: fails())
            fails()
        return step(hear)

    monkeypatch.setattr(engine, "step", stepping)

    async def job() -> list[Told]:
        all_told = {n: Told() for n in (0, 1, 2, 4, 5, 6)}  # two wait; the others are those that stop early
        tasks = [asyncio.create_task(listen(served, request(n, max_tokens=90), t)) for n, t in all_told.items()]
        await until(lambda: sum(bool(told.outputs) for told in all_told.values()) == 4)
        due.set()
        await asyncio.gather(*tasks)
        await until(lambda: served.ended)
        return list(all_told.values())

    assert all("the roof falls in" in str(told.error) for told in within(job))
    assert served.closed
    late = together(listen(served, request(9)))[0]
    assert late.error is not None and "closed" in str(late.error)
    served.close()


# The end


def test_closing_ends_all_with_an_error():
    served = AsyncLLM(model(max_running_requests=2))
    requests = [request(number, max_tokens=90) for number in range(5)]

    async def job() -> list[Told]:
        all_told = [Told() for _ in requests]
        tasks = [asyncio.create_task(listen(served, r, t)) for r, t in zip(requests, all_told, strict=True)]
        await until(lambda: any(told.outputs for told in all_told))
        assert not served.closed
        await asyncio.to_thread(served.close)
        assert served.closed
        await asyncio.gather(*tasks)
        return all_told

    for told in within(job):
        assert told.error is not None and "closed" in str(told.error)
    assert served.llm.engine.idle
    late = together(listen(served, request(9)))[0]
    assert late.error is not None and "closed" in str(late.error)
    with pytest.raises(EyasError, match="closed"):
        within(partial(served.call, lambda: 1))
    served.close()


def test_nobody_is_forgotten_who_comes_as_the_engine_closes():
    """What was asked for while the last step ran is answered too, if only with an error."""
    served = AsyncLLM(model())
    engine = served.llm.engine
    step, inside, go_on = engine.step, threading.Event(), threading.Event()

    def slow(hear: Any) -> list[Output]:
        inside.set()
        assert go_on.wait(PATIENCE)
        return step(hear)

    engine.step = slow  # type: ignore[method-assign]

    async def job() -> None:
        first = asyncio.create_task(listen(served, request(0, max_tokens=60)))
        await until(inside.is_set)
        second = asyncio.create_task(listen(served, request(1)))
        third = asyncio.create_task(served.call(lambda: 3))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(served.close))
        await until(lambda: served._closed)
        go_on.set()
        told = await asyncio.gather(first, second)
        assert all("closed" in str(one.error) for one in told)
        assert await third == 3
        await closing

    within(job)


def test_a_caller_whose_loop_is_gone(served):
    """It never said that it would leave: the engine goes on for others."""
    gone = asyncio.new_event_loop()
    stream = served.stream(request(0, max_tokens=60))
    first = gone.run_until_complete(anext(stream))
    assert first.emitted
    gone.close()
    for number in (1, 2):
        complete(together(listen(served, request(number)))[0], request(number))


def test_slots_do_not_leak(served, monkeypatch):
    """Callers that leave at every possible moment, over and over."""
    monkeypatch.setattr(served.llm.engine, "step", checked(served.llm.engine.step, served.llm.engine.scheduler))

    async def fickle(number: int) -> None:
        task = asyncio.create_task(listen(served, request(number)))
        await asyncio.sleep(0.002 * (number % 17))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    together(*(fickle(number) for number in range(60)))

    async def settled() -> bool:
        return await served.call(lambda: served.llm.engine.idle)

    assert within(settled)
    assert not served._listeners
    complete(together(listen(served, request(5)))[0], request(5))


def checked(step: Callable[[Any], list[Output]], scheduler: Scheduler) -> Callable[[Any], list[Output]]:
    def stepping(hear: Any) -> list[Output]:
        outputs = step(hear)
        scheduler.check()
        return outputs

    return stepping
