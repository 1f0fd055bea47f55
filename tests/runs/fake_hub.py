"""A Hugging Face Hub on loopback: the endpoints that huggingface_hub calls to make a repository and upload a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

TOKEN = "hf_right"


class FakeHub:
    """A context manager. `repositories` are the files of each repository, and whether it is private; `fails` is a part
    of a path: requests for it are answered with `status`.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.fails, self.status = "", 500
        self.objects: dict[str, bytes] = {}  # of large files, by SHA-256
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """The status and the JSON body of an answer."""
        path = path.partition("?")[0]
        if self.fails and self.fails in path:
            return self.status, {"error": "the fake hub was asked to fail"}
        if method == "PUT" and path.startswith("/objects/"):  # a signed address: no token
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name, _, rest = (
            path.removeprefix("/api/models/")
            .removeprefix("/")
            .partition("/preupload/" if "/preupload/" in path else "/commit/" if "/commit/" in path else ".git/")
        )
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = ["lfs" if file["path"].endswith(".safetensors") else "regular" for file in files]
            return 200, {
                "files": [
                    {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
                    for file, mode in zip(files, modes, strict=True)
                ]
            }
        if rest == "info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{self.url}/objects/{each['oid']}"}} for each in objects]
            return 200, {
                "transfer": "basic",
                "objects": [{**each, "actions": action} for each, action in zip(objects, actions, strict=True)],
            }
        return self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.repositories[name] = {"private": private, "files": {}}
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        files = self.repositories[name]["files"]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        return 200, {"commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = hub.answer(self.command, self.path, self.headers.get("Authorization") or "", body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = _serve

            def log_message(self, *args: Any) -> None:
                """Nothing is printed."""

        return Handler
