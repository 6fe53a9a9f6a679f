"""The viewer's server: pages, filters, access checks and hostile requests."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

import penstock as ps
from penstock.look.options import LookOptions
from penstock.look.survey import Flag
from penstock.look.viewer.app import listen
from penstock.look.viewer.session import Searcher, Session
from penstock.prepare.chat.conversation import Role
from tests.support.viewer import TOKEN, serving
from tools.fuzz_viewer import hostile_path

pytestmark = pytest.mark.slow


def ask(viewer: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    address = urlsplit(viewer)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    named = {"Cookie": f"penstock-{address.port}={TOKEN}"} | {n.replace("_", "-"): v for n, v in headers.items()}
    connection.putrequest(method, path, skip_host="Host" in named)
    for name, value in named.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def lines(text: str) -> list[dict[str, dict[str, object]]]:
    return [json.loads(line) for line in text.splitlines()]


def test_pages(viewer: str, dataset: ps.Dataset) -> None:
    for path, words in {
        "/": "1 to 50 of 406 rows",
        "/?page=9": "401 to 406",
        "/row/0": "Every loss policy, side by side",
        "/row/405?train_on=all_tokens": "Row 405",
        "/batch?step=1&capacity=256&batch_size=4": "256 tokens wide",
        "/batch?collate=padded": "as wide as the longest",
        "/report": "Where everything went",
        "/diff": "No difference",
        "/static/look.css": "--trained",
    }.items():
        status, text, headers = ask(viewer, path)
        assert status == 200 and words in text, path
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
    assert ask(viewer, "/jump?row=7")[2]["location"] == "/row/7"
    assert "\\u202egnihtyna" in ask(viewer, "/row/0")[1].split('id="rendered"')[1]


def test_filters_agree_with_a_plain_loop(viewer: str, dataset: ps.Dataset) -> None:
    view = dataset.view()
    tools = {int(n) for n, ex in zip(view.index.rows, view, strict=True) if (ex.runs.roles == Role.TOOL.value).any()}
    assert f"of {len(tools)} rows that pass" in ask(viewer, "/?role=tool")[1]

    assert f"of {len(dataset)} rows that pass" in ask(viewer, "/?part=body")[1]
    assert "No row passes" in ask(viewer, "/?part=empty_reasoning")[1]
    long = sum(length >= 100 for length in view.lengths.tolist())
    assert f"of {long} rows that pass" in ask(viewer, "/?min=100")[1]
    assert "of 6 rows that pass" in ask(viewer, "/?source=0")[1]
    assert f"of {dataset.stats().duplicate_rows} rows that pass" in ask(viewer, "/?warning=duplicate")[1]
    counted = dataset.view(max_length=128).stats()
    cut, mute = counted.flags["cut_answer"].rows, counted.rows_without_trained_token
    assert f"of {mute} rows that pass" in ask(viewer, "/?warning=nothing_trained")[1]
    assert f"of {cut} rows that pass" in ask(viewer, "/?warning=cut_answer")[1]
    first = ask(viewer, "/?sort=longest")[1].split('class="row-number">')[1].split("<")[0]
    assert int(first) == dataset.stats().longest[0].row
    assert "No row passes" in ask(viewer, "/?min=100000")[1]
    after = ask(viewer, "/row/0?source=0")[1]
    assert 'href="/row/1?source=0" rel="next"' in after


def test_search_finds_each_row_once(viewer: str, dataset: ps.Dataset) -> None:
    said = lines(ask(viewer, "/search?q=QUICK%20brown")[1])
    hits = [line["hit"] for line in said if "hit" in line]
    assert [hit["row"] for hit in hits] == [1] and hits[0]["match"] == "quick brown"
    assert said[-1]["done"] == {"scanned": 406, "rows": 406, "next": None}
    texts = {}
    for row in range(len(dataset)):
        table = dataset.vocabulary.token_bytes
        texts[row] = b"".join(table[token] for token in dataset.input_ids(row).tolist())
    for needle in ("legs", "中文", "🙂", "user", "<script>", "zzz"):
        expected = [row for row, text in texts.items() if needle.encode().lower() in text.lower()]
        found = [hit.row for scanned in Searcher(dataset).scan(needle) for hit in scanned.hits]
        assert found == expected, needle
    among = lines(ask(viewer, "/search?q=user&source=0")[1])
    assert [line["hit"]["row"] for line in among if "hit" in line] == [0, 1, 2, 3, 4, 5]
    first = lines(ask(viewer, "/search?q=user")[1])
    assert first[-1]["done"]["next"] == 100
    rest = lines(ask(viewer, "/search?q=user&after=100")[1])
    assert rest[0]["hit"]["row"] == 100


def test_a_search_ends_when_the_client_disconnects(viewer: str) -> None:
    address = urlsplit(viewer)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
        connection.sendall(f"GET /search?q=zzz HTTP/1.1\r\nHost: {address.netloc}\r\n".encode())
        connection.sendall(f"Cookie: penstock-{address.port}={TOKEN}\r\n\r\n".encode())
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    assert ask(viewer, "/")[0] == 200


def test_only_local_requests_with_the_right_host_are_answered(viewer: str) -> None:
    port = urlsplit(viewer).port
    with listen() as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port}@evil",
        "",
        f"127.0.0.2:{port}",
    ):
        status, text, _ = ask(viewer, "/", Host=host)
        assert status in (400, 421) and "row" not in text.lower().replace("browser", ""), host
    assert ask(viewer, "/", Host=f"localhost:{port}")[0] == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}.evil"):
        assert ask(viewer, "/search?q=a", Origin=origin)[0] == 403, origin
    assert ask(viewer, "/", Origin=viewer)[0] == 200
    assert ask(viewer, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="image")[0] == 403
    navigated = ask(viewer, "/row/1", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document")
    assert navigated[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(viewer, "/", method)[0] == 405


def test_only_requests_with_the_token_are_answered(viewer: str) -> None:
    name = f"penstock-{urlsplit(viewer).port}"
    for path in ("/", "/row/1", "/batch", "/report", "/diff", "/search?q=a", "/jump?row=1", "/static/look.css", "/no"):
        for cookie in (
            "",
            f"{name}=",
            f"{name}={TOKEN[:-1]}",
            f"penstock={TOKEN}",
            f"{name}=é",
        ):
            status, text, headers = ask(viewer, path, Cookie=cookie)
            assert (status, text.split(":")[0]) == (403, "Refused"), (path, cookie)
            assert "set-cookie" not in headers
    for wrong in ("", TOKEN[:-1], f"{TOKEN}a", "%C3%A9"):
        assert ask(viewer, f"/?token={wrong}", Cookie="")[0] == 403
    status, text, headers = ask(viewer, f"/row/1?train_on=all_tokens&token={TOKEN}", Cookie="")
    assert (status, text, headers["location"]) == (303, "", "/row/1?train_on=all_tokens")
    cookie, *flags = headers["set-cookie"].split("; ")
    assert {flag.lower() for flag in flags} == {"httponly", "path=/", "samesite=lax"}
    assert ask(viewer, headers["location"], Cookie=f"other=1; {cookie}")[0] == 200
    assert ask(viewer, f"//evil.example/?token={TOKEN}", Cookie="")[2]["location"] == "/evil.example/"
    assert ask(viewer, "/row/1?token=old")[2]["location"] == "/row/1"  # the cookie is enough


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_of_the_machine_gets_nothing(dataset: ps.Dataset) -> None:
    command = [sys.executable, "-m", "penstock.cli", "view", str(dataset.path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        address = urlsplit(running.stdout.readline().strip())
        try:
            plain = f"http://{address.netloc}"
            seen = "id -u; cat /proc/$1/cmdline | tr '\\0' ' '; echo"
            for path in ("/", "/row/1", "/?token=guess"):
                sent = f"GET {path} HTTP/1.1\\r\\nHost: {address.netloc}\\r\\nConnection: close\\r\\n\\r\\n"
                seen += f"; exec 3<>/dev/tcp/127.0.0.1/{address.port}; printf '{sent}' >&3; cat <&3; echo"
            other = subprocess.run(
                ["bash", "-c", seen, "-", str(running.pid)], user=65534, capture_output=True, text=True
            )
            user, line, *answers = other.stdout.splitlines()
            assert user == "65534" and "penstock.cli view" in line and address.query not in line, other
            assert len([1 for answer in answers if answer.startswith("HTTP/1.1 403")]) == 3, answers
            assert len([1 for answer in answers if answer.startswith("Refused: open the address")]) == 3, answers
            status, _, headers = ask(plain, f"{address.path}?{address.query}", Cookie="")
            assert status == 303
            assert ask(plain, "/row/1", Cookie=headers["set-cookie"].split(";")[0])[0] == 200
        finally:
            running.send_signal(signal.SIGINT)


def test_hostile_requests_get_4xx(viewer: str, caplog: pytest.LogCaptureFixture) -> None:
    seeded = random.Random(21)
    for _ in range(500):
        path = hostile_path(seeded)
        status, text, _ = ask(viewer, path)
        assert 400 <= status < 500, (path, status)
        assert "Traceback" not in text
    assert ask(viewer, "/?q=" + "a" * 5000)[0] == 414
    assert (
        "row=&lt;" not in ask(viewer, "/?role=%3Cscript%3E")[1]
        and "<script>alert" not in ask(viewer, "/?role=%3Cscript%3Ealert")[1]
    )
    assert not caplog.records


def test_pairs_have_pages(pairs: ps.Dataset) -> None:
    for viewer in serving(Session(pairs, LookOptions())):
        for path in ("/", "/row/3", "/batch", "/report", "/?warning=duplicate"):
            assert ask(viewer, path)[0] == 200, path
        assert "rejected" in ask(viewer, "/row/3")[1]


def test_flags_fit_their_column() -> None:
    assert max(Flag) < 256
