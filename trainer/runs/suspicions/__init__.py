"""Evidence of cheating: rules over the requests, the tool calls and the judged changes of a
session."""
