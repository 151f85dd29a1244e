"""A tokenizer that loses nothing, chat templates of the usual kinds, and servers that answer as they are told."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "[/INST]", "<turn>", "<end>")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (  # the end of the answer is left outside the tags, as in many templates
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTAGGED = TAGGED.replace(
    "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}", ""
).replace(
    "{{ '<|im_start|>assistant\n' }}{% else %}",
    "{% generation %}{{ '<|im_start|>assistant\n' }}{% endgeneration %}{{ message['content'] + '<|im_end|>\n' }}"
    "{% else %}",
)
THINKING = (  # thoughts of earlier turns are dropped; an answer without any gets an empty block
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set answer = text.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last and '</think>' in text %}{{ text }}"
    "{% elif loop.last %}{{ '<think>\n\n</think>\n\n' + answer }}{% else %}{{ answer }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
FORCED_THINKING = CHATML.replace(
    "'<|im_start|>assistant\n' }}{% endif %}", "'<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
INST = (  # the system message is part of the user's
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] | trim + '</s>' }}{% endif %}{% endfor %}"
)
MODEL = (  # another name for the assistant, and everything trimmed
    "{% for message in messages %}{{ '<turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n'"
    " + message['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)


def tokenizer(template: str | None = CHATML, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """One token a byte: whatever is encoded comes back as it was."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(BPE(vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=end,
        additional_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


WORDS = (
    "river",
    "stone",
    "bird",
    "window",
    "garden",
    "paper",
    "silver",
    "music",
    "winter",
    "bridge",
    "letter",
    "candle",
)


def utterance(prompt: str) -> str:
    """What the servers below say: words that depend on the prompt and on nothing else."""
    choose = random.Random(prompt)
    return " ".join(choose.choices(WORDS, k=choose.randint(4, 12))) + "."


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server. ``faults`` are replies (status, body, headers) that come before any good one."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self,
        tokenizer: Any,
        *,
        ids: bool = True,
        takes_ids: bool = True,
        completions: bool = True,
        strict: bool = False,
    ):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.ids, self.takes_ids, self.completions = tokenizer, ids, takes_ids, completions
        self.strict = strict  # refuses fields that it does not know
        self.models, self.delay, self.repeats = ["m"], 0.0, ""
        self.faults: list[tuple[int, str, dict[str, str]]] = []
        self.asked: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, body: dict[str, Any], chat: bool) -> dict[str, Any]:
        prompt = body.get("prompt", body.get("messages"))
        if isinstance(prompt, list) and not chat:
            prompt = self.tokenizer.decode(prompt)
        text = self.repeats or utterance(str(prompt))
        ids = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        stopped = len(ids) <= body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stopped else "length"}
        said = self.tokenizer.decode(ids, skip_special_tokens=True)
        choice |= {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
        if self.ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
        return {"choices": [choice]}

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that are killed go away in the middle


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("/chat/completions")
        with server.lock:
            server.asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
            fault = server.faults.pop(0) if server.faults else None
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        time.sleep(server.delay)
        with server.lock:
            server.running -= 1
        if fault is not None:
            self.reply(*fault)
        elif not chat and not server.completions:
            self.reply(404, json.dumps({"error": {"message": "Not Found"}}))
        elif server.strict and "repetition_detection" in body:
            self.reply(400, json.dumps({"error": {"message": "repetition_detection is no field"}}))
        elif not chat and not server.takes_ids and isinstance(body["prompt"], list):
            self.reply(400, json.dumps({"error": {"message": "prompt must be a string"}}))
        else:
            self.reply(200, json.dumps(server.answer(body, chat)))

    def reply(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        content = body.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(tokenizer: Any, **how: Any) -> Iterator[Server]:
    server = Server(tokenizer, **how)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
