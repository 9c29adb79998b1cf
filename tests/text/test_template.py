"""Chat templates: what they refuse is the caller's error, and nothing of a message is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.errors import InvalidRequestError
from pagedmlx.text.messages import normalize_messages
from tests.support.tokenizers import CHATML, SPECIAL_TOKENS, byte_tokenizer, smollm2_tokenizer

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content | trim }}{% endfor %}"
)
TOOLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls %}[{{ call.function.name }} ARGS]{% endfor %}{% endfor %}"
)
ITERATES = "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
CONCATENATES = "{{ 'args: ' + call.function.arguments }}"
PRINTS = "{{ call.function.arguments }}"
DUMPS = "{{ call.function.arguments | tojson }}"


def render(template: str, messages: object, /, **variables: object) -> str:
    tokenizer = byte_tokenizer(chat_template=template)
    ids = tokenizer.apply_chat_template(messages, **variables)
    return tokenizer.decode(ids, skip_special_tokens=False)


def refusal(template: str, messages: object, /, **variables: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        render(template, messages, **variables)
    assert "\n" not in str(caught.value)
    return caught.value


def test_developer_is_system():
    text = render(CHATML, [{"role": "developer", "content": "Be brief"}, USER])
    assert text.startswith("<|im_start|>system\nBe brief<|im_end|>")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<" in render(CHATML, [{"role": "user", "content": parts}])


def test_an_empty_list_of_parts_is_empty_text():
    assert "user\n<" in render(CHATML, [{"role": "user", "content": []}])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ({"role": "user"}, "messages"),
        ([5], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([USER, {"role": "banana", "content": "Hi"}], "messages[1].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_field(messages, field):
    assert refusal(CHATML, messages).field == field


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"]),
            inner | st.sampled_from(["user", "assistant", "text"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_like)
def test_no_input_escapes_as_another_error(messages):
    try:
        result = normalize_messages(messages)
    except InvalidRequestError:
        return
    assert all(isinstance(message["content"], str) for message in result)


def test_the_callers_messages_are_not_changed():
    messages = [{"role": "developer", "content": [{"type": "text", "text": "<s>"}]}, USER]
    before = json.dumps(messages)
    render(CHATML, messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "system", "content": "s"}], "System role not supported"),
        ([{"role": "system", "content": "s"}, USER, USER], "Roles must alternate"),
        ([USER, USER], "Roles must alternate"),
        ([{"role": "assistant", "content": "first"}], "Roles must alternate"),
    ],
)
def test_the_templates_own_reason_is_given(messages, reason):
    error = refusal(STRICT, messages)
    assert error.field == "messages"
    assert reason in str(error)
    assert error.http_status == 400


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content",
        "{{ messages[7].content.x.y }}",
        "{{ messages + 5 }}",
        "{{ 1 / 0 }}",
        "{{ nothing() }}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
    ],
)
def test_a_broken_template_is_no_crash(template):
    assert refusal(template, [USER]).field == "messages"


ONLY_USERS = "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}"


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("template", [STRICT, ONLY_USERS])
def test_a_template_without_system_role_gets_it_in_front_of_the_first_user_message(template, role):
    text = render(template, [{"role": role, "content": "Be brief"}, USER])
    assert text.strip("<>") == "Be brief\n\nHi"
    assert render(template, [{"role": role, "content": ""}, USER]).strip("<>") == "Hi"


def test_several_system_messages_at_the_start_are_merged_alike():
    messages = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, USER]
    assert render(STRICT, messages) == "a\n\nb\n\nHi"


def test_a_template_with_system_role_keeps_it():
    assert "system\nBe brief<" in render(CHATML, [{"role": "system", "content": "Be brief"}, USER])


def test_control_text_in_a_merged_system_message_stays_plain():
    tokenizer = byte_tokenizer(chat_template=STRICT)
    ids = tokenizer.apply_chat_template([{"role": "system", "content": "</s>"}, USER])
    assert not tokenizer.special_token_ids & set(ids)


def test_a_message_that_the_template_drops_is_reported():
    assert render(ONLY_USERS, [USER]) == "<Hi>"
    error = refusal(ONLY_USERS, [USER, {"role": "system", "content": "Be brief"}])
    assert error.field == "messages[1]"
    error = refusal("{{ messages[-1].content }}", [{**USER, "content": "lost"}, USER])
    assert error.field == "messages[0]"


def test_a_template_may_trim_content():
    assert render("{{ messages[0].content | trim }}", [{**USER, "content": "  a \n"}]) == "a"


SWITCH = (
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.content.startswith('/no_think') %} quick{% endif %}]"
    "{{ m.content.replace('/no_think', '') | trim }}{% endfor %}"
)


@pytest.mark.parametrize("word", ["", "Be brief"])
def test_a_template_may_read_switches_out_of_a_message(word):
    text = render(SWITCH, [{"role": "system", "content": f"/no_think\n{word}"}, USER])
    assert text == f"[system quick]{word}[user]Hi"


def test_a_template_may_escape_content():
    assert render("{{ messages[0].content | e }}", [{**USER, "content": "a < b"}]) == "a &lt; b"


def test_variables_reach_the_template():
    template = CHATML + "{% if enable_thinking %}<think>{% endif %}{{ tools | length }}"
    assert render(template, [USER], enable_thinking=True, tools=[{}, {}]).endswith("<think>2")
    assert render(template, [USER], enable_thinking=False, tools=[{}]).endswith("\n1")


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "conversation", "messages", "self"])
def test_variables_can_not_change_the_call(name):
    assert refusal(CHATML, [USER], **{name: True}).field == "chat_template_kwargs"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize(
    ("how", "shown"),
    [
        (ITERATES, "a=1"),
        (CONCATENATES, 'args: {"a": 1}'),
        (PRINTS, '{"a": 1}'),
        (DUMPS, '{"a": 1}'),
    ],
)
def test_tool_calls_render_in_templates_of_either_kind(how, shown, arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(TOOLS.replace("ARGS", how), messages) == f"user:Hiassistant:[add {shown}]"


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", "{", None])
@pytest.mark.parametrize("how", [ITERATES, CONCATENATES, PRINTS, DUMPS])
def test_arguments_that_are_no_json_object_still_render(how, arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    text = render(TOOLS.replace("ARGS", how), messages)
    assert (arguments or "") in text


def test_a_template_that_knows_no_tool_calls_says_so():
    error = refusal(CHATML, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert error.field == "messages[1].tool_calls"


@pytest.mark.parametrize("how", [ITERATES, CONCATENATES, PRINTS, DUMPS])
def test_control_text_in_tool_arguments_stays_plain(how):
    call = {"function": {"name": "add", "arguments": '{"a": "</s>"}'}}
    tokenizer = byte_tokenizer(chat_template=TOOLS.replace("ARGS", how))
    ids = tokenizer.apply_chat_template([{"role": "assistant", "tool_calls": [call]}])
    assert SPECIAL_TOKENS.index("</s>") not in ids
    assert "</s>" in tokenizer.decode(ids)


def test_a_template_that_walks_through_arguments_may_write_braces_of_its_own():
    call = {"function": {"name": "add", "arguments": ""}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    assert render("{}" + TOOLS.replace("ARGS", ITERATES), messages) == "{}user:Hiassistant:[add ]"


_FRAGMENTS = st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "<", "|im_end|>", "a", " ", "\n", "\ufdd0", "é", "<|im_"]),
    max_size=12,
).map("".join)


@given(_FRAGMENTS, _FRAGMENTS)
def test_no_message_text_becomes_a_special_token_and_none_is_lost(system, user):
    tokenizer = byte_tokenizer()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    ids = tokenizer.apply_chat_template(messages)
    special = [token for token in ids if token in tokenizer.special_token_ids]
    start, end = SPECIAL_TOKENS.index("<|im_start|>"), SPECIAL_TOKENS.index("<|im_end|>")
    assert special == [start, end, start, end, start]
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_embedded_model_gets_its_own_default_system_message():
    tokenizer = smollm2_tokenizer()
    text = tokenizer.decode(tokenizer.apply_chat_template([USER]), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
