"""A recorder within mitmproxy's addons, without a proxy that listens."""

import gc
import sys
from contextlib import asynccontextmanager, contextmanager

from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.test import taddons

from rolltap.addons.recorder import Recorder


def options_of(tmp_path, tokenizer_folder):
    """Return the options of a recorder. No server listens at its engine's address."""
    return {
        "rolltap_out": str(tmp_path / "run"),
        "rolltap_engine": "http://127.0.0.1:1",
        "rolltap_model": str(tokenizer_folder),
        "rolltap_renderer": "qwen3",
    }


@contextmanager
def own_pauses():
    """Undo at the end what a recorder sets for its process: pauses for collections and threads."""
    thresholds = gc.get_threshold()
    interval = sys.getswitchinterval()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)


@asynccontextmanager
async def running(options, *addons):
    """Yield a recorder with these options of mitmproxy, before other addons. It is stopped at the
    end."""
    recorder = Recorder()
    with own_pauses(), taddons.context(Proxyserver(), recorder, *addons) as context:
        context.options.update(**options)
        recorder.running()
        yield recorder
        await recorder.done()
