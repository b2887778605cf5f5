"""The tools of the Responses API: functions, freeform tools and namespaces of both."""

from dataclasses import dataclass, field
from typing import Any

from rolltap.addons.dialects.tools import freeform_tool, function_tool
from rolltap.addons.dialects.types import DialectError, ModelCall, Tool, WireTool


@dataclass(slots=True)
class ToolNames:
    """The names by which the model sees a request's tools: a namespace goes in front, because the model has none."""

    _seen: dict[tuple[str | None, str], str] = field(default_factory=dict)

    def add(self, namespace: str | None, name: str) -> str:
        """The name for a tool of the request; no two tools get the same."""
        seen = self.of(namespace, name)
        while seen in self._seen.values() and self._seen.get((namespace, name)) != seen:
            seen += "_"
        self._seen[namespace, name] = seen
        return seen

    def of(self, namespace: str | None, name: str) -> str:
        """The name for a tool of an earlier call, which the request need not have any more."""
        return self._seen.get((namespace, name), f"{namespace}__{name}" if namespace else name)


def read_tools(tools: Any, where: str, model_call: ModelCall, names: ToolNames) -> None:
    """Adds a request's list of tools to `model_call` and their names to `names`. Raises `DialectError`.

    Of two tools with the same name and namespace the later counts.
    """
    tools = _tool_list(tools, where)
    for i, tool in enumerate(tools):
        place = f"{where}[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise DialectError(f"'{place}' must be a tool with a type.")
        if kind == "namespace":
            namespace = _name(tool, place)
            for j, inner in enumerate(_tool_list(tool.get("tools"), f"{place}.tools")):
                _add_tool(inner, namespace, f"{place}.tools[{j}]", model_call, names)
        elif kind in ("function", "custom"):
            _add_tool(tool, None, place, model_call, names)
        else:
            model_call.hosted_tools.append(tool)


def _tool_list(tools: Any, where: str) -> list[Any]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise DialectError(f"'{where}' must be a list.")
    return tools


def _add_tool(tool: Any, namespace: str | None, where: str, model_call: ModelCall, names: ToolNames) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise DialectError(f"'{where}' must be a function or a custom tool.")
    name = _name(tool, where)
    seen = names.add(namespace, name)
    if kind == "function":
        shown = function_tool(seen, tool.get("description"), tool.get("parameters"))
    else:
        form = tool.get("format")
        shown = freeform_tool(seen, tool.get("description"), form.get("definition") if isinstance(form, dict) else None)
    _replace_or_append(model_call.tools, shown)
    model_call.wire_tools.pop(seen, None)
    if kind == "custom" or seen != name:
        model_call.wire_tools[seen] = WireTool(name, namespace, freeform=kind == "custom")


def _replace_or_append(tools: list[Tool], tool: Tool) -> None:
    for i, other in enumerate(tools):
        if other["function"]["name"] == tool["function"]["name"]:
            tools[i] = tool
            return
    tools.append(tool)


def _name(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise DialectError(f"'{where}.name' must be a non-empty string.")
    return name
