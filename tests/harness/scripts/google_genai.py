"""An agent in a few lines: the google-genai SDK's generateContent, first whole and then streamed.

The second request is asynchronous: the SDK uses another HTTP client for it.
"""

import asyncio

from google import genai
from google.genai import types
from tool import DECLARED, PARAMETERS, write_file

TOOL = types.FunctionDeclaration(**DECLARED, parameters_json_schema=PARAMETERS)


async def agent(client, task, streamed):
    contents = [types.UserContent(task)]
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[TOOL])])
    while True:
        asked = {"model": "gemini-2.5-pro", "contents": contents, "config": config}
        if streamed:
            chunks = await client.aio.models.generate_content_stream(**asked)
            parts = [
                part async for chunk in chunks for part in chunk.candidates[0].content.parts or []
            ]
        else:
            parts = client.models.generate_content(**asked).candidates[0].content.parts
        contents.append(types.ModelContent(parts))
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text for part in parts if part.text and not part.thought)
        results = []
        for call in calls:
            result = types.FunctionResponse(
                id=call.id, name=call.name, response={"result": write_file(**call.args)}
            )
            results.append(types.Part(function_response=result))
        contents.append(types.UserContent(results))


for name in ("whole", "streamed"):
    print(asyncio.run(agent(genai.Client(), f"Write {name}.txt, twice.", name == "streamed")))
