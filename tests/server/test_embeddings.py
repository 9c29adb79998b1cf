"""``/v1/embeddings``: over OpenAI's client, what is refused, many texts, clients that leave."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from pagedmlx.config import EngineConfig
from pagedmlx.core.step import Step
from pagedmlx.engine.load import load_engine
from pagedmlx.server.embeddings import MAX_IN_FLIGHT, MAX_INPUTS
from tests.support.embedding_model import EOS, PlainEmbedder, save_embedding_folder
from tests.support.engines import EMBEDDING, FakeRunner, hashed_hidden, make_engine
from tests.support.server import WAIT_S, Answer, RunningServer, serving
from tests.support.tokenizers import byte_ids

IDS = byte_ids(b"hello")


@pytest.fixture(scope="module")
def _fake() -> Iterator[RunningServer]:
    build = partial(make_engine, embedding=EMBEDDING, num_blocks=256, max_model_len=64)
    with serving(build) as server:
        yield server


@pytest.fixture
def fake(_fake: RunningServer) -> Iterator[RunningServer]:
    yield _fake
    _fake.assert_idle()


def embed(server: RunningServer, input: Any = "hello", **fields: Any) -> Answer:
    return server.post("/v1/embeddings", {"input": input, **fields})


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    data = answer.json["data"]
    assert [(each["object"], each["index"]) for each in data] == [
        ("embedding", index) for index in range(len(data))
    ]
    return [each["embedding"] for each in data]


def expected(ids: list[int]) -> list[float]:
    states = [hashed_hidden(ids[: end + 1]) for end in range(len(ids))]
    return np.mean(states, axis=0, dtype=np.float32).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedding_folder(tmp_path_factory.mktemp("model") / "tiny", is_matryoshka=True)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    config = EngineConfig(str(folder), num_blocks=128, max_model_len=256, check_integrity=True)
    with (
        serving(partial(load_engine, config)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client
        server.assert_idle()


def test_vectors_are_those_of_a_plain_forward(client: openai.OpenAI, folder: Path):
    texts = ["hello", "a longer text, of which there is more", "hello"] * 5
    plain = PlainEmbedder(folder)
    # Asks for base64 unless told otherwise.
    found = client.embeddings.create(model="tiny", input=texts)
    as_floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [each.index for each in found.data] == list(range(len(texts)))
    ids = [token_ids(client, text) for text in texts]
    for place, each in enumerate(found.data):
        np.testing.assert_allclose(each.embedding, plain(ids[place]), atol=2e-6)
        np.testing.assert_allclose(each.embedding, as_floats.data[place].embedding, atol=2e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    assert found.model == "tiny"
    assert ids[0][-1] == EOS


def token_ids(client: openai.OpenAI, text: str) -> list[int]:
    answer = client.post(
        str(client.base_url).replace("/v1/", "/tokenize"),
        body={"prompt": text},
        cast_to=object,
    )
    return answer["tokens"]  # type: ignore[index]


def test_ids_and_fewer_dimensions(client: openai.OpenAI, folder: Path):
    plain = PlainEmbedder(folder)
    ids = [[7, 8, 9], [10]]
    found = client.embeddings.create(model="tiny", input=ids, dimensions=8)
    for each, prompt in zip(found.data, ids, strict=True):
        np.testing.assert_allclose(each.embedding, plain(prompt, 8), atol=2e-6)
    one = client.embeddings.create(model="tiny", input=[7, 8, 9])
    np.testing.assert_allclose(one.data[0].embedding, plain([7, 8, 9]), atol=2e-6)


def test_text_is_written_beside_it(client: openai.OpenAI):
    said = client.completions.create(model="tiny", prompt="hello", max_tokens=4)
    assert said.usage is not None
    assert said.usage.completion_tokens >= 1


def test_what_is_too_long_says_by_how_much(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: has 257 tokens.*256") as told:
        client.embeddings.create(model="tiny", input=["x", "y" * 256])
    assert told.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("input", "ids"),
    [("hello", [IDS]), (["hello", "he"], [IDS, IDS[:2]]), (IDS, [IDS]), ([IDS[:3], IDS], None)],
)
def test_inputs_are_text_ids_or_lists_of_them(fake: RunningServer, input: Any, ids: Any):
    assert vectors(embed(fake, input)) == [expected(each) for each in ids or input]


def test_base64_is_the_same_numbers(fake: RunningServer):
    (text,) = vectors(embed(fake, encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == expected(IDS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (
            "input",
            ["", [], [[]], {}, 5, None, ["a", 5], ["a", [1]], [True], [10**6], [-1], [["a"]]],
        ),
        ("input", [["a"] * (MAX_INPUTS + 1), "x" * 65, ["a", "x" * 65], [7] * 65, ["a", ""]]),
        ("dimensions", [0, 5, -1, "4", 1.0, True, 10**30]),
        ("encoding_format", ["int8", 5]),
        ("priority", ["x", 2**40]),
        ("cache_salt", [5]),
        ("model", [5, []]),
        ("messages", [[{"role": "user", "content": "x"}]]),
        ("truncate_prompt_tokens", [5]),
        ("stream", [True]),
    ],
)
def test_a_value_that_is_off_is_refused_with_its_field(
    fake: RunningServer, field: str, values: list[Any]
):
    for value in values:
        answer = fake.post("/v1/embeddings", {"input": "hello", field: value})
        assert answer.status == 400, value
        assert answer.error["param"].partition("[")[0] == field, (value, answer.error)
    assert fake.post("/v1/embeddings", {}).error["param"] == "input"
    assert embed(fake, model="other").status == 404


def test_unknown_fields_are_named_in_a_header_or_refused(fake: RunningServer):
    answer = embed(fake, input_type="query", user="me", encoding_format=None)
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "input_type"
    with serving(partial(make_engine, embedding=EMBEDDING), strict=True) as server:
        assert embed(server, user="me").status == 200
        assert embed(server, input_type="query").error["param"] == "input_type"


def test_a_model_without_embeddings_says_so(server: RunningServer):
    answer = embed(server)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "gives no embeddings" in answer.error["message"]


def test_so_many_texts_run_together_but_never_all_of_the_most():
    seen: list[int] = []

    def note(_step: Step) -> None:
        scheduler = engines[0]._scheduler
        seen.append(len(scheduler.waiting) + len(scheduler.running))

    engines: list[Any] = []

    def build() -> Any:
        engines.append(
            make_engine(
                FakeRunner(before_step=note), embedding=EMBEDDING, num_blocks=256, max_num_seqs=16
            )
        )
        return engines[0]

    texts = [f"text {index}" for index in range(300)]
    with serving(build, log_requests=False) as server:
        answer = embed(server, texts)
        assert answer.json["usage"]["prompt_tokens"] == sum(map(len, texts))
        found = vectors(answer)
        assert found == [expected(byte_ids(text.encode())) for text in texts]
        server.assert_idle()
    # They came in together, not a text in each step.
    assert MAX_IN_FLIGHT // 2 < max(seen) <= MAX_IN_FLIGHT


def test_a_client_that_leaves_frees_its_blocks():
    def slowly(_step: Step) -> None:
        time.sleep(0.02)

    build = partial(make_engine, FakeRunner(before_step=slowly), embedding=EMBEDDING)
    with serving(build, max_body_bytes=2**20) as server:
        body = b'{"input": [%s]}' % b",".join(b'"%d%s"' % (n, b"x" * 100) for n in range(200))
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
            connection.sendall(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            server.wait_until(lambda: bool(server.get("/v1/stats").json["requests"]))
        server.assert_idle()
        assert server.get("/v1/stats").json["engine"]["num_requests"] < 200
        assert embed(server).status == 200


def test_a_full_queue_and_a_server_that_stops_are_told():
    build = partial(make_engine, embedding=EMBEDDING, max_num_seqs=1, max_num_waiting=2)
    with serving(build) as server:
        answer = embed(server, ["a", "b", "c", "d", "e", "f"] * 5)
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        server.assert_idle()
        assert embed(server).status == 200


def test_embeddings_are_counted(fake: RunningServer):
    embed(fake)
    text = fake.get("/metrics").body.decode()
    assert 'pagedmlx:http_responses_total{path="/v1/embeddings",status="200"}' in text
