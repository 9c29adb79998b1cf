"""README.md and docs/api.md say what the server does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

from pagedmlx.server.app import make_app
from pagedmlx.server.service import Service
from pagedmlx.server.settings import ServerSettings
from tests.support.engines import make_engine
from tests.support.server import serving
from tests.test_project import REPOSITORY, run_python

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
API = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
AGENTS = (REPOSITORY / "docs" / "agents.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Serve it\n")[2].partition("\n## ")[0]


def code(language: str, text: str = SECTION) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def url():
    build = lambda: make_engine(num_blocks=256)  # noqa: E731
    with serving(build, served_model_names=("smollm2",)) as server:
        yield server.url


CURLS = [each for block in code("sh") for each in block.split("\n\n") if each.startswith("curl")]


def test_the_section_has_examples() -> None:
    assert len(CURLS) == 4
    assert len(code("python")) == 1


@pytest.mark.parametrize("command", CURLS)
def test_a_curl_example_of_the_readme_works(url: str, command: str) -> None:
    run = command.replace("http://localhost:8000", url).replace("curl ", "curl --fail ", 1)
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    if "stream" in command:
        *_, usage, end = re.findall(r"^data: (.*)$", done.stdout, re.MULTILINE)
        assert end == "[DONE]"
        assert json.loads(usage)["usage"]["completion_tokens"] == 64
    elif "tokenize" in command:
        assert json.loads(done.stdout)["count"] == len(json.loads(done.stdout)["tokens"])
    else:
        assert len(json.loads(done.stdout)["choices"]) == 2


def test_the_python_example_of_the_readme_works(url: str) -> None:
    (example,) = code("python")
    program = example.replace("http://localhost:8000", url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10


def test_the_tables_of_fields_are_those_of_the_server() -> None:
    run_python("scripts/field_table.py", "--check")


def test_every_path_is_documented() -> None:
    app = make_app(Service("smollm2", ServerSettings()))
    for route in app.routes:
        path = str(getattr(route, "path", "")).replace("{model:path}", "NAME")
        path = path.replace("{response_id}", "ID")
        assert f"`{path}`" in API or f" {path}`" in API, path


def test_the_settings_of_agents_can_be_read_and_lead_here() -> None:
    read = {"json": json.loads, "toml": tomllib.loads}
    blocks = [(block, read[kind]) for kind in read for block in code(kind, AGENTS)]
    assert len(blocks) == 4
    for block, parse in blocks:
        assert "NAME" in json.dumps(parse(block))
    urls = set(re.findall(r"http://[\w.]+:8000[\w/]*", AGENTS))
    assert urls == {
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000/v1/models",
        "http://host.docker.internal:8000/v1",
    }


def test_the_python_example_for_agents_works(url: str) -> None:
    (example,) = code("python", AGENTS)
    program = example.replace("http://127.0.0.1:8000", url).replace("NAME", "smollm2")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
