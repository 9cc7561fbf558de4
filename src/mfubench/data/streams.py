"""Plain, gzip and zstandard files as byte streams that notice when they were cut short."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import zstandard

from mfubench.config import ConfigError

CHUNK = 2**17


class ZstandardReader(io.RawIOBase):
    """Decompress as it is read; unlike zstandard's own reader, raise EOFError where the file ends within a frame."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._frame_begun = False
        self._compressed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            if not self._compressed:
                self._compressed = self._file.read(CHUNK)
            if not self._compressed:
                if self._frame_begun:
                    raise EOFError("it ends within a zstandard frame")
                return 0
            self._ready = self._frame.decompress(self._compressed)
            self._frame_begun = True
            self._compressed = b""
            if self._frame.eof:
                self._compressed = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._frame_begun = False
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def open_stream(path: Path) -> io.BufferedIOBase:
    """The uncompressed bytes of a file; only a plain one can seek quickly."""
    if path.suffix == ".gz":
        return cast(io.BufferedIOBase, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return io.BufferedReader(ZstandardReader(path), CHUNK)
    return cast(io.BufferedIOBase, path.open("rb", buffering=CHUNK))


@contextmanager
def stream_errors(path: Path) -> Iterator[None]:
    """Turn what a damaged or unreadable file raises into a ConfigError that names it."""
    import pyarrow

    try:
        yield
    except (
        EOFError,
        gzip.BadGzipFile,
        zlib.error,
        zstandard.ZstdError,
        pyarrow.ArrowInvalid,
        pyarrow.ArrowException,
    ) as error:
        raise ConfigError(f"{path}: damaged or cut short ({error}); fetch it again") from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: gone since the files were listed") from None
    except PermissionError:
        raise ConfigError(f"{path}: may not be read; check its permissions") from None
