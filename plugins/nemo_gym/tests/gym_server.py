"""Serve one of the resources servers in the wheel of nemo-gym: `gym_server.py NAME PORT`, run by its Python."""

import importlib
import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

name, port = sys.argv[1], int(sys.argv[2])
module = importlib.import_module(f"resources_servers.{name}.app")
(kind,) = (
    each
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, SimpleResourcesServer) and each.__module__ == module.__name__
)
config = kind.model_fields["config"].annotation(
    host="127.0.0.1", port=port, entrypoint="app.py", name=name, domain="other"
)
server = kind(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="error")
