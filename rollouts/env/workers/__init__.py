"""Workers: environments that run in another process, in a virtual environment of their own, or on another machine.

protocol.py   the messages between a run and a worker, the table of requests, and how values and errors are written
channel.py    `Connector`: what starts workers; `MessageChannel`: what carries the messages; `PipeChannel`
server.py     the worker's side: answers requests, and has the environment objects
library.py    the worker's side: finds environments and reads their settings; the sandboxes of episodes
model.py      the worker's side: the `model` of an environment's own `rollout`
process.py    a worker in a child process: `main` runs in the child, `ProcessConnector` starts it
websocket.py  workers at an address: the connector, and the server of `rollouts env serve`
pool.py       the run's side: the workers of one environment, their requests and their heartbeat
proxy.py      the run's side: a class that behaves as the environment's class, and sandboxes that are in workers
"""
