"""The lender's end of the side channel."""

from __future__ import annotations

import socket

from fleetfoot.kv_transfer.base.sockets import SocketServer, receive_message, send_message
from fleetfoot.kv_transfer.nixl.leases import DECLINED, LOST, LeaseError, Leases
from fleetfoot.kv_transfer.nixl.side_channel import (
    Accepted,
    Acquire,
    Blocks,
    Decline,
    Finish,
    Hello,
    Identity,
    Refusal,
    Reply,
    Welcome,
    decode_request,
    differences,
    encode,
)

PATIENCE_SECONDS = 5.0
"""How long a reader waits here for the step that tells of its lease."""


class LendingServer:
    """Answers readers, each in a thread of its own.

    Args:
        host, port: where it listens; port 0: any that is free.
        engine_id: whom readers must want to speak to.
        identity: what they must be.

    Raises:
        ValueError: nobody can listen there.
    """

    def __init__(
        self, host: str, port: int, engine_id: str, identity: Identity, leases: Leases, welcome: Welcome
    ) -> None:
        self._engine_id = engine_id
        self._identity = identity
        self._leases = leases
        self._welcome = welcome
        self._server = SocketServer(host, port, self._serve, "kv-side-channel")

    @property
    def address(self) -> str:
        """``host:port``."""
        return self._server.address

    def close(self) -> None:
        self._leases.close()
        self._server.close()

    def _serve(self, connection: socket.socket) -> None:
        held: set[str] = set()
        is_welcome = False
        try:
            while True:
                request = decode_request(receive_message(connection))
                if isinstance(request, Decline):
                    self._leases.give_up(request.lease, DECLINED)
                    continue
                if isinstance(request, Hello):
                    reply = self._greet(request)
                    is_welcome = isinstance(reply, Welcome)
                elif is_welcome:
                    reply = self._answer(request, held)
                else:
                    reply = Refusal("this needs a Hello that was welcome")
                send_message(connection, encode(reply))
        finally:
            for lease in held:
                self._leases.give_up(lease, LOST)

    def _greet(self, hello: Hello) -> Reply:
        if hello.engine_id != self._engine_id:
            return Refusal(f"this is engine {self._engine_id!r}, and {hello.engine_id!r} is wanted")
        if unlike := differences(reader=hello.identity, lender=self._identity):
            return Refusal(f"it is another kind of engine: {unlike}")
        return self._welcome

    def _answer(self, request: Acquire | Finish, held: set[str]) -> Reply:
        try:
            if isinstance(request, Acquire):
                block_ids = self._leases.acquire(request.lease, PATIENCE_SECONDS)
                held.add(request.lease)
                return Blocks(block_ids)
            held.discard(request.lease)
            self._leases.finish(request.lease)
        except LeaseError as error:
            return Refusal(str(error))
        return Accepted()
