"""The Hugging Face hub, or a mirror of it: found out once and quickly, with a way out in every message."""

from __future__ import annotations

import functools
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from mfubench.config import ConfigError

PROBE_S = 4.0  # longest wait for a hub that does not answer; the client library's own retries take up to a minute


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def reachable() -> bool:
    """Whether the hub answers; one short request a process. False in offline mode."""
    return not offline() and _answers(endpoint())


@functools.cache
def _answers(url: str) -> bool:
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE_S).close()
        except urllib.error.HTTPError:
            pass  # an answer, if not a kind one
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, since looking up a name can hang for longer than the timeout of the connection.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_S)
    return answered.is_set()


def download(
    repo: str,
    filename: str,
    revision: str,
    repo_type: Literal["model", "dataset"] = "model",
    local_dir: Path | None = None,
) -> Path:
    """One file of a repository, from the cache or the hub; raises ConfigError with what to do."""
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{repo}@{revision}: {filename}"
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repo,
                filename,
                repo_type=repo_type,
                revision=revision,
                endpoint=endpoint(),
                local_dir=local_dir,
                local_files_only=not reachable(),
            )
        )
    except errors.GatedRepoError:
        raise ConfigError(gated_message(where, repo, repo_type)) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{where}: no such repository on {endpoint()}, or it is private: check the name; for a private one log in "
            "with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{where}: the repository has no revision {revision!r}; state a branch, tag or commit"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise ConfigError(unreachable_message(where)) from None
    except errors.EntryNotFoundError:
        raise ConfigError(f"{where}: the repository has no such file at this revision") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{where}: download failed ({error}); run again to go on where it stopped") from None


def gated_message(where: str, repo: str, repo_type: str) -> str:
    page = f"{endpoint()}/{'datasets/' if repo_type == 'dataset' else ''}{repo}"
    return (
        f"{where}: this repository is gated. Accept its licence at {page}, then log in with `hf auth login` (or set "
        "HF_TOKEN to a token that may read it). Without access use a local copy: kind: folder"
    )


def unreachable_message(where: str) -> str:
    state = "HF_HUB_OFFLINE is set" if offline() else f"{endpoint()} does not answer"
    return (
        f"{where}: not in the cache ({os.environ.get('HF_HOME', '~/.cache/huggingface')}), and {state}. Ways out: a "
        "mirror (HF_ENDPOINT), a cache filled elsewhere (HF_HOME), or local files (tokenizers: kind: folder; "
        "datasets: source: local; without any download: kind: bpe and source: embedded)"
    )
