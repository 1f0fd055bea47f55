"""For all tests: one thread of torch per process. They run side by side, and so do the ranks that some of them start;
with a thread a core each they would starve one another, and run into deadlines. And the GPUs of the machine are hidden,
also from the processes that tests start: tests compare with models on the CPU, and have more ranks than there are GPUs.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""  # of NVIDIA, and of AMD
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # tests look at folders that they import files from
sys.dont_write_bytecode = True
# A machine that is busy makes examples slowly; that says nothing of what they test.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
sys.path.append(str(Path(__file__).parent))  # for `import forks`


PACKAGE = Path(__file__).parents[1] / "rollouts"
_freeze = gc.freeze
IMPORTS = 100  # so many modules are worth excluding


@pytest.fixture(autouse=True)
def forget_modules_of_tests(request, tmp_path_factory):
    """A file that a test wrote and imported by its name, as `broken.py`, is not the next test's module of that name.
    What a test imported, such as torch, is excluded from the garbage collections of the next ones. A test that leaves
    another handler of Ctrl-C behind fails, and not the next one.
    """
    modules, path, interrupt = set(sys.modules), list(sys.path), signal.getsignal(signal.SIGINT)
    yield
    if (left := signal.getsignal(signal.SIGINT)) is not interrupt:
        signal.signal(signal.SIGINT, interrupt)
        raise AssertionError(f"the test left {left} as the handler of SIGINT, in place of {interrupt}")
    if len(sys.modules) > len(modules) + IMPORTS and not getattr(request.module, "WHOLE_COLLECTIONS", False):
        gc.collect()
        _freeze()
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]
    # A component named by its file adds that file's folder: one of the package would make its vllm.py a library `vllm`.
    added = (written, str(PACKAGE))
    sys.path[:] = [folder for folder in sys.path if folder in path or not folder.startswith(added)]


LONGEST = """
    plugins/ray/tests/test_ray.py tests/runs/test_phases.py tests/runs/test_resume.py tests/test_chaos.py
    plugins/openenv/tests/test_openenv.py tests/first_notes/test_audit.py plugins/check/tests/test_scaffold.py
    tests/training/backends/test_fsdp.py tests/test_main_job.py tests/workers/test_installs.py
    environments/python/tests/test_python.py tests/runs/test_seeds.py tests/test_bad_input.py
    tests/test_example_scripts.py plugins/gymnasium/tests/test_environment.py tests/runs/test_interrupted.py
    plugins/text_rewards/tests/test_text_rewards.py tests/test_gallery.py tests/test_depth.py
""".split()  # the modules that take longest


def pytest_collection_modifyitems(config, items):
    """The longest modules first, so that none of them begins as the others end; then those with slow tests."""
    root, ranks = config.rootpath, {name: rank for rank, name in enumerate(LONGEST)}
    missing = [name for name in LONGEST if not (root / name).is_file()]
    assert not missing, f"tests/conftest.py names files that are gone: {missing}"
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = {
        path: (ranks.get(path.relative_to(root).as_posix(), len(ranks)), path not in slow)
        for path in {item.path for item in items}
    }
    items.sort(key=lambda item: order[item.path])


@pytest.fixture(scope="module", autouse=True)
def quick_collections(request):
    """Garbage collections do not visit what existed before the module, such as imported packages: a quarter of a second
    each. A module with `WHOLE_COLLECTIONS` tests them.
    """
    if getattr(request.module, "WHOLE_COLLECTIONS", False):
        gc.unfreeze()
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        gc.freeze()
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
        gc.collect()


@pytest.fixture
def forked_ranks(monkeypatch):
    """The ranks of distributed training start as forks, which saves each of them five seconds of imports."""
    import forks

    from rollouts.training.backends import ranks

    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forks.popen}))
