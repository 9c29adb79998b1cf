"""Conversations: every version is kept, one path is shown, and prompts are what templates want."""

from __future__ import annotations

from pagedmlx.chat.session import (
    ASSISTANT,
    DONE,
    ROOT,
    STOPPED,
    STREAMING,
    USER,
    Conversation,
    Message,
    restored,
)


def talk(*texts: str) -> Conversation:
    conversation = Conversation(system="Be brief.")
    for place, text in enumerate(texts):
        message = conversation.add(ASSISTANT if place % 2 else USER, text)
        conversation.change(message.message_id, status=DONE)
    return conversation


def texts(conversation: Conversation) -> list[str]:
    return [message.text for message in conversation.path()]


def test_messages_follow_each_other() -> None:
    conversation = talk("a", "b", "c")
    assert texts(conversation) == ["a", "b", "c"]
    assert [each.parent_id for each in conversation.path()] == [ROOT, 1, 2]
    assert conversation.changed == {1, 2, 3}


def test_another_answer_is_a_version_and_the_first_one_stays() -> None:
    conversation = talk("a", "b")
    other = conversation.add(ASSISTANT, "B", parent_id=1)
    assert texts(conversation) == ["a", "B"]
    assert conversation.versions(other.message_id) == [2, 3]
    conversation.choose(conversation.other_version(3, -1))
    assert texts(conversation) == ["a", "b"]
    assert conversation.other_version(2, -1) == 2
    assert conversation.other_version(2, 5) == 3


def test_an_edited_question_keeps_what_followed_the_old_one() -> None:
    conversation = talk("a", "b", "c", "d")
    conversation.add(USER, "C", parent_id=2)
    assert texts(conversation) == ["a", "b", "C"]
    conversation.choose(3)
    assert texts(conversation) == ["a", "b", "c", "d"]


def test_a_prompt_has_the_system_message_and_everything_before_the_answer() -> None:
    conversation = talk("a", "b", "c")
    answer = conversation.add(ASSISTANT)
    assert conversation.prompt_for(answer.message_id) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_an_answer_that_failed_before_it_began_leaves_roles_that_take_turns() -> None:
    conversation = talk("a", " ", "c")
    conversation.system = ""
    answer = conversation.add(ASSISTANT)
    assert conversation.prompt_for(answer.message_id) == [{"role": "user", "content": "a\n\nc"}]


def test_a_branch_has_everything_up_to_a_message_and_is_on_its_own() -> None:
    conversation = talk("a", "b", "c", "d")
    branch = conversation.branch(2)
    assert texts(branch) == ["a", "b"]
    assert branch.system == "Be brief."
    assert branch.conversation_id != conversation.conversation_id
    branch.add(USER, "other")
    assert texts(conversation) == ["a", "b", "c", "d"]


def test_a_branch_of_an_answer_that_is_being_written_ends_where_it_is() -> None:
    conversation = talk("a")
    answer = conversation.add(ASSISTANT, "half")
    branch = conversation.branch(answer.message_id)
    assert branch.path()[-1].status == STOPPED


def test_the_title_is_the_users_or_the_beginning_of_the_first_message() -> None:
    conversation = talk("  Why\n is   the sky " + "so very " * 9 + "blue?")
    assert conversation.shown_title == "Why is the sky so very so very so very…"
    conversation.title = "Sky"
    assert conversation.shown_title == "Sky"
    assert Conversation().shown_title == ""


def test_what_was_being_written_when_the_program_died_counts_as_stopped() -> None:
    found = restored(
        [Message(1, ROOT, USER, "a"), Message(2, 1, ASSISTANT, "half", STREAMING)],
        {ROOT: 1, 1: 2},
    )
    assert [each.status for each in found.path()] == [DONE, STOPPED]


def test_a_choice_of_a_message_that_is_not_there_is_left_out() -> None:
    found = restored([Message(1, ROOT, USER, "a")], {ROOT: 1, 1: 9, 5: 1})
    assert texts(found) == ["a"]
    assert found.chosen == {ROOT: 1}
