from rolltap.trainer.training.arguments import last_checkpoint, remove_incomplete


def write_checkpoints(folder):
    for step, state in [(2, "{}"), (9, "{}"), (10, '{"global'), (11, None), (12, "")]:
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        if state is not None:
            (checkpoint / "trainer_state.json").write_text(state)


def test_an_incomplete_checkpoint_is_skipped(tmp_path):
    write_checkpoints(tmp_path)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"


def test_incomplete_checkpoints_are_removed_and_whole_ones_stay(tmp_path):
    write_checkpoints(tmp_path)
    remove_incomplete(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-9"}


def test_without_a_checkpoint_there_is_none(tmp_path):
    remove_incomplete(tmp_path / "nowhere")
    assert last_checkpoint(tmp_path / "nowhere") is None
