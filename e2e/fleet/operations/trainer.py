"""A trainer that drives engines by itself, under control External: through their agents, which know it by the token of
its ServiceAccount. Runs in a pod of the cluster, with the standard library alone.

    python3 trainer.py pause|continue|release|resume|check AGENT...
    python3 trainer.py move VERSION FOLDER AGENT...       AGENT: host:port from status.engines[].agent
"""

import json
import sys
import time
import urllib.error
import urllib.request

TOKEN = "/var/run/secrets/rollout/token"


def call(agent: str, route: str, body: dict[str, object]) -> None:
    """One of the engine's own routes; prints what it answers."""
    with open(TOKEN) as file:
        headers = {"Authorization": f"Bearer {file.read()}", "Content-Type": "application/json"}
    url = f"http://{agent}/v1/engine/{route}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    print(json.dumps({"agent": agent, "route": route, "status": status, "text": text[:300]}))
    if status != 200:
        sys.exit(1)


def pause(agents: list[str]) -> None:
    for agent in agents:
        call(agent, "pause_generation", {"mode": "retract"})


def resume_generation(agents: list[str]) -> None:
    for agent in agents:
        call(agent, "continue_generation", {})


def move(version: str, folder: str, agents: list[str]) -> None:
    """All stand still before the first has other weights, and all have them before one goes on."""
    pause(agents)
    for agent in agents:
        call(agent, "flush_cache", {})
        update = {"model_path": folder, "weight_version": version, "flush_cache": False, "abort_all_requests": False}
        call(agent, "update_weights_from_disk", update)
    time.sleep(0.5)  # until the routers hold no engine of before
    resume_generation(agents)


def main(words: list[str]) -> None:
    verb, rest = words[0], words[1:]
    if verb == "move":
        move(rest[0], rest[1], rest[2:])
    elif verb == "pause":
        pause(rest)
    elif verb == "continue":
        resume_generation(rest)
    else:
        routes = {"release": "release_memory_occupation", "resume": "resume_memory_occupation"}
        body: dict[str, object] = {} if verb in routes else {"action": "checksum"}
        for agent in rest:
            call(agent, routes.get(verb, "weights_checker"), body)


if __name__ == "__main__":
    main(sys.argv[1:])
