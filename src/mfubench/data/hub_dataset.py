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
    path: Path | None  # None: to be downloaded


def list_files(corpus: HubCorpus) -> list[HubFile]:
    """The files of one split, as the repository's own configuration (its README) or its file names define it."""
    if hub.reachable():
        return _list_online(corpus)
    return _list_cached(corpus)


def fetch(corpus: HubCorpus, name: str, local_dir: Path | None) -> Path:
    """Download one file into the hub's cache, or into `local_dir`."""
    return hub.download(corpus.dataset, name, corpus.revision, "dataset", local_dir)


def _list_online(corpus: HubCorpus) -> list[HubFile]:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{corpus.dataset}@{corpus.revision}"
    try:
        urls = _data_files(corpus.dataset, corpus)
        # hf://datasets/owner/name@commit/path
        names = [re.sub(r"^hf://datasets/[^/]+/[^/]+?@[^/]+/", "", url) for url in urls]
        api = huggingface_hub.HfApi(endpoint=hub.endpoint())
        infos = api.get_paths_info(corpus.dataset, names, repo_type="dataset", revision=corpus.revision)
    except errors.GatedRepoError:
        raise ConfigError(hub.gated_message(where, corpus.dataset, "dataset")) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{where}: its files cannot be listed ({error})") from None
    sizes = {info.path: info.size for info in infos if isinstance(info, huggingface_hub.hf_api.RepoFile)}
    return [HubFile(name, sizes[name], None) for name in names]


def _list_cached(corpus: HubCorpus) -> list[HubFile]:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{corpus.dataset}@{corpus.revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            corpus.dataset, repo_type="dataset", revision=corpus.revision, local_files_only=True
        )
    except (errors.LocalEntryNotFoundError, FileNotFoundError):
        raise ConfigError(hub.unreachable_message(where)) from None
    paths = [Path(name) for name in _data_files(folder, corpus)]
    for path in paths:
        numbered = re.search(r"-\d{5}-of-(\d{5})\.", path.name)
        if numbered and len(paths) != int(numbered[1]):
            raise ConfigError(
                f"{where}: the cache holds {len(paths)} of {int(numbered[1])} files of split {corpus.split!r}, and the "
                "hub is not in reach to fetch the others"
            )
    return [HubFile(str(path.relative_to(folder)), path.stat().st_size, path) for path in paths]


def _data_files(repository: str, corpus: HubCorpus) -> list[str]:
    """Addresses of the split's files; repository: an id, or a folder that holds a copy."""
    import datasets

    revision = None if Path(repository).is_dir() else corpus.revision
    where = f"{corpus.dataset}@{corpus.revision}"
    try:
        builder: Any = datasets.load_dataset_builder(repository, name=corpus.config_name, revision=revision)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        raise ConfigError(
            f"{where}: cannot be understood as a dataset ({error}); set config_name, or download it"
        ) from None
    files = builder.config.data_files or {}
    if corpus.split not in files:
        raise ConfigError(
            f"{where}: has no split {corpus.split!r} (found: {', '.join(map(str, files)) or 'none'}); set split"
        )
    return sorted(map(str, files[corpus.split]))
