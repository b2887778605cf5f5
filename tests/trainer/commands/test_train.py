from tests.trainer.commands.program import rolltap


def test_a_finished_training_is_not_overwritten(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "r.toml").write_text("")
    ended = rolltap("train", tmp_path / "r.toml", "--out", tmp_path / "run")
    assert ended.returncode == 1
    assert "holds a finished training" in " ".join(ended.stderr.split())
