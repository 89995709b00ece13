"""Uses `ostinato serve` through LangChain: messages, streams, batches, tools, structured outputs, embeddings, completions and
the Responses API. Usage: langchain.py BASE_URL MODEL. The model's chat template has tools and reasoning."""

import sys
from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

reach = dict(base_url=sys.argv[1], api_key="none", model=sys.argv[2], max_retries=0)
# The model is tiny: what it says means nothing, so outputs are short or constrained.
options = dict(reach, temperature=0, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
brief, long = ChatOpenAI(max_tokens=16, **options), ChatOpenAI(max_tokens=200, **options)


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def messages():
    asked = [SystemMessage("Be brief."), HumanMessage("Tell me a story.")]
    whole = brief.invoke(asked)
    assert whole.content and whole.usage_metadata["output_tokens"] <= 16
    chunks = list(brief.stream(asked, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1]["output_tokens"] <= 16
    assert len(brief.batch(["one", "two", "three", "four"])) == 4


def tools():
    bound = long.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    asked = [HumanMessage("What is the weather in Rome?")]
    answer = bound.invoke(asked)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and not answer.invalid_tool_calls
    whole = None
    for chunk in bound.stream(asked):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [call["args"]]
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert brief.bind_tools([weather]).invoke([*asked, answer, result]) is not None


def structured():
    for method in ("json_schema", "function_calling"):
        assert isinstance(long.with_structured_output(Weather, method=method).invoke("The weather?"), Weather), method


def others():
    vectors = OpenAIEmbeddings(check_embedding_ctx_length=False, **reach).embed_documents(["one", "two"])
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 0
    assert OpenAI(max_tokens=8, **reach).invoke("Once upon a time")
    answers = ChatOpenAI(max_tokens=16, use_responses_api=True, **options)
    assert answers.invoke("Hello").text
    assert "".join(chunk.text for chunk in answers.stream("Hello"))


def errors():
    try:
        brief.invoke("word " * 4000)
    except ContextOverflowError:
        return
    raise AssertionError("a prompt that is too long is not known as one")


for check in (messages, tools, structured, others, errors):
    check()
    print("langchain:", check.__name__, "ok", flush=True)
