"""The files of a checkpoint, read as data: a stranger's cannot run code, and a damaged one is told in a sentence."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

from mfubench.config import ConfigError

# What torch's index of a checkpoint (.metadata, a pickle) is made of where it describes tensors. BytesStorageMetadata
# is left out: values of that kind would be unpickled without limits.
INDEX_NAMES = {
    "torch": {"Size", *(f"float{bits}" for bits in (16, 32, 64)), "bfloat16", "uint8", "int32", "int64", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


def memory_format(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """getattr(_MEM_FORMAT_ENCODING, name), which is how Python before 3.11.4 pickles a member of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr of no memory format, which no index of tensors does")
    return _MEM_FORMAT_ENCODING[name]


class IndexUnpickler(pickle.Unpickler):
    """Takes nothing but descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return memory_format
        if name not in INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors does")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """torch's reader of a checkpoint folder, without its trust in the index. (Tensors it reads with weights_only.)"""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata: Metadata = IndexUnpickler(stream).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def damage_told(checkpoint: Path) -> Iterator[None]:
    """Turn what goes wrong while a checkpoint is read into a ConfigError: folder, fault, what to do."""
    try:
        yield
    except ConfigError:
        raise
    except CheckpointException as error:
        _, failure = next(iter(error.failures.items()))
        raise ConfigError(damage(checkpoint, failure[0])) from None
    except (OSError, EOFError, ValueError, KeyError, AttributeError, pickle.UnpicklingError) as error:
        raise ConfigError(damage(checkpoint, error)) from None


def damage(checkpoint: Path, error: BaseException) -> str:
    fault = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return (
        f"{checkpoint}: this checkpoint is damaged ({fault}). "
        "Remove its folder and start again: the run goes on from the checkpoint before it, or anew where there is none"
    )
