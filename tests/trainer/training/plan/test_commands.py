"""The lines of a shell that a plan prints."""

from pathlib import Path

import pytest

from rolltap.trainer.training.plan import commands
from rolltap.trainer.training.plan.memory import machine_of
from rolltap.trainer.training.recipe import Machine, Recipe

GPU = {"gpu_gib": 80}
OUT = Path("runs/x")
LORA = {"publish": "lora", "lora": {"r": 4, "rank_pattern": {"q_proj": 12}}}


def lines(machine=GPU, *, engine=None, runs=(), **keys):
    """Return the lines of engines and of the training. `machine` is a table [machine], and `engine`
    a value of `--engine`."""
    recipe = Recipe(model=Path("m"), steps=1, machine=Machine(**machine), **keys)
    where = machine_of(recipe, engine, None, online=not runs)
    served = []
    if not runs:
        served = [*commands.serving(recipe, where, None)]
    return served, [*commands.training(where, Path("recipe.toml"), runs, OUT)]


def test_as_many_engines_and_processes_start_as_there_are():
    machine = {"processes": 3, "engines": 2, **GPU}
    served, trained = lines(machine, max_tokens=1000, dtype="float32", **LORA)
    engine = "--max-model-len 1000 --lora-rank 16 -- --max-num-seqs 16 --dtype float32"
    assert served == [
        commands.KEY,
        f"CUDA_VISIBLE_DEVICES=0 rolltap serve m --port 8000 {engine}",
        f"CUDA_VISIBLE_DEVICES=1 rolltap serve m --port 8001 {engine}",
    ]
    urls = "http://127.0.0.1:8000,http://127.0.0.1:8001"
    program = "torchrun --standalone --nproc-per-node 3 -m rolltap train recipe.toml"
    assert trained == [f"CUDA_VISIBLE_DEVICES=2,3,4 {program} --engine {urls} --out runs/x"]


def test_an_engine_has_places_for_adapters_of_several_steps_and_records_experts():
    served, _ = lines(max_staleness=3, grpo={"routing": "recorded"}, **LORA)
    assert " --lora-rank 16 --max-staleness 3 --routing -- " in served[1]


def test_one_line_starts_the_training_on_each_node():
    _, trained = lines({"processes": 4, "nodes": 2, **GPU})
    where = "--nnodes 2 --node-rank $NODE --master-addr $HEAD --nproc-per-node 2"
    train = "rolltap train recipe.toml --engine http://127.0.0.1:8000 --out runs/x"
    assert trained == [commands.NODE, f"CUDA_VISIBLE_DEVICES=1,2 torchrun {where} -m {train}"]


def test_engines_of_other_machines_have_lines_and_gpus_of_their_own():
    urls = "http://127.0.0.1:9000,http://a:8000,http://a:8001,http://b"
    served, trained = lines({**GPU, "engines": 4, "processes": 2}, engine=urls)
    assert [line.partition(" -- ")[0] for line in served[1:]] == [
        "CUDA_VISIBLE_DEVICES=0 rolltap serve m --port 9000",
        "# on a, with a copy of engine.key:",
        "CUDA_VISIBLE_DEVICES=0 rolltap serve m --host a --port 8000",
        "CUDA_VISIBLE_DEVICES=1 rolltap serve m --host a --port 8001",
        "# on b, with a copy of engine.key:",
        "CUDA_VISIBLE_DEVICES=0 rolltap serve m --host b --port 80",
        "# here:",
    ]
    assert trained[0].startswith("CUDA_VISIBLE_DEVICES=1,2 torchrun --standalone ")
    assert trained[0].endswith(f" --engine {urls} --out runs/x")


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1"])
def test_a_loopback_address_is_this_machine(url):
    served, _ = lines(engine=url)
    assert served[1].startswith("CUDA_VISIBLE_DEVICES=0 rolltap serve m --port 1 -- ")


def test_recorded_runs_need_no_engine():
    machine = {**GPU, "engines": 2, "shared_gpu": True}
    _, trained = lines(machine, runs=[Path("runs/a"), Path("runs/b")])
    command = "rolltap train recipe.toml --from runs/a --from runs/b --out runs/x"
    assert trained == [f"CUDA_VISIBLE_DEVICES=0 {command}"]
