"""Make the quickstart's tiny model: a Qwen3 of a million parameters that drives a coding agent's harness, and no more.

    python recipes/quickstart/make_model.py OUT [--seed 0]

Nothing is downloaded. The vocabulary and the filler text come from the Python standard library; the model is taught
one session of three turns: look around, count something, submit. Which counting command it runs is drawn at random
from four that occur equally often, and only one of them solves the task in tasks.jsonl. So about a quarter of the
sessions succeed, and reinforcement learning has something to find.
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

RECIPE_FILE = "recipe.json"  # in the model's folder: what it was made from

STEPS = 400
WARM = (
    0.5  # share of the way from the shortest to the longest prompts at the first step; all lengths from the middle on
)
COOL = 2  # the learning rate falls to 0 over the last 1/COOL of the steps
COMMAND_IN_FILLER = 0.5  # share of filler texts that quote a taught command
BATCH = 4  # sessions a step
LEARNING_RATE = 4e-3
PROMPT_CHARACTERS = (40, 4000)  # system and user message together; log-uniform
MEASURED = 64  # second turns sampled to measure the share of the right command


def bash_tool(description: str, command: str) -> dict:
    """A harness's one tool in OpenAI's form, with the descriptions of the tool and of its argument."""
    parameters = {
        "type": "object",
        "properties": {"command": {"type": "string", "description": command}},
        "required": ["command"],
    }
    return {"type": "function", "function": {"name": "bash", "description": description, "parameters": parameters}}


def make_network(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained Qwen3. Its embeddings are untied: vLLM's CPU backend does not refresh tied ones on a reload."""
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
    """Draws taught sessions, rendered turn by turn as the recorder renders them at serving time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, seed: int) -> None:
        self.tokenizer = tokenizer
        self.renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
        self.text = text
        self.random = random.Random(seed)

    def filler(self, characters: int) -> str:
        """A stretch of library text; some hold a command, which the model must not mistake for its own turn."""
        start = self.random.randrange(len(self.text) - characters)
        text = self.text[start : start + characters]
        if self.random.random() < COMMAND_IN_FILLER:
            cut = self.random.randrange(characters)
            decoy = " ".join(self.random.choice([*LOOK, *COUNT, SUBMIT]))
            start, end = sorted(self.random.randrange(len(decoy) + 1) for _ in range(2))
            text = f"{text[:cut]} {decoy[start:end]} {text[cut:]}"
        return text

    def observation(self) -> str:
        """What a command printed, as a harness reports it; often nothing."""
        output = self.filler(int(600 ** self.random.random())) if self.random.random() < 0.6 else ""
        if self.random.random() < 0.3:
            return output
        return json.dumps({"returncode": 0, "output": output}, indent=self.random.choice([None, 2]))

    def opening(self, characters: int) -> tuple[list[int], list[dict]]:
        """The first prompt, about so many characters long, and the tools it offers."""
        system = self.random.randint(10, characters // 2)
        messages = [
            {"role": "system", "content": self.filler(system)},
            {"role": "user", "content": self.filler(characters - system)},
        ]
        tools = [bash_tool(self.filler(self.random.randint(5, 60)), self.filler(self.random.randint(5, 60)))]
        return self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True), tools

    def answer(self, ids: list[int], turn: list[int], role: str, content: str, tools: list[dict]) -> list[int]:
        """The prompt after `turn` was sampled on the prompt `ids` and the harness answered."""
        bridged = self.renderer.bridge_to_next_turn(ids, turn, [{"role": role, "content": content}], tools=tools)
        assert bridged is not None  # the turns are whole and reasoning is kept
        return bridged.token_ids

    def draw(
        self, looking: tuple[str, str], counting: tuple[str, str], characters: int
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a whole session, and which of them are taught."""
        ids, tools = self.opening(characters)
        taught: list[bool] = []
        for step in (looking, counting, SUBMIT):
            if self.random.random() < 0.1:  # a turn without a tool call; the harness complains and the model goes on
                slip = self.tokenizer.encode(self.filler(self.random.randint(5, 80)) + "<|im_end|>")
                ids = self.answer(ids, slip, "user", self.filler(self.random.randint(20, 400)), tools)
            turn = self.tokenizer.encode(reply(*step))
            taught += [False] * (len(ids) - len(taught)) + [True] * len(turn)
            ids = ids + turn if step is SUBMIT else self.answer(ids, turn, "tool", self.observation(), tools)
        return ids, taught

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Token ids and taught positions, each (BATCH, length), padded at the right; each counting command as often."""
        low, high = PROMPT_CHARACTERS
        for step in range(STEPS):
            reach = min(1.0, WARM + step / STEPS)
            characters = int(low * (high / low) ** (reach * self.random.random()))
            looks = self.random.sample(LOOK * 2, BATCH)
            drawn = [self.draw(look, count, characters) for look, count in zip(looks, COUNT, strict=True)]
            length = max(len(ids) for ids, _ in drawn)
            tokens = torch.full((BATCH, length), self.tokenizer.pad_token_id)
            taught = torch.zeros((BATCH, length), dtype=torch.bool)
            for row, (ids, flags) in enumerate(drawn):
                tokens[row, : len(ids)] = torch.tensor(ids)
                taught[row, : len(flags)] = torch.tensor(flags)
            yield tokens, taught


def teach(network: Qwen3ForCausalLM, sessions: Sessions, progress: Progress) -> None:
    """Cross entropy on the taught tokens only, so that the shares of the commands become the model's probabilities."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, COOL * (1 - step / STEPS))
    )  # warm up, hold, cool down
    task = progress.add_task("teaching", total=STEPS)
    for tokens, taught in sessions.batches():
        # Padding is at the right, so causal attention alone keeps it out of sight.
        hidden = network.model(input_ids=tokens[:, :-1]).last_hidden_state
        logits = network.lm_head(hidden[taught[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][taught[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.update(task, advance=1, description=f"teaching, loss {loss.item():.3f}")


@torch.no_grad()
def share_of_right_command(network: Qwen3ForCausalLM, sessions: Sessions) -> float:
    """How often a sampled second turn runs the command that solves the task."""
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
@click.option("--seed", default=0, show_default=True, help="Of the weights and of what is taught.")
def main(out: Path, seed: int) -> None:
    """Make the model in the folder OUT. One that this recipe made already is left alone."""
    parts = (Path(__file__), Path(__file__).with_name("words.py"), TEMPLATE)
    recipe = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
    made_from = json.dumps({"recipe": recipe, "seed": seed})
    if (out / RECIPE_FILE).exists() and (out / RECIPE_FILE).read_text() == made_from:
        print(f"{out} is there already")
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
