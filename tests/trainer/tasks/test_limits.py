from rolltap.trainer.tasks.task import Limits


def test_a_box_that_isolates_has_limits_where_a_task_sets_none():
    assert Limits().of_isolated() == Limits(memory_gib=8, processes=1024, disk_gib=20)


def test_a_task_sets_its_own_limits_lower_and_higher():
    own = Limits(cpus=2, memory_gib=64, processes=3)
    assert own.of_isolated() == own.model_copy(update={"disk_gib": 20})
