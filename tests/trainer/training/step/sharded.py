"""Trainings of packs with transformers' trainer, as one process or several ranks take them."""

from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from rolltap.trainer.models.saving import save_adapter, save_whole
from rolltap.trainer.training.step.checkpoint import Checkpoints
from rolltap.trainer.training.step.distributed import (
    on_main,
    reduce_unused,
    several,
    use_fsdp,
    use_replicas,
)
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import FEWEST_TOKENS, Pack
from tests.trainer.training.step.small_models import branching_rows, small_model
from tests.trainer.training.step.tiny import whole

CASES = (
    "qwen3",
    "qwen3, bfloat16",
    "qwen3-moe",
    "qwen3-moe, LoRA",
    "qwen3, LoRA, bfloat16",
    "qwen3, an expert",
)
"""Family, and what is trained of it. "An expert": a part that a process without rows does not
use."""
SHARDINGS = ("none", "full")
STEPS = 3
SAVED = 2
"""Step with the checkpoint."""


def make_model(case):
    family, *kinds = case.split(", ")
    model = small_model(family)
    if "bfloat16" in kinds:
        model.config.dtype = torch.bfloat16
    if "an expert" in kinds:
        _add_expert(model.model.layers[0])
    prepare(model, 1.0)
    if "LoRA" in kinds:
        if "bfloat16" in kinds:
            model.bfloat16()
        torch.manual_seed(1)
        lora = LoraConfig(
            r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False
        )
        if family == "qwen3-moe":  # its head is not tied to the embeddings
            lora.modules_to_save = ["lm_head"]
        model = get_peft_model(model, lora)
        model.enable_input_require_grads()
    model.activation_checkpointing_enable()
    return model


def _add_expert(layer):
    torch.manual_seed(2)
    layer.expert = torch.nn.Linear(64, 64)

    def add(module, args, output):
        return output + layer.expert(args[0]) if args[0].shape[1] > FEWEST_TOKENS else output

    layer.mlp.register_forward_hook(add)


class PackTrainer(Trainer):
    """Trains each step on the rows of `micro_batches`, lists of indices."""

    def __init__(self, *args, micro_batches, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_batches = micro_batches
        self.model_accepts_loss_kwargs = True
        self.checkpoints = Checkpoints(self)
        self.add_callback(self.checkpoints)
        self.spy = Spy()
        self.add_callback(self.spy)

    def get_train_dataloader(self):
        return DataLoader(range(100), batch_size=1, collate_fn=list)

    def get_batch_samples(self, *args):
        samples, _ = super().get_batch_samples(*args)
        return self.micro_batches, torch.tensor(len(samples))

    def _prepare_inputs(self, inputs):
        return inputs

    def compute_loss(self, model, inputs, **_):
        rows = branching_rows()
        pack = Pack([[rows[i]] for i in inputs])
        with self.accelerator.autocast():
            logprobs = pack.unpack(model(**pack.inputs()).log_probs)
        weights = torch.zeros(logprobs.shape)
        for number, i in enumerate(inputs):
            count = len(rows[i].scored)
            weights[number, :count] = torch.randn(count, generator=torch.Generator().manual_seed(i))
        return (weights * logprobs).sum() * self.accelerator.num_processes / 100

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.checkpoints.resume_from(Path(resume_from_checkpoint))


class Spy(TrainerCallback):
    """Keeps the gradients of the first step and, at the end, the trained weights."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.gradients = {}
        reduce_unused(model)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.gradients:
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    self.gradients[name] = whole(weight.grad)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.weights = {}
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                self.weights[name.removeprefix("module.")] = whole(weight.detach())


def parts(empty):
    """Return the micro-batches of this rank: its share of all rows, in two; or all on rank 0, where
    `empty`."""
    every = list(range(0, len(branching_rows()), 3))
    rank = 0
    number = 1
    if several():
        rank = dist.get_rank()
        number = dist.get_world_size()
    if empty:
        every = [] if rank else every
        rank = 0
        number = 1
    return [every[2 * rank :: 2 * number], every[2 * rank + 1 :: 2 * number]]


def make_trainer(case, sharding, folder, empty=False, **settings):
    defaults = {
        "max_steps": STEPS,
        "save_steps": SAVED,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-4,
        "max_grad_norm": 0.1,
        "weight_decay": 0.1,
        "gradient_accumulation_steps": 2,
        "bf16": "bfloat16" in case,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "ignore_data_skip": True,
    }
    args = TrainingArguments(str(folder), **defaults | settings)
    model = make_model(case)
    if sharding == "full" and several():
        use_fsdp(args, model)
    else:
        use_replicas(args)
    return PackTrainer(model, args, micro_batches=parts(empty))


def results(trainer, resume=None):
    """Train, and return the gradients of the first step and the weights of the last one."""
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return {"gradients": trainer.spy.gradients, "weights": trainer.spy.weights}


def publish(trainer, case, folder):
    """Save the model of a trainer on the main process, for a base of its kind."""
    base = folder / "base"

    def save():
        plain = [kind for kind in case.split(", ") if kind not in ("LoRA", "bfloat16")]
        make_model(", ".join(plain)).save_pretrained(base)
        save_whole(trainer.model, folder / "model", base)
        if (
            isinstance(trainer.model, PeftModel) and "moe" not in case
        ):  # whose experts have adapters too
            save_adapter(trainer.model, folder / "model", base)

    on_main(save)


def folder_of(folder, number, sharding, case):
    """Return the folder of what `number` ranks train."""
    return folder / str(number) / sharding / case


def started(folder, cases, number, shardings=SHARDINGS):
    """Train each case from the start, publish the model, and go on from the checkpoint; then take a
    step with all rows on one rank."""
    found = {}
    for sharding in shardings:
        for case in cases:
            out = folder_of(folder, number, sharding, case)
            trainer = make_trainer(case, sharding, out)
            found["start", sharding, case] = results(trainer)
            publish(trainer, case, out)
            again = make_trainer(case, sharding, folder / "out")
            found["resumed", sharding, case] = results(again, out / f"checkpoint-{SAVED}")
            if number > 1:
                alone = make_trainer(case, sharding, folder / "out", empty=True, max_steps=1)
                found["empty", sharding, case] = results(alone)
    return found


def resumed(folder, case, ways):
    """Go on from checkpoints. `ways` are the number of ranks that wrote it, their sharding, and
    that of the ranks that go on."""
    found = {}
    for number, began, sharding in ways:
        trainer = make_trainer(case, sharding, folder / "out")
        saved = folder_of(folder, number, began, case) / f"checkpoint-{SAVED}"
        found[number, began, sharding] = results(trainer, saved)["weights"]
    return found
