"""The processes of ``server.py``: clients on raw sockets, and a stub of a server. Standard library alone.

python clients.py client               one line of JSON in; a line once connected; go in; one line of JSON out
python clients.py stub COUNT ANSWER    prints its port, waits for COUNT requests and answers them
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

END = b"data: [DONE]"


def client() -> None:
    """Sends its requests when it is told to, and reads the streams to their ends."""
    task = json.loads(sys.stdin.readline())
    selector = selectors.DefaultSelector()
    requests = []
    for prompt in task["prompts"]:
        body = {"model": "m", "prompt": prompt, "max_tokens": task["answer"], "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", task["port"]))
        selector.register(connection, selectors.EVENT_READ)
        requests.append((connection, head.encode() + data))
    print("connected", flush=True)
    sys.stdin.readline()
    for connection, request in requests:
        connection.sendall(request)
    last = {connection.fileno(): b"" for connection, _ in requests}
    first: dict[int, float] = {}
    errors, tokens, end = [], 0, 0.0
    while last:
        for key, _ in selector.select():
            number, data = key.fd, key.fileobj.recv(65536)  # type: ignore[union-attr]
            if number not in first and b"data: " in data:
                first[number] = time.monotonic()
            last[number] = (last[number] + data)[-1000:]
            if data and END not in last[number]:
                continue
            text = last.pop(number)
            selector.unregister(key.fileobj)
            end = time.monotonic()
            usage = text.rpartition(b'"completion_tokens":')[2].lstrip()
            digits = usage[: len(usage) - len(usage.lstrip(b"0123456789"))]
            if END not in text or not digits:
                errors.append(text.decode(errors="replace"))
            else:
                tokens += int(digits)
    print(json.dumps({"first": list(first.values()), "tokens": tokens, "end": end, "errors": errors}))


def serve_stub(count: int, answer: int) -> None:
    """Waits for ``count`` requests, then sends each of them a token in turn, as fast as it can."""
    choice = b'{"index":0,"text":"<12345>","logprobs":null,"finish_reason":null,"stop_reason":null}'
    chunk = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","model":"m","choices":[' + choice
    chunk += b'],"usage":null}\n\n'
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": answer}})
    last = f"data: {usage}\n\n".encode() + END + b"\n\n"
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        print(listener.getsockname()[1], flush=True)
        connections = [listener.accept()[0] for _ in range(count)]
        for connection in connections:
            connection.recv(2**20)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        for turn in range(answer):
            for connection in connections:
                connection.sendall((b"" if turn else head) + chunk)
        for connection in connections:
            connection.sendall(last)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client()
    else:
        serve_stub(int(sys.argv[2]), int(sys.argv[3]))
