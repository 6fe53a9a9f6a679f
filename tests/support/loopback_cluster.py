"""A real Ray cluster on the loopback interface, in a process of its own: `python loopback_cluster.py NODES FOLDER`.

Each node, the head included, has one CPU. Prints a line of JSON with the address and the process id of each node's
raylet; then reads commands, one a line, and answers each with the same line: `remove N` kills node N. Ends with its
input.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": sys.argv[2]}  # before Ray

from ray._private import ray_constants
from ray.cluster_utils import Cluster

ray_constants.ENABLE_RAY_CLUSTER = False  # otherwise Ray replaces the loopback address by another one
NODE = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "num_cpus": 1, "memory": 4 << 30}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    nodes = [cluster.head_node, *(cluster.add_node(wait=False, **NODE) for _ in range(int(sys.argv[1]) - 1))]
    cluster.wait_for_nodes()
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    while True:
        print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
        match sys.stdin.readline().split():
            case ["remove", number]:
                cluster.remove_node(nodes[int(number)], allow_graceful=False)
            case _:
                break
    cluster.shutdown()


if __name__ == "__main__":
    main()
