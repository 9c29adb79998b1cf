"""Who may use the server, and what it tells about itself."""

from __future__ import annotations

import logging

import pytest

from pagedmlx.core.snapshot_json import snapshot_from_json
from tests.support.engines import make_engine
from tests.support.server import MODEL, RunningServer, serving
from tests.support.tokenizers import byte_ids

CHAT = {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 2}


def test_only_those_with_a_key_come_in():
    with serving(api_keys=("first", "second")) as server:
        for header in ("", "Bearer", "Bearer wrong", "Basic first", "Bearer first2", "bearer \xff"):
            for path in ("/v1/models", "/metrics", "/v1/stats"):
                answer = server.get(path, {"Authorization": header})
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert server.post("/v1/chat/completions", CHAT).status == 401
        for key in ("first", "second"):
            assert server.get("/v1/models", {"Authorization": f"Bearer {key}"}).status == 200
        assert server.get("/health").status == server.get("/ready").status == 200


def test_web_pages_come_in_only_from_origins_that_are_named():
    ask = {
        "Origin": "http://page",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    with serving(cors_origins=("http://page",), api_keys=("k",)) as server:
        answer = server.send("OPTIONS", "/v1/chat/completions", headers=ask)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "http://page"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        refused = server.send("OPTIONS", "/v1/models", headers={**ask, "Origin": "http://other"})
        assert refused.status == 400
        # A page must be able to read why it was refused.
        wrong = server.get("/v1/models", {"Origin": "http://page"})
        assert (wrong.status, wrong.headers["access-control-allow-origin"]) == (401, "http://page")
    with serving() as server:
        answer = server.send("OPTIONS", "/v1/chat/completions", headers=ask)
        assert answer.status == 405
        assert "access-control-allow-origin" not in server.get("/health", ask).headers


def test_every_answer_has_an_id_and_keeps_a_good_one(server: RunningServer):
    assert server.get("/health", {"X-Request-Id": "mine.1"}).headers["x-request-id"] == "mine.1"
    for bad in ("a b", "x" * 65, "\xff"):
        assert server.get("/health", {"X-Request-Id": bad}).headers["x-request-id"] != bad
    assert server.get("/nothing").headers["x-request-id"].startswith("req-")


def test_the_log_has_no_contents_unless_asked(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "pagedmlx.server")
    with serving() as server:
        server.post("/v1/chat/completions", CHAT)
        server.get("/nothing%7F%0Aforged?key=value")
    text = caplog.text
    assert "secret" not in text
    assert "POST /v1/chat/completions 200" in text
    assert "output=2" in text
    assert "\nforged" not in text
    assert "value" not in text
    caplog.clear()
    with serving(log_contents=True) as server:
        server.post("/v1/chat/completions", CHAT)
        server.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert caplog.text.count("secret words") == 2
    assert caplog.text.count("answered:") == 2


def test_the_model_is_listed_and_found(server: RunningServer):
    (model,) = server.get("/v1/models").json["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 512)
    assert server.get(f"/v1/models/{MODEL}").json == model


def test_text_goes_to_ids_and_back_in_vllms_shapes(server: RunningServer):
    found = server.post("/tokenize", {"prompt": "né", "return_token_strs": True}).json
    assert found["tokens"] == byte_ids("né".encode())
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "né"}
    chat = server.post("/tokenize", {"messages": CHAT["messages"]}).json
    usage = server.post("/v1/chat/completions", CHAT).json["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**20]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        answer = server.post(path, body)
        assert (answer.status, answer.error["param"]) == (400, param)


def test_metrics_and_statistics_count_what_was_done():
    with serving(lambda: make_engine(num_blocks=16)) as server:
        for _ in range(2):
            server.complete("a prompt of some blocks", max_tokens=3)
        server.get("/made/up")
        stats = server.get("/v1/stats").json
        assert (stats["status"], stats["requests"]) == ("ready", [])
        assert stats["engine"]["num_output_tokens"] == 6
        text = server.get("/metrics").body.decode()
        label = f'{{model_name="{MODEL}"}}'
        assert f"vllm:generation_tokens_total{label} 6.0" in text
        assert f"vllm:time_to_first_token_seconds_count{label} 2.0" in text
        assert f"vllm:inter_token_latency_seconds_count{label} 4.0" in text
        assert "pagedmlx:engine_up 1.0" in text
        assert 'finished_reason="length"' in text
        assert "/made/up" not in text
        assert server.get("/version").json["version"]


def test_statistics_tell_who_holds_each_block_to_whom_asks_for_it():
    with serving(lambda: make_engine(num_blocks=16)) as server:
        server.complete("a prompt of some blocks", max_tokens=3)
        stats = server.get("/v1/stats?blocks=true").json
        snapshot = snapshot_from_json(stats["engine"], stats["blocks"])
        (pool,) = snapshot.pools
        assert len(pool.owners) == snapshot.stats.num_blocks == 16
        assert pool.is_cached.sum() == snapshot.stats.num_cached_blocks > 0
        assert "blocks" not in server.get("/v1/stats?blocks=no").json
