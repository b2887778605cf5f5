import gzip
import os
import struct
import tracemalloc
import zlib
from contextlib import suppress

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.model_call import DialectError
from rolltap.addons.endpoint.body import _DECODERS, decompress
from tests.deep import examples

MEGABYTE = 1 << 20
ENCODERS = {"zstd": zstandard.compress, "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}
EMPTY_BLOCK = struct.pack("<BHH", 0, 0, 0xFFFF)
NOTHING = {
    "gzip members": ("gzip", gzip.compress(b"") * 400_000),
    "gzip padding": ("gzip", gzip.compress(b"") + bytes(8 * MEGABYTE)),
    "zstd frames": ("zstd", zstandard.compress(b"") * 800_000),
    "deflate blocks": ("deflate", b"\x78\x9c" + EMPTY_BLOCK * 1_600_000),
}
"""Bodies of 8 MB that become nothing. A quadratic way takes minutes for each."""


@given(body=st.binary(max_size=2000), encoding=st.sampled_from(sorted(_DECODERS)))
@examples(300)
def test_no_bytes_crash_a_decompressor(body, encoding):
    for made in (body, ENCODERS[encoding](body)[: len(body)]):
        with suppress(DialectError):
            assert len(decompress(made, encoding, 1000)) <= 1000


@pytest.mark.parametrize(("encoding", "body"), NOTHING.values(), ids=NOTHING)
def test_input_that_becomes_nothing_ends(encoding, body):
    with suppress(DialectError):
        assert decompress(body, encoding, 1000) == b""


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_long_body_that_was_not_compressed_is_read_in_linear_time(encoding):
    body = os.urandom(31 * MEGABYTE)
    encoded = gzip.compress(body, 0) if encoding == "gzip" else zlib.compress(body, 0)
    assert decompress(encoded, encoding, 32 * MEGABYTE) == body


def test_brotli_that_becomes_a_gigabyte_takes_bounded_memory():
    bomb = brotli.compress(bytes(1 << 30), quality=5)
    assert len(bomb) < 2000
    tracemalloc.start()
    try:
        with pytest.raises(DialectError) as refused:
            decompress(bomb, "br", MEGABYTE)
        assert tracemalloc.get_traced_memory()[1] < 100 * MEGABYTE
    finally:
        tracemalloc.stop()
    assert refused.value.status == 413
