"""Tokenizers from GGUF metadata: the ids that the model was trained on, or a refusal by name."""

from __future__ import annotations

import io

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from pagedmlx.errors import ModelLoadError, UnsupportedModelError
from pagedmlx.text.gguf_tokenizer import tokenizer_from_gguf
from tests.support.tokenizers import (
    byte_level_backend,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
)

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "the theatre there, their other brother: 1024 and 2048!",
    "  leading, trailing and   inner   spaces  ",
    "naïve café, 漢字かな交じり文 and emoji 🙂",
    "def f(x):\n    return x + 1\n",
]


def byte_level_metadata(**changes: object) -> dict[str, object]:
    vocab = byte_level_backend().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] * 5 + [1] * (len(tokens) - 5),
        "merges": ["t h", "th e", "Ġ the", "Ġ a", "f o", "fo x", "o w"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


# Ids that SmolLM2's published tokenizer gives.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("\n", [198]),
        ("<|im_start|>user", [1, 4093]),
    ],
)
def test_smollm2_gives_the_published_ids(text, ids):
    assert smollm2_tokenizer().encode(text) == ids


def test_smollm2_knows_its_special_tokens():
    tokenizer = smollm2_tokenizer()
    ends = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    assert tokenizer.eos_token_ids == ends == {2, 0}
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == 49152
    assert tokenizer.has_chat_template
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a")


@pytest.mark.parametrize("text", [*SENTENCES, "", " ", "\t\n", "1234567890", "don't we'LL"])
@pytest.mark.parametrize("make", [smollm2_tokenizer, sentencepiece_tokenizer])
def test_text_survives_the_round_trip(make, text):
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own_for_smollm2():
    assert len(smollm2_tokenizer().encode("1234567890")) == 10


@pytest.mark.parametrize(
    ("pre", "num_pieces"),
    [("gpt-2", 1), ("smollm", 7), ("llama-bpe", 3), ("qwen2", 7), ("default", 3)],
)
def test_pre_tokenizers_split_numbers_their_own_way(pre, num_pieces):
    steps = ["1 2", "12 3", "123 4", "1234 5", "12345 6", "123456 7", "4 5", "45 6"]
    made = ["".join(step.split()) for step in steps]
    base = byte_level_metadata()
    tokens = [*base["tokenizer.ggml.tokens"], *made]
    metadata = byte_level_metadata(
        pre=pre, tokens=tokens, token_type=[3] * 5 + [1] * (len(tokens) - 5), merges=steps
    )
    tokenizer = tokenizer_from_gguf(metadata, source="t")
    ids = tokenizer.encode("1234567", add_special_tokens=False)
    assert [tokenizer.decode([token]) for token in ids] == {
        1: ["1234567"],
        3: ["123", "456", "7"],
        7: list("1234567"),
    }[num_pieces]


def test_an_unknown_pre_tokenizer_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="'tekken-9'") as caught:
        tokenizer_from_gguf(byte_level_metadata(pre="tekken-9"), source="m.gguf")
    assert "smollm" in caught.value.hint


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", None])
def test_an_unknown_kind_of_tokenizer_is_refused_by_name(model):
    with pytest.raises(UnsupportedModelError, match=repr(model)):
        tokenizer_from_gguf(byte_level_metadata(model=model), source="m.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": []},
        {"tokens": "abc"},
        {"tokens": [1, 2]},
        {"token_type": [1]},
        {"merges": None},
        {"merges": ["no such"]},
        {"merges": ["alone"]},
        {"eos_token_id": 10**6},
        {"bos_token_id": -1},
        {"add_bos_token": "yes"},
    ],
)
def test_damaged_metadata_is_one_line_with_the_files_name(changes):
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_from_gguf(byte_level_metadata(**changes), source="m.gguf")
    assert str(caught.value).startswith("m.gguf: ")
    assert "\n" not in str(caught.value)


def test_bos_and_eos_are_added_when_the_file_says_so():
    def encode(**changes: object) -> list[int]:
        return tokenizer_from_gguf(byte_level_metadata(**changes), source="t").encode("the")

    plain = encode()
    assert encode(add_bos_token=True) == [1, *plain]
    assert encode(add_bos_token=True, add_eos_token=True) == [1, *plain, 2]
    assert encode(add_bos_token=False, pre="llama-bpe") == plain
    assert encode(pre="llama-bpe") == [1, *plain]


def test_end_of_turn_token_of_the_file_ends_the_output_too():
    tokenizer = tokenizer_from_gguf(byte_level_metadata(eot_token_id=4), source="t")
    assert tokenizer.eos_token_ids == {2, 4}
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize(("kind", "ends"), [(3, True), (1, False)])
@pytest.mark.parametrize("token", ["<|endoftext|>", "<|end_of_text|>"])
def test_the_end_of_a_text_ends_the_output_too_if_it_is_a_control_token(token, kind, ends):
    base = byte_level_metadata()
    tokens = [*base["tokenizer.ggml.tokens"], token]
    types = [*base["tokenizer.ggml.token_type"], kind]
    tokenizer = tokenizer_from_gguf(
        byte_level_metadata(tokens=tokens, token_type=types), source="t"
    )
    assert (len(tokens) - 1 in tokenizer.eos_token_ids) == ends


def test_user_defined_tokens_are_whole_but_not_special():
    base = byte_level_metadata()
    tokens = [*base["tokenizer.ggml.tokens"], "<think>"]
    types = [*base["tokenizer.ggml.token_type"], 4]
    tokenizer = tokenizer_from_gguf(
        byte_level_metadata(tokens=tokens, token_type=types), source="t"
    )
    ids = tokenizer.encode("a<think>b")
    assert ids[1] == len(tokens) - 1
    assert tokenizer.decode(ids) == "a<think>b"


@pytest.fixture(scope="module")
def trained():
    """A BPE model of the sentencepiece library, and the same one as GGUF metadata."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=file,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    size = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(size)
    ]
    fields = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in range(size)],
        "scores": [model.get_score(i) for i in range(size)],
        "token_type": kinds,
        "unknown_token_id": model.unk_id(),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return model, tokenizer_from_gguf(metadata, source="t")


_WORDS = st.lists(
    st.sampled_from(["the", "The", "other", "fox", " ", "  ", "1024", "é", "漢字", "🙂", "\n", "!"])
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@given(text=_WORDS)
def test_sentencepiece_ids_are_those_of_the_sentencepiece_library(trained, text):
    model, tokenizer = trained
    if any(special in text for special in ("<unk>", "<s>", "</s>")):
        return
    assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text)
    assert tokenizer.encode(text)[0] == model.bos_id()


def test_sentencepiece_without_a_space_prefix_keeps_the_first_space():
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_from_gguf(metadata, source="t")
    assert tokenizer.encode("the")[1:] == [tokenizer.token_to_id("the")]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_sentencepiece_needs_scores():
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelLoadError, match="scores"):
        tokenizer_from_gguf(metadata, source="t")
