"""An agent in a few lines whose instructions, tools and first message are a cached content of the Gemini API."""

from google import genai
from google.genai import types
from tool import DECLARED, write_file

PARAMETERS = {"type": "OBJECT", "properties": {"path": {"type": "STRING"}, "content": {"type": "STRING"}}}
TOOL = types.FunctionDeclaration(**DECLARED, parameters=PARAMETERS)

client = genai.Client()
cached = client.caches.create(
    model="gemini-3-pro",
    config=types.CreateCachedContentConfig(
        system_instruction="Be brief.",
        tools=[types.Tool(function_declarations=[TOOL])],
        contents=[types.Content(role="user", parts=[types.Part(text="A long book.")])],
    ),
)
contents = [types.Content(role="user", parts=[types.Part(text="Write cached.txt, twice.")])]
config = types.GenerateContentConfig(cached_content=cached.name)
while True:
    reply = client.models.generate_content(model="gemini-3-pro", contents=contents, config=config)
    contents.append(reply.candidates[0].content)
    if not reply.function_calls:
        print(reply.text)
        break
    for call in reply.function_calls:
        answer = types.FunctionResponse(id=call.id, name=call.name, response={"output": write_file(**call.args)})
        contents.append(types.Content(role="user", parts=[types.Part(function_response=answer)]))
client.caches.delete(name=cached.name)
