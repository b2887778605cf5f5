from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.views.plot import plot_rewards


def test_the_plot_is_a_png_even_of_a_run_without_rewards(tmp_path):
    write_metadata(tmp_path, {})
    writer = RunWriter(tmp_path)
    writer.add_session(
        Session(session_id="a", task_id="t", group_id="g", harness="h", status="completed", policy_version="0")
    )
    plot_rewards(tmp_path, tmp_path / "none.png", "nothing yet")
    writer.add_session(
        Session(
            session_id="b", task_id="t", group_id="g", harness="h", status="completed", reward=0.5, policy_version="1"
        )
    )
    plot_rewards(tmp_path, tmp_path / "some.png", "something")
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "some.png").stat().st_size > (tmp_path / "none.png").stat().st_size
