"""A running viewer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import uvicorn

from penstock.look.viewer.app import listen, make_app
from penstock.look.viewer.session import Session

TOKEN = "token-of_the_tests"


def serving(session: Session) -> Iterator[str]:
    """Serve in a thread and return the address."""
    listening = listen()
    port = listening.getsockname()[1]
    app = make_app(session, port, TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
    listening.close()
