"""A tokenizer from the metadata of a GGUF file: byte-level BPE and SentencePiece BPE.

Which pre-tokenizer a file means by ``tokenizer.ggml.pre`` is a matter of exact token ids, so names
that aren't known here are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from pagedmlx.errors import ModelLoadError, UnsupportedModelError
from pagedmlx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_ID_NAMES = ("bos", "eos", "unknown", "padding", "eot", "eom")
# A file names one end; the makers' own lists have the end of a turn and that of a text.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Splits of a text before BPE, one after the other.

    Attributes:
        names: What ``tokenizer.ggml.pre`` calls it.
        patterns: Each match becomes a piece of its own.
        ignore_merges: A piece that is a token is taken whole, whatever the merges say.
        nfc: The text is normalized to NFC first.
        add_bos: Whether a text begins with BOS when the file doesn't say.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_GPT2_NAMES = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_PRE_TOKENIZERS = (
    _PreTokenizer(_GPT2_NAMES, (_GPT2,)),
    _PreTokenizer(_DIGIT_NAMES, (r"\p{N}", _GPT2)),
    _PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3"),
        (_WORDS % "{1,3}",),
        ignore_merges=True,
        add_bos=True,
    ),
    _PreTokenizer(("dbrx", "smaug-bpe"), (_WORDS % "{1,3}",)),
    _PreTokenizer(("qwen2", "deepseek-r1-qwen"), (_WORDS % "",), nfc=True),
    _PreTokenizer(("default",), (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
)


def tokenizer_from_gguf(metadata: Mapping[str, object], *, source: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: The file's keys and plain Python values.
        source: What to call the file in messages.

    Raises:
        UnsupportedModelError: A kind of tokenizer or pre-tokenizer that isn't known here.
        ModelLoadError: The metadata is incomplete or contradicts itself.
    """
    from transformers import PreTrainedTokenizerFast

    fields = _Fields(metadata, source)
    model = fields.get("model", str, None)
    if model == "gpt2":
        build = _byte_level
    elif model == "llama":
        build = _sentencepiece
    else:
        raise UnsupportedModelError(
            f"{source}: a tokenizer of the kind {model!r} can't be built",
            hint="Known kinds: gpt2 (byte-level BPE) and llama (SentencePiece BPE).",
        )
    vocabulary = _Vocabulary.read(fields)
    try:
        backend = build(fields, vocabulary)
        _add_special_tokens(backend, fields, vocabulary, by_default=build is _sentencepiece)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for bad merges and patterns
        raise fields.damaged(str(error)) from error
    ids = {name: fields.token_id(name) for name in _ID_NAMES}
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{
            f"{names[name]}_token": vocabulary.tokens[index]
            for name, index in ids.items()
            if index is not None and name in names
        },
    )
    inner.chat_template = _text(metadata.get("tokenizer.chat_template"))
    ends = [index for name in ("eos", "eot", "eom") if (index := ids[name]) is not None]
    control = vocabulary.of_type(_TokenType.CONTROL)
    ends += [vocabulary.ids[token] for token in _END_OF_TEXT if token in control]
    return Tokenizer(inner, eos_token_ids=ends)


class _Fields:
    """Typed access to the keys under ``tokenizer.ggml``."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def get(self, name: str, kind: type, default: Any) -> Any:
        """A field; ``default`` when it is absent."""
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.damaged(f"tokenizer.ggml.{name} is a {type(value).__name__}")
        return value

    def strings(self, name: str) -> list[str]:
        """A field that must be there and be a list of strings; only merges may be empty."""
        values: list[Any] | None = self.get(name, list, None)
        if (
            values is None
            or not (values or name == "merges")
            or not all(isinstance(value, str) for value in values)
        ):
            raise self.damaged(f"tokenizer.ggml.{name} is missing or not a list of strings")
        return values

    def token_id(self, name: str) -> int | None:
        """The id of a named special token, within the vocabulary; None when absent."""
        value = self.get(f"{name}_token_id", int, None)
        size = len(self.strings("tokens"))
        if value is None or 0 <= value < size:
            return value
        raise self.damaged(f"tokenizer.ggml.{name}_token_id is {value}, the vocabulary has {size}")

    def damaged(self, reason: str) -> ModelLoadError:
        """The error for metadata that makes no sense."""
        return ModelLoadError(
            f"{self._source}: the tokenizer in the file can't be built: {reason}",
            hint="The file is damaged or incomplete; fetch it again.",
        )

    def unsupported(self, what: str, hint: str) -> UnsupportedModelError:
        """The error for a sound file that asks for what isn't known here."""
        return UnsupportedModelError(f"{self._source}: {what}", hint=hint)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, fields: _Fields) -> _Vocabulary:
        tokens = fields.strings("tokens")
        types = fields.get("token_type", list, [_TokenType.NORMAL] * len(tokens))
        if len(types) != len(tokens):
            raise fields.damaged(f"{len(tokens)} tokens but {len(types)} token types")
        ids: dict[str, int] = {}
        for index, token in enumerate(tokens):
            ids.setdefault(token, index)
        return cls(tokens, types, ids)

    def of_type(self, kind: _TokenType) -> list[str]:
        return [
            token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ == kind
        ]


def _byte_level(fields: _Fields, vocabulary: _Vocabulary) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(fields)
    pairs = (merge.partition(" ") for merge in fields.strings("merges"))
    merges = [(left, right) for left, _, right in pairs]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(
                add_prefix_space=fields.get("add_space_prefix", bool, False), use_regex=False
            ),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(fields: _Fields) -> _PreTokenizer:
    name = fields.get("pre", str, "default")
    for pre in _PRE_TOKENIZERS:
        if name in pre.names:
            return pre
    known = ", ".join(name for pre in _PRE_TOKENIZERS for name in pre.names)
    raise fields.unsupported(f"the pre-tokenizer {name!r} isn't known", f"Known: {known}.")


def _sentencepiece(fields: _Fields, vocabulary: _Vocabulary) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if fields.get("remove_extra_whitespaces", bool, False):
        raise fields.unsupported("remove_extra_whitespaces isn't supported", "Use another file.")
    scores = fields.get("scores", list, [])
    if len(scores) != len(vocabulary.tokens):
        raise fields.damaged(f"{len(vocabulary.tokens)} tokens but {len(scores)} scores")
    unknown = fields.token_id("unknown")
    prefix = fields.get("add_space_prefix", bool, True)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_type(_TokenType.BYTE)),
        )
    )
    spaces = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores stand for: every way to make a piece of two others.

    SentencePiece merges the pair whose result scores highest; a list of merges in that order says
    the same.
    """
    mergeable = (_TokenType.NORMAL, _TokenType.USER_DEFINED, _TokenType.UNUSED)
    pieces = {
        token: score
        for token, type_, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if type_ in mergeable
    }
    found = [
        (-score, vocabulary.ids[piece[:cut]], vocabulary.ids[piece[cut:]], cut, piece)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(piece[:cut], piece[cut:]) for *_, cut, piece in sorted(found)]


def _add_special_tokens(
    backend: Backend, fields: _Fields, vocabulary: _Vocabulary, *, by_default: bool
) -> None:
    from tokenizers import AddedToken, processors

    control = vocabulary.of_type(_TokenType.CONTROL) + vocabulary.of_type(_TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    # A piece with space marks can't be found in raw text; the merges make it.
    plain = [t for t in vocabulary.of_type(_TokenType.USER_DEFINED) if _SPACE_MARK not in t]
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    if not by_default:
        by_default = _pre_tokenizer(fields).add_bos
    bos, eos = fields.token_id("bos"), fields.token_id("eos")
    first = bos if fields.get("add_bos_token", bool, by_default) else None
    last = eos if fields.get("add_eos_token", bool, False) else None
    if first is None and last is None:
        return
    ends = [(vocabulary.tokens[index], index) for index in (first, last) if index is not None]
    single = ["$A"]
    if first is not None:
        single.insert(0, vocabulary.tokens[first])
    if last is not None:
        single.append(vocabulary.tokens[last])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
