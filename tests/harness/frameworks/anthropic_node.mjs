// An agent in a few lines: the anthropic SDK for JavaScript, whose requests are Node's own fetch.
import { writeFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const schema = {
  type: "object",
  properties: { path: { type: "string" }, content: { type: "string" } },
  required: ["path", "content"],
};
const tools = [{ name: "write_file", description: "Write a file.", input_schema: schema }];
const client = new Anthropic();
const messages = [{ role: "user", content: "Write notes.txt, twice." }];
for (;;) {
  const { content } = await client.messages.create({ model: "claude-sonnet-4-5", max_tokens: 1000, messages, tools });
  messages.push({ role: "assistant", content });
  const calls = content.filter((block) => block.type === "tool_use");
  if (!calls.length) {
    console.log(content.find((block) => block.type === "text").text);
    break;
  }
  for (const { input } of calls) writeFileSync(input.path, input.content);
  const results = calls.map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "written" }));
  messages.push({ role: "user", content: results });
}
