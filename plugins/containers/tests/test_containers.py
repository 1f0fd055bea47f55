"""Containers: real ones of podman where it works, with a small root file system of busybox; and the exact arguments
with which both programs are called.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time

import pytest
import rollouts_containers
from rollouts_containers import DockerSandboxes, PodmanSandboxes

from rollouts.errors import ConfigError, SandboxError, SandboxLostError
from rollouts.sandboxes import ImageSandbox, Sandboxes, SandboxLimits

TOOLS = "sh cat ls sleep true test mkdir readlink head stat seq id ps grep yes dd touch ln kill env setsid".split()
RUNC = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=2000:2000"]
[engine]
runtime = "runc"
"""


def busybox() -> str:
    """A busybox that needs no libraries."""
    path = shutil.which("busybox") or ""
    return path if path and b"statically" in subprocess.run(["file", "-b", path], capture_output=True).stdout else ""


@pytest.fixture(scope="module")
def root_file_system(tmp_path_factory):
    if not shutil.which("podman"):
        pytest.skip("podman is not installed: apt-get install podman catatonit")
    if not shutil.which("file") or not busybox():
        pytest.skip("there is no static busybox: apt-get install busybox-static file")
    folder = tmp_path_factory.mktemp("root")
    (folder / "bin").mkdir()
    shutil.copy(busybox(), folder / "bin" / "busybox")
    for name in TOOLS:
        (folder / "bin" / name).symlink_to("busybox")
    for name in ("dev", "proc", "sys", "tmp", "etc"):
        (folder / name).mkdir()
    path = tmp_path_factory.mktemp("tar") / "root.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname=".")
    return str(path)


@pytest.fixture(scope="module")
def podman(root_file_system, tmp_path_factory):
    """The settings of sandboxes that work here. Skips if no container can be started, also not with runc."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            PodmanSandboxes(root_file_system=root_file_system).check()
        except ConfigError:
            conf = tmp_path_factory.mktemp("conf") / "containers.conf"
            conf.write_text(RUNC)
            patch.setenv("CONTAINERS_CONF", str(conf))
            try:
                PodmanSandboxes(root_file_system=root_file_system).check()
            except ConfigError as error:
                pytest.skip(f"podman cannot start a container here: {error}")
        yield {"root_file_system": root_file_system}
        image = PodmanSandboxes(root_file_system=root_file_system).run_arguments("")[-2]
        subprocess.run(["podman", "rmi", "-f", image], capture_output=True)


@pytest.fixture
def open_sandbox(podman):
    opened = []

    def open_sandbox(**limits):
        opened.append(PodmanSandboxes(limits=SandboxLimits(**limits), **podman).open())
        return opened[-1]

    yield open_sandbox
    for sandbox in opened:
        sandbox.close()
    names = containers()
    assert not any(sandbox.name in names for sandbox in opened)


def containers():
    return subprocess.run(["podman", "ps", "-a", "--format", "{{.Names}}"], capture_output=True, text=True).stdout


@pytest.mark.slow
def test_commands_and_files(open_sandbox):
    sandbox = open_sandbox()
    result = sandbox.exec("cat a/b; pwd; echo $HOME; echo err >&2; exit 3", files={"a/b": "1\n"})
    assert result[:3] == (3, "1\n/workspace\n/workspace\n", "err\n")
    assert sandbox.exec(["cat"], stdin="x" * 200_000, output_kib=1)[1:] == ("x" * 1024, "", False, False, False, True)
    assert sandbox.exec(["no-such-program"]).exit_code == 127
    sandbox.exec("ln -s a/b link; ln -s /etc/passwd out; echo 2 > made; dd if=/dev/zero of=big bs=1k count=2000")
    assert sandbox.read("link") == sandbox.read("/workspace/a/b") == b"1\n"
    sandbox.write("c/d", b"\x00\xff")
    assert sandbox.read("c/d") == b"\x00\xff"
    for path in ("out", "../x", "/etc/passwd"):
        with pytest.raises(ValueError, match="outside"):
            sandbox.read(path)
        with pytest.raises(ValueError, match="outside"):
            sandbox.write(path, "changed")
    with pytest.raises(FileNotFoundError):
        sandbox.read("none")
    with pytest.raises(ValueError, match="not a regular file"):
        sandbox.read("a")
    with pytest.raises(ValueError, match="memory_gib is a limit of the whole container"):
        sandbox.exec("true", memory_gib=0.1)


@pytest.mark.slow
def test_nothing_outside_can_be_reached(open_sandbox, tmp_path):
    (tmp_path / "secret").write_text("private")
    sandbox = open_sandbox()
    assert sandbox.exec(["cat", str(tmp_path / "secret")]).exit_code == 1
    assert sandbox.exec(f"mkdir -p {tmp_path}; echo changed > {tmp_path}/secret; echo 1 > /proc/sys/kernel/x").exit_code
    assert (tmp_path / "secret").read_text() == "private"
    assert sandbox.exec("ls /sys/class/net").stdout == "lo\n"
    assert sandbox.exec("grep CapEff /proc/self/status").stdout.split()[1] == "0" * 16


@pytest.mark.slow
def test_limits_and_the_end_of_processes(open_sandbox):
    sandbox = open_sandbox(memory_gib=0.25, processes=20, file_mib=1)
    late = sandbox.exec("setsid sh -c 'sleep 2; touch late' & sleep 300", seconds=0.7)
    assert late.timed_out and late.exit_code == 137
    assert sandbox.exec("setsid sleep 300 & sleep 300 & echo left").stdout == "left\n"
    assert sandbox.exec("ps | grep -c 'slee[p] 300'; ls").stdout == "0\n"  # and there is no file `late`
    bomb = sandbox.exec("i=0; while [ $i -lt 100 ]; do sleep 300 & i=$((i + 1)); done; wait", seconds=5)
    assert "fork" in bomb.stderr
    assert sandbox.exec("for i in 1 2 3; do sleep 300 & done; echo again").stdout == "again\n"
    assert sandbox.exec("dd if=/dev/zero of=/dev/null bs=500M count=1").was_killed_for_memory
    assert not sandbox.exec("exit 1").was_killed_for_memory
    assert sandbox.exec("dd if=/dev/zero of=big bs=1M count=3; stat -c %s big").stdout == f"{1 << 20}\n"


@pytest.mark.slow
def test_a_container_that_is_gone_is_a_lost_sandbox(open_sandbox):
    sandbox = open_sandbox()
    subprocess.run(["podman", "rm", "-f", sandbox.name], capture_output=True, check=True)
    with pytest.raises(SandboxLostError, match=r"the sandbox was lost: .*(no such container|no container with name)"):
        sandbox.exec("true")
    assert sandbox.lost
    short = open_sandbox(ttl_seconds=2)
    with pytest.raises(SandboxLostError, match=r"its time to live of 2 s is over; raise --sandbox\.ttl-seconds"):
        short.exec("sleep 300", seconds=300)
    closed = open_sandbox()
    closed.close()
    with pytest.raises(SandboxLostError, match="the sandbox is closed"):
        closed.read("x")


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_was_killed(podman):
    code = (
        "import sys; from rollouts_containers import PodmanSandboxes\n"
        f"sandbox = PodmanSandboxes(root_file_system={podman['root_file_system']!r}).open()\n"
        "print(sandbox.name, flush=True); sandbox.exec('sleep 300', seconds=300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        assert name in containers()
        process.kill()
    deadline = time.monotonic() + 60
    while name in containers():
        assert time.monotonic() < deadline, "the container is still there"
        time.sleep(0.1)


# --- the arguments, for both programs ---------------------------------------------------------------------------------

FAKE = """\
#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
words = sys.argv[1:]
if words[0] == "inspect":
    print("true")
elif words[0] == "exec" and words[-1].startswith("for p in"):
    print("1\\n7")
elif words[0] == "image" and not {has_image}:
    sys.exit(1)
elif words[0] == "build" and not {builds}:
    sys.exit("STEP 1\\nno such base")
elif words[0] == "version" and not {runs}:
    sys.exit("Cannot connect to the Docker daemon")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A program that writes down its arguments: (program, function that returns them)."""
    monkeypatch.setattr(rollouts_containers, "_reapers", {(os.getpid(), str(tmp_path / "fake")): None})

    def fake(has_image=True, runs=True, builds=True):
        path, log = tmp_path / "fake", tmp_path / "log"
        shown = {"has_image": has_image, "runs": runs, "builds": builds}
        path.write_text(FAKE.format(python=sys.executable, log=str(log), **shown))
        path.chmod(0o755)
        return str(path), lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return fake


@pytest.mark.parametrize("kind", [PodmanSandboxes, DockerSandboxes])
def test_the_arguments_of_the_program(fake, kind):
    program, called = fake()
    limits = SandboxLimits(memory_gib=1.5, processes=10, cpu_seconds=5, file_mib=2, ttl_seconds=60)
    made = kind(program=program, limits=limits, image="img:1", options=["--user", "1000"])
    assert isinstance(made, Sandboxes)
    sandbox = made.open()
    sandbox.exec(["echo", "hi"])
    sandbox.write("a/b", "x")
    sandbox.close()
    inside = ["exec", "-i", "-w", "/workspace", sandbox.name, "/bin/sh", "-c"]
    run, look, execute, write, remove = called()
    assert run == [
        *("run", "-d", "--rm", "--init", "--name", sandbox.name, "--label", rollouts_containers._label),
        *("--pull", "never", "--stop-timeout", "0", "--network", "none", "--memory", "1536m", "--memory-swap", "1536m"),
        *("--pids-limit", "14", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--volume", "/workspace"),
        *("--env", "HOME=/workspace", "--env", "TMPDIR=/tmp", "--user", "1000", "--entrypoint", "sleep", "img:1", "60"),
    ]
    assert look == [*inside, rollouts_containers.LIST]
    assert execute == [*inside, rollouts_containers.EXEC, "sh", "5", "4096", "1 7", "echo", "hi"]
    assert write == [*inside, rollouts_containers.WRITE, "/workspace/a/b"]
    assert remove == ["rm", "-f", "-v", sandbox.name]
    assert "--network" not in kind(program=program, network=True).run_arguments("x")


@pytest.mark.parametrize(
    ("kind", "offline"),
    [(PodmanSandboxes, ["--pull=never", "--network=none"]), (DockerSandboxes, ["--network=none"])],
)
def test_a_sandbox_begins_again_with_another_image(fake, kind, offline, tmp_path):
    program, called = fake(has_image=False)
    made = kind(program=program, image="img:1")
    sandbox = made.open()
    assert isinstance(sandbox, ImageSandbox)
    folder = tmp_path / "environment"
    folder.mkdir()
    names = []
    for text in ("FROM a", "FROM b", "FROM a"):
        (folder / "Dockerfile").write_text(text)
        before = len(called())
        sandbox.use_image(str(folder))
        asked, build, remove, run, _ = called()[before:]
        names.append(asked[2])
        assert asked[:2] == ["image", "inspect"] and asked[2].startswith("localhost/rollouts-built:")
        assert build == ["build", *offline, "-t", asked[2], str(folder)]
        assert remove == ["rm", "-f", "-v", sandbox.name] and run[-2] == asked[2]
    assert names[0] == names[2] != names[1], "a folder is built again when it changes"
    with pytest.raises(ConfigError, match=r"the image absent:1 is not on this machine\ntype: .* pull absent:1"):
        sandbox.use_image("absent:1")
    program, called = fake(has_image=False, builds=False)
    with pytest.raises(
        ConfigError, match=r"cannot be built: no such base\n.*--sandbox\.network true.*\ntype: .* build -t"
    ):
        made.image_of(str(folder))


def test_what_is_missing_is_said_with_what_to_type(fake, tmp_path):
    with pytest.raises(
        ConfigError, match=r"the program 'no-docker' is not installed\ntype: apt-get install docker\.io"
    ):
        DockerSandboxes(program="no-docker").check()
    program, _ = fake(runs=False)
    with pytest.raises(ConfigError, match=r"--sandbox docker: .* failed: Cannot connect to the Docker daemon"):
        DockerSandboxes(program=program).check()
    program, _ = fake(has_image=False)
    with pytest.raises(
        ConfigError, match=r"the image img is not on this machine\ntype: .* pull img, or choose another"
    ):
        PodmanSandboxes(program=program, image="img").check()
    with pytest.raises(ConfigError, match=r"--sandbox\.root-file-system /no\.tar: No such file"):
        PodmanSandboxes(root_file_system="/no.tar")
    program, called = fake(has_image=False)
    (tmp_path / "root.tar").write_bytes(b"")
    DockerSandboxes(program=program, root_file_system=str(tmp_path / "root.tar")).check()
    (made,) = [call for call in called() if call[0] == "import"]
    assert made[1] == str(tmp_path / "root.tar") and made[2].startswith("localhost/rollouts-sandbox:")


def test_a_container_that_does_not_start(tmp_path):
    with pytest.raises(SandboxError, match="cannot start a container: exit code 1"):
        PodmanSandboxes(program=shutil.which("false")).open()
