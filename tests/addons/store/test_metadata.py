import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.store.metadata import add_engine, add_recorder, read_metadata, write_metadata
from rolltap.addons.store.records import SCHEMA_VERSION


def test_the_run_folder_is_created_and_its_metadata_read_back(tmp_path):
    write_metadata(tmp_path / "runs" / "1", {"model": "tiny"})
    metadata = read_metadata(tmp_path / "runs" / "1")
    assert len(metadata.pop("run_id")) == 8
    assert metadata == {"schema_version": SCHEMA_VERSION, "model": "tiny"}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"is not a run folder: it has no run\.json"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read"), ("[]", "should be an object"), ("{}", "has no schema_version")],
)
def test_damaged_metadata_is_refused(run, text, words):
    (run / "run.json").write_text(text)
    with pytest.raises(RunError, match=words):
        read_metadata(run)


def test_a_run_keeps_its_first_metadata(run):
    write_metadata(run, {"model": "other"})
    assert read_metadata(run)["model"] == "tiny"


@pytest.mark.parametrize("key", ["tokenizer_sha256", "chat_template_sha256"])
@pytest.mark.parametrize("recorded", [{"tokenizer_sha256": "a", "chat_template_sha256": "a"}, {}])
def test_another_tokenizer_or_template_is_refused_and_any_where_it_is_unknown(
    tmp_path, recorded, key
):
    for _ in range(2):
        write_metadata(tmp_path, recorded)
    with pytest.raises(RunError, match=f"recorded with another {key.removesuffix('_sha256')}"):
        write_metadata(tmp_path, {**recorded, key: "b"})


def test_equal_recorders_are_noted_once(run):
    for temperature in (1.0, 0.7, 1.0):
        add_recorder(run, {"sampling": {"temperature": temperature}})
    assert [each["sampling"]["temperature"] for each in read_metadata(run)["recorders"]] == [
        1.0,
        0.7,
    ]


def test_an_engine_that_changed_is_noted_as_it_is(run):
    for version in ("0.32.0", "0.33.0"):
        add_engine(run, "http://a", {"vllm": version})
    assert read_metadata(run)["engines"] == {"http://a": {"vllm": "0.33.0"}}
