"""Stands in for Ray's setup_worker.py: has a worker forked by ``warm_python``, and ends as it does."""

import json
import os
import socket
import sys

CONTEXT = "--serialized-runtime-env-context="

words = [word for word in sys.argv[1:] if not word.startswith(("--language=", CONTEXT))]
contexts = [json.loads(word.removeprefix(CONTEXT)) for word in sys.argv[1:] if word.startswith(CONTEXT)]
environment = dict(os.environ)
for context in contexts:
    environment |= context.get("env_vars") or {}
    unknown = {key for key in context.keys() - {"env_vars", "py_executable"} if context[key]}
    assert not unknown and context.get("py_executable", sys.executable) == sys.executable, (
        f"no warm Python can {context}"
    )
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(environment["WARM_PYTHON"])
    request = {"arguments": words, "environment": environment, "folder": os.getcwd()}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    forked = int(connection.recv(16)) > 0
    returncode = int(connection.recv(16) or 1) if forked else 0
if not forked:
    cold = words[0].replace("default_worker", "setup_worker")
    os.execv(sys.executable, [sys.executable, cold, *sys.argv[1:]])
os._exit(returncode & 0xFF)
