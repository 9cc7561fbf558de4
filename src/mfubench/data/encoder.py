"""Text to token ids, as fast as the ids allow; no torch, no transformers (a worker imports this in 0.1 s).

A document is ordinary text: a string in it that spells a special token is encoded as the characters it consists of,
so that the end-of-document id occurs at the ends of documents and nowhere else. (In Hugging Face terms:
`split_special_tokens=True, add_special_tokens=False`.)

The reference is always what `tokenizers` makes of tokenizer.json. Two faster roads give the same ids, and are taken
only where that is known: tiktoken for byte-level BPE, and a cache of words for BPE in SentencePiece's style.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import string
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import Tokenizer, normalizers

from mfubench.config import ConfigError
from mfubench.data.meta import EncoderKind, TokenizerMeta, read_meta

# The split that `ByteLevel(use_regex=True)` stands for (Radford et al. 2019, encoder.py of the GPT-2 release).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Many scripts, digits, runs of blanks, contractions, combining marks and emoji: two tokenizers that agree on these ids
# have the same merges, splits and normalizer for all practical purposes.
PROBE = (
    "Hello, world! I'll've said: 'twas the DOG's 1234567 days\u2026 3.14159e-10\n\n\n\t  def f(x):\r\n  return x**2  \n"
    "Äpfel, naïve cafe\u0301s; Ελληνικά, Привет мир, שלום, مرحبا, हिन्दी भाषा, 中文字符，日本語テキスト、한국어 문장 "
    "\u1112\u1161\u11ab ½ ² Ⅷ ٣٤ \U0001f999\U0001f469\u200d\U0001f467 \u00a0\u2009\u3000x\u200b ﬁ ǆ \U0001d54f "
    "'S 'RE he'd HE'LL <|endoftext|> </s> ▁ ▁▁a"
)
EncodeBatch = Callable[[Sequence[str]], list[np.ndarray]]  # texts -> ids of each, uint16 or uint32

WORD_CACHE_SIZE = 2**19  # words; about 150 MB
LONGEST_CACHED_WORD = 64  # characters; longer ones hardly ever return


class Encoder:
    """Token ids of documents, without the end-of-document id."""

    def __init__(self, meta: TokenizerMeta, encode_batch: EncodeBatch, payload: bytes) -> None:
        self.kind = meta.encoder
        self.name = meta.name
        self.sha256 = meta.sha256
        self.eos_id = meta.eos_id
        self.vocab_size = meta.vocab_size
        self.encode_batch = encode_batch
        self._payload = payload

    @functools.cached_property
    def _reference(self) -> Tokenizer:
        return Tokenizer.from_buffer(self._payload)  # takes as long as all else together; hardly anyone decodes

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, special tokens spelled out."""
        return self._reference.decode([int(i) for i in ids], skip_special_tokens=False)


def read_tokenizer(folder: Path | str) -> tuple[TokenizerMeta, bytes]:
    """meta.json and tokenizer.json of a folder; raises ConfigError where the folder is not what it was."""
    folder = Path(folder)
    meta = read_meta(TokenizerMeta, folder)
    path = folder / "tokenizer.json"
    if not path.is_file() or hashlib.sha256(payload := path.read_bytes()).hexdigest() != meta.sha256:
        raise ConfigError(f"{path}: missing, or changed since meta.json was written; get the tokenizer again")
    return meta, payload


def load_encoder(folder: Path | str) -> Encoder:
    """The encoder of a folder that `get_tokenizer` wrote; raises ConfigError where the folder is not what it was."""
    meta, payload = read_tokenizer(folder)
    reference = functools.cache(lambda: tokenizers_encoder(json.loads(payload)))
    return Encoder(meta, build_encoder(meta.encoder, json.loads(payload), reference), payload)


def build_encoder(kind: EncoderKind, spec: dict[str, Any], reference: Callable[[], EncodeBatch]) -> EncodeBatch:
    """The function that encodes; spec: the parsed tokenizer.json, reference: gives what `tokenizers` makes of it."""
    if kind == "tiktoken":
        return tiktoken_encoder(spec, reference)
    return word_cache_encoder(spec) if kind == "word-cache" else reference()


class NotApplicable(Exception):
    """Why a fast road cannot give this tokenizer's ids."""


# --- the reference ---------------------------------------------------------------------------------------------------


def tokenizers_encoder(spec: dict[str, Any]) -> EncodeBatch:
    """`tokenizers` itself, for text without special tokens. spec: the parsed tokenizer.json."""
    tokenizer = Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "post_processor": None}))

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return encode_batch


# --- byte-level BPE through tiktoken ---------------------------------------------------------------------------------


def tiktoken_encoder(spec: dict[str, Any], reference: Callable[[], EncodeBatch]) -> EncodeBatch:
    """The same ids from tiktoken; raises NotApplicable where that cannot be said from the specification."""
    pattern = _split_pattern(spec["pre_tokenizer"])
    normalize = _normalizer(spec["normalizer"])
    ranks = _ranks(spec)
    encoding = tiktoken.Encoding(
        "", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|end|>": max(ranks.values()) + 1}
    )

    def encode(text: str) -> np.ndarray:
        try:
            # disallowed_special=(): what spells a special token is text
            return encoding.encode_to_numpy(normalize(text), disallowed_special=())
        except ValueError:  # its regular expressions give up on a run of a million blanks
            return reference()([text])[0]

    return lambda texts: [encode(text) for text in texts]


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **options} if options.get("use_regex", True):
            return GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    raise NotApplicable("its pre-tokenizer is not a split by one regular expression into bytes")


def _normalizer(spec: dict[str, Any] | None) -> Callable[[str], str]:
    if spec is None:
        return lambda text: text
    if spec != {"type": "NFC"}:
        raise NotApplicable(f"its normalizer is {spec['type']}")
    # Python's tables are newer than those of `tokenizers`. What is NFC by the newer ones is NFC by the older ones (a
    # mark that they do not know yet only prevents reordering and composition), so the quick check may use Python's.
    nfc = normalizers.NFC().normalize_str
    return lambda text: text if text.isascii() or unicodedata.is_normalized("NFC", text) else nfc(text)


def _ranks(spec: dict[str, Any]) -> dict[bytes, int]:
    """Token bytes -> id, after making sure that lower ids merge first, which is tiktoken's rule."""
    model = spec["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise NotApplicable("its model is not a plain BPE")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotApplicable("its tokens carry a prefix or suffix")
    added = {token["content"] for token in spec["added_tokens"]}
    # A letter of the alphabet becomes the character with the number of its byte, any other one becomes unencodable.
    to_byte = dict.fromkeys(range(256), 0xFFFF) | {ord(letter): byte for byte, letter in byte_alphabet().items()}
    try:
        ranks = {
            token.translate(to_byte).encode("latin-1"): rank
            for token, rank in model["vocab"].items()
            if token not in added
        }
    except UnicodeEncodeError as error:
        raise NotApplicable(f"its tokens are not spelled in the byte-level alphabet ({error.object!r})") from None
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise NotApplicable("a byte is missing from its vocabulary")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged_ids = [model["vocab"][left + right] for left, right in merges]
    if any(later < earlier for earlier, later in pairwise(merged_ids)):
        raise NotApplicable("its merges are not in the order of their ids")
    return ranks


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


# --- SentencePiece-style BPE through a cache of words ----------------------------------------------------------------


def word_cache_encoder(spec: dict[str, Any]) -> EncodeBatch:
    """LLaMA-2's ids, several times faster: encode each distinct word once.

    Such a tokenizer runs its merges over a whole document in which ▁ stands for a blank. Cutting the document between
    two characters changes nothing if no merge makes a token that holds the two side by side, since any merge across the
    cut would make such a token. LLaMA-2 has no token in which ▁ follows another character, a line break stands beside
    one, or a letter or digit follows punctuation: so a document can be cut at all these places, and its words encoded
    apart. Raises NotApplicable where the merges do not have this property.
    """
    _require_llama2_rules(spec)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in spec["model"]["merges"]]
    joined = {token[i : i + 2] for token in map("".join, merges) for i in range(len(token) - 1)}
    alphanumeric = string.ascii_letters + string.digits
    punctuation = "".join(mark for mark in string.punctuation if joined.isdisjoint(mark + x for x in alphanumeric))
    if not punctuation or any("\n" in pair or (pair[1] == "▁" and pair[0] != "▁") for pair in joined):
        raise NotApplicable("a token reaches over the boundary of a word")

    bare = Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "post_processor": None, "normalizer": None}))
    marks, others = f"[{re.escape(punctuation)}]", f"[^▁\n{re.escape(punctuation)}]"
    split = re.compile(f"\n|▁*{others}*(?:{marks}+(?![a-zA-Z0-9]){others}*)*{marks}*").findall
    code = "H" if max(spec["model"]["vocab"].values()) < 2**16 else "I"  # of uint16 and uint32
    cache: dict[str, bytes] = {}  # word -> its ids; as bytes, since joining them is what takes the time

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        documents = [split("▁" + text.replace(" ", "▁")) if text else [] for text in texts]
        new = list(set(chain.from_iterable(documents)).difference(cache))
        for word, encoding in zip(new, bare.encode_batch_fast(new, add_special_tokens=False), strict=True):
            cache[word] = array(code, encoding.ids).tobytes()
        ids = [np.frombuffer(b"".join(map(cache.__getitem__, words)), dtype=code) for words in documents]
        if len(cache) > WORD_CACHE_SIZE:
            cache.clear()
        for word in new:
            if len(word) > LONGEST_CACHED_WORD:
                cache.pop(word, None)
        return ids

    return encode_batch


def _require_llama2_rules(spec: dict[str, Any]) -> None:
    """Raise NotApplicable unless the document is one sequence of characters, ▁ for blanks, bytes for unknown ones."""
    prepend_then_replace = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    if spec["normalizer"] != prepend_then_replace or spec["pre_tokenizer"] is not None:
        raise NotApplicable("its normalizer is not the one of LLaMA-2")
    model = spec["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or model.get("ignore_merges") or model.get("dropout"):
        raise NotApplicable("its model is not a BPE with byte fallback")
    if any(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256)):
        raise NotApplicable("a byte is missing from its vocabulary")


# --- choosing, and proving the choice --------------------------------------------------------------------------------


def choose_encoder(
    spec: dict[str, Any], samples: Sequence[str], reference: EncodeBatch
) -> tuple[EncoderKind, EncodeBatch, str | None]:
    """The fastest encoder whose ids equal the reference's on `samples`, and why it is not a faster one."""
    expected = reference(samples)
    reasons = []
    kinds: tuple[EncoderKind, ...] = ("tiktoken", "word-cache")
    for kind in kinds:
        try:
            encode_batch = build_encoder(kind, spec, lambda: reference)
        except NotApplicable as reason:
            reasons.append(f"no {kind}: {reason}")
            continue
        if all(np.array_equal(a, b) for a, b in zip(encode_batch(samples), expected, strict=True)):
            return kind, encode_batch, "; ".join(reasons) or None
        reasons.append(f"no {kind}: its ids differ from those of tokenizers on sample text")
    return "tokenizers", reference, "; ".join(reasons)


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Hash of the vocabulary without added tokens: the same for every spelling of one tokenizer in files."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    rows = sorted((i, token) for token, i in tokenizer.get_vocab(with_added_tokens=False).items() if token not in added)
    return hashlib.sha256("".join(f"{i}\t{token}\n" for i, token in rows).encode()).hexdigest()


def probe_sha256(reference: EncodeBatch) -> str:
    """Hash of the ids of PROBE: tells merges, splits and normalizer of two tokenizers apart."""
    return hashlib.sha256(reference([PROBE])[0].astype("<u4").tobytes()).hexdigest()
