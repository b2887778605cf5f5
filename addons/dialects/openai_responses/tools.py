"""Tools of the Responses API: functions, freeform tools and namespaces of both."""

from dataclasses import dataclass, field

from rolltap.addons.dialects.call import ModelCall, WireTool
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.tools import freeform_tool, function_tool


@dataclass(slots=True)
class ToolNames:
    """Map from the tools of a request to the names that the model sees.

    The model has no namespaces: a namespace becomes a prefix of the name.
    """

    _shown: dict[tuple[str | None, str], str] = field(default_factory=dict)
    _indices: dict[str, int] = field(default_factory=dict)
    _newest: dict[str, str] = field(default_factory=dict)
    """Name without the underscores that make it unique -> the last unique name made of it."""

    def add(self, namespace: str | None, name: str) -> tuple[str, int]:
        """Return a unique name for a tool of the request, and its index among the tools.

        A tool that is added again keeps both.
        """
        shown = plain = self.of(namespace, name)
        if (namespace, name) not in self._shown:
            shown = self._newest.get(plain, plain)
            while shown in self._indices:
                shown += "_"
            self._shown[namespace, name] = self._newest[plain] = shown
        return shown, self._indices.setdefault(shown, len(self._indices))

    def of(self, namespace: str | None, name: str) -> str:
        """Return the name for the tool of an earlier call, which the request may lack."""
        return self._shown.get((namespace, name), f"{namespace}__{name}" if namespace else name)


def read_tools(fields: Fields, model_call: ModelCall, names: ToolNames) -> None:
    """Add the list `tools` of a request or an item to `model_call`, and the tools' names to `names`.

    A tool replaces an earlier one with the same name and namespace. Raises `DialectError`.
    """
    for tool in fields.objects("tools"):
        kind = tool.text("type")
        if kind == "namespace":
            namespace = tool.tool_name("name")
            for inner in tool.objects("tools"):
                _add_tool(inner, namespace, model_call, names)
        elif kind in ("function", "custom"):
            _add_tool(tool, None, model_call, names)
        else:
            model_call.hosted_tools.append(tool.values)


def _add_tool(tool: Fields, namespace: str | None, model_call: ModelCall, names: ToolNames) -> None:
    freeform = tool.choice("type", ("function", "custom")) == "custom"
    name, description = tool.tool_name("name"), tool.maybe("description", str)
    shown, index = names.add(namespace, name)
    if freeform:
        function = freeform_tool(shown, description, tool.inner("format").maybe("definition", str))
    else:
        function = function_tool(shown, description, tool.maybe("parameters", dict))
    model_call.tools[index : index + 1] = [function]
    model_call.wire_tools.pop(shown, None)
    if freeform or shown != name:
        model_call.wire_tools[shown] = WireTool(name, namespace, freeform)
