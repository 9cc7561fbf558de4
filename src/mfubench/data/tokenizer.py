"""Tokenizers: trained here, from the hub, from a folder or from the files that a package ships; checked, never trusted.

Whatever the kind, a folder holds tokenizer.json (Hugging Face's format), tokenizer_config.json (so that transformers'
AutoTokenizer loads it as PreTrainedTokenizerFast) and meta.json, written last.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mfubench.config import ConfigError
from mfubench.data import hub
from mfubench.data.config import (
    BpeTokenizer,
    EmbeddedCorpus,
    ExistingTokenizer,
    FilesTokenizer,
    FolderTokenizer,
    HubTokenizer,
    TokenizerConfig,
    families,
)
from mfubench.data.documents import first_documents
from mfubench.data.encoder import (
    PROBE,
    EncodeBatch,
    Encoder,
    byte_alphabet,
    choose_encoder,
    load_encoder,
    probe_sha256,
    tokenizers_encoder,
    vocabulary_sha256,
)
from mfubench.data.meta import TokenizerMeta, write_meta
from mfubench.run_log import write_text_atomically

__all__ = ["Encoder", "get_tokenizer", "load_encoder"]

END_OF_DOCUMENT = "<|endoftext|>"  # of the tokenizers that are trained here
SAMPLE_BYTES = 2**18  # text on which a fast encoder must equal the reference before it is chosen


def get_tokenizer(config: TokenizerConfig, out_dir: Path) -> TokenizerMeta:
    """Make or fetch a tokenizer and write its folder; raises ConfigError where it is not what `config` says."""
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "meta.json").unlink(missing_ok=True)
    match config:
        case BpeTokenizer():
            payload, settings, source = _train(config)
        case HubTokenizer():
            payload, settings = _from_hub(config)
            source = f"{config.repo}@{config.revision}"
        case FolderTokenizer():
            payload, settings = _from_folder(config)
            source = str(config.path)
        case FilesTokenizer():
            payload, settings = _from_files(config)
            source = str(config.path)

    tokenizer, spec = parse_tokenizer(payload, source)
    vocabulary = vocabulary_sha256(tokenizer)
    reference = tokenizers_encoder(spec)
    if isinstance(config, ExistingTokenizer):
        check_existing(config, tokenizer, vocabulary, reference, source)
    stated = None if isinstance(config, BpeTokenizer) else config.eos_token
    eos_token = stated or _token_text(settings.get("eos_token"))
    special = [token["content"] for token in spec.get("added_tokens", []) if token["special"]]
    candidates = f"set eos_token to the one that ends a document (special tokens: {', '.join(special) or 'none'})"
    if eos_token is None:
        raise ConfigError(
            f"{source}: names no token that ends a document (eos_token in tokenizer_config.json); {candidates}"
        )
    eos_id = tokenizer.token_to_id(eos_token)
    if eos_id is None:
        raise ConfigError(f"{source}: end-of-document token {eos_token!r} is not in its vocabulary; {candidates}")
    encoder, encode_batch, reason = choose_encoder(spec, _sample_texts(eos_token), reference)
    if eos_id in encode_batch([eos_token])[0]:
        raise ConfigError(
            f"{source}: the text {eos_token!r} is encoded as the end-of-document id {eos_id}, so documents could not "
            "be told apart; set eos_token to a special token"
        )
    largest_id = max(tokenizer.get_vocab(with_added_tokens=True).values())
    meta = TokenizerMeta(
        name=out_dir.name,
        kind=config.kind,
        source=source,
        config=config.model_dump(mode="json"),
        vocab_size=largest_id + 1,
        largest_id=largest_id,
        eos_id=eos_id,
        eos_token=eos_token,
        sha256=hashlib.sha256(payload).hexdigest(),
        vocabulary_sha256=vocabulary,
        encoder=encoder,
        encoder_reason=reason,
    )
    write_text_atomically(out_dir / "tokenizer.json", payload.decode())
    write_text_atomically(
        out_dir / "tokenizer_config.json", json.dumps(_transformers_config(settings, eos_token), indent=2)
    )
    write_meta(meta, out_dir)
    return meta


# --- where the vocabulary comes from: each gives tokenizer.json and what tokenizer_config.json said ------------------


def _train(config: BpeTokenizer) -> tuple[bytes, dict[str, Any], str]:
    texts = first_documents(config.corpus, config.max_bytes)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < config.vocab_size:
        raise ConfigError(
            f"kind: bpe: the text is enough for {tokenizer.get_vocab_size()} tokens, not for vocab_size "
            f"{config.vocab_size}; lower vocab_size or train on more text (corpus, max_bytes)"
        )
    return tokenizer.to_str().encode(), {"eos_token": END_OF_DOCUMENT}, f"trained on {config.corpus.source} text"


def _from_hub(config: HubTokenizer) -> tuple[bytes, dict[str, Any]]:
    path = hub.download(config.repo, "tokenizer.json", config.revision)
    settings = hub.download(config.repo, "tokenizer_config.json", config.revision)
    return _read_checked(path, config.sha256), _read_settings(settings)


def _from_folder(config: FolderTokenizer) -> tuple[bytes, dict[str, Any]]:
    folder = Path(config.path).expanduser()
    settings = _read_settings(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        return _read_checked(folder / "tokenizer.json", config.sha256), settings
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return byte_level_bpe(folder / "vocab.json", folder / "merges.txt"), settings
    raise ConfigError(f"{folder}: holds neither tokenizer.json nor vocab.json and merges.txt; is the path right?")


def _from_files(config: FilesTokenizer) -> tuple[bytes, dict[str, Any]]:
    facts = families()[config.family]
    path = Path(config.path).expanduser()
    expected = facts["files_sha256"]
    if config.family != "gpt2":
        ranks = _read_checked(path, config.sha256 or expected["ranks"])
        return rank_file_bpe(ranks, facts, str(path)), {}
    vocab = next(
        (path / name for name in ("vocab.json", "encoder.json") if (path / name).is_file()), path / "vocab.json"
    )
    merges = next((path / name for name in ("merges.txt", "vocab.bpe") if (path / name).is_file()), path / "merges.txt")
    _read_checked(vocab, expected["vocab"])
    _read_checked(merges, expected["merges"])
    return byte_level_bpe(vocab, merges), {}


def _read_checked(path: Path, sha256: str | None) -> bytes:
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); is the path right?") from None
    found = hashlib.sha256(payload).hexdigest()
    if sha256 is not None and found != sha256:
        raise ConfigError(
            f"{path}: sha256 is {found}, expected {sha256}: another file, or one that was cut while downloading "
            f"({len(payload):,} bytes); fetch it again"
        )
    return payload


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); fetch it again") from None


# --- other spellings of a vocabulary, as tokenizer.json --------------------------------------------------------------


def byte_level_bpe(vocab: Path, merges: Path) -> bytes:
    """tokenizer.json of GPT-2's two files."""
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return tokenizer.to_str().encode()


def rank_file_bpe(content: bytes, facts: dict[str, Any], where: str) -> bytes:
    """tokenizer.json of a tiktoken rank file: lines of a base64 token and its rank.

    Such a file states no merges: any two neighbours merge if the result is a token, lowest rank first. As a list of
    merges that is, for each token in the order of ranks, every way to put it together from two others.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise ConfigError(f"{where}: is no tiktoken rank file (lines of base64 and a number)") from None
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        halves.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in halves]

    tokenizer = Tokenizer(models.BPE(vocab={spelled[t]: rank for t, rank in ranks.items()}, merges=merges))
    tokenizer.model.ignore_merges = True  # a piece that is a token stays one, as in tiktoken
    if facts.get("normalizer") == "NFC":
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(facts["pattern"]), "isolated", invert=False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    specials = list(facts["special_tokens"])
    reserved = facts["vocab_size"] - len(ranks) - len(specials)
    first = sum("reserved" in token for token in specials)
    specials += [f"<|reserved_special_token_{first + i}|>" for i in range(reserved)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer.to_str().encode()


# --- checks ----------------------------------------------------------------------------------------------------------


def parse_tokenizer(payload: bytes, where: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer.json as object and as data; raises ConfigError where it is not one (cut short, an error page)."""
    try:
        return Tokenizer.from_buffer(payload), json.loads(payload)
    except Exception as error:  # the binding raises plain Exception
        raise ConfigError(
            f"{where}: tokenizer.json is damaged or none ({len(payload):,} bytes, {error}); fetch it again"
        ) from None


def check_existing(
    config: ExistingTokenizer, tokenizer: Tokenizer, vocabulary: str, reference: EncodeBatch, where: str
) -> None:
    """Raise ConfigError unless vocabulary, size and ids are the expected ones."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if config.vocab_size is not None and size != config.vocab_size:
        raise ConfigError(
            f"{where}: holds ids up to {size - 1}, so vocab_size {size}, but {config.vocab_size} is expected "
            f"({config.family or 'as configured'}): the wrong tokenizer, or only part of one"
        )
    if config.vocabulary_sha256 is not None and vocabulary != config.vocabulary_sha256:
        raise ConfigError(
            f"{where}: has as many tokens as {config.family or 'the expected tokenizer'}, but other ones "
            f"(vocabulary_sha256 {vocabulary}, expected {config.vocabulary_sha256}): it is another model's tokenizer"
        )
    expected = families()[config.family].get("probe_sha256") if config.family is not None else None
    if expected is not None and (found := probe_sha256(reference)) != expected:
        raise ConfigError(
            f"{where}: has the vocabulary of {config.family}, but splits or merges text differently (probe_sha256 "
            f"{found}, expected {expected}); take tokenizer.json from the repository of tokenizers.yaml"
        )


def _sample_texts(eos_token: str) -> list[str]:
    """Text in many scripts and some of the standard library: what a fast encoder is compared on."""
    hard = [PROBE, "", " ", "\n", eos_token, PROBE.swapcase(), " ".join(PROBE), PROBE.replace(" ", "  \n")]
    try:
        return hard + list(first_documents(EmbeddedCorpus(source="embedded"), SAMPLE_BYTES))
    except ConfigError:  # a Python without its sources
        return hard


def _token_text(token: Any) -> str | None:
    """A special token in tokenizer_config.json is a text, or a mapping with its text under `content`."""
    return token["content"] if isinstance(token, dict) else token


def _transformers_config(settings: dict[str, Any], eos_token: str) -> dict[str, Any]:
    names = ("bos_token", "unk_token", "pad_token")
    specials = {name: _token_text(settings[name]) for name in names if settings.get(name)}
    return {
        # Not the source's own class: transformers' classes of some families change what tokenizer.json says.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2**20,
        "eos_token": eos_token,
        **specials,
    }
