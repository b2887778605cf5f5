"""A server on loopback with the Hub's routes for pushing to a dataset repository. It keeps the
pushed files.

The routes are those that `huggingface_hub` 1 uses: create, info, list, preupload, Git LFS batch and
transfer, commit.
"""

import base64
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit


@dataclass
class Hub:
    token: str = "hf_secret"
    url: str = ""
    refused: str | None = None
    """Substring of `METHOD path`. Requests that contain it get 403."""
    visible: dict[str, bool] = field(default_factory=dict)
    """Repository -> True when it is private."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Repository -> path -> contents, after the last commit."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> Git LFS object."""
    requests: list[str] = field(default_factory=list)

    def answer(self, method, path, authorization, body):
        """Return the status and the JSON of the answer."""
        self.requests.append(f"{method} {path}")
        if self.refused and self.refused in f"{method} {path}":
            return 403, {"error": "Private repository storage limit reached"}
        if path.startswith("/lfs/"):
            self.objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        if authorization != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            for each in wanted:
                each["actions"] = {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}
            return 200, {"transfer": "basic", "objects": wanted}
        _, _, _, org, name, *rest = path.split("/")
        repository = f"{org}/{name}"
        if rest[:1] == ["tree"]:
            file = {"type": "file", "size": 1, "oid": "0"}
            return 200, [{**file, "path": path} for path in self.files[repository]]
        if rest[:1] == ["preupload"]:
            files = json.loads(body)["files"]
            for file in files:
                file["uploadMode"] = "lfs" if file["path"].endswith("parquet") else "regular"
                file["shouldIgnore"] = False
            return 200, {"files": files}
        if rest[:1] == ["commit"]:
            self._commit(self.files[repository], [json.loads(line) for line in body.splitlines()])
            url = f"{self.url}/datasets/{repository}/commit/c0ffee"
            return 200, {"success": True, "commitOid": "c0ffee", "commitUrl": url, "hookOutput": ""}
        if repository not in self.visible:
            return 404, {"error": "Repository not found"}
        about = {"id": repository, "sha": "c0ffee", "siblings": []}
        return 200, {**about, "private": self.visible[repository]}

    def _create(self, asked):
        repository = f"{asked['organization']}/{asked['name']}"
        assert asked["type"] == "dataset"
        if asked["organization"] == "strangers":
            why = "You don't have the rights to create a dataset under this namespace"
            return 403, {"error": why}
        answer = {"url": f"{self.url}/datasets/{repository}", "id": repository}
        if repository in self.visible:
            return 409, {**answer, "error": "You already created this dataset repo"}
        is_private = asked.get("private") is True or asked.get("visibility") == "private"
        self.visible[repository] = is_private
        self.files[repository] = {".gitattributes": b""}
        return 200, answer

    def _commit(self, files, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]


@contextmanager
def loopback_hub():
    """Yield a `Hub` that listens until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            path = urlsplit(self.path).path
            status, answer = hub.answer(self.command, path, self.headers.get("authorization"), body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
