"""The page's server: what it answers, to whom, and what a page of the web cannot get from it."""

import http.client
import json
import socket
import struct
import threading

import pytest

from manyhands.record import Record
from manyhands.watch import Jobs, serve

pytestmark = pytest.mark.quick


@pytest.fixture
def server(tmp_path):
    with Record(tmp_path / "a.jsonl", batch_size=4) as record:
        for step in range(20):
            record.step(loss=float("nan") if step == 19 else 1.0 / (1 + step))
    with serve(Jobs([tmp_path / "a.jsonl", tmp_path / "later.jsonl"]), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_it_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"


def test_the_page_may_load_nothing_from_elsewhere(server):
    for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript")):
        answer, body = ask(server, path)
        assert answer.status == 200 and kind in answer.headers["Content-Type"]
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none';")
        assert b"https:" not in body and body.count(b"http:") == body.count(b"http://www.w3.org")
        assert answer.headers["Cache-Control"] == "no-store"


def test_a_browser_that_goes_away_is_not_worth_a_traceback(server, capsys):
    ask(server, "/")  # or the socket might be closed before it is accepted
    for _ in range(5):
        with socket.create_connection(server.server_address) as gone:
            gone.sendall(b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n")
            # a reset in place of an orderly end
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ask(server, "/jobs")
    assert capsys.readouterr() == ("", "")


def test_the_numbers_are_strict_json(server):
    answer, body = ask(server, "/jobs")
    found = json.loads(body, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert answer.status == 200
    first, later = found["jobs"]
    assert (first["state"], first["step"], first["latest"]["loss"]) == ("ended", 20, "nan")
    assert later["state"] == "waiting"
    assert found["panels"]["loss"] == {
        "title": "loss", "meaning": "", "own": True, "order": 0, "drawn": True
    }  # fmt: skip
    curves = json.loads(ask(server, "/curves/0")[1])
    assert curves["version"] == first["version"]
    assert curves["x"]["samples"][:3] == [4.0, 8.0, 12.0]
    assert curves["mean"]["loss"][1] == 0.5
    assert json.loads(ask(server, "/curves/1")[1])["x"] == {}


@pytest.mark.parametrize(
    "path",
    [
        "/a.jsonl",
        "/../page.js",
        "/curves/2",
        "/curves/-1",
        "/curves/x",
        "/curves/%C2%B2",
        "/jobs/",
    ],
)
def test_there_is_nothing_else(server, path):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.putrequest("GET", path)
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (404, b"There is nothing here.\n")
    connection.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]"]
)
def test_a_page_under_another_name_is_refused(server, host):
    for path in ("/", "/jobs", "/curves/0"):
        answer, body = ask(server, path, Host=host)
        assert answer.status == 421
        assert b"loss" not in body and b"html" not in body


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST"])
def test_a_forwarded_port_is_answered(server, host):
    assert ask(server, "/jobs", Host=host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, "/jobs", method)[0].status == 501


def test_head_has_no_body(server):
    answer, body = ask(server, "/jobs", "HEAD")
    assert (answer.status, body) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 100


def test_a_port_that_is_taken_is_an_error_if_it_was_asked_for(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            serve(Jobs([tmp_path]), port)
        monkeypatch.setattr("manyhands.watch.PORT", port)
        with serve(Jobs([tmp_path])) as server:
            assert server.server_address[1] != port
