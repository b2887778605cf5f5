"""The OpenAI Responses API."""

from rolltap.addons.dialects.openai_responses.request import OpenAIResponses as OpenAIResponses
