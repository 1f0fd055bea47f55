"""`rollouts env install | list | remove`: environments in virtual environments of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollouts.cli.app import NamedGroup
from rollouts.terminal_text import aligned_table

if TYPE_CHECKING:
    from rollouts.env.installing import Installed


@click.group("env", cls=NamedGroup, no_args_is_help=True)
def env() -> None:
    """Install environments in virtual environments of their own.

    An environment that is installed so runs with `--worker venv`. Its package and what it requires are not installed in
    the Python of the run, so two environments may require packages that clash.
    """


@env.command("install")
@click.argument("name")
@click.option("--with", "more", multiple=True, metavar="NAME", help="Another package beside it, such as a sandbox.")
@click.option("--python", default="", metavar="PYTHON", help="The interpreter.  [default: the one that runs rollouts]")
@click.option("--index-url", default="", metavar="URL", help="The package index.")
@click.option("--find-links", multiple=True, metavar="PATH", help="A folder with packages, or the URL of a list.")
@click.option("--no-index", is_flag=True, help="Use no package index. What rollouts requires is copied from here.")
@click.option(
    "--lock",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Install these exact versions: the lock file of an earlier installation or run.",
)
def _install(
    name: str,
    more: tuple[str, ...],
    python: str,
    index_url: str,
    find_links: tuple[str, ...],
    no_index: bool,
    lock: Path,
) -> int:
    """Install a package into a virtual environment of its own.

    NAME is a package, with or without versions, a wheel, or a folder. The virtual environment has the package, what it
    requires, and rollouts without torch. `uv` installs it if it is on PATH, else pip. If the package is installed
    already, it is installed anew, and stays as it is if that fails.

    \b
    Examples:
      rollouts env install rollouts-calculator
      rollouts env install 'my-env[web]>=1.2' --python python3.12
      rollouts env install ./my-env --with rollouts-bubblewrap
      rollouts run --env my-env --loss grpo --worker venv
    """
    from rollouts.env.installing import NAMES_MAX, Index
    from rollouts.env.installing import install as install_package

    index = Index(index_url, find_links, no_index, lock)
    installed = install_package(name, index, more=more, python=python, note=lambda line: click.echo(line, err=True))
    click.echo(f"installed {_words(installed)}\nlock: {installed.lock}")
    for each in installed.install.environments[:NAMES_MAX]:
        click.echo(f"type: rollouts run --env {each} --loss grpo --worker venv")
    return 0


@env.command("list")
def _list() -> int:
    """List the installed packages.

    `contract` is the version of the environment contract that the package states.
    """
    from rollouts.env.installing import all_installed, envs_folder

    found = all_installed()
    if not found:
        click.echo(f"no environment is installed in {envs_folder()}\ntype: rollouts env install NAME")
        return 0
    head = ("environment", "package", "version", "python", "rollouts", "contract", "size", "folder")
    click.echo(aligned_table(head, [_row(each) for each in found]))
    return 0


def _row(each: Installed) -> tuple[str, ...]:
    from rollouts.env.installing import shown_names

    install = each.install
    names, size = shown_names(install.environments), f"{install.bytes / 1e6:.0f} MB"
    versions = (install.version, install.python, install.rollouts, install.contract or "-")
    return (names, install.package, *versions, size, str(each.venv))


@env.command("remove")
@click.argument("name")
def _remove(name: str) -> int:
    """Remove an installed package. NAME is the package, or one of its environments."""
    from rollouts.env.installing import remove_installed

    click.echo(f"removed {_words(remove_installed(name))}")
    return 0


def _words(installed: Installed) -> str:
    """The package and its size in words."""
    install = installed.install
    return f"{install.package} {install.version} (Python {install.python}, {install.bytes / 1e6:.0f} MB)"


@env.command("serve")
@click.argument("name")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="The port. 0: any free one."
)
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="The token that runs must give.")
@click.option("--certificate", type=click.Path(path_type=Path), metavar="FILE", help="The certificate chain for TLS.")
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="The private key of the certificate.")
@click.option("--insecure", is_flag=True, help="Allow a --host other than loopback without TLS.")
@click.option(
    "--count",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="How many connections there may be at the same time. Each has a process of its own.",
)
@click.option("--memory-gib", type=click.FloatRange(0, min_open=True), help="The largest address space of a process.")
@click.option(
    "--cpu-seconds", type=click.FloatRange(0, min_open=True), help="The CPU time of a process, which then ends."
)
@click.option(
    "--sandbox", default="", metavar="NAME", help="The sandbox that the environment may open, with these settings only."
)
def _serve(
    name: str,
    host: str,
    port: int,
    token_file: Path | None,
    certificate: Path | None,
    key: Path | None,
    insecure: bool,
    count: int,
    sandbox: str,
    **limits: float | None,
) -> int:
    """Serve an environment to runs, also on other hosts.

    NAME is an environment of this Python, else one of `rollouts env install`. Runs choose its settings. Ctrl-C closes
    the episodes and ends the server.

    \b
    Examples:
      rollouts env serve calculator --token-file token
      rollouts env serve calculator --host 0.0.0.0 --token-file token --certificate cert.pem --key key.pem
      rollouts env serve my-env --token-file token --sandbox bubblewrap --sandbox.memory-gib 1
      rollouts run --env calculator --loss grpo --worker ws://127.0.0.1:8100 --worker.token-file token
    """
    from rollouts.env.workers.process import Options
    from rollouts.env.workers.websocket import Address, check_exposure, read_token, tls_context
    from rollouts.runs.env_serving import serve_until_signal, served_sandbox

    has_token, has_tls = token_file is not None, certificate is not None
    check_exposure(host, has_token=has_token, has_tls=has_tls, is_insecure=insecure)
    token = "" if token_file is None else read_token(token_file, "--token-file")
    address = Address(host, port, token, tls_context(certificate, key), count)
    allowed = served_sandbox(sandbox, click.get_current_context().obj or {})
    serve_until_signal(name, address, Options(**limits, only=name, sandbox=allowed), click.echo)
    return 0
