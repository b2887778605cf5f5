"""A server for the HTTP clients of SDKs: it answers as the recorder does, and knows some calls by
their ids."""

import httpx

from rolltap.addons.dialects.call import DialectError, Reply, ReplyContext, ServedModel, Usage
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.openai_responses.stored import NeedsStoredState, StoredCall
from rolltap.addons.dialects.routes import find_route

NOW = 1_700_000_000
USAGE = Usage(prompt=7, completion=3, cached=4)
MODELS = [ServedModel("tiny", 4096), ServedModel("org/big", 8192)]
TALK = Reply("Hi.", "I greet.")


def stored_call(call_id, messages, reply, parent=None, **asked):
    """Return a call whose request had `messages` after those of its parent."""
    return StoredCall(
        call_id=call_id,
        parent=parent,
        messages=messages,
        reply=reply.to_message(),
        asked=asked,
    )


def by_id(*calls):
    return {call.call_id: call for call in calls}


class Server:
    """Answers every request with `reply`, a `Reply` or a `DialectError`. A stream fails after its
    first text.

    A text is streamed one letter at a time, each followed by a keep-alive.
    """

    def __init__(self, reply=None, *stored):
        self.reply = reply or Reply()
        self.stored = by_id(*stored)
        self.calls = []
        """The decoded requests."""
        self.requests = 0

    @property
    def client(self):
        """An HTTP client whose requests come here."""
        return httpx.Client(transport=httpx.MockTransport(self))

    def __call__(self, request):
        target = request.url.raw_path.decode()
        route = find_route(request.method, target, request.headers)
        self.requests += 1
        try:
            return self._answer(route.dialect, route.service, request, target)
        except DialectError as error:
            return httpx.Response(error.status, content=route.dialect.encode_error(error))

    def _answer(self, dialect, service, request, target):
        if service == "models":
            return httpx.Response(200, content=dialect.encode_models(target, MODELS, 5))
        call = self.decode(dialect, request.content, target)
        self.calls.append(call)
        if service == "count_tokens":
            return httpx.Response(200, content=dialect.encode_token_count(42))
        context = ReplyContext("c9", NOW, target, call, prompt_tokens=USAGE.prompt)
        if call.stream:
            encoder = dialect.stream_encoder(context)
            headers = {"content-type": encoder.content_type}
            return httpx.Response(200, headers=headers, content=self._events(encoder))
        if isinstance(self.reply, DialectError):
            raise self.reply
        return httpx.Response(200, content=dialect.encode_reply(context, self.reply, USAGE))

    def _events(self, encoder):
        yield encoder.start() + encoder.keep_alive()
        if isinstance(self.reply, DialectError):
            yield encoder.delta("", "Hal") + encoder.error(self.reply)
            return
        for letter in self.reply.reasoning:
            yield encoder.delta(letter, "") + encoder.keep_alive()
        for letter in self.reply.content:
            yield encoder.delta("", letter) + encoder.keep_alive()
        yield encoder.finish(self.reply, USAGE)

    def decode(self, dialect, body, target):
        """Return the model call of a request, which may name a reply."""
        try:
            return dialect.decode(parse_object(body), target)
        except NeedsStoredState as named:
            return named.complete(self.stored.get)
