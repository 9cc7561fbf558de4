"""The data files of a dataset on the hub: which they are, and one of them here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfubench.config import ConfigError
from mfubench.data import hub
from mfubench.data.config import HubCorpus


@dataclass(frozen=True)
class HubFile:
    name: str  # path within the repository
    size: int
    commit: str
    path: Path | None  # None: to be downloaded


def list_files(corpus: HubCorpus) -> list[HubFile]:
    """The files of one split, as the repository's own configuration (its README) or its file names define it."""
    if hub.reachable():
        return _list_online(corpus)
    return _list_cached(corpus)


def download_needs(corpus: HubCorpus, files: list[tuple[str, int, str]], work: Path) -> tuple[int, Path]:
    """Bytes that are still to be downloaded and kept at one time, and the folder they go to.

    files: name, size and commit of each.
    """
    import huggingface_hub

    if not corpus.keep_downloads:
        return 2 * max((size for _, size, _ in files), default=0), work  # one is read while the next is fetched
    missing = 0
    for name, size, commit in files:
        cached = huggingface_hub.try_to_load_from_cache(corpus.dataset, name, revision=commit, repo_type="dataset")
        missing += 0 if isinstance(cached, str) else size
    return missing, Path(huggingface_hub.constants.HF_HUB_CACHE)


def fetch(corpus: HubCorpus, name: str, commit: str, local_dir: Path | None) -> Path:
    """Download one file into the hub's cache, or into `local_dir`."""
    return hub.download(corpus.dataset, name, commit, "dataset", local_dir)


def _list_online(corpus: HubCorpus) -> list[HubFile]:
    import huggingface_hub
    from huggingface_hub import errors

    addresses = [re.fullmatch(r"hf://datasets/.+?@([^/]+)/(.+)", url) for url in _data_files(corpus.dataset, corpus)]
    commits = {address[1] for address in addresses if address}
    names = [address[2] for address in addresses if address]
    if len(commits) != 1 or len(names) != len(addresses):
        raise ConfigError(f"{_where(corpus)}: split {corpus.split!r} has files outside the repository; download them")
    (commit,) = commits
    api = huggingface_hub.HfApi(endpoint=hub.endpoint())
    try:
        infos = api.get_paths_info(corpus.dataset, names, repo_type="dataset", revision=commit)
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{_where(corpus)}: its files cannot be listed ({error})") from None
    sizes = {info.path: info.size for info in infos if isinstance(info, huggingface_hub.hf_api.RepoFile)}
    return [HubFile(name, sizes[name], commit, None) for name in names]


def _list_cached(corpus: HubCorpus) -> list[HubFile]:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        snapshot = huggingface_hub.snapshot_download(
            corpus.dataset, repo_type="dataset", revision=corpus.revision, local_files_only=True
        )
    except (errors.LocalEntryNotFoundError, FileNotFoundError):
        raise ConfigError(hub.unreachable_message(_where(corpus))) from None
    folder = Path(snapshot)
    paths = [Path(name) for name in _data_files(snapshot, corpus)]
    for path in paths:
        numbered = re.search(r"-\d{5}-of-(\d{5})\.", path.name)
        if numbered and len(paths) != int(numbered[1]):
            raise ConfigError(
                f"{_where(corpus)}: the cache holds {len(paths)} of {int(numbered[1])} files of split "
                f"{corpus.split!r}, and the hub is not in reach to fetch the others"
            )
    return [HubFile(path.relative_to(folder).as_posix(), path.stat().st_size, folder.name, path) for path in paths]


def _data_files(repository: str, corpus: HubCorpus) -> list[str]:
    """Addresses of the split's files; repository: an id, or a folder that holds a copy."""
    import datasets

    revision = None if Path(repository).is_absolute() else corpus.revision
    try:
        builder: Any = datasets.load_dataset_builder(repository, name=corpus.config_name, revision=revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error):
            raise ConfigError(hub.gated_message(_where(corpus), corpus.dataset, "dataset")) from None
        raise ConfigError(
            f"{_where(corpus)}: no such dataset on {hub.endpoint()}, or it is private: check name and revision; for a "
            "private one log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"{_where(corpus)}: cannot be read as a dataset ({error}); set config_name?") from None
    files = builder.config.data_files or {}
    if corpus.split not in files:
        found = ", ".join(map(str, files)) or "none"
        raise ConfigError(f"{_where(corpus)}: has no split {corpus.split!r} (found: {found}); set split")
    return sorted(map(str, files[corpus.split]))


def _where(corpus: HubCorpus) -> str:
    return f"{corpus.dataset}@{corpus.revision}"
