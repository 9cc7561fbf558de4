"""Finished parts, appended in order to shards; a journal that lets a killed preparation go on where it was."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from mfubench.data.meta import Shard, Skipped, Split, SplitName, TokenDtype
from mfubench.data.parts import Part, part_path
from mfubench.run_log import write_text_atomically


class OpenSplit(BaseModel):
    """A split while it grows: closed shards, and the tokens in the one that is being filled."""

    model_config = ConfigDict(extra="forbid")

    documents: int = 0
    closed: list[Shard] = []
    open_tokens: int = 0

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.closed) + self.open_tokens


class Journal(BaseModel):
    """journal.json: what the shards hold, rewritten after each slice that was appended."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str  # of config, tokenizer and source files: another one means another preparation
    group: int = 0  # next slice: group of files, and slice within it
    slice: int = 0
    done_bytes: int = 0  # of source files, as stored
    text_bytes: int = 0
    skipped: dict[str, int] = {}
    splits: dict[SplitName, OpenSplit]


class Assembly:
    """The shards of a preparation, in `folder`."""

    def __init__(self, folder: Path, journal: Journal, dtype: TokenDtype, shard_tokens: int, eos_id: int) -> None:
        self.folder = folder
        self.journal = journal
        self._dtype = np.dtype(dtype)
        self._shard_tokens = shard_tokens
        self._eos_id = eos_id

    @classmethod
    def resume(
        cls, folder: Path, fingerprint: str, splits: list[SplitName], dtype: TokenDtype, shard_tokens: int, eos_id: int
    ) -> Assembly:
        """Go on from the journal in `folder` if it is of the same preparation and its shards are there; else afresh."""
        journal = Journal(fingerprint=fingerprint, splits={split: OpenSplit() for split in splits})
        try:
            found = Journal.model_validate_json((folder / "journal.json").read_text())
        except (FileNotFoundError, ValidationError):
            found = None
        assembly = cls(folder, found or journal, dtype, shard_tokens, eos_id)
        if found is None or found.fingerprint != fingerprint or not assembly._shards_are_there():
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            assembly = cls(folder, journal, dtype, shard_tokens, eos_id)
        return assembly

    def _shards_are_there(self) -> bool:
        """Check sizes; what was appended after the journal's last entry is cut off."""
        for split, state in self.journal.splits.items():
            sizes = [shard.tokens for shard in state.closed] + [state.open_tokens]
            for i, tokens in enumerate(sizes):
                path = self._path(split, i)
                size = tokens * self._dtype.itemsize
                if (path.stat().st_size if path.is_file() else 0) < size:
                    return False
                if i == len(state.closed) and path.is_file():
                    with path.open("r+b") as file:
                        file.truncate(size)
        return True

    def _path(self, split: SplitName, number: int) -> Path:
        return self.folder / f"{split}-{number:05d}.bin"

    def append(self, part: Part, name: str, after: tuple[int, int], max_tokens: int | None) -> None:
        """Add a part's tokens; `after`: group and slice that come next; max_tokens: of the training split."""
        journal, text_bytes = self.journal, part.text_bytes
        for split, state in journal.splits.items():
            tokens, documents = part.tokens[split], part.documents[split]
            source = part_path(self.folder, name, split)
            if split == "train" and max_tokens is not None and state.tokens + tokens > max_tokens:
                tokens, documents = self._first_documents(source, max_tokens - state.tokens)
                text_bytes -= sum(part.train_bytes[documents:])
            with source.open("rb") as read, self._path(split, len(state.closed)).open("ab") as write:
                if tokens == part.tokens[split]:
                    shutil.copyfileobj(read, write, 2**22)
                else:
                    write.write(np.fromfile(read, dtype=self._dtype, count=tokens).tobytes())
            state.open_tokens += tokens
            state.documents += documents
            if state.open_tokens >= self._shard_tokens:
                self._close(split)
        journal.group, journal.slice = after
        journal.done_bytes += part.size
        journal.text_bytes += text_bytes
        for reason, count in part.skipped.items():
            journal.skipped[reason] = journal.skipped.get(reason, 0) + count
        write_text_atomically(self.folder / "journal.json", journal.model_dump_json())
        for path in [part_path(self.folder, name, split) for split in ("train", "val")] + [
            self.folder / f"{name}.json"
        ]:
            path.unlink(missing_ok=True)

    def _first_documents(self, path: Path, tokens: int) -> tuple[int, int]:
        """Tokens and number of the first documents of a part, up to the one in which `tokens` is reached."""
        ends = np.flatnonzero(np.fromfile(path, dtype=self._dtype) == self._eos_id) + 1
        documents = int(np.searchsorted(ends, tokens)) + 1
        return int(ends[documents - 1]), documents

    def _close(self, split: SplitName) -> None:
        state = self.journal.splits[split]
        path = self._path(split, len(state.closed))
        path.touch()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        state.closed.append(Shard(file=path.name, tokens=state.open_tokens, sha256=digest))
        state.open_tokens = 0

    def finish(self) -> dict[SplitName, Split]:
        """Close the last shards; a split of one shard is named without a number."""
        splits: dict[SplitName, Split] = {}
        for split, state in self.journal.splits.items():
            if state.open_tokens or not state.closed:
                self._close(split)
            shards = state.closed
            if len(shards) == 1:
                shards = [shards[0].model_copy(update={"file": f"{split}.bin"})]
            splits[split] = Split(tokens=state.tokens, documents=state.documents, shards=tuple(shards))
        return splits

    def publish(self, splits: dict[SplitName, Split], out_dir: Path) -> None:
        """Move the shards to where readers look; what lay there before goes first, its meta.json before all."""
        (out_dir / "meta.json").unlink(missing_ok=True)
        for split in ("train", "val"):
            for old in out_dir.glob(f"{split}*.bin"):
                old.unlink()
        for split, index in splits.items():
            for number, shard in enumerate(index.shards):
                shutil.move(self._path(split, number), out_dir / shard.file)

    def skipped(self) -> Skipped:
        return Skipped(**self.journal.skipped)
