"""A small Ray cluster on this machine, in a process of its own: `python ray_cluster.py PYTHONPATH_OF_THE_HEAD`.

It begins with the node `home`. The first line that it prints is the address; the others answer the commands that it
reads: `add` and `remove` the node `away`. It ends when its input is closed.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
SYSTEM = {"health_check_period_ms": 500, "health_check_failure_threshold": 4, "prestart_worker_first_driver": False}


def main(path: str) -> None:
    head = {**NODE, "resources": {"home": 2.0}, "include_dashboard": False, "env_vars": {"PYTHONPATH": path}}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": SYSTEM})
    try:
        print(cluster.address, flush=True)
        away = None
        for command in sys.stdin:
            if command.strip() == "remove":
                cluster.remove_node(away, allow_graceful=False)
            else:
                away = cluster.add_node(**NODE, resources={"away": 2.0})
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
