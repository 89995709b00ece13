"""Sends requests to `ostinato serve` with the official `openai` client and checks the answers: chats, streams, tools,
parsed outputs, responses, embeddings and errors. Usage: api.py BASE_URL MODEL. The model's chat template has tools and reasoning."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = sys.argv[2]
# The model is tiny: what it says means nothing, so outputs are short or constrained.
THINK_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


TOOLS = [openai.pydantic_function_tool(Weather, name="weather")]


def models():
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def chats():
    asked = dict(model=model, messages=QUESTION, max_completion_tokens=24, temperature=0, extra_body=THINK_OFF)
    whole = client.chat.completions.create(**asked)
    assert whole.usage.completion_tokens <= 24 and whole._request_id == whole.id
    text, usage = "", None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content and usage.completion_tokens == whole.usage.completion_tokens
    both = client.chat.completions.create(**(asked | dict(n=2, temperature=1, seed=7, logprobs=True, top_logprobs=3)))
    assert len(both.choices) == 2
    for choice in both.choices:
        assert len(choice.logprobs.content[0].top_logprobs) == 3
        said = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert said.decode(errors="replace").startswith(choice.message.content)


def completions():
    asked = dict(model=model, prompt="Once upon a time", max_tokens=8, temperature=0)
    whole = client.completions.create(**asked, echo=True, logprobs=1)
    assert whole.choices[0].text.startswith("Once upon a time")
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    parts = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "Once upon a time" + "".join(parts) == whole.choices[0].text


def tools():
    asked = dict(model=model, messages=QUESTION, tools=TOOLS, tool_choice="required", seed=3, extra_body=THINK_OFF)
    asked |= dict(parallel_tool_calls=False, max_completion_tokens=200)
    parsed = client.chat.completions.parse(**asked)
    (call,) = parsed.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather) and parsed.choices[0].finish_reason == "tool_calls"
    arguments = ""
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
        final = stream.get_final_completion()
    assert json.loads(arguments) == json.loads(call.function.arguments)
    assert final.choices[0].message.tool_calls[0].function.arguments == arguments
    # The call and its result go back into the conversation.
    history = QUESTION + [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    history[1]["tool_calls"][0]["function"].pop("parsed_arguments", None)
    client.chat.completions.create(model=model, messages=history, tools=TOOLS, max_completion_tokens=4)


def parsed_outputs():
    asked = dict(model=model, messages=QUESTION, max_completion_tokens=100, extra_body=THINK_OFF)
    parsed = client.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**asked, response_format=Weather) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    extra = THINK_OFF | {"structured_outputs": {"choice": ["red", "blue"]}}
    chosen = client.chat.completions.create(**(asked | dict(extra_body=extra)))
    assert chosen.choices[0].message.content in ("red", "blue")


def responses():
    asked = dict(model=model, input="Hello", max_output_tokens=12, temperature=0, extra_body=THINK_OFF)
    whole = client.responses.create(**asked)
    assert whole.status in ("completed", "incomplete")
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if kinds[-1] == "response.completed" else None
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert final is None or final.output_text == whole.output_text
    asked["max_output_tokens"] = 100
    parsed = client.responses.parse(**asked, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": True}
    called = client.responses.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = [item for item in called.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)


def errors():
    def fails(kind, **asked):
        try:
            client.chat.completions.create(**({"model": model, "messages": QUESTION, "max_tokens": 1} | asked))
        except kind as error:
            return error
        raise AssertionError(f"{asked} does not fail")

    assert fails(openai.NotFoundError, model="other").code == "model_not_found"
    assert fails(openai.BadRequestError, temperature=-1).param == "temperature"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused = fails(openai.BadRequestError, messages=image)
    assert refused.param == "messages[0].content[0].type" and "image_url" in refused.message
    try:
        client.embeddings.create(model=model, input=[])
    except openai.BadRequestError as error:
        assert error.param == "input"
    else:
        raise AssertionError("no input is embedded")


def embeddings():
    texts = ["The weather in Rome", "Once upon a time", "Rome"]
    # The client asks for base64 and decodes it.
    together = client.embeddings.create(model=model, input=texts)
    assert [entry.index for entry in together.data] == [0, 1, 2]
    size = len(together.data[0].embedding)
    for text, entry in zip(texts, together.data):
        assert abs(sum(value * value for value in entry.embedding) - 1) < 1e-5
        alone = client.embeddings.create(model=model, input=text, encoding_format="float")
        assert sum(a * b for a, b in zip(alone.data[0].embedding, entry.embedding)) > 0.9999
    assert together.usage.total_tokens == together.usage.prompt_tokens > 3
    short = client.embeddings.create(model=model, input=texts[0], dimensions=8).data[0].embedding
    assert len(short) == 8 < size
    scale = sum(value * value for value in together.data[0].embedding[:8]) ** 0.5
    assert all(abs(a - b / scale) < 1e-2 for a, b in zip(short, together.data[0].embedding))


for check in (models, chats, completions, tools, parsed_outputs, responses, embeddings, errors):
    check()
    print(check.__name__, "ok", flush=True)
