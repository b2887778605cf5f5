"""A model as the recorder sees it, by its tokenizer and chat template alone: for `rolltap doctor --model`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rolltap.addons.errors import MissingPackageError, install_command
from rolltap.addons.options import require_options
from rolltap.addons.prompts.tokenizer import resolve_model


@dataclass(frozen=True)
class ModelDiagnosis:
    """How a model's prompts are written, and its replies are read.

    `tool_parser` is None when replies are text. `turns` says of each turn that the chat template writes
    whether it is read as it was written. `refusal` is why conversations are never continued token for token, or None.
    """

    model: str
    renderer: str
    tool_parser: str | None
    turns: dict[str, bool]
    refusal: str | None
    stop_tokens: dict[str, int]
    problems: list[str]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {"ok": not self.problems, **asdict(self)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        writer = (
            "the chat template, whose text no renderer writes"
            if self.renderer == "default"
            else f"the renderer {self.renderer}"
        )
        read = ", ".join(f"{name}: {'yes' if good else 'no'}" for name, good in self.turns.items())
        for name, text in (
            ("prompts by", writer),
            ("replies by", self.tool_parser or "none"),
            ("read", f"{read}; other turns are not written"),
            ("continued", self.refusal or "token for token"),
            ("stop tokens", ", ".join(f"{text} ({number})" for text, number in self.stop_tokens.items())),
            *(("problem", problem) for problem in self.problems),
            *(("note", note) for note in self.notes),
        ):
            yield Text.assemble((f"{name:12}", "red" if name == "problem" else "dim"), text)
        verdict, style = ("not ready", "bold red") if self.problems else ("ready", "bold green")
        yield Text(f"{self.model}: {verdict}.", style)


def diagnose(model: str, options: Mapping[str, str | Sequence[str]]) -> ModelDiagnosis:
    """Return what a model gives with options of the recorder. Raises `InputError`, and `MissingPackageError`."""
    try:
        from rolltap.addons.prompts.rendering import Rendering
    except ImportError as error:
        raise MissingPackageError(f"the recorder is not installed ({error}): {install_command('record')}") from error
    given = require_options(options)
    rendering = Rendering(resolve_model(model), given.renderer, given.tool_parser)
    return ModelDiagnosis(
        model=model,
        renderer=rendering.name,
        tool_parser=rendering.family.name,
        turns=rendering.read_turns(),
        refusal=rendering.refusal,
        stop_tokens={rendering.tokenizer.decode([token_id]): token_id for token_id in rendering.stop_token_ids},
        problems=rendering.lacks,
        notes=rendering.notes,
    )
