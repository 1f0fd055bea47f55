"""Sandboxes, in which tools run commands that a model wrote.

- `base.py`: the Protocols of a sandbox and of the component that opens it, limits, results; from a component to the
  sandbox of one episode, closed also on cancellation
- `subprocesses.py`: sandboxes with a keeper, and the sandbox `subprocess`: a temporary folder, limits of the system
- `keeper.py`: the process that runs the commands of one sandbox and removes its folder

The sandboxes `bubblewrap`, `podman` and `docker` are separate packages in `plugins/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.errors import SandboxError as SandboxError
    from rollouts.errors import SandboxLostError as SandboxLostError
    from rollouts.sandboxes.base import ImageSandbox as ImageSandbox
    from rollouts.sandboxes.base import LocalSandbox as LocalSandbox
    from rollouts.sandboxes.base import Result as Result
    from rollouts.sandboxes.base import Sandbox as Sandbox
    from rollouts.sandboxes.base import Sandboxes as Sandboxes
    from rollouts.sandboxes.base import SandboxLimits as SandboxLimits
    from rollouts.sandboxes.subprocesses import KeptSandboxes as KeptSandboxes
    from rollouts.sandboxes.subprocesses import SubprocessSandboxes as SubprocessSandboxes

__getattr__, __dir__ = lazy_face(__name__)
