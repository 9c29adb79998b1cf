from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from pagedmlx.core.sampling_params import SamplingParams
from pagedmlx.core.sequence import Sequence
from pagedmlx.core.step import INVALID_TOKEN
from pagedmlx.engine.outputs import Job, OutputEvent
from pagedmlx.errors import InvalidRequestError, QueueFullError, RequestFailedError
from pagedmlx.text.detokenizer import Detokenizer
from tests.support.engines import (
    EOS,
    LETTERS,
    FakeRunner,
    assert_idle,
    events_of,
    hashed_letter,
    make_engine,
    run_job,
    run_jobs,
    spelled,
)
from tests.support.tokenizers import byte_ids, byte_tokenizer

pytestmark = pytest.mark.usefixtures("depth")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def job(prompt: str = "hello", request_id: str | None = None, **params: object) -> Job:
    return Job(
        prompt=prompt,
        request_id=request_id,
        sampling_params=replace(GREEDY, **params),  # type: ignore[arg-type]
    )


def by_request(events: list[OutputEvent]) -> dict[str, list[OutputEvent]]:
    grouped: dict[str, list[OutputEvent]] = defaultdict(list)
    for event in events:
        grouped[event.request_id].append(event)
    return grouped


# Text and ends.


def test_joined_deltas_are_the_text_and_only_the_last_event_has_a_reason():
    engine = make_engine()
    engine.add_request(job(request_id="a"))
    events = events_of(engine)
    text = "".join(event.text for event in events)
    tokens = [token for event in events for token in event.token_ids]
    assert text == byte_tokenizer().decode(tokens)
    assert len(tokens) == 12
    assert [event.finish_reason for event in events] == [None] * 11 + ["length"]
    assert_idle(engine)


def test_an_output_ends_at_the_models_end_token_which_is_no_text():
    output = run_job(make_engine(FakeRunner(spelled("abc"))), job()).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", None)
    assert output.token_ids == (*byte_ids(b"abc"), EOS)


def test_a_first_token_that_ends_gives_empty_text():
    for others in ([], [job("x"), job("y")]):
        outputs = run_jobs(make_engine(FakeRunner(spelled(""))), [job(), *others])
        for output in outputs:
            assert output.outputs[0].text == ""
            assert output.outputs[0].finish_reason == "stop"
            assert output.outputs[0].token_ids == (EOS,)


@pytest.mark.parametrize("num_others", [0, 3])
def test_max_tokens_one_gives_one_token_and_length(num_others: int):
    engine = make_engine()
    jobs = [job("abcd", max_tokens=1), *(job("xyz" * n) for n in range(1, num_others + 1))]
    output = run_jobs(engine, jobs)[0].outputs[0]
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"
    assert_idle(engine)


def test_an_end_token_that_is_the_last_one_allowed_counts_as_stop():
    output = run_job(make_engine(FakeRunner(spelled("abc"))), job(max_tokens=4)).outputs[0]
    assert (output.text, output.finish_reason) == ("abc", "stop")
    output = run_job(make_engine(FakeRunner(spelled("abc"))), job(max_tokens=3)).outputs[0]
    assert (output.text, output.finish_reason) == ("abc", "length")


def test_a_stop_string_completed_by_the_last_token_allowed_counts_as_stop():
    engine = make_engine(FakeRunner(spelled("one fox")))
    output = run_job(engine, job(max_tokens=7, stop=("fox",))).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("one ", "stop", "fox")
    assert len(output.token_ids) == 7
    assert_idle(engine)


def test_a_stop_string_ends_the_output_and_frees_its_blocks_at_once():
    engine = make_engine(FakeRunner(spelled("a brown fox jumps")))
    output = run_job(engine, job(max_tokens=100, stop=("own fox", "zzz"))).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a br", "stop", "own fox")
    assert_idle(engine)


def test_text_held_back_for_a_stop_string_arrives_at_the_end():
    engine = make_engine(FakeRunner(spelled("a brown fo")))
    output = run_job(engine, job(stop=("fox",))).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a brown fo", "stop", None)


def test_a_named_stop_token_is_told_apart_from_the_models_own():
    stop = byte_ids(b"c")[0]
    engine = make_engine(FakeRunner(spelled("abcd")))
    output = run_job(engine, job(stop_token_ids=(stop,))).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", stop)


def test_ends_before_min_tokens_are_passed_over():
    stop = byte_ids(b"b")[0]
    params = {"stop_token_ids": (stop,), "min_tokens": 5, "stop": ("ab",), "max_tokens": 20}
    output = run_job(make_engine(FakeRunner(spelled("abababab"))), job(**params)).outputs[0]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) == 6
    assert output.text == "abab" + ("" if output.stop_reason == "ab" else "a")
    output = run_job(make_engine(FakeRunner(spelled("ab"))), job(min_tokens=9)).outputs[0]
    assert len(output.token_ids) == 9
    assert output.finish_reason == "stop"


def test_an_ignored_end_token_goes_on_to_the_length():
    output = run_job(make_engine(FakeRunner(spelled("ab"))), job(ignore_eos=True)).outputs[0]
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("ab", "length", 12)


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_character_cut_off_by_the_length_is_never_half_shown(cut: int):
    engine = make_engine(FakeRunner(spelled("\N{SLIGHTLY SMILING FACE}!")))
    engine.add_request(job(max_tokens=cut))
    text = "".join(event.text for event in events_of(engine))
    assert text == ("\N{SLIGHTLY SMILING FACE}" if cut == 4 else "")


# n outputs and seeds.


def test_one_of_three_outputs_may_end_early_and_the_others_go_on():
    def choose(sequence: Sequence) -> int:
        ends = sequence.index == 1 and sequence.num_output_tokens == 2
        return EOS if ends else hashed_letter(sequence)

    engine = make_engine(FakeRunner(choose))
    outputs = run_job(engine, job(n=3, temperature=1.0, seed=1)).outputs
    assert [output.finish_reason for output in outputs] == ["length", "stop", "length"]
    assert [len(output.token_ids) for output in outputs] == [12, 3, 12]
    assert_idle(engine)


def test_outputs_of_one_request_differ_and_are_reproducible():
    request = job(n=3, temperature=1.0, seed=1)
    first = run_job(make_engine(), request).outputs
    engine = make_engine()
    run_jobs(engine, [job("other traffic", temperature=1.0)])
    again = run_jobs(engine, [job("more", temperature=1.0), request])[1].outputs
    assert len({output.token_ids for output in first}) == 3
    assert [output.token_ids for output in first] == [output.token_ids for output in again]


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them():
    jobs = [job(temperature=1.0)] * 3
    texts = [[o.outputs[0].text for o in run_jobs(make_engine(seed=5), jobs)] for _ in range(2)]
    assert len(set(texts[0])) == 3
    assert texts[0] == texts[1]
    other = [output.outputs[0].text for output in run_jobs(make_engine(seed=6), jobs)]
    assert other != texts[0]


def test_lifetimes_of_all_lengths_in_one_batch_equal_solo():
    lengths = (1, 2, 3, 5, 8, 13, 40, 80)
    jobs = [job(f"prompt {n}", max_tokens=n) for n in lengths]
    solo = [run_job(make_engine(enable_prefix_caching=False), each).outputs for each in jobs]
    engine = make_engine(num_blocks=200)
    assert [output.outputs for output in run_jobs(engine, jobs)] == solo
    assert_idle(engine)


# A pool that is too small for all at once.


def test_with_a_small_pool_everything_completes_and_equals_solo():
    rng = random.Random(3)
    jobs: list[Job] = []
    for number in range(24):
        sampled = number % 2
        jobs.append(
            job(
                "system prompt. " * (number % 3) + "x" * rng.randint(1, 20),
                n=1 + number % 5 // 4 * 2,
                temperature=float(sampled),
                seed=number if sampled else None,
                max_tokens=rng.randint(1, 40),
                stop=("ab", "g h"),
            )
        )
    solo = [run_job(make_engine(enable_prefix_caching=False), each) for each in jobs]
    engine = make_engine(num_blocks=24, max_num_seqs=8, max_num_batched_tokens=24)
    outputs = run_jobs(engine, jobs)
    assert [each.outputs for each in outputs] == [each.outputs for each in solo]
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_waits > 0
    assert stats.peak_used_blocks <= 24
    assert sum(output.metrics.num_preemptions for output in outputs) == stats.num_preemptions
    assert_idle(engine)


# One request's failure is its own.


@pytest.mark.parametrize("n", [1, 3])
def test_a_row_that_is_not_finite_ends_that_output_alone(n: int):
    def choose(sequence: Sequence) -> int:
        guilty = sequence.request.request_id == "bad" and sequence.index == n - 1
        return INVALID_TOKEN if guilty and sequence.num_output_tokens == 4 else LETTERS[0]

    engine = make_engine(FakeRunner(choose))
    bad, good = run_jobs(engine, [job("bad", "bad", n=n, temperature=1.0), job("good", "good")])
    assert isinstance(bad.error, RequestFailedError)
    assert bad.outputs[-1].finish_reason == "error"
    assert len(bad.outputs[-1].token_ids) == 4
    assert all(output.finish_reason == "length" for output in bad.outputs[:-1])
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 12
    assert_idle(engine)


@pytest.mark.parametrize("method", ["add", "finish"])
def test_a_detokenizer_that_fails_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch, method: str
):
    engine = make_engine()
    engine.add_request(job(request_id="bad"))
    engine.add_request(job(request_id="good"))

    detokenizer = engine._live["bad"].outputs[0].detokenizer
    original = getattr(Detokenizer, method)

    def fail(self: Detokenizer, *rest: object) -> str:
        if self is detokenizer:
            raise ValueError("broken")
        return original(self, *rest)

    monkeypatch.setattr(Detokenizer, method, fail)
    events = by_request(events_of(engine))
    assert events["bad"][-1].finish_reason == "error"
    assert isinstance(events["bad"][-1].error, RequestFailedError)
    assert events["good"][-1].finish_reason == "length"
    assert_idle(engine)


def test_a_detokenizer_that_fails_does_not_hinder_an_abort(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    engine.add_request(job(request_id="a"))
    engine.step()
    monkeypatch.setattr(Detokenizer, "finish", lambda self: 1 / 0)
    (event,) = engine.abort("a")
    assert event.finish_reason == "error"
    assert events_of(engine) == []
    assert_idle(engine)


def test_a_refused_request_changes_nothing():
    engine = make_engine(max_num_waiting=1)
    engine.add_request(job(request_id="a"))
    with pytest.raises(QueueFullError):
        engine.add_request(job(request_id="b"))
    engine.step()
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        engine.add_request(job(request_id="a"))
    engine.check_integrity()
    assert set(by_request(events_of(engine))) == {"a"}
    engine.add_request(job(request_id="a"))
    engine.abort("a")
    assert_idle(engine)


# Abort.


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("n", [1, 3])
def test_abort_frees_everything_at_any_moment(num_steps: int, n: int):
    engine = make_engine()
    engine.add_request(job("a long prompt that takes steps", "a", n=n, temperature=1.0))
    engine.add_request(job("x", "b", max_tokens=30))
    early = [event for _ in range(num_steps) for event in engine.step()]
    events = engine.abort("a")
    assert [(event.index, event.finish_reason) for event in events] == [
        (index, "abort") for index in range(n)
    ]
    assert engine.abort("a") == []
    engine.check_integrity()
    assert engine.stats().num_running + engine.stats().num_waiting == 1
    late = events_of(engine)
    assert {event.request_id for event in late} == {"b"}
    assert sum(len(e.token_ids) for e in [*early, *late] if e.request_id == "b") == 30
    assert_idle(engine)


def test_a_request_aborted_while_it_waits_is_never_run():
    runner = FakeRunner()
    engine = make_engine(runner, num_blocks=8)
    engine.add_request(job("x" * 20, "long", max_tokens=12))
    engine.step()
    engine.add_request(job("y" * 20, "waits"))
    engine.step()
    assert engine.stats().num_waiting == 1
    (event,) = engine.abort("waits")
    assert event.finish_reason == "abort"
    assert event.metrics is not None
    assert event.metrics.queue_s is None
    events_of(engine)
    assert "waits" not in runner.scheduled
    assert_idle(engine)


def test_abort_shows_the_text_that_was_held_back():
    engine = make_engine(FakeRunner(spelled("abcdef", then=LETTERS[0])))
    engine.add_request(job(request_id="a", stop=("abcdefgh",)))
    shown = "".join(event.text for _ in range(4) for event in engine.step())
    assert shown == ""
    (event,) = engine.abort("a")
    assert "abcdef".startswith(event.text)
    assert event.text


def test_unknown_ids_abort_nothing():
    assert make_engine().abort("nobody") == []


def test_two_thousand_small_requests_leave_no_record():
    rng = random.Random(1)
    engine = make_engine(num_blocks=16, check_integrity=False)
    num_refused = 0
    for number in range(2000):
        name = f"r{number}"
        if number % 10 == 0:
            num_refused += 1
            with pytest.raises(InvalidRequestError):
                engine.add_request(job("x" * 60, name, max_tokens=60))
        else:
            prompt = "x" * rng.randint(1, 12)
            engine.add_request(job(prompt, name, max_tokens=1, n=rng.choice((1, 1, 2))))
        if number % 3 == 0:
            engine.abort(name)
        if rng.random() < 0.3:
            engine.step()
    events_of(engine)
    assert engine.stats().num_requests == 2000 - num_refused
    assert engine.stats().num_finished_requests == 2000 - num_refused
    assert_idle(engine)


# What is told.


def test_metrics_tell_waiting_from_work():
    ticks = iter(range(1000))
    engine = make_engine()
    engine._clock = lambda: float(next(ticks))
    output = run_job(engine, job(max_tokens=3))
    metrics = output.metrics
    assert metrics.queue_s is not None
    assert metrics.ttft_s is not None
    assert 0 <= metrics.queue_s < metrics.ttft_s <= metrics.total_s


def test_cached_tokens_are_reported_and_always_fewer_than_the_prompt():
    for length in (1, 3, 4, 5, 8, 16):
        engine = make_engine()
        first = run_job(engine, job("abcdefghijklmnop"[:length]))
        again = run_job(engine, job("abcdefghijklmnop"[:length]))
        assert first.outputs == again.outputs
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens == (length - 1) // 4 * 4


def test_requests_of_another_salt_share_nothing():
    engine = make_engine()
    for salt in ("a", "b", "\ud800"):
        request = replace(job("a prompt of some blocks"), cache_salt=salt)
        assert run_job(engine, request).num_cached_tokens == 0
        assert run_job(engine, request).num_cached_tokens > 0


def test_a_larger_priority_is_served_first():
    engine = make_engine(max_num_seqs=1)
    for priority in (0, 5, -5):
        engine.add_request(replace(job(request_id=str(priority)), priority=priority))
    order = [event.request_id for event in events_of(engine) if event.finish_reason]
    assert order == ["5", "0", "-5"]


def test_an_idle_engine_steps_to_nothing():
    engine = make_engine()
    assert engine.step() == []
    assert not engine.has_unfinished
