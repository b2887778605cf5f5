"""Make the quickstart's tiny model: a Qwen3 of about a million parameters, trained to drive a coding agent's harness.

    python recipes/quickstart/make_model.py OUT [--seed 0]

Nothing is downloaded. The vocabulary and the filler text come from the Python standard library. The model is trained on
sessions of three turns: look around, count something, submit. The counting command is one of four, each equally often,
and only one of them solves the task in tasks.jsonl. So about a quarter of the sessions succeed, and reinforcement
learning can improve the rest.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from rich.progress import Progress
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging
from words import COUNT, LOOK, RIGHT, SUBMIT, TEMPLATE, filler_text, make_tokenizer, reply

RECIPE_FILE = "recipe.json"  # in the model's folder: hash of the sources that made it, and the seed

STEPS = 400
# Length curriculum: at step 0, prompts up to this fraction of the log-range PROMPT_CHARACTERS; all from the middle on.
WARM = 0.5
COOL = 2  # the learning rate decays linearly to 0 over the last 1/COOL of the steps
COMMAND_IN_FILLER = 0.5  # fraction of filler texts that quote a taught command
BATCH = 4  # sessions per step
LEARNING_RATE = 4e-3
PROMPT_CHARACTERS = (40, 4000)  # system and user message together; log-uniform
MEASURED = 64  # second turns sampled to measure the fraction with the right command


def bash_tool(description: str, command: str) -> dict:
    """Return a harness's only tool in OpenAI's form, with the descriptions of the tool and of its argument."""
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": command}},
        "required": ["command"],
    }
    return {"type": "function", "function": {"name": "bash", "description": description, "parameters": parameters}}


def make_network(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3, its embeddings untied: vLLM's CPU backend does not update tied ones on a reload."""
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )
    network = Qwen3ForCausalLM(config)
    network.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    return network


class Sessions:
    """A sampler of training sessions, rendered turn by turn as the recorder renders them at serving time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, seed: int) -> None:
        self.tokenizer = tokenizer
        self.renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
        self.text = text
        self.random = random.Random(seed)

    def filler(self, characters: int) -> str:
        """Return a piece of library text. Some quote part of a taught turn, which the model learns not to act on."""
        start = self.random.randrange(len(self.text) - characters)
        text = self.text[start : start + characters]
        if self.random.random() < COMMAND_IN_FILLER:
            cut = self.random.randrange(characters)
            # harnesses describe their tool by these words, which must not pass for a turn that was taken
            decoy = " ".join(("bash", "command", *self.random.choice([*LOOK, *COUNT, SUBMIT])))
            start, end = sorted(self.random.randrange(len(decoy) + 1) for _ in range(2))
            text = f"{text[:cut]} {decoy[start:end]} {text[cut:]}"
        return text

    def observation(self) -> str:
        """Return a command's output as a harness reports it, often an empty one."""
        output = self.filler(int(600 ** self.random.random())) if self.random.random() < 0.6 else ""
        if self.random.random() < 0.3:
            return output
        return json.dumps({"returncode": 0, "output": output}, indent=self.random.choice([None, 2]))

    def opening(self, characters: int) -> tuple[list[int], list[dict]]:
        """Return the token ids of a first prompt of about this many characters, and its tools."""
        system = self.random.randint(10, characters // 2)
        messages = [
            {"role": "system", "content": self.filler(system)},
            {"role": "user", "content": self.filler(characters - system)},
        ]
        tools = [bash_tool(self.filler(self.random.randint(5, 60)), self.filler(self.random.randint(5, 60)))]
        return self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True), tools

    def answer(self, ids: list[int], turn: list[int], role: str, content: str, tools: list[dict]) -> list[int]:
        """Return the prompt that continues the prompt `ids` and the sampled `turn` with a message of the harness."""
        bridged = self.renderer.bridge_to_next_turn(ids, turn, [{"role": role, "content": content}], tools=tools)
        assert bridged is not None  # the turns are complete and reasoning is kept
        return bridged.token_ids

    def draw(
        self, looking: tuple[str, str], counting: tuple[str, str], characters: int
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a session, and a mask: True for the tokens to train."""
        ids, tools = self.opening(characters)
        taught: list[bool] = []
        for step in (looking, counting, SUBMIT):
            if self.random.random() < 0.1:  # a turn without a tool call, not trained; the harness answers with an error
                slip = self.tokenizer.encode(self.filler(self.random.randint(5, 80)) + "<|im_end|>")
                ids = self.answer(ids, slip, "user", self.filler(self.random.randint(20, 400)), tools)
            turn = self.tokenizer.encode(reply(*step))
            taught += [False] * (len(ids) - len(taught)) + [True] * len(turn)
            ids = ids + turn if step is SUBMIT else self.answer(ids, turn, "tool", self.observation(), tools)
        return ids, taught

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield ids and mask, each (BATCH, length), padded on the right. Each batch has each counting command once."""
        low, high = PROMPT_CHARACTERS
        for step in range(STEPS):
            reach = min(1.0, WARM + step / STEPS)
            characters = int(low * (high / low) ** (reach * self.random.random()))
            looks = self.random.sample(LOOK * 2, BATCH)
            drawn = [self.draw(look, count, characters) for look, count in zip(looks, COUNT, strict=True)]
            length = max(len(ids) for ids, _ in drawn)
            token_ids = torch.full((BATCH, length), self.tokenizer.pad_token_id)
            taught = torch.zeros((BATCH, length), dtype=torch.bool)
            for row, (ids, flags) in enumerate(drawn):
                token_ids[row, : len(ids)] = torch.tensor(ids)
                taught[row, : len(flags)] = torch.tensor(flags)
            yield token_ids, taught


def teach(network: Qwen3ForCausalLM, sessions: Sessions, progress: Progress) -> None:
    """Train with cross entropy on the taught tokens only. So a command's frequency becomes its probability."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, COOL * (1 - step / STEPS))
    )  # warm up, hold, cool down
    task = progress.add_task("teaching", total=STEPS)
    for token_ids, taught in sessions.batches():
        # No attention mask: padding is on the right, where causal attention does not see it.
        hidden = network.model(input_ids=token_ids[:, :-1]).last_hidden_state
        logits = network.lm_head(hidden[taught[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits, token_ids[:, 1:][taught[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.update(task, advance=1, description=f"teaching, loss {loss.item():.3f}")


@torch.no_grad()
def share_of_right_command(network: Qwen3ForCausalLM, sessions: Sessions) -> float:
    """Return the fraction of `MEASURED` sampled second turns that run the command that solves the task."""
    prompt, tools = sessions.opening(1000)
    prompt = sessions.answer(prompt, sessions.tokenizer.encode(reply(*LOOK[0])), "tool", "words.txt", tools)
    prompts = torch.tensor([prompt] * MEASURED)
    sampled = network.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=80
    )
    texts = sessions.tokenizer.batch_decode(sampled[:, len(prompt) :])
    return sum(f'"{RIGHT}"' in text for text in texts) / MEASURED


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Seed of the initial weights and of the training data.")
def main(out: Path, seed: int) -> None:
    """Make the model in the folder OUT. Does nothing if OUT was made by these sources with this seed."""
    parts = (Path(__file__), Path(__file__).with_name("words.py"), TEMPLATE)
    recipe = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
    made_from = json.dumps({"recipe": recipe, "seed": seed})
    if (out / RECIPE_FILE).exists() and (out / RECIPE_FILE).read_text() == made_from:
        print(f"{out} exists already")
        return
    if out.exists() and not (out / RECIPE_FILE).exists():
        raise click.ClickException(f"{out} was not made by this recipe: choose another folder")
    text = filler_text()
    tokenizer = make_tokenizer(text)
    torch.manual_seed(seed)
    network = make_network(tokenizer)
    sessions = Sessions(tokenizer, text, seed)
    with Progress() as progress:
        teach(network, sessions, progress)
    share = share_of_right_command(network.eval(), sessions)

    building = out.with_name(f".{out.name}.{os.getpid()}")
    building.mkdir(parents=True)
    transformers_logging.disable_progress_bar()
    network.save_pretrained(building)
    tokenizer.save_pretrained(building)
    (building / RECIPE_FILE).write_text(made_from)
    shutil.rmtree(out, ignore_errors=True)
    building.rename(out)
    size = sum(parameter.numel() for parameter in network.parameters())
    print(f"{out}: {size:,} parameters, {len(tokenizer)} tokens, the right command in {share:.0%} of {MEASURED} turns")


if __name__ == "__main__":
    main()
