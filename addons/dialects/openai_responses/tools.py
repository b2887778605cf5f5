"""The tools of the Responses API: functions, freeform tools and namespaces of both."""

from dataclasses import dataclass, field

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.tools import freeform_tool, function_tool
from rolltap.addons.dialects.types import ModelCall, WireTool


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


def read_tools(fields: Fields, model_call: ModelCall, names: ToolNames) -> None:
    """Adds the list `tools` of a request or an item to `model_call`, and their names to `names`. Raises `DialectError`.

    Of two tools with the same name and namespace the later counts.
    """
    for tool in fields.objects("tools"):
        kind = tool.text("type")
        if kind == "namespace":
            namespace = tool.name("name")
            for inner in tool.objects("tools"):
                _add_tool(inner, namespace, model_call, names)
        elif kind in ("function", "custom"):
            _add_tool(tool, None, model_call, names)
        else:
            model_call.hosted_tools.append(tool.values)


def _add_tool(tool: Fields, namespace: str | None, model_call: ModelCall, names: ToolNames) -> None:
    freeform = tool.choice("type", ("function", "custom")) == "custom"
    name, description = tool.name("name"), tool.maybe("description", str)
    seen = names.add(namespace, name)
    if freeform:
        shown = freeform_tool(seen, description, tool.inner("format").maybe("definition", str))
    else:
        shown = function_tool(seen, description, tool.maybe("parameters", dict))
    places = {other["function"]["name"]: place for place, other in enumerate(model_call.tools)}
    place = places.get(seen, len(places))
    model_call.tools[place : place + 1] = [shown]
    model_call.wire_tools.pop(seen, None)
    if freeform or seen != name:
        model_call.wire_tools[seen] = WireTool(name, namespace, freeform)
