// An agent with the Vercel AI SDK. On the Responses API it names earlier items by their ids.
import { writeFileSync } from "node:fs";
import { openai } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, tool } from "ai";

const write_file = tool({
  description: "Write a file.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { path: { type: "string" }, content: { type: "string" } },
    required: ["path", "content"],
    additionalProperties: false,
  }),
  execute: async ({ path, content }) => {
    writeFileSync(path, content);
    return "written";
  },
});
const model = process.argv[2] === "chat" ? openai.chat("gpt-4.1") : openai.responses("gpt-5.5");
const tools = { write_file };
const { text } = await generateText({ model, tools, prompt: "Write notes.txt, twice.", stopWhen: isStepCount(5) });
console.log(text);
