import pytest

from tests.recorder_process import CHAT, HELLO
from tests.security.raw import News, recording


@pytest.fixture(scope="module")
def recorder(request, tmp_path_factory, tokenizer, tokenizer_folder):
    """Yield a recorder that the tests of a module share, with its `OPTIONS`. Another session is
    answered in the end."""
    folder = tmp_path_factory.mktemp("recorder")
    options = [option.format(folder=folder) for option in getattr(request.module, "OPTIONS", ())]
    with recording(folder, tokenizer, tokenizer_folder, *options) as recorder:
        answered(recorder)
        yield recorder
        answered(recorder)
        assert recorder.stop() == 0
        for words in ("Traceback", "bug of rolltap"):
            assert words not in recorder.log()


def answered(recorder):
    with recorder.client("other") as client:
        assert client.post(CHAT, json=HELLO).status_code == 200


@pytest.fixture
def news(recorder):
    return News(recorder)
