"""Trainings of packs with transformers' trainer, and the program that several ranks run: `FOLDER CASES [NUMBERS]`.

With the numbers of ranks that wrote checkpoints they go on from these.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from rolltap.trainer.models.saving import save_adapter, save_whole
from rolltap.trainer.training.step.checkpoint import Checkpoints
from rolltap.trainer.training.step.distributed import (
    is_main,
    on_main,
    reduce_unused,
    several,
    use_fsdp,
    use_replicas,
)
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import FEWEST_TOKENS, Pack
from tests.trainer.training.step.small_models import branching_rows, small_model

CASES = ("qwen3", "qwen3, bfloat16", "qwen3-moe", "qwen3-moe, LoRA", "qwen3, LoRA, bfloat16", "qwen3, an expert")
"""Family, and what is trained of it. "An expert": a part that a process without rows does not use."""
SHARDINGS = ("none", "full")
STEPS = 4
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
        lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
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
        weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = {name.removeprefix("module."): whole(weight.detach()) for name, weight in weights}


def whole(tensor):
    """Return a copy of a tensor. One that is sharded is gathered, which is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def parts(empty):
    """Return the micro-batches of this rank: its share of all rows, in two; or all on rank 0, where `empty`."""
    every = range(0, len(branching_rows()), 3)
    rank, number = (dist.get_rank(), dist.get_world_size()) if several() else (0, 1)
    if empty:
        return [list(every[::2]), list(every[1::2])] if rank == 0 else [[], []]
    return [list(every[2 * rank :: 2 * number]), list(every[2 * rank + 1 :: 2 * number])]


def make_trainer(case, sharding, folder, empty=False, **settings):
    defaults = {"max_steps": STEPS, "save_steps": SAVED, "learning_rate": 1e-3}
    defaults |= {"adam_epsilon": 1e-4, "max_grad_norm": 0.1, "weight_decay": 0.1, "gradient_accumulation_steps": 2}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    args = TrainingArguments(str(folder), bf16="bfloat16" in case, **defaults | quiet | settings)
    args.ignore_data_skip = True
    model = make_model(case)
    if sharding == "full" and several():
        use_fsdp(args, model)
    else:
        use_replicas(args)
    return PackTrainer(model, args, micro_batches=parts(empty))


def trained(case, sharding, folder, empty=False, resume=None):
    """Train, and return the gradients of the first step and the weights of the last one."""
    trainer = make_trainer(case, sharding, folder, empty)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return {"gradients": trainer.spy.gradients, "weights": trainer.spy.weights}


def published(case, sharding, folder):
    """Train, and save the model on the main process. Return its trained weights, and those of the folder."""
    base = folder / "base"
    if is_main():
        plain = [kind for kind in case.split(", ") if kind not in ("LoRA", "bfloat16")]
        make_model(", ".join(plain)).save_pretrained(base)
    trainer = make_trainer(case, sharding, folder / "out", max_steps=1)
    trainer.train()

    def save():
        save_whole(trainer.model, folder / "model", base)
        if isinstance(trainer.model, PeftModel) and "moe" not in case:  # whose experts have adapters too
            save_adapter(trainer.model, folder / "model", base)

    on_main(save)
    return trainer.spy.weights


def checkpoint(folder, number, sharding, case):
    """Return the folder of the checkpoint that `number` ranks wrote."""
    return folder / str(number) / sharding / case / f"checkpoint-{SAVED}"


def started(folder, cases, number, shardings=SHARDINGS):
    """Train each case from the start, with all rows on one rank, and from the checkpoint; and publish a model."""
    found = {}
    for sharding in shardings:
        for case in cases:
            out = folder / str(number) / sharding / case
            found["start", sharding, case] = trained(case, sharding, out)
            resumed = checkpoint(folder, number, sharding, case)
            found["resumed", sharding, case] = trained(case, sharding, folder / "out", resume=resumed)
            found["empty", sharding, case] = trained(case, sharding, folder / "out", empty=True)
            found["published", sharding, case] = published(case, sharding, out)
    return found


def resumed(folder, cases, others, shardings=SHARDINGS):
    """Go on from the checkpoints that other numbers of ranks have written, each with each sharding."""
    found = {}
    for number in others:
        for began in SHARDINGS if number > 1 else ("none",):
            for sharding in shardings:
                for case in cases:
                    begun = checkpoint(folder, number, began, case)
                    found[number, began, sharding, case] = trained(case, sharding, folder / "out", resume=begun)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    cases = sys.argv[2].split("; ")
    others = [int(number) for number in sys.argv[3:]]
    number = dist.get_world_size()
    found = resumed(folder, cases, others) if others else started(folder, cases, number)
    if is_main():
        torch.save(found, folder / f"{number}{'-resumed' if others else ''}.pt")
