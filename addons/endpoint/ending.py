"""The end of a session: a request of its own, or of the program that runs it.

A body gives the session its reward. It is accepted only with `rolltap_accept_rewards`, because the harness knows the
session's credentials and an agent could reward itself. The first reward counts.
"""

import asyncio
import logging

from aiohttp import web

from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint.body import Bodies
from rolltap.addons.endpoint.client_request import HOST_HEADER, SESSION_HEADER
from rolltap.addons.endpoint.refusals import Refusals
from rolltap.addons.endpoint.session_state import SessionState
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.records import Event
from rolltap.addons.store.rewards import GivenReward, give_reward
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

SOURCE = "/end"
"""Value of `GivenReward.source` for a reward from a session's end."""
_NOT_ACCEPTED = "this recorder accepts no rewards: start it with rolltap_accept_rewards, or use `rolltap reward`"


async def end_session(
    request: web.Request,
    bodies: Bodies,
    session: SessionState,
    writer: RunWriter,
    refusals: Refusals,
    *,
    accept_rewards: bool,
) -> web.Response:
    """End the session of the request: abort its calls, refuse later ones, sync as `rolltap_fsync` says.

    A request whose body is refused changes nothing, and is recorded. A reward that the session cannot have is refused
    with status 409 after the session has ended.
    """
    session_id = request.headers[SESSION_HEADER]
    try:
        async with bodies.read(request, session_id) as body:
            if body and not accept_rewards:
                raise DialectError(_NOT_ACCEPTED, status=403)
            given = GivenReward.parse(body, SOURCE) if body else None
    except (DialectError, InputError) as error:
        host = request.headers[HOST_HEADER]
        detail = f"a body with a reward: {error}"
        refusals.record(
            Event(kind="refused", session_id=session_id, host=host, method="POST", path=request.path, detail=detail)
        )
        return web.Response(status=error.status if isinstance(error, DialectError) else 400, text=str(error))
    refusals.end(session_id)
    try:
        await session.end()
        if given is not None:
            await asyncio.to_thread(give_reward, writer, session_id, given)
        await asyncio.to_thread(writer.end_session)
    except InputError as error:
        return web.Response(status=409, text=str(error))
    except (RunError, OSError) as error:
        logger.error("cannot write to %s: %s", writer.run, error)
        return web.Response(status=500, text=f"the session has ended, but its calls may not be on disk: {error}")
    return web.Response()
