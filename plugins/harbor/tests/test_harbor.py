"""Task folders in Harbor's format: which are served, and episodes in real sandboxes where this machine has them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from rollouts_harbor import Harbor
from rollouts_harbor.dockerfiles import read_dockerfile
from rollouts_harbor.folders import read_folders

from rollouts.cli import main
from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.inference.chatting import ChatReply
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Message, Status, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from made import HELLO, make_task

FOLDERS = ["/app", "/logs", "/solution", "/tests"]
PROGRAMS = "sh cat ls cp rm mv ln mkdir readlink sleep true test chmod dirname env tar grep touch echo ps kill".split()
RUNC = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=2000:2000"]\n[engine]\nruntime = "runc"\n'


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_tasks_gives_many_and_the_canary_is_not_shown(tmp_path):
    for name in ("b", "a", "deep/c"):
        make_task(tmp_path / name)
    (tmp_path / "README.md").write_text("no task")
    found = read_folders("--env.path", str(tmp_path), "image", skips=False)
    assert list(found) == ["a", "b", "deep/c"]
    assert found["a"].instruction == "Write the word that greets.txt asks for into /app/out.txt.\n"
    assert found["a"].config.verifier.timeout_sec == 30.0
    assert list(read_folders("--env.path", str(tmp_path / "a"), "image", skips=False)) == ["a"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tests__test_dot_sh": None}, "is incomplete: it has no tests/test.sh, which writes the reward"),
        ({"instruction_dot_md": None}, "is incomplete: it has no instruction.md"),
        ({"environment__Dockerfile": None}, "has neither environment/Dockerfile nor a docker_image"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = 'long'"}, "cannot be read: .*timeout_sec"),
        ({"task_dot_toml": "[verifier"}, "task.toml that cannot be read"),
        ({"task_dot_toml": "[[steps]]\nname = 'one'", "instruction_dot_md": None}, r"it has several steps"),
        ({"task_dot_toml": "[environment]\nos = 'windows'"}, "cannot be served: it runs on windows"),
        ({"task_dot_toml": "[environment]\ngpus = 1"}, "it needs a GPU or TPU"),
        ({"task_dot_toml": "[verifier]\nenvironment_mode = 'separate'"}, "tests run in a container of their own"),
        ({"task_dot_toml": "[agent]\nuser = 'ann'"}, "its agent is the user ann"),
        (
            {"task_dot_toml": "[verifier.env]\nKEY = '${NO_SUCH_KEY}'"},
            r"needs the environment variable \$\{NO_SUCH_KEY",
        ),
        ({"environment__docker-compose_dot_yaml": "services: {}"}, "it has several containers"),
    ],
)
def test_a_task_that_cannot_be_served_is_refused_or_skipped(tmp_path, change, words):
    make_task(tmp_path / "odd", **change)
    with pytest.raises(ConfigError, match=f"--env.path .*: the task odd .*{words}"):
        read_folders("--env.path", str(tmp_path), "image", skips=False)
    with pytest.raises(ConfigError, match="none of its 1 tasks can be served"):
        read_folders("--env.path", str(tmp_path), "image", skips=True)
    make_task(tmp_path / "fine")
    assert list(read_folders("--env.path", str(tmp_path), "image", skips=True)) == ["fine"]


def test_a_link_out_of_the_task_is_refused(tmp_path):
    (make_task(tmp_path / "a") / "tests" / "secret").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="tests/secret links to a file outside of it"):
        read_folders("--env.path", str(tmp_path), "image", skips=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [([], "--env.path: no folder"), (["--env.path", "no-folder"], "--env.path no-folder: there is no such folder")],
)
def test_a_folder_is_needed(given, words, capsys):
    assert main(["run", "--env", "harbor", *given, "--dry-run", "--steps", "1"]) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


def test_a_folder_without_tasks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no task.toml\nexpected a folder with task.toml"):
        read_folders("--env.path", str(tmp_path), "image", skips=False)


def test_lines_of_a_dockerfile(tmp_path):
    file = make_task(tmp_path / "a") / "environment" / "Dockerfile"
    assert [tuple(each) for each in read_dockerfile(file)] == [
        ("ENV", ("GREETING", "hello"), 4),
        ("COPY", ("greets.txt", "/app/data/"), 5),
        ("RUN", ("mkdir -p /app/made && echo $GREETING > /app/made/by-run",), 6),
        ("WORKDIR", ("/app",), 8),
    ]
    for line in ("COPY --from=build /a /b", "ADD http://x /b", "USER ann", "FROM b", "WORKDIR $HOME", "COPY ../x /b"):
        file.write_text(f"FROM a\n{line}\n")
        with pytest.raises(ConfigError, match=r"line 2 of its Dockerfile is .*\ntype: --env.system image"):
            read_dockerfile(file)


def test_the_solution_is_the_demonstration(tmp_path):
    make_task(tmp_path / "a")
    make_task(tmp_path / "b", solution__solve_dot_sh=None)
    env = Harbor(path=str(tmp_path))
    (shown,) = env.demonstrations("train", None, env.shared())
    calls = [call for message in shown for call in message.tool_calls]
    assert [call.name for call in calls] == ["write_file", "write_file", "shell"]
    assert calls[0].arguments == {"path": "/solution/answer", "text": "hello\n"}
    assert "/solution/solve.sh > /logs/agent/oracle.txt" in calls[2].arguments["command"]


# --- episodes in real sandboxes ---------------------------------------------------------------------------------------


def shell(command: str) -> Message:
    return Message("assistant", "", [ToolCall("shell", {"command": command}, "c1")])


@pytest.fixture(scope="module")
def bubblewrap():
    """The settings of a sandbox that works here."""
    settings = {"name": "bubblewrap", "folders": FOLDERS}
    refusal = why_not(settings)
    if refusal:
        pytest.skip(refusal)
    return "sandbox", settings


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    """The settings of podman, with a small image that Dockerfiles can begin with."""
    box = shutil.which("busybox") or ""
    if not shutil.which("podman") or not box:
        pytest.skip("podman or busybox is not installed: apt-get install podman catatonit busybox-static")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in (".", "bin", "tmp"):
            about = tarfile.TarInfo(name)
            about.type, about.mode = tarfile.DIRTYPE, 0o777 if name == "tmp" else 0o755
            tar.addfile(about)
        tar.add(os.path.realpath(box), "bin/busybox")
        for name in PROGRAMS:
            about = tarfile.TarInfo(f"bin/{name}")
            about.type, about.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(about)
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("root") / "root.tar"
        root.write_bytes(data.getvalue())
        settings = {"name": "podman", "root_file_system": str(root)}
        if why_not(settings):
            conf = root.with_name("containers.conf")
            conf.write_text(RUNC)
            patch.setenv("CONTAINERS_CONF", str(conf))
            if refusal := why_not(settings):
                pytest.skip(refusal)
        base = HELLO["environment/Dockerfile"].split()[1]
        subprocess.run(["podman", "import", str(root), base], check=True, capture_output=True)
        yield "image", settings
        built = subprocess.run(["podman", "images", "-q", "localhost/rollouts-built"], capture_output=True, text=True)
        subprocess.run(["podman", "rmi", "-f", base, *built.stdout.split()], capture_output=True)


def why_not(settings: dict) -> str:
    """Why this sandbox cannot be opened here; "" if it can."""
    from rollouts.plugins.manager import PluginManager

    manager, given = PluginManager(), dict(settings)
    try:
        manager.load(manager.find("sandboxes", given.pop("name")))(**given).check()
    except ConfigError as error:
        return str(error)
    return ""


BUBBLEWRAP = pytest.mark.parametrize("play", ["bubblewrap"], indirect=True)
PODMAN = pytest.mark.parametrize("play", [pytest.param("podman", marks=pytest.mark.slow)], indirect=True)
BOTH = pytest.mark.parametrize("play", ["bubblewrap", pytest.param("podman", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture
def play(request, tmp_path):
    """Plays an episode of a task in a sandbox: `play(replies, **files)`."""
    system, sandbox = request.getfixturevalue(request.param)

    def play(replies, more=(), **files):
        make_task(tmp_path / "task", **files)
        given = iter(replies)

        def reply(_):
            return ChatReply(next(given, Message("assistant", "Done.")), "stop")

        env = {"name": "harbor", "path": str(tmp_path / "task"), "system": system}
        tree = {"env": env, "sandbox": {**sandbox, **dict(more)}, "eval_tasks": 1, "max_turns": 9, "mode": "sft"}
        with shared_values(), play_plan(tree) as plan:
            (task,) = Harbor(path=str(tmp_path / "task"), system=system).tasks("train", None, _shared(plan))
            return play_episode(plan, task, 0, reply)

    def _shared(plan):
        return plan.environments[0].make_env().shared()

    return play


def results(episode) -> list[str]:
    return [message.text for message in episode.trajectory.messages if message.role == "tool"]


@BOTH
def test_a_task_is_done_with_a_shell_and_judged_by_its_tests(play):
    look = "pwd; cat data/greets.txt made/by-run; echo $GREETING $COLOR; ls /tests /solution"
    write = Message("assistant", "", [ToolCall("write_file", {"path": "out.txt", "text": "hello\n"}, "c2")])
    episode = play([shell(look), write, shell("cat /app/out.txt; exit 3")])
    assert results(episode)[0].split() == "/app hello hello hello blue /solution: /tests:".split()
    assert results(episode)[1:] == ["written", "hello\n[exit code 3]"]
    assert episode.score.value == 1.0 and episode.trajectory.status is Status.COMPLETED


@BOTH
def test_the_solution_earns_the_reward_and_nothing_earns_none_of_it(play, tmp_path):
    env = Harbor(path=str(make_task(tmp_path / "task")))
    (shown,) = env.demonstrations("train", None, env.shared())
    episode = play([message for message in shown if message.role == "assistant"])
    assert results(episode) == [message.text for message in shown if message.role == "tool"]
    assert episode.score.value == 1.0
    assert play([]).score.value == 0.0, "the control: nothing was written"


FORGERIES = {
    "the reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "the other reward": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; chmod 500 /logs/verifier",
    "a link": "echo 1 > /app/one; rm -rf /logs/verifier; ln -s /app /logs/verifier; ln -s one /app/reward.txt",
    "a test": "echo true > /tests/check.sh; chmod 400 /tests/check.sh; chmod 500 /tests",
    "a late process": "(while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.1; done) & sleep 0.3",
}


@BUBBLEWRAP
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_reward_is_not_counted(play, forgery):
    assert play([shell(FORGERIES[forgery])]).score.value == 0.0


@BOTH
@pytest.mark.parametrize("forgery", ["the reward", "a link"])
def test_a_forged_reward_is_not_read_if_the_tests_write_none(play, forgery):
    episode = play([shell(FORGERIES[forgery])], tests__test_dot_sh="#!/bin/sh\necho broken; exit 7\n")
    assert episode.score.value is None and episode.trajectory.status is Status.COMPLETED
    assert "wrote no reward; [exit code 7]; they said: broken" in episode.score.why


@BUBBLEWRAP
@pytest.mark.parametrize(
    ("script", "value", "words"),
    [
        ('echo \'{"reward": 0.5, "style": 2}\' > /logs/verifier/reward.json', 0.5, ""),
        ("echo '{\"accuracy\": 0.25}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", 0.25, ""),
        (
            'echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json',
            None,
            "has a, b, and no reward; type: --env.reward-key",
        ),
        ("echo '[1]' > /logs/verifier/reward.json", None, "no table of finite numbers"),
        ("echo nan > /logs/verifier/reward.txt", None, "no finite number"),
        ("touch /logs/verifier/reward.txt", None, "no finite number"),
        ("sleep 60", None, "the tests took longer than 0.5 seconds"),
    ],
    ids=["table", "one", "several", "list", "nan", "empty", "late"],
)
def test_what_the_tests_write_is_the_reward(play, script, value, words):
    config = "[verifier]\ntimeout_sec = 0.5" if value is None and "sleep" in script else "[verifier]"
    episode = play([], tests__test_dot_sh=f"#!/bin/sh\n{script}\n", task_dot_toml=config)
    assert episode.score.value == value and words in (episode.score.why or "")


@BUBBLEWRAP
def test_a_lost_sandbox_is_no_verdict(play):
    episode = play([shell("sleep 30")], more={"ttl_seconds": 2.5})
    assert episode.score.value is None and episode.trajectory.status is Status.ENVIRONMENT_ERROR
    assert "its time to live of 2.5 s is over" in episode.trajectory.error and episode.may_retry


@PODMAN
def test_an_image_that_cannot_be_built_or_found_ends_the_run_with_what_to_type(play):
    absent = {"environment__Dockerfile": "FROM localhost/rollouts-test-absent\n"}
    with pytest.raises(EnvironmentDefinitionError, match=r"cannot be built: .*absent(.*\n)*type: podman build -t"):
        play([], **absent)
    with pytest.raises(
        EnvironmentDefinitionError, match=r"is not on this machine\ntype: podman pull localhost/absent:1"
    ):
        play([], task_dot_toml="[environment]\ndocker_image = 'localhost/absent:1'")


@PODMAN
def test_the_files_beside_an_image_without_a_dockerfile_are_copied(play):
    config = "[environment]\ndocker_image = 'localhost/rollouts-test-base'\nworkdir = '/app'\n[verifier.env]\nA = 'b'"
    test = "#!/bin/sh\n[ $A = b ] && cp greets.txt out && echo 1 > /logs/verifier/reward.txt\n"
    assert play([], environment__Dockerfile=None, task_dot_toml=config, tests__test_dot_sh=test).score.value == 1.0


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("image", r"has an image, and this sandbox has none\ntype: --sandbox podman"),
        ("sandbox", r"has the files of this machine\ntype: --sandbox bubblewrap --sandbox.folders '\[\"/app\", "),
    ],
)
def test_the_sandbox_subprocess_is_refused(tmp_path, system, words, capsys):
    path = make_task(tmp_path / "a")
    make_task(tmp_path / "b")
    command = ["run", "--env", "harbor", "--env.path", str(path.parent), "--env.system", system, "--steps", "1"]
    assert main([*command, "--dry-run"]) == 2
    shown = capsys.readouterr().err
    assert re.search(words, shown) and "Traceback" not in shown
    assert not Path("/logs").exists() and not Path("/tests").exists()


@pytest.mark.adapters
def test_keeps_the_contract(bubblewrap, tmp_path, capsys):
    for name in ("a", "b", "c"):
        text = f"Task {name}: write the word that greets.txt asks for into /app/out.txt.\n"
        make_task(tmp_path / name, instruction_dot_md=text)
    system, sandbox = bubblewrap
    flags = ["--env.path", str(tmp_path), "--env.system", system, "--skip", "wheel", "--tasks", "1"]
    flags += ["--sandbox.name", sandbox["name"], "--sandbox.folders", json.dumps(sandbox["folders"])]
    assert main(["check", "harbor", *flags]) == 0, capsys.readouterr().out
