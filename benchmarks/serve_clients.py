"""Clients of the OpenAI API, and the page in headless Chromium, against `lm serve` with SmolLM2. Usage: serve_clients.py ADDRESS

Each check prints a line. The program fails if one fails.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

import openai

ADDRESS = sys.argv[1]
BASE = f"{ADDRESS}/v1"
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
ASK = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def metric(name):
    text = urllib.request.urlopen(f"{ADDRESS}/metrics").read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@check
def openai_chat():
    said = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=30)
    assert "Paris" in said.choices[0].message.content, said
    assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
    assert said.choices[0].finish_reason in ("stop", "length")


@check
def openai_stream_is_the_same():
    whole = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=30)
    chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens and not chunks[-1].choices


@check
def openai_stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0, max_tokens=30) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert "Paris" in final.choices[0].message.content


@check
def openai_parse():
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=99)

    ask = [{"role": "user", "content": "Tom is 30 years old. Who is he?"}]
    said = client.chat.completions.parse(model=MODEL, messages=ask, response_format=Person, temperature=0, max_tokens=100)
    assert said.choices[0].message.parsed.age in range(100), said


@check
def openai_json_schema_in_a_stream():
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    for seed in range(5):
        chunks = client.chat.completions.create(model=MODEL, messages=ASK, response_format=form, seed=seed, temperature=1.5, max_tokens=100, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        made = json.loads(text)
        assert set(made) == {"name", "age"} and made["age"] in range(100), text


@check
def openai_forced_calls():
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (named, "required"):
        said = client.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, temperature=0, max_tokens=100)
        call = said.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather" and isinstance(json.loads(call.function.arguments)["city"], str), said
        assert said.choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, temperature=0, max_tokens=100) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


@check
def openai_choices_logprobs_and_seeds():
    ask = dict(model=MODEL, messages=ASK, n=3, logprobs=True, top_logprobs=4, max_tokens=5, temperature=1)
    said = client.chat.completions.create(seed=7, **ask)
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    for choice in said.choices:
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 4 and token.logprob <= 0
            assert token.top_logprobs[0].logprob >= token.logprob - 1e-4
    # One text alone, with the same part of its prompt in the cache.
    ask["n"] = 1
    texts = [client.chat.completions.create(seed=7, **ask).choices[0].message.content for _ in range(3)]
    assert texts[1] == texts[2], texts


@check
def openai_completions():
    said = client.completions.create(model=MODEL, prompt=["Once upon", "The sea"], max_tokens=6, temperature=0, logprobs=2, echo=True)
    assert said.choices[0].text.startswith("Once upon") and said.choices[1].text.startswith("The sea")
    logprobs = said.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and "".join(logprobs.tokens) == said.choices[0].text
    streamed = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=6, temperature=0, stream=True)
    # Sums of several texts, and of those whose beginning was cached, have another order: texts may part after some tokens.
    assert "".join(chunk.choices[0].text for chunk in streamed)[:10] == said.choices[0].text[9:19]


@check
def openai_stop_and_length():
    said = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=40, stop=["Paris"])
    assert "Paris" not in said.choices[0].message.content and said.choices[0].finish_reason == "stop"
    said = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=2)
    assert said.choices[0].finish_reason == "length" and said.usage.completion_tokens == 2


@check
def openai_errors():
    def fails(kind, **fields):
        try:
            client.chat.completions.create(**({"model": MODEL, "messages": ASK} | fields))
        except kind as error:
            return error
        raise AssertionError(f"{fields} should fail")

    error = fails(openai.BadRequestError, messages=[{"role": "user", "content": "word " * 3000}])
    assert error.code == "context_length_exceeded" and "maximum context length" in error.message
    assert fails(openai.BadRequestError, temperature=5).param == "temperature"
    assert fails(openai.NotFoundError, model="gpt-4o").code == "model_not_found"
    fails(openai.BadRequestError, n=0)
    fails(openai.BadRequestError, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "("}}})
    try:
        client.embeddings.create(model=MODEL, input="Hi")
        raise AssertionError("there are no embeddings")
    except openai.BadRequestError:
        pass


@check
def openai_headers():
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASK, max_tokens=1, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine" and raw.parse()._request_id == "mine"


@check
def openai_cancellation():
    stream = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert metric("vllm:num_requests_running") >= 1
    stream.close()
    until(lambda: metric("vllm:num_requests_running") == 0)


@check
def openai_many_at_once():
    alone = [client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"Count to {i}."}], temperature=0, max_tokens=20).choices[0].message.content for i in range(6)]
    texts = [None] * 12

    def ask(place):
        texts[place] = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"Count to {place % 6}."}], temperature=0, max_tokens=20).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(12)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    # The order of sums is another one, so texts may part after some tokens.
    # Products with quantized weights round otherwise in a batch, so that a text may turn where two tokens are nearly as likely.
    same = sum(text == alone[at % 6] for at, text in enumerate(texts))
    assert same >= 8 and all(texts), (texts, alone)


@check
def openai_responses():
    ask = dict(model=MODEL, input=ASK[0]["content"], temperature=0, max_output_tokens=30)
    whole = client.responses.create(**ask)
    assert "Paris" in whole.output_text and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens, whole
    assert whole.output_text == client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=30).choices[0].message.content
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", f"response.{whole.status}"), events
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    with client.responses.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_item.added", "response.content_part.added", "response.output_text.done", "response.output_item.done"} <= kinds, kinds
    assert final.output_text == whole.output_text
    talk = [{"role": "user", "content": "My name is Ada."}, *[item.model_dump(exclude_none=True) for item in whole.output], {"role": "user", "content": "Go on."}]
    assert client.responses.create(**(ask | {"input": talk, "instructions": "Be short."})).output_text
    told = client.responses.create(**ask, include=["message.output_text.logprobs"], top_logprobs=3).output[0].content[0].logprobs
    assert told and all(len(token.top_logprobs) == 3 for token in told)


@check
def openai_responses_with_schemas_and_calls():
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=99)

    ask = dict(model=MODEL, input="Tom is 30 years old. Who is he?", temperature=0, max_output_tokens=100)
    assert client.responses.parse(**ask, text_format=Person).output_parsed.age in range(100)
    with client.responses.stream(**ask, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed.age in range(100)
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    for choice in ({"type": "function", "name": "get_weather"}, "required"):
        fields = dict(ask, input="Weather in Rome?", tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        call = client.responses.create(**fields).output[0]
        assert call.type == "function_call" and isinstance(json.loads(call.arguments)["city"], str), call
        with client.responses.stream(**fields) as stream:
            events = list(stream)
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [call.arguments], events
        talk = [{"role": "user", "content": "Weather in Rome?"}, call.model_dump(exclude_none=True), {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}]
        assert client.responses.create(**(ask | {"input": talk})).output_text


@check
def openai_responses_errors():
    for fields, param in (
        (dict(previous_response_id="resp_1"), "previous_response_id"),
        (dict(background=True), "background"),
        (dict(store=True), "store"),
        (dict(tools=[{"type": "web_search"}]), "tools"),
        (dict(input=[{"role": "user", "content": "word " * 3000}]), "input"),
        (dict(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "string", "pattern": "("}}}), "text"),
    ):
        try:
            client.responses.create(**(dict(model=MODEL, input="Hi") | fields))
            raise AssertionError(f"{fields} should fail")
        except openai.BadRequestError as error:
            assert error.param == param, error
    try:
        client.responses.retrieve("resp_1")
        raise AssertionError("no response is stored")
    except openai.NotFoundError:
        pass
    cut = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2, extra_body={"ignore_eos": True})
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens", cut


@check
def langchain():
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=BASE, api_key="none", temperature=0, max_tokens=40, max_retries=0)
    talk = [HumanMessage(ASK[0]["content"])]
    said = chat.invoke(talk)
    assert "Paris" in said.content and said.usage_metadata["output_tokens"] > 0, said
    assert "".join(chunk.content for chunk in chat.stream(talk)) == said.content
    responds = ChatOpenAI(model=MODEL, base_url=BASE, api_key="none", temperature=0, max_tokens=40, max_retries=0, use_responses_api=True)
    assert responds.invoke(talk).text == said.content
    assert "".join(chunk.text for chunk in responds.stream(talk)) == said.content
    bound = chat.bind_tools([TOOL], tool_choice="get_weather").invoke("Weather in Rome?")
    assert bound.tool_calls[0]["name"] == "get_weather" and isinstance(bound.tool_calls[0]["args"]["city"], str), bound
    for method in ("json_schema", "function_calling"):
        made = chat.with_structured_output({"title": "person", "description": "A person", **SCHEMA}, method=method).invoke("Tom is 30.")
        assert set(made) == {"name", "age"}, made


@check
def litellm():
    os.environ["LITELLM_LOG"] = "ERROR"
    import litellm

    litellm.suppress_debug_info = True
    to = dict(model=f"openai/{MODEL}", api_base=BASE, api_key="none", temperature=0, max_tokens=40, num_retries=0)
    said = litellm.completion(messages=ASK, **to)
    assert "Paris" in said.choices[0].message.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=ASK, stream=True, **to))
    assert text == said.choices[0].message.content
    called = litellm.completion(messages=ASK, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}}, **to)
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 3000}], **to)
        raise AssertionError("it is too long")
    except litellm.ContextWindowExceededError:
        pass


JAVASCRIPT = """
const OpenAI = require("openai").default;
const assert = require("node:assert");
const [base, model] = process.argv.slice(1);
const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France? Answer in one short sentence." }];
const options = { model, messages, temperature: 0, max_tokens: 30 };
(async () => {
  const whole = await client.chat.completions.create(options);
  assert(whole.choices[0].message.content.includes("Paris"));
  const stream = client.chat.completions.stream(options);
  const final = await stream.finalChatCompletion();
  assert.strictEqual(final.choices[0].message.content, whole.choices[0].message.content);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) text += chunk.choices[0].delta.content ?? "";
  assert.strictEqual(text, whole.choices[0].message.content);
  const tool = { type: "function", function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] } } };
  const called = await client.chat.completions.stream({ ...options, max_tokens: 100, tools: [tool], tool_choice: { type: "function", function: { name: "get_weather" } } }).finalChatCompletion();
  assert.strictEqual(typeof JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, "string");
  const ask = { model, input: messages[0].content, temperature: 0, max_output_tokens: 30 };
  const response = await client.responses.create(ask);
  assert.strictEqual(response.output_text, whole.choices[0].message.content);
  const responding = client.responses.stream(ask);
  assert.strictEqual((await responding.finalResponse()).output_text, response.output_text);
  await assert.rejects(client.chat.completions.create({ ...options, model: "gpt-4o" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...options, temperature: 9 }), OpenAI.BadRequestError);
  const endless = await client.chat.completions.create({ ...options, max_tokens: 900, stream: true, ignore_eos: true });
  for await (const chunk of endless) { endless.controller.abort(); break; }
  assert.strictEqual((await client.models.list()).data[0].id, model);
})().catch((error) => { console.error(error); process.exit(1); });
"""


@check
def openai_npm():
    if not shutil.which("node") or not os.path.isdir(os.environ.get("NODE_PATH", "") + "/openai"):
        print("  SKIPPED: there is no node with openai")
        return
    subprocess.run(["node", "-e", JAVASCRIPT, BASE, MODEL], check=True, timeout=120)
    until(lambda: metric("vllm:num_requests_running") == 0)


class Browser:
    """A page in headless Chromium, which is steered through a pipe (the DevTools protocol)."""

    def __init__(self, program, folder, url):
        pipes = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (*os.pipe(), *os.pipe())]
        (read, self.to), (self.of, write) = pipes[:2], pipes[2:]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        command = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "chromium", program, *flags]
        self.process = subprocess.Popen(command, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read), os.close(write)
        self.number, self.rest, self.session, self.faults = 0, b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable"), self.call("Log.enable"), self.call("Page.enable")
        self.call("Page.navigate", url=url)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                more = os.read(self.of, 1 << 16)
                assert more, "Chromium has ended"
                self.rest += more
            answer, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(answer)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            kind, told = answer.get("method"), answer.get("params", {})
            if kind == "Runtime.exceptionThrown" or (kind == "Log.entryAdded" and told["entry"]["level"] == "error"):
                self.faults.append(told)

    def run(self, script):
        made = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in made, made
        return made["result"].get("value")

    def end(self):
        self.process.kill(), self.process.wait(), os.close(self.to), os.close(self.of)


@check
def page_in_chromium():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        print("  SKIPPED: there is no Chromium to test the page in; apt-get install chromium")
        return
    # Its profile may still be written when it has been killed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder, ADDRESS)
        try:
            of_page(browser)
        finally:
            browser.end()


def of_page(browser):
    lines = lambda kind: browser.run(f"[...document.querySelectorAll('#talk .{kind}')].map((line) => line.textContent)")
    is_idle = lambda: browser.run("!document.getElementById('send').disabled && document.getElementById('stop').hidden")

    def send(text, temperature=0):
        browser.run(f"element('temperature').value = {temperature}; element('message').value = {json.dumps(text)}; element('form').requestSubmit()")

    until(lambda: browser.run("document.getElementById('name')?.textContent") == MODEL, 60)
    send(ASK[0]["content"])
    until(is_idle, 60)
    wanted = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0).choices[0].message.content
    assert lines("user") == [ASK[0]["content"]] and lines("assistant") == [wanted], (lines("assistant"), wanted)
    # The second turn has the first before it, and markup is text.
    markup = "<img src=x onerror=alert(1)> & <b>bold</b>"
    send(markup)
    until(is_idle, 60)
    talk = [*ASK, {"role": "assistant", "content": wanted}, {"role": "user", "content": markup}]
    wanted = client.chat.completions.create(model=MODEL, messages=talk, temperature=0).choices[0].message.content
    assert lines("user")[1] == markup and lines("assistant")[1] == wanted, (lines("assistant"), wanted)
    assert browser.run("document.querySelector('#talk img, #talk b')") is None
    browser.run("element('clear').click()")
    assert browser.run("element('talk').childElementCount") == 0
    # A text that is stopped is cancelled in the server.
    send("Write a very long story about the sea, the sky and a ship with a hundred sailors.", 1)
    until(lambda: "".join(lines("assistant")), 60)
    browser.run("element('stop').click()")
    until(is_idle)
    until(lambda: metric("vllm:num_requests_running") == 0)
    assert not lines("error")
    assert not browser.faults, browser.faults
    # What the server refuses is shown.
    send("Hi", 5)
    until(lambda: any("temperature" in line for line in lines("error")))
    until(is_idle)


failed = 0
for one in CHECKS:
    began = time.monotonic()
    try:
        one()
        print(f"ok     {one.__name__} ({time.monotonic() - began:.1f} s)", flush=True)
    except Exception:
        failed += 1
        print(f"FAILED {one.__name__}", flush=True)
        traceback.print_exc()
print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed")
sys.exit(failed > 0)
