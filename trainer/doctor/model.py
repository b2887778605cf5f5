"""A model as the recorder sees it, by its tokenizer and chat template alone: for `rolltap doctor --model`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

from rolltap.addons.errors import InputError, MissingPackageError
from rolltap.addons.options import OPTIONS, typed


@dataclass(frozen=True)
class ModelDiagnosis(JupyterMixin):
    """How a model's prompts are written, and its replies are read.

    Attributes:
        renderer: Name of the renderer; `default` is the model's own chat template.
        tool_parser: The family that reads replies; None when the renderer does.
        turns: Turn of an assistant -> whether it is read as the chat template writes it. Others it does not write.
        continuation: Why conversations are never continued token for token; None when they are.
        stop_tokens: Text -> id.
        problems: What rollouts would lack, and the setting that helps.
        notes: Other things to know.
    """

    model: str
    renderer: str
    tool_parser: str | None
    turns: dict[str, bool]
    continuation: str | None
    stop_tokens: dict[str, int]
    problems: list[str]
    notes: list[str]

    @property
    def ready(self) -> bool:
        """True without a problem."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {"ok": self.ready, **asdict(self)}

    def _lines(self) -> Iterator[tuple[str, str]]:
        own = "the model's chat template, whose text no renderer gives"
        yield (
            "prompts",
            own if self.renderer == "default" else f"renderer {self.renderer}, which gives the template's text",
        )
        yield "replies", f"the renderer {self.renderer}" if self.tool_parser is None else f"family {self.tool_parser}"
        calls = [name for name in ("one call", "awkward arguments", "two calls") if name in self.turns]
        yield "tool calls", self._read(calls) if calls else "the chat template writes none"
        reasoning = [name for name in self.turns if "reasoning" in name]
        yield "reasoning", self._read(reasoning) if reasoning else "the chat template writes none"
        yield "continued", self.continuation or "token for token"
        yield "stop tokens", ", ".join(f"{text} ({number})" for text, number in self.stop_tokens.items())

    def _read(self, names: Sequence[str]) -> str:
        read = ", ".join(f"{name}: {'yes' if self.turns[name] else 'no'}" for name in names)
        return f"read as the chat template writes them: {read}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        verdict = "ready" if self.ready else f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        yield Text(f"{self.model}: {verdict}.", style="bold green" if self.ready else "bold red")
        for name, text in self._lines():
            yield Text.assemble((f"{name:12}", "dim"), text)
        for problem in self.problems:
            yield Text.assemble(("problem: ", "red"), problem)
        for note in self.notes:
            yield Text.assemble(("note: ", "yellow"), note)


def diagnose(model: str, options: Mapping[str, Sequence[str]]) -> ModelDiagnosis:
    """Return what a model gives with options of the recorder. Raises `InputError`, and `MissingPackageError`."""
    try:
        from rolltap.addons.prompts.rendering import Rendering, resolve_model
    except ImportError as error:
        raise MissingPackageError(f"the recorder is not installed ({error}): pip install 'rolltap[record]'") from error
    given, wrong = typed({name: [*values] for name, values in options.items()})
    if wrong:
        raise InputError("\n".join(wrong))
    names = ("rolltap_renderer", "rolltap_tool_parser")
    rendering = Rendering(resolve_model(model), *(given.get(name, OPTIONS[name].default) for name in names))
    return ModelDiagnosis(
        model=model,
        renderer=rendering.name,
        tool_parser=None if rendering.family is None else rendering.family.name,
        turns=rendering.read_turns(),
        continuation=rendering.refusal,
        stop_tokens={rendering.decode([token_id]): token_id for token_id in rendering.stop_token_ids()},
        problems=rendering.lacks,
        notes=rendering.notes,
    )
