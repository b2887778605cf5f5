"""A script for `mitmdump -s` that measures how late the event loop is, beside the addons of the
recorder."""

import asyncio
import os
import struct
import time

from mitmproxy import ctx

SLEEP_SECONDS = 0.005
_BLOCK = 100
"""Samples between two writes."""


class Lag:
    """An addon that sleeps again and again and appends each lateness to the file `bench_lag`.

    A sample is two doubles: `time.monotonic` when it woke, and the seconds by which that was late.
    """

    def load(self, loader):
        loader.add_option("bench_lag", str, "", "File that the samples are appended to.")

    def running(self):
        self._file = os.open(ctx.options.bench_lag, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._task = asyncio.get_running_loop().create_task(self._measure())

    async def _measure(self):
        block = b""
        while True:
            before = time.monotonic()
            await asyncio.sleep(SLEEP_SECONDS)
            now = time.monotonic()
            block += struct.pack("dd", now, now - before - SLEEP_SECONDS)
            if len(block) >= _BLOCK * 16:
                os.write(self._file, block)
                block = b""


addons = [Lag()]
