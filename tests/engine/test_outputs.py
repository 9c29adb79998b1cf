from __future__ import annotations

from pagedmlx.engine.outputs import (
    Job,
    OutputCollector,
    OutputEvent,
    RequestMetrics,
    refused_output,
)
from pagedmlx.errors import EngineDeadError, InvalidRequestError


def make_collector(n: int = 1) -> OutputCollector:
    return OutputCollector("r", "prompt", (1, 2), n)


def test_events_add_up_to_text_and_tokens():
    collector = make_collector()
    for text, token in (("a", 5), ("", 6), ("bc", 7)):
        collector.add(OutputEvent("r", 0, text, (token,)))
        output = collector.output(changed=0)
        assert output.outputs[0].delta == text
        assert not output.finished
    collector.add(OutputEvent("r", 0, "d", (8,), "stop", "xyz"))
    output = collector.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", (1, 2))
    (only,) = output.outputs
    assert (only.text, only.token_ids, only.delta) == ("abcd", (5, 6, 7, 8), "")
    assert (only.finish_reason, only.stop_reason) == ("stop", "xyz")
    assert output.finished


def test_a_request_is_finished_when_all_its_outputs_are():
    collector = make_collector(n=2)
    collector.add(OutputEvent("r", 1, "b", (5,), "stop"))
    assert not collector.finished
    assert [each.text for each in collector.output(changed=1).outputs] == ["", "b"]
    assert [each.delta for each in collector.output(changed=1).outputs] == ["", "b"]
    collector.add(OutputEvent("r", 0, "a", (5,), "length"))
    assert collector.finished
    assert [each.finish_reason for each in collector.output().outputs] == ["length", "stop"]


def test_an_engine_that_died_does_not_wipe_out_what_was_known():
    collector = make_collector()
    metrics = RequestMetrics(queue_s=0.1, ttft_s=0.2, total_s=0.3, num_preemptions=1)
    collector.add(OutputEvent("r", 0, "a", (5,), num_cached_tokens=16, metrics=metrics))
    error = EngineDeadError("gone")
    collector.add(OutputEvent.failed("r", 0, error))
    output = collector.output()
    assert output.finished
    assert output.error is error
    assert (output.num_cached_tokens, output.metrics) == (16, metrics)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "error")


def test_the_first_error_of_a_request_is_kept():
    collector = make_collector(n=2)
    first, second = EngineDeadError("first"), EngineDeadError("second")
    collector.add(OutputEvent.failed("r", 1, first))
    collector.add(OutputEvent.failed("r", 0, second))
    assert collector.output().error is first


def test_a_refused_job_has_no_outputs_but_an_error():
    error = InvalidRequestError("prompt", "is empty")
    output = refused_output(Job(prompt="", request_id="mine"), error)
    assert (output.request_id, output.prompt, output.outputs) == ("mine", "", ())
    assert output.finished
    assert output.error is error
