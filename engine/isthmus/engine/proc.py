"""The engine's process: `python -m isthmus.engine.proc FOLDER FD`, as ProcessLink starts it.

It lives as long as the other end of the socket FD is open, so it ends with the front end however that ends, and it
leaves signals from a terminal to the front end.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import zmq

from isthmus.engine.failure import pickled_failure
from isthmus.engine.loop import EngineLoop, Inbox
from isthmus.engine.messages import (
    PROTOCOL_VERSION,
    Dead,
    Failed,
    FromEngine,
    FromFrontend,
    Hello,
    Ready,
    Stage,
    Start,
    encoder,
    from_frontend,
)
from isthmus.engine.sockets import Addresses, bounded, received, unbounded
from isthmus.errors import EngineDeadError

logger = logging.getLogger(__name__)

EXIT_DEAD = 1


class SocketInbox(Inbox):
    """Messages of a ZeroMQ socket."""

    def __init__(self, pull: zmq.Socket[bytes]) -> None:
        self._socket = pull
        self._decoder = from_frontend()

    def take(self, timeout_s: float | None) -> Sequence[FromFrontend]:
        if timeout_s != 0:
            self._socket.poll(None if timeout_s is None else int(timeout_s * 1000) + 1)
        return received(self._socket, self._decoder)


class Outbox:
    """Writes to a ZeroMQ socket, and waits while the front end is too far behind."""

    def __init__(self, push: zmq.Socket[bytes]) -> None:
        self._socket = push
        self._encoder = encoder()

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def main(folder: Path, lifeline: socket.socket) -> int:
    """The process's life; its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline, folder), name="isthmus-lifeline", daemon=True).start()
    addresses = Addresses(folder)
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        unbounded(pull)
        bounded(push)
        pull.bind(addresses.to_engine)
        push.connect(addresses.from_engine)
        return serve(SocketInbox(pull), Outbox(push))


def serve(inbox: SocketInbox, outbox: Outbox) -> int:
    """Greet, start, serve until told to end."""
    outbox.send(Hello(PROTOCOL_VERSION, os.getpid()))
    [start] = inbox.take(None)
    assert isinstance(start, Start)
    logging.basicConfig(level=start.log_level, format="%(levelname)s engine %(name)s: %(message)s")
    outbox.send(Stage("importing"))
    try:
        from isthmus.engine.boot import boot

        core, started = boot(
            pickle.loads(start.config), pickle.loads(start.make_plugins), lambda stage: outbox.send(Stage(stage))
        )
    except Exception as error:  # the front end raises it where it is waited for
        outbox.send(Failed(pickled_failure(error)))
        return EXIT_DEAD
    outbox.send(Ready(pickle.dumps(started)))
    try:
        EngineLoop(core, inbox, outbox.send).run()
    except Exception as error:  # whatever it is, it is the end of this engine, and the front end must hear of it
        logger.exception("the engine ends")
        outbox.send(Dead(str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"))
        return EXIT_DEAD
    finally:
        core.shutdown()
    return 0


def _end_with(lifeline: socket.socket, folder: Path) -> None:
    """Wait for the front end to be gone, then go at once: nobody is left to answer."""
    while lifeline.recv(1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_DEAD)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    logging.shutdown()
    # Everything of ours is closed. What the interpreter would tidy up, module by module, takes seconds.
    os._exit(status)
