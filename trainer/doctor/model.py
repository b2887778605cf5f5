"""A model as the recorder sees it, by its tokenizer and chat template alone: for `rolltap doctor
--model`."""

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

    `tool_parser` is None when replies are text. `turns` says of each turn that the chat template
    writes whether it is read as it was written. `refusal` is why conversations are never continued
    token for token, or None.
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
        writer = f"the renderer {self.renderer}"
        if self.renderer == "default":
            writer = "the chat template, whose text no renderer writes"
        read = [f"{name}: {'yes' if good else 'no'}" for name, good in self.turns.items()]
        stop_tokens = [f"{text} ({number})" for text, number in self.stop_tokens.items()]
        yield _line("prompts by", writer)
        yield _line("replies by", self.tool_parser or "none")
        yield _line("read", f"{', '.join(read)}; other turns are not written")
        continued = "token for token"
        if self.refusal is not None:
            continued = f"no: {self.refusal}"
        yield _line("continued", continued)
        yield _line("stop tokens", ", ".join(stop_tokens))
        for problem in self.problems:
            yield _line("problem", problem, "red")
        for note in self.notes:
            yield _line("note", note)
        if self.problems:
            yield Text(f"{self.model}: not ready.", "bold red")
        else:
            yield Text(f"{self.model}: ready.", "bold green")


def _line(name: str, text: str, style: str = "dim") -> Text:
    return Text.assemble((f"{name:12}", style), text)


def diagnose(model: str, options: Mapping[str, str | Sequence[str]]) -> ModelDiagnosis:
    """Return what a model gives with options of the recorder.

    Raises `InputError`, and `MissingPackageError`.
    """
    try:
        from rolltap.addons.prompts.rendering import Rendering
    except ImportError as error:
        raise MissingPackageError(
            f"the recorder is not installed ({error}): {install_command('record')}",
        ) from error
    given = require_options(options)
    rendering = Rendering(resolve_model(model), given.renderer, given.tool_parser)
    stop_tokens = {}
    for token_id in rendering.stop_token_ids:
        stop_tokens[rendering.tokenizer.decode([token_id])] = token_id
    return ModelDiagnosis(
        model=model,
        renderer=rendering.name,
        tool_parser=rendering.family.name,
        turns=rendering.read_turns(),
        refusal=rendering.refusal,
        stop_tokens=stop_tokens,
        problems=rendering.lacks,
        notes=rendering.notes,
    )
