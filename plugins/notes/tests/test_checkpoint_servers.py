"""The engines of the first notes: their requests to a server, and that no bad folder is requested."""

from __future__ import annotations

import http.server
import json
import shutil
import threading

import pytest
import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.models.loading import TINY_PATH
from rollouts.training import SGLangEngine, VLLMEngine, WeightSyncManager, sync_weights_to_engines


@pytest.fixture
def server():
    """Answers everything, and remembers it; `broken` is a path that it fails."""
    asked, broken = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "null")
            asked.append((self.path, body))
            good = self.path not in broken
            data = json.dumps({"success": good, "message": "done" if good else "no such layer"}).encode()
            self.send_response(200 if good else 500)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    made.daemon_threads = True
    yield f"http://127.0.0.1:{made.server_port}", asked, broken
    made.shutdown()
    made.server_close()


def run(*engines, path=str(TINY_PATH)):
    return trio.run(sync_weights_to_engines, list(engines), path)


def test_the_names_are_where_the_notes_have_them():
    from rollouts.training import weight_sync

    names = ("InferenceEngine", "SGLangEngine", "VLLMEngine", "WeightSyncManager", "sync_weights_to_engines")
    assert all(hasattr(weight_sync, name) for name in names) and weight_sync.WeightSyncManager is WeightSyncManager


def test_sglang_loads_from_disk_and_flushes(server):
    url, asked, _ = server
    assert run(SGLangEngine(base_url=url)) == [{"success": True, "message": f"SGLang at {url} loaded {TINY_PATH}"}]
    body = next(body for path, body in asked if path == "/update_weights_from_disk")
    assert body["model_path"] == str(TINY_PATH) and body["flush_cache"] is True


def test_vllm_reloads_while_requests_wait_and_forgets_its_cache(server):
    url, asked, _ = server
    assert run(VLLMEngine(base_url=url)) == [{"success": True, "message": f"vLLM at {url} loaded {TINY_PATH}"}]
    paths = [path.partition("?")[0] for path, _ in asked]
    in_order = [path for path in paths if path in ("/pause", "/collective_rpc", "/reset_prefix_cache", "/resume")]
    assert in_order == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    body = next(body for path, body in asked if path == "/collective_rpc")
    assert body == {"method": "reload_weights", "kwargs": {"weights_path": str(TINY_PATH)}}


def test_several_at_once_and_the_one_that_fails_is_named(server):
    url, asked, broken = server
    engines = [SGLangEngine(url), VLLMEngine(url), SGLangEngine(url)]
    assert [each["success"] for each in run(*engines)] == [True, True, True]
    broken += ["/collective_rpc"]
    asked.clear()
    with pytest.raises(InferenceError, match=r"VLLMEngine\(.* did not load .* \(1 of 3 engines failed\): .*status 500"):
        run(*engines)
    broken += ["/update_weights_from_disk"]
    with pytest.raises(InferenceError, match=r"SGLangEngine\(.* did not load .*no such layer"):
        run(SGLangEngine(url))


def test_a_folder_that_is_not_whole_is_never_asked_for(server, tmp_path):
    url, asked, _ = server
    with pytest.raises(ConfigError, match="there is no folder"):
        run(SGLangEngine(url), path=str(tmp_path / "nowhere"))
    cut = tmp_path / "cut"
    shutil.copytree(TINY_PATH, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cut off"):
        run(VLLMEngine(url), path=str(cut))
    (cut / "model.safetensors").rename(cut / "adapter_model.safetensors")
    (cut / "adapter_model.safetensors").write_bytes((TINY_PATH / "model.safetensors").read_bytes())
    (cut / "config.json").rename(cut / "adapter_config.json")
    with pytest.raises(ConfigError, match="holds an adapter"):
        run(SGLangEngine(url), path=str(cut))
    assert asked == []
