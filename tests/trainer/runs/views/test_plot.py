from matplotlib.figure import Figure

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.runs.views.report import plot_rewards


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


def test_the_attempts_at_a_step_are_one_point(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    write_metadata(tmp_path, {})
    versions = ["1a2b3c4d.9.0", "1a2b3c4d.10.0", "1a2b3c4d.10.1", "1a2b3c4d.11.1", "model-2.5"]
    with RunWriter(tmp_path) as writer:
        for number, version in enumerate(versions):
            writer.add_session(
                Session(session_id=str(number), status="completed", reward=number, policy_version=version)
            )
        writer.add_session(
            Session(session_id="fault", status="infrastructure", reward=9.0, policy_version="1a2b3c4d.11.1")
        )
        writer.add_session(Session(session_id="unknown", status="completed", reward=5.0))
    plot_rewards(tmp_path, tmp_path / "some.png", "something")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["9", "10", "11", "model-2.5", "default"]
    assert list(axes.lines[0].get_ydata()) == [0.0, 1.5, 3.0, 4.0, 5.0]
    dots = axes.collections[0].get_offsets().tolist()
    assert sorted(dots) == [[0, 0], [1, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
