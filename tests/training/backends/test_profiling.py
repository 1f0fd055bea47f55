"""Profiles: readable files with our operators; errors for a second or unfinished profile."""

from __future__ import annotations

import gzip
import json
import math
import resource
import sys
import threading

import pytest
import torch

from rollouts.errors import OutputError, TrainingError
from rollouts.models.futures import TorchThread
from rollouts.training.backends import metric_sums, profiling
from rollouts.training.backends.profiling import Profile, peak_gib


@pytest.fixture
def profile():
    made = Profile()
    yield made
    made.discard()
    assert profiling._current is None


def some_work():
    weight = torch.randn(32, 48, requires_grad=True)
    (torch.randn(64, 32) @ weight).relu().sum().backward()


def profiled(profile, folder, rank=0, work=some_work):
    profile.start(torch.device("cpu"))
    work()
    return profile.finish(folder / "profile", rank)


def events_of(path):
    with gzip.open(path, "rt", encoding="utf-8") as packed:
        return json.load(packed)["traceEvents"]


def test_the_files_of_a_profile(profile, tmp_path):
    files = profiled(profile, tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in files] == [
        "profile/trace_rank0.json.gz",
        "profile/operators_rank0.txt",
        "profile/memory_rank0.json",
    ]
    assert sorted(tmp_path.rglob("*.*")) == sorted(files)  # and nothing else
    trace, table, memory = files
    names = {event.get("name") for event in events_of(trace)}
    assert {"aten::mm", "aten::relu", "aten::threshold_backward"} <= names
    assert "aten::mm" in table.read_text() and "Self CPU" in table.read_text()
    found = json.loads(memory.read_text())
    assert found["peak_rss_bytes"] >= 50 * 2**20
    if sys.platform == "linux":
        assert 50 * 2**20 <= found["rss_bytes"] <= found["peak_rss_bytes"] + 2**20
    by_name = {each["name"]: each for each in found["operators"]}
    assert by_name["aten::mm"]["bytes"] >= (64 * 48 + 32 * 48) * 4 and by_name["aten::mm"]["calls"] >= 2
    sizes = [each["bytes"] for each in found["operators"]]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0 and len(sizes) <= profiling.OPERATORS_MAX


def test_every_rank_has_its_own_files(profile, tmp_path):
    profiled(profile, tmp_path, rank=0)
    profiled(profile, tmp_path, rank=3)
    assert len(list((tmp_path / "profile").iterdir())) == 6
    assert (tmp_path / "profile" / "trace_rank3.json.gz").is_file()


def test_in_the_thread_of_a_backend(profile, tmp_path):
    thread = TorchThread("test-torch")
    try:
        thread.submit(profile.start, torch.device("cpu")).wait()
        thread.submit(some_work).wait()
        torch.ones(4).cos()  # of this thread nothing is seen
        trace, *_ = thread.submit(profile.finish, tmp_path / "profile", 0).wait()
    finally:
        thread.close()
    names = {event.get("name") for event in events_of(trace)}
    assert {"aten::mm", "aten::threshold_backward"} <= names and "aten::cos" not in names


def test_a_backend_s_step(profile, tmp_path, tiny):
    from rollouts.training.algorithms.recipes import GRPO
    from rollouts.training.backends.optimizer import TorchSettings
    from rollouts.training.backends.torch import create_torch_backend
    from rollouts.training.batching import make_batch

    samples = tiny.make_samples()
    batch = make_batch(samples, [math.sin(n + 1) for n in range(12)], aggregation="token_mean", step=0)
    backend = create_torch_backend(
        "tiny", 0, 3, 1e-3, 0, 1024, {"main": GRPO}, None, settings=TorchSettings(device="cpu")
    )
    try:
        backend.thread.submit(profile.start, "cpu").wait()
        backend.forward_backward(batch).wait()
        backend.optim_step().wait()
        trace, *_ = backend.thread.submit(profile.finish, tmp_path / "profile", 0).wait()
    finally:
        backend.close()
    names = {str(event.get("name")) for event in events_of(trace)}
    assert "_LinearTokenLogprobs" in names and "_LinearTokenLogprobsBackward" in names
    assert "aten::scaled_dot_product_attention" in names and "aten::_fused_adamw_" in names


def test_it_is_started_twice(profile, tmp_path):
    profile.start("cpu")
    assert profile._profiler is not None
    for other in (profile, Profile()):
        with pytest.raises(TrainingError, match="running in this process already"):
            other.start("cpu")
    some_work()
    trace, *_ = profile.finish(tmp_path / "profile", 0)  # the first is none the worse
    assert profile._profiler is None
    assert "aten::mm" in {event.get("name") for event in events_of(trace)}


def test_nothing_was_started(profile, tmp_path):
    with pytest.raises(TrainingError, match="none was started"):
        profile.finish(tmp_path / "profile", 0)
    profile.discard()
    assert list(tmp_path.iterdir()) == []


def test_it_is_never_finished(profile, tmp_path):
    profile.start("cpu")
    profile.discard()
    profile.discard()
    assert profile._profiler is None
    files = profiled(profile, tmp_path)
    assert len(files) == 3


def test_a_run_that_failed_left_one_running(profile, tmp_path):
    left = Profile()
    thread = threading.Thread(target=left.start, args=("cpu",))
    thread.start()
    thread.join()
    assert left._profiler is not None
    files = profiled(profile, tmp_path)
    assert left._profiler is None
    assert "aten::mm" in {event.get("name") for event in events_of(files[0])}


def test_a_disk_that_refuses(profile, tmp_path):
    (tmp_path / "profile").write_text("a file where a folder should be")
    with pytest.raises(OutputError, match=r"the profile cannot be written to .*profile: "):
        profiled(profile, tmp_path)
    assert profile._profiler is None
    (tmp_path / "profile").unlink()
    assert len(profiled(profile, tmp_path)) == 3


def test_a_trace_that_torch_could_not_write(profile, tmp_path):
    """It only logs that, so nothing would be packed."""
    profile.start("cpu")
    some_work()
    profile._profiler.export_chrome_trace = lambda path: None
    with pytest.raises(OutputError, match=r"torch could not write trace_rank0\.json"):
        profile.finish(tmp_path / "profile", 0)
    assert list((tmp_path / "profile").iterdir()) == []


def test_a_disk_that_fills_leaves_no_half_trace(profile, tmp_path, monkeypatch):
    def full(source, target):
        target.write(source.read(100))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling.shutil, "copyfileobj", full)
    with pytest.raises(OutputError, match="No space left on device"):
        profiled(profile, tmp_path)
    assert list((tmp_path / "profile").iterdir()) == []


def test_on_a_gpu_the_snapshot_is_torch_s_own(profile, tmp_path, monkeypatch):
    """No GPU here: the calls that would be made."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: open(path, "wb").close())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    profile.start("cuda:1")
    some_work()
    *_, memory = profile.finish(tmp_path / "profile", 1)
    assert memory.name == "memory_rank1.pickle" and memory.is_file()
    assert calls == [{"max_entries": profiling._HISTORY_ENTRIES_MAX, "stacks": "python"}, {"enabled": None}]


def test_the_peak(monkeypatch):
    gib = peak_gib("cpu")
    assert 0.05 < gib < 64
    held = torch.ones(2**26)  # 256 MiB, touched
    assert peak_gib("cpu") >= gib and held.sum() > 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(metric_sums.sys, "platform", "linux")
    assert metric_sums.peak_resident_bytes() == pytest.approx(most * 1024, rel=0.01)
    monkeypatch.setattr(metric_sums.sys, "platform", "darwin")
    assert metric_sums.peak_resident_bytes() == pytest.approx(most, rel=0.01)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29 * (device.index == 1))
    assert peak_gib("cuda:1") == 1.5
