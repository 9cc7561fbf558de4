"""A hub in miniature on this machine: enough of its web interface for the client libraries to list and download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """repositories: "owner/name" of a model or "datasets/owner/name" -> its files."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            hub.requests.append(format % args)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def send(self, status: int, content: bytes, body: bool, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def answer(self, body: bool = True) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            form = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not path:
                return self.send(200, b"", body)
            if path.startswith("api/"):
                return self.answer_api(path, form, body)
            repository, _, rest = path.partition("/resolve/")
            if repository in hub.gated:
                return self.send(401, b"", body, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted.")
            files = hub.repositories.get(repository)
            if files is None:
                return self.send(404, b"", body, X_Error_Code="RepoNotFound")
            revision, _, name = rest.partition("/")
            if revision not in ("main", COMMIT):
                return self.send(404, b"", body, X_Error_Code="RevisionNotFound")
            if name not in files:
                return self.send(404, b"", body, X_Error_Code="EntryNotFound")
            etag = hashlib.sha1(files[name]).hexdigest()
            return self.send(200, files[name], body, ETag=f'"{etag}"')

        def answer_api(self, path: str, form: bytes, body: bool) -> None:
            """api/datasets/owner/name[/revision/R | /tree/R[/folder] | /paths-info/R]"""
            _, kind, owner, name, *rest = path.split("/")
            repository = f"{'datasets/' if kind == 'datasets' else ''}{owner}/{name}"
            files = hub.repositories.get(repository)
            if files is None:
                return self.send(404, b"", body, X_Error_Code="RepoNotFound")
            entries = [entry(name, content) for name, content in files.items()]
            match rest:
                case ["tree", _, *folder]:
                    inside = "/".join([*folder, ""])
                    result: Any = [e for e in entries if e["path"].startswith(inside)]
                    recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["False"])[0].lower() == "true"
                    if not recursive:
                        result = level(result, inside)
                case ["paths-info", _]:
                    wanted = parse_qs(form.decode())["paths"]
                    folders = {name.rsplit("/", 1)[0] for name in files if "/" in name}
                    result = [e for e in entries if e["path"] in wanted]
                    result += [folder_entry(f) for f in folders if f in wanted]
                case _:
                    result = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
            return self.send(200, json.dumps(result).encode(), body, Content_Type="application/json")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def folder_entry(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()}


def level(entries: list[dict[str, Any]], inside: str) -> list[dict[str, Any]]:
    """One level of a tree: files in the folder, and its sub-folders."""
    found = {}
    for one in entries:
        head, _, rest = one["path"][len(inside) :].partition("/")
        found[head] = folder_entry(inside + head) if rest else one
    return list(found.values())
